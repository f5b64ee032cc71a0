"""Commit records: the JSON file beside a shard that says what it holds. A shard without one does not exist."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.errors import StoreError
from tasks.files import json_bytes, write_atomic
from tasks.storage import Location, read_all
from tasks.store.layout import Store, shard_stem

if TYPE_CHECKING:
    from tasks.store.lock import WriterLock

FORMAT = "drillcore.shard/1"


@dataclass(frozen=True)
class RowRecord:
    """A row inside a shard. The health lists have one value a state: aux layers in order, then the final state."""

    row: int
    tokens: int
    rms: list[float]
    """Root mean square over the row's elements."""
    zero_rows: list[int]
    """Tokens whose state is all zero."""


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
    rows: list[RowRecord]
    failed: list[FailedRow]
    written: dict[str, Any]
    """Who wrote it, when, and how long the batch took."""
    withdrawn: list[WithdrawnRow] = field(default_factory=list)
    """By `verify --repair`. Records of before this was kept have none."""

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


def record_name(batch: int, part: int) -> str:
    return f"{shard_stem(batch, part)}.json"


def record_path(store: Store, batch: int, part: int) -> Location:
    return store.shards / record_name(batch, part)


def record_paths(store: Store) -> list[Location]:
    """All commit records, by name."""
    return sorted(store.shards.glob("[0-9]*.json"))


def write_record(store: Store, record: Record, lock: "WriterLock | None" = None) -> None:
    """Commit a shard that lies under its final name already; lock: the writer's."""
    path, data = record_path(store, record.batch, record.part), json_bytes({"format": FORMAT, **asdict(record)})
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
        value["rows"] = [RowRecord(**row) for row in value["rows"]]
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
