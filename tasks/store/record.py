"""Commit records: the JSON file beside a shard that says what it holds. A shard without one does not exist."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from tasks.errors import StoreError
from tasks.files import write_atomic
from tasks.storage import Location, read_all
from tasks.store.layout import Store, shard_stem

if TYPE_CHECKING:
    from tasks.store.lock import WriterLock

FORMAT = "drillcore.shard/1"


@dataclass(frozen=True, slots=True)
class RowRecord:
    """A row inside a shard. The health lists have one value a state: aux layers in order, then the final state."""

    row: int
    tokens: int
    rms: list[float]
    """Root mean square over the row's elements."""
    zero_rows: list[int]
    """Tokens whose state is all zero."""


class RowRecords(Sequence[RowRecord]):
    """Rows of a record as columns: 44 bytes a row of four states, a tenth of what as many objects take."""

    numbers: np.ndarray
    """int64 [rows]."""
    tokens: np.ndarray
    """int32 [rows]."""
    rms: np.ndarray
    """float64 [rows, states]."""
    zero_rows: np.ndarray
    """int32 [rows, states]."""

    def __init__(self, rows: Iterable[RowRecord]):
        rows = list(rows)
        shape = len(rows), len(rows[0].rms) if rows else 0
        self.numbers = np.array([row.row for row in rows], dtype=np.int64)
        self.tokens = np.array([row.tokens for row in rows], dtype=np.int32)
        self.rms = np.array([row.rms for row in rows], dtype=np.float64).reshape(shape)
        zero_rows = np.array([row.zero_rows for row in rows], dtype=np.int32).reshape(shape)
        self.zero_rows = zero_rows if zero_rows.any() else np.broadcast_to(np.int32(0), zero_rows.shape)  # no memory

    @staticmethod
    def of(rows: Sequence[RowRecord]) -> "RowRecords":
        """The same rows as columns."""
        return rows if isinstance(rows, RowRecords) else RowRecords(rows)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> RowRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[RowRecord]: ...
    def __getitem__(self, at: int | slice) -> RowRecord | list[RowRecord]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        return RowRecord(
            int(self.numbers[at]), int(self.tokens[at]), self.rms[at].tolist(), self.zero_rows[at].tolist()
        )

    def __iter__(self) -> Iterator[RowRecord]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowRecords):
            mine, others = vars(self), vars(other)
            return all(np.array_equal(mine[name], others[name]) for name in mine)
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]  # like a list


@dataclass(frozen=True)
class FailedRow:
    """A row of the batch that could not be extracted, and why."""

    row: int
    reason: str
    may_heal: bool = True
    """Whether another try may succeed, so that a resumed run makes it; a row that the server refused is refused again.
    Records of before this field was kept say nothing: their rows are tried again."""


@dataclass(frozen=True)
class WithdrawnRow:
    """A row whose states still lie in the shard but count no more: it is missing until a later part has it."""

    row: int
    reason: str


@dataclass(frozen=True)
class Record:
    """What one shard holds, and what of its batch is missing."""

    fingerprint: str
    batch: int
    part: int
    file: str | None
    """Name of the shard: that of the record, in a bucket with its writer's mark; None where every row failed."""
    bytes: int
    checksum: str
    """XXH3-128 of the shard, hexadecimal."""
    codec: str
    rows: Sequence[RowRecord]
    """RowRecords where the record was read."""
    failed: list[FailedRow]
    written: dict[str, Any]
    """Who wrote it, when, and how long the batch took."""
    withdrawn: list[WithdrawnRow] = field(default_factory=list)
    """By `verify --repair`. Records of before this was kept have none."""

    @property
    def tokens(self) -> int:
        return int(RowRecords.of(self.rows).tokens.sum(dtype=np.int64))


def record_name(batch: int, part: int) -> str:
    return f"{shard_stem(batch, part)}.json"


def record_path(store: Store, batch: int, part: int) -> Location:
    return store.shards / record_name(batch, part)


def record_paths(store: Store) -> list[Location]:
    """All commit records, by name."""
    return sorted(store.shards.glob("[0-9]*.json"))


def write_record(store: Store, record: Record, lock: "WriterLock | None" = None) -> None:
    """Commit a shard that lies under its final name already; lock: the writer's."""
    import orjson  # a trainer that reads a store has none

    path = record_path(store, record.batch, record.part)
    data = orjson.dumps({"format": FORMAT, **vars(record), "rows": list(record.rows)}) + b"\n"
    if lock is None:
        write_atomic(path, data)
    else:
        lock.write(path, data)


def read_record(path: Location) -> Record:
    """Raises StoreError if the record is damaged, or is not the one that its name says."""
    return _whole(path, read_whole_record(path))


def _whole(path: Location, record: Record | None) -> Record:
    if record is None:
        raise StoreError(f"The commit record {path} is damaged: it is no JSON. `extract` extracts its rows again.")
    return record


def read_whole_record(path: Location) -> Record | None:
    """The record, or None if only a part of it was ever written. Raises StoreError if it is damaged otherwise."""
    try:
        return parse_record(path, path.read_bytes())
    except OSError as error:
        raise StoreError(f"The commit record {path} cannot be read: {error.strerror}.") from error


def with_contents(paths: list[Location]) -> Iterator[tuple[Location, bytes]]:
    """Each path with what it holds, in order; from a bucket, several are read at a time. Raises StoreError."""
    try:
        yield from zip(paths, read_all(paths), strict=True)
    except OSError as error:
        raise StoreError(f"A commit record cannot be read: {error.strerror} ({error.filename or paths[0]}).") from error


def parse_record(path: Location, data: bytes) -> Record | None:
    """What a commit record holds, as read_whole_record; path: where it was read.

    What is complete and still wrong was made by another version or by hand: a person must decide.
    """
    try:
        value = json.loads(data)
    except ValueError:
        return None
    try:
        if value.pop("format") != FORMAT:
            raise ValueError(f"not of the format {FORMAT}")
        value["rows"] = RowRecords(RowRecord(**row) for row in value["rows"])
        value["failed"] = [FailedRow(**row) for row in value["failed"]]
        value["withdrawn"] = [WithdrawnRow(**row) for row in value.get("withdrawn", [])]
        record = Record(**value)
        stem = shard_stem(record.batch, record.part)
        shard = re.compile(rf"{re.escape(stem)}(-[0-9a-f]{{8}})?\.safetensors")
        if path.name != f"{stem}.json" or not (record.file is None or shard.fullmatch(record.file)):
            raise ValueError(f"it is that of batch {record.batch}, part {record.part}, in {record.file}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"The commit record {path} is damaged: {error}. Delete it to extract its rows again."
        ) from error
    return record


def read_records(store: Store) -> list[Record]:
    """All commit records by batch and part, the state of the store. Raises StoreError for a damaged one."""
    return in_order([_whole(path, parse_record(path, data)) for path, data in with_contents(record_paths(store))])


def in_order(records: list[Record]) -> list[Record]:
    """By batch and part: what a later part says of a row wins."""
    return sorted(records, key=lambda record: (record.batch, record.part))
