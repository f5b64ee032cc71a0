"""What a store really has: its commit records against its files. Resuming starts from this, never from a list."""

import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace

from tasks.errors import StoreError
from tasks.files import checksum_of, human_bytes
from tasks.storage import Location
from tasks.store.layout import Store, in_batches
from tasks.store.record import Record, in_order, parse_record, record_path, record_paths, with_contents

THREADS = 8  # that read shards; the hash and the reads run outside the interpreter's lock
SHOW_EVERY = 15.0  # seconds between two lines about how far the checksums are


@dataclass(frozen=True)
class Inspection:
    """Records that count, and what does not."""

    records: list[Record]
    """Their shard is there, of the recorded size and, where that was asked for, with the recorded checksum."""
    damaged: list[Record]
    """Their shard is not."""
    unfinished: list[Location]
    """Records of which only a part was written."""
    contents: str
    """SHA-256 over the names and the contents of all record files: another one when somebody wrote to the store."""
    batches: range | None = None
    """Only of these was anything looked at; None: of all."""

    def without_rows(self) -> "Inspection":
        """What is needed once the books are made: of a million rows the records take 44 MB."""
        records, damaged = ([replace(record, rows=[]) for record in part] for part in (self.records, self.damaged))
        return replace(self, records=records, damaged=damaged)

    def useless_files(self, store: Store) -> list[Location]:
        """Shards that no record counts: damaged, or never committed."""
        kept = {record.file for record in self.records}
        return [path for path in _shards(store, self.batches) if path.name not in kept]

    def problems(self, store: Store) -> list[str]:
        """A line for each record that does not count."""
        return [
            *(f"{record.file} is not what its commit record says" for record in self.damaged),
            *(f"{path.name}, a commit record, is half written" for path in self.unfinished),
        ]


NOTHING = Inspection([], [], [], hashlib.sha256().hexdigest())


def inspect_store(store: Store, fingerprint: str, deep: bool = False, batches: range | None = None) -> Inspection:
    """Compare records and shards; deep: their checksums too, which reads every byte, with progress on stderr.

    batches: look at these only, where others write to the rest. Raises StoreError for a record of another extraction,
    or one that nobody but a person can judge.
    """
    records: list[Record] = []
    damaged: list[Record] = []
    unfinished: list[Location] = []
    contents = hashlib.sha256()
    sizes = shard_sizes(store, batches)
    for path, data in with_contents([path for path in record_paths(store) if in_batches(path, batches)]):
        contents.update(b"%s %d\n%s" % (path.name.encode(), len(data), data))
        record = parse_record(path, data)
        if record is None:
            unfinished.append(path)
        elif record.fingerprint != fingerprint:
            raise StoreError(
                f"{path} belongs to another extraction ({record.fingerprint[:12]}, this one is {fingerprint[:12]}). "
                "Move it out of the store."
            )
        else:
            there = record.file is None or sizes.get(record.file) == record.bytes
            (records if there else damaged).append(record)
    if deep and (spoiled := _with_other_checksum(store, records)):
        damaged += spoiled
        records = [record for record in records if record not in spoiled]
    return Inspection(in_order(records), in_order(damaged), unfinished, contents.hexdigest(), batches)


def _shards(store: Store, batches: range | None) -> list[Location]:
    return [path for path in store.shards.glob("[0-9]*.safetensors") if in_batches(path, batches)]


def shard_sizes(store: Store, batches: range | None = None) -> dict[str, int]:
    """Bytes of each shard's file, by name."""
    sizes = {}
    for path in _shards(store, batches):
        with suppress(FileNotFoundError):  # removed by another run since it was listed
            sizes[path.name] = path.stat().st_size
    return sizes


def remove_remains(store: Store, inspection: Inspection) -> None:
    """Remove what does not count; the lock must be held.

    Records whose shard is damaged, half-written records, shards without a record, files that never got their name.
    Of the other batches nothing, where only some were inspected: others write to them.
    """
    for record in inspection.damaged:
        record_path(store, record.batch, record.part).unlink()
    for path in inspection.unfinished:
        path.unlink()
    for path in inspection.useless_files(store):
        path.unlink()
    for folder in (store.root, store.shards) if inspection.batches is None else ():
        for path in folder.glob(".*.tmp"):
            path.unlink()


def _with_other_checksum(store: Store, records: list[Record]) -> list[Record]:
    with_shard = [record for record in records if record.file is not None]
    total, done, spoiled = sum(record.bytes for record in with_shard), 0, []
    next_line = time.monotonic() + SHOW_EVERY
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="checksum")
    try:
        checks = {pool.submit(checksum_of, store.shards / str(record.file)): record for record in with_shard}
        for check in as_completed(checks):
            record = checks[check]
            if check.result() != record.checksum:
                spoiled.append(record)
            done += record.bytes
            if time.monotonic() >= next_line or done == total:
                _show(done, total, len(spoiled))
                next_line = time.monotonic() + SHOW_EVERY
    finally:
        pool.shutdown(cancel_futures=True)
    return spoiled


def _show(done: int, total: int, spoiled: int) -> None:
    text = f"{human_bytes(done)} of {human_bytes(total)} read, {spoiled} shards damaged"
    print(f"  checksums  {text}", file=sys.stderr, flush=True)
