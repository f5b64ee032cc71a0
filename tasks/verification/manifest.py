"""Writes the manifest: what a store that passed is. Its presence says that it did."""

from typing import Any

from tasks.files import sha256_of, write_json
from tasks.store.books import Books
from tasks.store.layout import Store
from tasks.store.record import Record


def write_manifest(
    store: Store, extraction: dict[str, Any], records: list[Record], digest: str, books: Books
) -> dict[str, Any]:
    """Write it and return it; digest: of the records. The same store gives the same bytes: no clock, no host in it."""
    manifest = {
        "format": "drillcore.manifest/1",
        "fingerprint": extraction["fingerprint"],
        "parts": extraction["parts"],
        "rows": len(books),
        "rows_by_state": books.counts(),
        "tokens": sum(record.tokens for record in records),
        "bytes": sum(record.bytes for record in records),
        "shards": sum(record.file is not None for record in records),
        "records_sha256": digest,
        "plan_sha256": sha256_of(store.plan),
        "ledger_sha256": sha256_of(store.ledger),
    }
    write_json(store.manifest, manifest)
    return manifest
