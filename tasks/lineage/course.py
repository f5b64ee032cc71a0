"""The course of an extraction as MLflow's metrics over time, from the samples that its runs left."""

import bisect
import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from mlflow.entities import Metric

from tasks.store.attempts import COUNTS, LONGEST, SHORTEST, Attempt

POINTS = 300  # of one run's samples, at most; the file with all of them is an artifact
SUMMED = ("retries", "restarts", "failed")  # over the runs


def course_of(attempts: list[Attempt]) -> list[Metric]:
    """Metrics of all runs, one after the other, those of a fleet together.

    Their step: seconds of extraction, without the pauses between runs. The same attempts give the same metrics, which
    MLflow keeps once however often they are logged.
    """
    metrics, before = [], dict.fromkeys(("seconds", *SUMMED), 0.0)
    for _, group in itertools.groupby(attempts, _fleet_of):
        there, samples = _together(list(group))
        for earlier, sample in pairwise([{"seconds": 0.0, "tokens": 0, "bytes": 0}, *samples]):
            step, at = round(before["seconds"] + sample["seconds"]), int(sample["at"] * 1000)
            figures = _figures(earlier, sample, there, before)
            metrics += [Metric(name, float(value), at, step) for name, value in figures]
        before = {name: value + (samples[-1][name] if samples else 0) for name, value in before.items()}
    return metrics


def _fleet_of(attempt: Attempt) -> str:
    """Runs of one fleet extract at the same time; every other run alone."""
    partition = attempt.header.get("origin", {}).get("partition")
    return partition["fleet"] if partition else attempt.path.name


def _together(attempts: list[Attempt]) -> tuple[int, list[dict[str, Any]]]:
    """Rows that were there before, and the samples: of one run its own, of a fleet's the sums over its nodes."""
    first = attempts[0].header
    if "partition" not in first.get("origin", {}):
        return first["there"], thin_out(list(attempts[0].samples()))
    courses = [
        (attempt.header["origin"]["partition"]["number"], attempt.header["there"], samples)
        for attempt in attempts
        if (samples := list(attempt.samples()))
    ]
    there: int = first["origin"]["partition"]["there"]
    if not courses:
        return there, []
    began = min(samples[0]["at"] - samples[0]["seconds"] for _, _, samples in courses)
    ended = max(samples[-1]["at"] for _, _, samples in courses)
    # Each node samples when it likes, so the sums are made at moments further apart than the samples.
    step = max((ended - began) / POINTS, 2 * SHORTEST)
    moments = [began + step * number for number in range(1, int((ended - began) / step))]
    return there, [_sum_at(moment, began, courses) for moment in [*moments, ended]]


def _sum_at(moment: float, began: float, courses: list[tuple[int, int, list[dict[str, Any]]]]) -> dict[str, Any]:
    """One sample for all nodes; courses: partition, rows it had when the run began, samples, by their begin."""
    total: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"at": moment, "seconds": moment - began, "machine": {}}
    before: dict[int, int] = {}  # rows of each partition when its first run began
    rows: dict[int, int] = {}  # and now
    for partition, there, samples in courses:
        before.setdefault(partition, there)
        at = bisect.bisect_right(samples, moment, key=lambda sample: sample["at"]) - 1
        if at < 0:
            continue
        sample = samples[at]
        rows[partition] = there + sample["rows"]
        for name in COUNTS:
            # What a run that was lost had in flight is not for ever.
            if name != "in_flight" or moment - sample["at"] <= 2 * LONGEST:
                total[name] += sample[name]
        total["machine"] = sample["machine"]
    return total | {"rows": sum(now - before[partition] for partition, now in rows.items())}


def thin_out(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most POINTS of the samples, evenly chosen, the last one among them. Rates between them lose nothing."""
    every = -(-len(samples) // POINTS) or 1
    return samples[::-1][::every][::-1]


def _figures(
    earlier: dict[str, Any], sample: dict[str, Any], there: int, before: dict[str, float]
) -> Iterator[tuple[str, float]]:
    if (passed := sample["seconds"] - earlier["seconds"]) > 0:
        yield "progress/tokens_per_second", (sample["tokens"] - earlier["tokens"]) / passed
        yield "progress/gigabytes_per_second", (sample["bytes"] - earlier["bytes"]) / passed / 1e9
    yield "progress/rows_done", there + sample["rows"]
    yield "progress/requests_in_flight", sample["in_flight"]
    for name in SUMMED:
        yield f"progress/{name}", before[name] + sample[name]
    for name, value in sample["machine"].items():
        yield f"system/{name}", value
