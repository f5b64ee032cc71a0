"""Reads the manifest of a verified store. A trainer does it, too: no PyTorch, SGLang or Prefect is imported."""

import json
from typing import Any

from tasks.errors import StoreError
from tasks.files import checksum_of
from tasks.store.books import records_digest
from tasks.store.inspection import shard_sizes
from tasks.store.layout import Store
from tasks.store.record import Record, read_records


def read_manifest(store: Store) -> dict[str, Any]:
    """The manifest of a verified store. Raises StoreError if there is none, or if the records changed since."""
    return _with_records(store)[0]


def check_contents(store: Store, deep: bool = False) -> dict[str, Any]:
    """The manifest of a store that is what it says: each shard there, of its size; `deep`: of its checksum, too.

    Raises StoreError naming the first shard that is not, or as `read_manifest`.
    """
    manifest, records = _with_records(store)
    sizes = shard_sizes(store)
    for record in records:
        if record.file is None:
            continue
        size = sizes.get(record.file)
        if size is None:
            raise StoreError(f"{store.root} is not what its manifest says: {record.file} is gone.")
        if size != record.bytes:
            raise StoreError(
                f"{store.root} is not what its manifest says: {record.file} has {size} bytes, not {record.bytes}."
            )
        if deep and (actual := checksum_of(store.shards / record.file)) != record.checksum:
            raise StoreError(
                f"{store.root} is not what its manifest says: {record.file} has the checksum {actual}, not "
                f"{record.checksum}."
            )
    return manifest


def _with_records(store: Store) -> tuple[dict[str, Any], list[Record]]:
    try:
        manifest = json.loads(store.manifest.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{store.root} has no readable manifest ({error}): it is not verified.") from error
    records = read_records(store)
    if manifest["records_sha256"] != records_digest(store, records):
        raise StoreError(f"{store.root} changed since it was verified: verify it again.")
    return manifest, records
