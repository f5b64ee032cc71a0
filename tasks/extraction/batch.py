"""One batch: all its rows in flight together, each dump into the shard as it comes, the commit record last."""

import contextlib
import itertools
import os
import socket
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

from tasks.dataset.rows import Row
from tasks.errors import RemoteError, RowError, TransientPrefillError, WriteError
from tasks.extraction.engine import PrefillEngine
from tasks.model import ITEMSIZE
from tasks.server.dumps import Dump
from tasks.store.layout import Store
from tasks.store.lock import WriterLock
from tasks.store.record import FORMAT, FailedRow, Record, RowRecord, write_record
from tasks.store.shard import ShardWriter, file_bytes


@dataclass(frozen=True)
class BatchResult:
    """What one batch came to."""

    batch: int
    rows: int
    tokens: int
    bytes: int
    failed: list[FailedRow]


def extract_batch(
    batch: int, rows: list[Row], engine: PrefillEngine, store: Store, fingerprint: str, lock: WriterLock
) -> BatchResult:
    """Extract `rows` of a batch into its next shard and commit it.

    Rows that cannot be had are named in the record, with the reason and whether a later try may heal them. Raises
    ServerError if the server is gone (nothing is committed then), LostLockError if another writer has taken the store,
    WriteError if the shard or its record could not be written.
    """
    captured = engine.captured
    tokens = [len(row.input_ids) for row in rows]
    size = file_bytes(tokens, len(captured.layers) + 1, captured.hidden_size, ITEMSIZE[captured.dtype])
    with lock.room(size, engine.held):
        return _extract(batch, rows, engine, store, fingerprint, lock)


def _extract(
    batch: int, rows: list[Row], engine: PrefillEngine, store: Store, fingerprint: str, lock: WriterLock
) -> BatchResult:
    started = time.monotonic()
    captured = engine.captured
    metadata = {"format": FORMAT, "fingerprint": fingerprint, "batch": str(batch)}
    path: Path | None = None
    done: list[RowRecord] = []
    failed: list[FailedRow] = []
    # Longest first: what does not fit or cannot be served shows early, and the batch ends with short rows.
    waiting = iter(sorted(rows, key=lambda row: -len(row.input_ids)))
    futures: dict[Future[Dump], Row] = {}
    finished: SimpleQueue[Future[Dump]] = SimpleQueue()
    try:
        part = lock.next_part(store, batch)
        path = lock.shard_file(store, batch, part)
        with ShardWriter(path, len(rows), captured.dtype, metadata, lock.workspace, lock.durable) as writer:
            while True:
                for row in itertools.islice(waiting, engine.most_waiting - len(futures)):
                    future = engine.submit(row.number, row.input_ids)
                    futures[future] = row
                    future.add_done_callback(finished.put)
                if not futures:
                    break
                future = finished.get()
                row = futures.pop(future)  # the future holds the dump's mapping: let go of it with the row
                try:
                    dump = future.result()
                except (RowError, TransientPrefillError) as error:
                    failed.append(FailedRow(row.number, str(error), may_heal=not isinstance(error, RowError)))
                    engine.count(failed=1)
                    continue
                try:
                    writer.add(row.number, *dump.raw(), row.input_ids, row.loss_mask)
                    done.append(RowRecord(row.number, len(row.input_ids), dump.rms, dump.zero_rows))
                    engine.count(rows=1, tokens=len(row.input_ids), bytes=dump.aux.nbytes + dump.last.nbytes)
                finally:
                    engine.release(dump)
                    del dump
            lock.check()
            shard = writer.finish() if done else None
        written = {
            "by": f"{socket.gethostname()}:{os.getpid()}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 3),
            **(lock.deliver(store, path) if shard else {}),
        }
        record = Record(
            fingerprint=fingerprint,
            batch=batch,
            part=part,
            file=path.name if shard else None,
            bytes=shard.bytes if shard else 0,
            checksum=shard.checksum if shard else "",
            codec="raw",
            rows=sorted(done, key=lambda record: record.row),
            failed=failed,
            written=written,
        )
        lock.check()  # again: a large shard takes seconds to become durable
        write_record(store, record, lock)
    except RemoteError as error:
        raise WriteError(
            f"{store.root} cannot be written. {error} What was committed stays: start the same command again."
        ) from error
    except OSError as error:
        with contextlib.suppress(RemoteError):
            lock.check()  # who takes over removes the workspace of the writer before
        raise WriteError(
            f"{store.root} cannot be written: {error.strerror} ({error.filename or path}). What was committed stays: "
            "make room, and start the same command again."
        ) from error
    finally:
        for future in futures:
            engine.discard(future)
        futures.clear()  # an exception keeps this frame, and the frame would keep the dumps mapped
    return BatchResult(batch, len(done), record.tokens, record.bytes, failed)
