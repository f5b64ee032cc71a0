"""The course of an extraction as MLflow's metrics over time, from the samples that its runs left."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from mlflow.entities import Metric

from tasks.store.attempts import Attempt

POINTS = 300  # of one run's samples, at most; the file with all of them is an artifact
SUMMED = ("retries", "restarts", "failed")  # over the runs


def course_of(attempts: list[Attempt]) -> list[Metric]:
    """Metrics of all runs, one after the other. Their step: seconds of extraction, without the pauses between runs.

    The same attempts give the same metrics, which MLflow keeps once however often they are logged.
    """
    metrics, before = [], dict.fromkeys(("seconds", *SUMMED), 0.0)
    for attempt in attempts:
        samples = thin_out(list(attempt.samples()))
        there = attempt.header["there"]
        for earlier, sample in pairwise([{"seconds": 0.0, "tokens": 0, "bytes": 0}, *samples]):
            step, at = round(before["seconds"] + sample["seconds"]), int(sample["at"] * 1000)
            figures = _figures(earlier, sample, there, before)
            metrics += [Metric(name, float(value), at, step) for name, value in figures]
        before = {name: value + (samples[-1][name] if samples else 0) for name, value in before.items()}
    return metrics


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
