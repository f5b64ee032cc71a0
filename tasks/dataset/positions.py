"""Reading rows again at the positions that the plan has for them.

A JSONL file is read at the row's offset. A packed one has no random access, and a Parquet file only by row group, which
may be the whole file: they are read forwards, and what stands between is skipped. The batches of a run are read about
in order, so a file that a batch is done with stays open where it is, and a later batch goes on from there: the whole
run reads the file about once for each batch that is in flight. Only a batch that is tried again begins at the start. So
no unpacked copy is written, which would need room, an owner and an end.
"""

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from tasks.dataset.formats import errors_named, identity_of, is_parquet, is_plain, open_lines, open_table
from tasks.dataset.tables import read_tables, values_of
from tasks.errors import DatasetError

SKIP_BYTES = 1 << 20
MOST_IDLE = 8  # files that stay open, as many as batches are in flight


class Cursor(Protocol):
    """An open file that is read forwards. `position` is the first offset that it can still read."""

    position: int

    def read(self, offset: int, size: int) -> bytes | dict[str, Any]: ...

    def close(self) -> None: ...


class PositionReader:
    """Reads rows by offset and size, as `Plan` has them. A context manager, for one thread."""

    def __init__(self, path: Path):
        self._path = path
        self._identity = identity_of(path)
        self._cursor: Cursor | None = None

    def __enter__(self) -> "PositionReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._cursor is not None:
            # A generator that is left early ends with GeneratorExit: the file is still where it says.
            self._leave(whole=kind is None or kind is GeneratorExit)

    def read(self, offset: int, size: int) -> bytes | dict[str, Any]:
        """A line's bytes, or a table row's values. Raises DatasetError if the file cannot be read there."""
        with errors_named(self._path):
            if self._cursor is None or self._cursor.position > offset:
                if self._cursor is not None:
                    self._leave(whole=True)
                self._cursor = _take(self._identity, offset) or _open(self._path, offset)
            return self._cursor.read(offset, size)

    def _leave(self, whole: bool) -> None:
        assert self._cursor is not None
        cursor, self._cursor = self._cursor, None
        if whole and not is_plain(self._path):  # opening a plain file anew costs nothing
            _put_back(self._identity, cursor)
        else:
            cursor.close()


class _PlainLines:
    position = 0  # a seek goes anywhere

    def __init__(self, file: BinaryIO):
        self._file = file

    def read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


class _PackedLines(_PlainLines):
    def read(self, offset: int, size: int) -> bytes:
        while (between := offset - self.position) > 0:
            skipped = len(self._file.read(min(between, SKIP_BYTES)))
            if not skipped:
                return b""
            self.position += skipped
        line = self._file.read(size)
        self.position += len(line)
        return line


class _Table:
    """Positions are row numbers."""

    def __init__(self, path: Path, row: int):
        self._path = path
        self._file = open_table(path)
        metadata = self._file.metadata
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        starts = list(itertools.accumulate(sizes, initial=0))
        group = bisect.bisect_right(starts, row) - 1
        self.position = starts[group]
        self._batches: Iterator[pa.RecordBatch] = read_tables(self._file, group)
        self._batch: pa.RecordBatch | None = None

    def read(self, offset: int, size: int) -> dict[str, Any]:
        """`position` is the first row of the batch at hand: each of its rows can be read again."""
        while self._batch is None or offset >= self.position + len(self._batch):
            self.position += 0 if self._batch is None else len(self._batch)
            self._batch = next(self._batches, None)
            if self._batch is None:
                raise DatasetError(f"The dataset {self._path} has no row {offset} (dataset.path).")
        return values_of(self._batch, offset - self.position)

    def close(self) -> None:
        self._file.close()


_idle: list[tuple[tuple[int, ...], Cursor]] = []
_lock = Lock()


def _open(path: Path, offset: int) -> Cursor:
    if is_parquet(path):
        return _Table(path, offset)
    return (_PlainLines if is_plain(path) else _PackedLines)(open_lines(path))


def _take(identity: tuple[int, ...], offset: int) -> Cursor | None:
    """The idle cursor that has the shortest way to an offset, if there is one before it."""
    with _lock:
        fitting = [entry for entry in _idle if entry[0] == identity and entry[1].position <= offset]
        if not fitting:
            return None
        nearest = max(fitting, key=lambda entry: entry[1].position)
        _idle.remove(nearest)
        return nearest[1]


def _put_back(identity: tuple[int, ...], cursor: Cursor) -> None:
    with _lock:
        _idle.append((identity, cursor))
        dropped = _idle.pop(0) if len(_idle) > MOST_IDLE else None
    if dropped:
        dropped[1].close()
