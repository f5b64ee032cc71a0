"""The books: what became of every row of the plan, by the commit records."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.dataset.plan import ACTIONS, SKIP, TRUNCATE, Plan
from tasks.files import sha256_of, sha256_of_json, write_parquet
from tasks.store.layout import Store
from tasks.store.record import Record, record_path

DONE, TRUNCATED, SKIPPED, FAILED = "done", "truncated", "skipped", "failed"
STATES = (DONE, TRUNCATED, SKIPPED, FAILED)
MISSING = "missing"  # not in the books at all: never tried, or its shard was lost


@dataclass(frozen=True)
class Books:
    """State, reason and shard of each row, in order."""

    states: list[str]
    reasons: list[str]
    shards: list[str | None]
    problems: list[str]
    """Contradictions between plan and records."""

    def counts(self) -> dict[str, int]:
        """Rows by final state."""
        return {state: self.states.count(state) for state in STATES}


def balance(plan: Plan, records: list[Record]) -> Books:
    """Find each row of the plan in the records."""
    states, reasons = [MISSING] * len(plan), ["not extracted yet"] * len(plan)
    shards: list[str | None] = [None] * len(plan)
    problems: list[str] = []
    for row in np.flatnonzero(plan.action == ACTIONS.index(SKIP)).tolist():
        states[row], reasons[row] = SKIPPED, plan.reason[row]
    for record in records:
        name = f"{record.batch:06d}.{record.part}"
        listed = [row.row for row in record.rows] + [row.row for row in record.failed]
        if strange := [row for row in listed if not 0 <= row < len(plan) or plan.batch[row] != record.batch]:
            problems.append(f"record {name} lists rows that the plan does not have in that batch: {strange[:5]}")
            continue
        for failure in record.failed:
            if states[failure.row] in (MISSING, FAILED):  # a later part may have it, and an earlier one may have had
                states[failure.row], reasons[failure.row] = FAILED, failure.reason
        for stored in record.rows:
            row = stored.row
            if states[row] not in (MISSING, FAILED):
                problems.append(f"row {row} is in the books twice, again in record {name}")
            states[row] = TRUNCATED if ACTIONS[plan.action[row]] == TRUNCATE else DONE
            reasons[row], shards[row] = plan.reason[row], record.file
    return Books(states, reasons, shards, problems)


def write_ledger(path: Path, plan: Plan, books: Books) -> None:
    """Write a line a row as Parquet, atomically."""
    table = pa.table(
        {
            "row": np.arange(len(plan), dtype=np.int64),
            "id": pa.array(plan.id, pa.string()),
            "state": pa.array(books.states).dictionary_encode(),
            "reason": pa.array(books.reasons, pa.string()),
            "tokens": plan.tokens,
            "input_tokens": plan.input_tokens,
            "shard": pa.array(books.shards, pa.string()),
        }
    )
    write_parquet(path, table)


def records_digest(store: Store, records: list[Record]) -> str:
    """SHA-256 over all commit records: another one where any row was extracted anew."""
    files = [record_path(store, record.batch, record.part) for record in records]
    return sha256_of_json({file.name: sha256_of(file) for file in files})
