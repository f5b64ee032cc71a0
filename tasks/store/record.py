"""Commit records: the JSON file beside a shard that says what it holds. A shard without one does not exist."""

import json
from dataclasses import asdict, dataclass
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
    """A row of the batch that could not be extracted, and why. A later run tries it again."""

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

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


def record_path(store: Store, batch: int, part: int) -> Path:
    return store.shard(batch, part).with_suffix(".json")


def write_record(store: Store, record: Record) -> None:
    """Commit a shard that lies under its final name already."""
    write_json(record_path(store, record.batch, record.part), {"format": FORMAT, **asdict(record)})


def read_record(path: Path) -> Record:
    """Raises StoreError if the record is damaged."""
    try:
        value = json.loads(path.read_bytes())
        if value.pop("format") != FORMAT:
            raise ValueError(f"not of the format {FORMAT}")
        value["rows"] = [RowRecord(**row) for row in value["rows"]]
        value["failed"] = [FailedRow(**row) for row in value["failed"]]
        return Record(**value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"The commit record {path} is damaged: {error}. Delete it to extract its rows again."
        ) from error


def read_records(store: Store) -> list[Record]:
    """All commit records by batch and part, the state of the store. Raises StoreError for a damaged one."""
    records = [read_record(path) for path in store.shards.glob("[0-9]*.json")]
    return sorted(records, key=lambda record: (record.batch, record.part))


def usable_records(store: Store, fingerprint: str) -> list[Record]:
    """The records whose shard is there with the recorded size. A record without its shard does not count.

    Raises StoreError for a record of another extraction.
    """
    usable = []
    for record in read_records(store):
        if record.fingerprint != fingerprint:
            raise StoreError(
                f"{record_path(store, record.batch, record.part)} belongs to another extraction "
                f"({record.fingerprint[:12]}, this one is {fingerprint[:12]}). Move it out of the store."
            )
        if record.file is None:
            usable.append(record)
            continue
        try:
            size = (store.shards / record.file).stat().st_size
        except FileNotFoundError:
            continue
        if size == record.bytes:
            usable.append(record)
    return usable
