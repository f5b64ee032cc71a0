"""The course of an extraction as MLflow's metrics over time, from the samples that its runs left."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from mlflow.entities import Metric

from tasks.store.attempts import Attempt

POINTS = 300  # of one run's samples, at most; the file with all of them is an artifact
LEVELS = {"retries": "retries", "restarts": "restarts", "in_flight": "requests_in_flight", "tokens": "tokens"}


def course_of(attempts: list[Attempt]) -> list[Metric]:
    """Metrics of all runs, one after the other. Their step: seconds of extraction, without the pauses between runs.

    The same attempts give the same metrics, which MLflow keeps once however often they are logged.
    """
    metrics, before = [], 0.0
    for attempt in attempts:
        samples = thin_out(list(attempt.samples()))
        there = attempt.header["there"]
        for earlier, sample in pairwise([{"seconds": 0.0, "tokens": 0, "bytes": 0}, *samples]):
            step, at = round(before + sample["seconds"]), int(sample["at"] * 1000)
            figures = dict(_figures(earlier, sample, there))
            metrics += [Metric(name, float(value), at, step) for name, value in figures.items()]
        before += samples[-1]["seconds"] if samples else 0.0
    return metrics


def thin_out(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most POINTS of the samples, evenly chosen, the last one among them. Rates between them lose nothing."""
    every = -(-len(samples) // POINTS) or 1
    return samples[::-1][::every][::-1]


def _figures(earlier: dict[str, Any], sample: dict[str, Any], there: int) -> Iterator[tuple[str, float]]:
    if (passed := sample["seconds"] - earlier["seconds"]) > 0:
        yield "progress/tokens_per_second", (sample["tokens"] - earlier["tokens"]) / passed
        yield "progress/gigabytes_per_second", (sample["bytes"] - earlier["bytes"]) / passed / 1e9
    yield "progress/rows_done", there + sample["rows"]
    yield "progress/rows_failed", sample["failed"]
    for name, shown in LEVELS.items():
        yield f"progress/{shown}", sample[name]
    for name, value in sample["machine"].items():
        yield f"system/{name}", value
