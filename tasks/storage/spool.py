"""The local room for shards on their way to a bucket, counted in bytes."""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SPARE = 256 << 20  # bytes of a disk that stay free: for records, logs and the file system itself


def spool_limit(folder: Path, most: int) -> int:
    """Bytes of shards that may lie there: the configured limit, or what its disk has free."""
    while not folder.exists():
        folder = folder.parent
    return min(most, shutil.disk_usage(folder).free - SPARE)


class Spool:
    """First come, first served. One shard is always let in, however large: preflight has checked that it fits."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def room(self, size: int, held: Callable[[int], None] = lambda change: None) -> Iterator[None]:
        """Take `size` bytes for the time of the context, and wait for them first.

        held: told +1 when somebody begins to wait and -1 when the waiting ends.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            waits = not self._fits(ticket, size)
            if waits:
                held(1)
            try:
                self._changed.wait_for(lambda: self._fits(ticket, size))
                self.used += size
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
                if waits:
                    held(-1)
        try:
            yield
        finally:
            with self._changed:
                self.used -= size
                self._changed.notify_all()

    def _fits(self, ticket: object, size: int) -> bool:
        return self._waiting[0] is ticket and (not self.used or self.used + size <= self.limit)
