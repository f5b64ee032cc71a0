"""Which row lies in which shard, as arrays: made from the commit records once, read in milliseconds afterwards.

100,000 rows are 20 MB of commit records. What is worked out of them is kept beside them (those of a bucket: in this
machine's state folder), with their names, sizes and times or ETags: where those differ, the records are read again. A
trainer reads it: only NumPy and safetensors are imported.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tasks.errors import StoreError
from tasks.files import sha256_of_json, write_atomic
from tasks.storage import Location, S3Path
from tasks.store.layout import Store
from tasks.store.record import Record, RowRecords, in_order, parse_record, record_paths, with_contents

FORMAT = "drillcore.index/1"


@dataclass(frozen=True)
class Index:
    """Where the stored rows lie. All arrays are [rows], in the rows' order."""

    rows: np.ndarray
    """int64: numbers in the dataset, ascending."""
    tokens: np.ndarray
    """int32."""
    shard: np.ndarray
    """int32: index into `files`."""
    files: list[str]
    """Names of the shards."""
    bytes: list[int]
    """Size of each shard."""
    fingerprints: list[str]
    """Of the extractions that wrote them: one, in a sound store."""
    digest: str
    """SHA-256 over the commit records, as the manifest has it."""


def load_index(store: Store) -> Index:
    """The index of a store with sound records, kept or made anew. Raises StoreError if a record is damaged."""
    paths = record_paths(store)
    if kept := _read(store, _state_of(paths)):
        return kept
    records, digests = [], {}
    for path, data in with_contents(paths):
        records.append(_whole(path, data))
        digests[path.name] = hashlib.sha256(data).hexdigest()
    return _keep(store, paths, records, sha256_of_json(digests))  # as `records_digest`, which the manifest has


def keep_index(store: Store, records: list[Record], digest: str) -> Index:
    """Make the index of these records, all that the store has, and keep it; digest: of the records."""
    return _keep(store, record_paths(store), records, digest)


def _keep(store: Store, paths: list[Location], records: list[Record], digest: str) -> Index:
    index = make_index(records, digest)
    data = {"rows": index.rows, "tokens": index.tokens, "shard": index.shard}
    about = {"files": index.files, "bytes": index.bytes, "fingerprints": index.fingerprints, "digest": index.digest}
    metadata = {"format": FORMAT, "state": _state_of(paths), "about": json.dumps(about)}
    # A reader may have no right to write; then the records are read again next time.
    with contextlib.suppress(OSError):
        store.index.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(store.index, save(data, metadata))
    return index


def make_index(records: list[Record], digest: str = "") -> Index:
    """Of records with a raw codec; what a later part says of a row wins. Raises StoreError for another codec."""
    files: list[str] = []
    sizes: list[int] = []
    parts = []
    for record in in_order(records):
        if record.file is None or not record.rows:
            continue
        if record.codec != "raw":
            raise StoreError(f"{record.file} has the codec {record.codec!r}, which this version cannot read.")
        stored = RowRecords.of(record.rows)
        parts.append(
            np.column_stack([stored.numbers, stored.tokens, np.full(len(stored), len(files))]).astype(np.int64)
        )
        files.append(record.file)
        sizes.append(record.bytes)
    # From the end, so that of a row that is there twice the last one counts.
    every = np.concatenate(parts)[::-1] if parts else np.empty((0, 3), dtype=np.int64)
    rows, last = np.unique(every[:, 0], return_index=True)
    tokens, shard = every[last, 1].astype(np.int32), every[last, 2].astype(np.int32)
    return Index(rows, tokens, shard, files, sizes, sorted({record.fingerprint for record in records}), digest)


def _whole(path: Location, data: bytes) -> Record:
    record = parse_record(path, data)
    if record is None:
        raise StoreError(f"The commit record {path} is damaged: it is half written.")
    return record


def _state_of(paths: list[Location]) -> str:
    def version(path: Location) -> tuple[int, int | str]:
        if isinstance(path, S3Path):
            facts = path.stat()
            return facts.st_size, facts.etag
        status = path.stat()
        return status.st_size, status.st_mtime_ns

    return sha256_of_json([(path.name, *version(path)) for path in paths])


def _read(store: Store, state: str) -> Index | None:
    """The kept index, if it is that of these records."""
    try:
        with safe_open(str(store.index), framework="np") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("state") != state:
                return None
            arrays = {name: file.get_tensor(name) for name in ("rows", "tokens", "shard")}
            return Index(**arrays, **json.loads(metadata["about"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
