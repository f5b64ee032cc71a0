"""The course of each run that wrote to a store: a file a run, its first line what ran, then a line a sample.

Written while the extraction goes on, so a run that is killed leaves all but its last seconds. Each writer has a file of
its own.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from tasks.files import append_line
from tasks.machine import machine_figures
from tasks.storage import Location
from tasks.store.layout import Store

ATTEMPTS = "attempts"  # in the store's logs
SHORTEST, LONGEST = 2.0, 60.0  # seconds between two samples: a hundredth of the run's age
COUNTS = ("rows", "tokens", "bytes", "failed", "retries", "restarts", "in_flight")

logger = logging.getLogger(__name__)


class Counts(Protocol):
    """What is sampled: `tasks.extraction.engine.Progress`."""

    rows: int
    tokens: int
    bytes: int
    failed: int
    retries: int
    restarts: int
    in_flight: int


@dataclass(frozen=True)
class Attempt:
    """One run's file."""

    path: Location
    header: dict[str, Any]
    """`at`, `origin` (what ran) and `there`: rows that were in the store before it."""

    def samples(self) -> Iterator[dict[str, Any]]:
        """`at` (seconds since 1970), `seconds` (since the run's begin), the COUNTS, `machine`; no cut lines."""
        with self.path.open() as file:
            next(file, None)
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue


def read_attempts(store: Store) -> list[Attempt]:
    """The runs in the order in which they began; a file without a whole first line does not count."""
    attempts = []
    paths: list[Location] = sorted((store.logs / ATTEMPTS).glob("*.jsonl"))
    for path in paths:
        with path.open() as file:
            try:
                attempts.append(Attempt(path, json.loads(file.readline())))
            except ValueError:
                continue
    return attempts


class Sampler:
    """A context manager around the extraction: samples it from a thread of its own. It never stops a run."""

    def __init__(self, store: Store, counts: Counts, origin: dict[str, Any], there: int):
        """origin: what runs, for `Attempt.header`; there: rows that were in the store before."""
        self.counts, self.started = counts, time.monotonic()
        now = datetime.now(UTC)
        folder = store.logs / ATTEMPTS
        self.path = folder / f"{now:%Y%m%d-%H%M%S-%f}-{socket.gethostname()}-{os.getpid()}.jsonl"
        self.header = {"at": now.isoformat(timespec="seconds"), "origin": origin, "there": there}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        self._append(self.header)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._append(self._sample())

    def _run(self) -> None:
        machine_figures()  # the processor's figure is the one since the call before
        while not self._stop.wait(min(max((time.monotonic() - self.started) / 100, SHORTEST), LONGEST)):
            self._append(self._sample())

    def _sample(self) -> dict[str, Any]:
        counts = {name: getattr(self.counts, name) for name in COUNTS}
        seconds = round(time.monotonic() - self.started, 3)
        return {"at": round(time.time(), 3), "seconds": seconds, **counts, "machine": machine_figures()}

    def _append(self, value: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, json.dumps(value))
        except OSError as error:  # a full disk has its own error where the shards are written
            logger.debug("a sample could not be kept: %s", error)
