"""Reads all shards of a store, several at a time, and says how far it is."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from tasks.files import human_bytes, human_seconds
from tasks.store.record import Record
from tasks.verification.kept import KeptChecks
from tasks.verification.shards import Checked, ShardReader

# Reading, hashing and measuring all run outside the interpreter's lock.
THREADS = min(16, os.cpu_count() or 1)
SHOW_EVERY = 15.0  # seconds between two lines about how far it is


@dataclass
class ReadingProgress:
    """How far the reading is."""

    bytes: int
    """To read, in all."""
    shards: int
    started: float
    """time.monotonic()"""
    bytes_done: int = 0
    """Read by this run."""
    bytes_kept: int = 0
    """Read by an earlier run that did not finish."""
    shards_done: int = 0
    problems: int = 0

    def text(self) -> str:
        seconds = time.monotonic() - self.started
        rate = self.bytes_done / seconds if seconds else 0.0
        left = self.bytes - self.bytes_kept - self.bytes_done
        return (
            f"{human_bytes(self.bytes_done + self.bytes_kept)} of {human_bytes(self.bytes)} read, "
            f"{self.shards_done:,} of {self.shards:,} shards, {rate / 1e9:.2f} GB/s, "
            f"{human_seconds(left / rate) if rate else '?'} left, {self.problems:,} problems"
        )


Show = Callable[[ReadingProgress], None]


def read_shards(
    records: list[Record],
    reader: Callable[[Callable[[int], None]], ShardReader],
    kept: KeptChecks,
    show: Show,
    progress: ReadingProgress,
) -> Iterator[Checked]:
    """Check the shard of each record; yields as they are done. reader: makes one for a thread, given its counter."""
    lock, local = threading.Lock(), threading.local()

    def count(size: int) -> None:
        with lock:
            progress.bytes_done += size

    def prepare() -> None:
        torch.set_num_threads(1)  # of this thread: the shards are the parallel work
        local.reader = reader(count)

    def check(record: Record) -> Checked:
        checked: Checked = local.reader.check(record)
        return checked

    def done(checked: Checked) -> Checked:
        progress.shards_done += 1
        progress.problems += len(checked.problems)
        return checked

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="verify", initializer=prepare)
    running: dict[Future[Checked], Record] = {}
    waiting = iter(records)
    next_line = time.monotonic() + SHOW_EVERY
    try:
        while True:
            while len(running) < 2 * THREADS and (record := next(waiting, None)) is not None:
                if (found := kept.get(record)) is not None:
                    progress.bytes_kept += found.bytes
                    yield done(found)
                else:
                    running[pool.submit(check, record)] = record
            if not running:
                break
            ended = wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done
            for future in sorted(ended, key=lambda future: future.exception() is not None):  # what was read is kept
                record, checked = running.pop(future), future.result()
                kept.add(record, checked)
                yield done(checked)
            if time.monotonic() >= next_line:
                show(progress)
                next_line = time.monotonic() + SHOW_EVERY
    finally:
        pool.shutdown(cancel_futures=True)
    show(progress)
