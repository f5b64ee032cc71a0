"""Puts what is damaged or suspicious back into the plan: the next `extract` extracts just these rows.

A damaged shard's record goes, and with it the shard. A bad row of a good shard is withdrawn: the record no longer lists
it among its rows, so it is missing; its bytes stay in the shard, named in the record as withdrawn, and no reader that
goes by the records sees them.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from tasks.store.layout import Store
from tasks.store.lock import WriterLock
from tasks.store.record import Record, WithdrawnRow, read_whole_record, write_record
from tasks.verification.findings import Problem


@dataclass(frozen=True)
class Repair:
    """What was put back into the plan."""

    rows: list[int]
    shards: list[str]
    """Commit records that were withdrawn as a whole."""
    left: list[str]
    """Problems that another extraction of rows does not mend."""


def withdraw(store: Store, problems: list[Problem], lock: WriterLock) -> Repair:
    """Withdraw rows and records. Raises LostLockError if another writer has the store."""
    by_record: dict[str, list[Problem]] = defaultdict(list)
    left = []
    for problem in problems:
        if problem.mend == "nothing" or problem.record is None:
            left.append(problem.text)
        else:
            by_record[problem.record].append(problem)
    rows: set[int] = set()
    shards = []
    for name, found in sorted(by_record.items()):
        lock.check()
        path = store.shards / name
        record = read_whole_record(path)
        if record is None:  # half written
            path.unlink()
            shards.append(name)
            continue
        bad = {problem.row: problem.text for problem in reversed(found) if problem.row is not None}
        keep = [row for row in record.rows if row.row not in bad]
        if keep and not any(problem.mend == "shard" for problem in found):
            gone = [WithdrawnRow(row.row, bad[row.row]) for row in record.rows if row.row in bad]
            record_now = replace(record, rows=keep, withdrawn=[*record.withdrawn, *gone])
            write_record(store, record_now, lock)
            rows |= bad.keys()
        else:
            _withdraw_shard(store, record, name, lock)
            rows |= {row.row for row in record.rows}
            shards.append(name)
    return Repair(sorted(rows), shards, left)


def _withdraw_shard(store: Store, record: Record, name: str, lock: WriterLock) -> None:
    """The record first: a shard without one does not exist. What it says of failed rows stays."""
    if record.failed:
        empty = replace(record, file=None, bytes=0, checksum="", rows=[], withdrawn=[])
        write_record(store, empty, lock)
    else:
        (store.shards / name).unlink()
    if record.file is not None:
        (store.shards / record.file).unlink(missing_ok=True)
