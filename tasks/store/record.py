"""Commit records: the JSON file beside a shard that says what it holds. A shard without one does not exist."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.errors import StoreError
from tasks.files import write_json
from tasks.store.layout import Store

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
    """Name of the shard; None where every row failed."""
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


def record_path(store: Store, batch: int, part: int) -> Path:
    return store.shard(batch, part).with_suffix(".json")


def record_paths(store: Store) -> list[Path]:
    """All commit records, by name."""
    return sorted(store.shards.glob("[0-9]*.json"))


def write_record(store: Store, record: Record, workspace: Path | None = None) -> None:
    """Commit a shard that lies under its final name already; workspace: the writer's, see WriterLock."""
    write_json(record_path(store, record.batch, record.part), {"format": FORMAT, **asdict(record)}, workspace)


def read_record(path: Path) -> Record:
    """Raises StoreError if the record is damaged, or is not the one that its name says."""
    record = read_whole_record(path)
    if record is None:
        raise StoreError(f"The commit record {path} is damaged: it is no JSON. `extract` extracts its rows again.")
    return record


def read_whole_record(path: Path) -> Record | None:
    """The record, or None if only a part of it was ever written. Raises StoreError if it is damaged otherwise.

    What is complete and still wrong was made by another version or by hand: a person must decide.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return None
    except OSError as error:
        raise StoreError(f"The commit record {path} cannot be read: {error.strerror}.") from error
    try:
        if value.pop("format") != FORMAT:
            raise ValueError(f"not of the format {FORMAT}")
        value["rows"] = [RowRecord(**row) for row in value["rows"]]
        value["failed"] = [FailedRow(**row) for row in value["failed"]]
        value["withdrawn"] = [WithdrawnRow(**row) for row in value.get("withdrawn", [])]
        record = Record(**value)
        shard = Store(path.parents[1]).shard(record.batch, record.part).name
        if shard != path.with_suffix(".safetensors").name or record.file not in (None, shard):
            raise ValueError(f"it is that of batch {record.batch}, part {record.part}, in {record.file}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"The commit record {path} is damaged: {error}. Delete it to extract its rows again."
        ) from error
    return record


def read_records(store: Store) -> list[Record]:
    """All commit records by batch and part, the state of the store. Raises StoreError for a damaged one."""
    return in_order([read_record(path) for path in record_paths(store)])


def in_order(records: list[Record]) -> list[Record]:
    """By batch and part: what a later part says of a row wins."""
    return sorted(records, key=lambda record: (record.batch, record.part))
