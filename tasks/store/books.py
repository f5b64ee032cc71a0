"""The books: what became of every row of the plan, by the commit records."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.dataset.plan import ACTIONS, SKIP, TRUNCATE, Plan
from tasks.files import sha256_of_json, write_parquet
from tasks.storage import Location
from tasks.store.layout import Store
from tasks.store.record import Record, record_name, record_paths, with_contents

DONE, TRUNCATED, SKIPPED, FAILED = "done", "truncated", "skipped", "failed"
STATES = (DONE, TRUNCATED, SKIPPED, FAILED)
MISSING = "missing"  # not in the books at all: never tried, or its shard was lost


@dataclass(frozen=True)
class Contradiction:
    """Something that plan and records say differently."""

    text: str
    record: str | None = None
    """File name of the record concerned."""
    row: int | None = None
    """The row, if the record's others are not concerned."""


@dataclass(frozen=True)
class Books:
    """State, reason and shard of each row, in order."""

    states: list[str]
    reasons: list[str]
    shards: list[str | None]
    final: frozenset[int]
    """Failed rows that no other try can heal."""
    contradictions: list[Contradiction]
    """Between plan and records."""

    @property
    def problems(self) -> list[str]:
        """The contradictions, for people."""
        return [contradiction.text for contradiction in self.contradictions]

    def counts(self) -> dict[str, int]:
        """Rows by final state."""
        return {state: self.states.count(state) for state in STATES}

    def rows(self, state: str) -> list[int]:
        """The rows in this state, in order."""
        return [row for row, found in enumerate(self.states) if found == state]

    def due(self) -> set[int]:
        """The rows that a resumed run extracts: never tried, lost, or failed in a way that may heal."""
        return {*self.rows(MISSING), *self.rows(FAILED)} - self.final


def balance(plan: Plan, records: list[Record]) -> Books:
    """Find each row of the plan in the records."""
    states, reasons = [MISSING] * len(plan), ["not extracted yet"] * len(plan)
    shards: list[str | None] = [None] * len(plan)
    final: set[int] = set()
    problems: list[Contradiction] = []
    for row in np.flatnonzero(plan.action == ACTIONS.index(SKIP)).tolist():
        states[row], reasons[row] = SKIPPED, plan.reason[row]
    for record in records:
        name = f"{record.batch:06d}.{record.part}"
        file_name = record_name(record.batch, record.part)
        listed = [row.row for row in record.rows] + [row.row for row in record.failed]
        if strange := [row for row in listed if not 0 <= row < len(plan) or plan.batch[row] != record.batch]:
            text = f"record {name} lists rows that the plan does not have in that batch: {strange[:5]}"
            problems.append(Contradiction(text, file_name))
            continue
        if len(set(listed)) < len(listed):
            problems.append(Contradiction(f"record {name} lists a row more than once", file_name))
        for failure in record.failed:
            if states[failure.row] in (MISSING, FAILED):  # a later part may have it, and an earlier one may have had
                states[failure.row], reasons[failure.row] = FAILED, failure.reason
                (final.discard if failure.may_heal else final.add)(failure.row)
        for withdrawn in record.withdrawn:
            if 0 <= withdrawn.row < len(plan) and states[withdrawn.row] == MISSING:
                reasons[withdrawn.row] = f"withdrawn: {withdrawn.reason}"
        for stored in record.rows:
            row = stored.row
            if states[row] not in (MISSING, FAILED):
                text = f"row {row} is in the books twice, again in record {name}"
                problems.append(Contradiction(text, file_name, row))
            states[row] = TRUNCATED if ACTIONS[plan.action[row]] == TRUNCATE else DONE
            reasons[row], shards[row] = plan.reason[row], record.file
            final.discard(row)
    problems += [
        Contradiction(f"row {row} is {state} without a reason")
        for row, state in enumerate(states)
        if state not in (DONE, MISSING) and not reasons[row]
    ]
    return Books(states, reasons, shards, frozenset(final), problems)


def write_ledger(path: Location, plan: Plan, books: Books) -> None:
    """Write a line a row as Parquet, atomically."""
    table = pa.table(
        {
            "row": np.arange(len(plan), dtype=np.int64),
            "id": pa.array(plan.id, pa.string()),
            "state": pa.array(books.states).dictionary_encode(),
            "reason": pa.array(books.reasons, pa.string()),
            "may_heal": pa.array(
                [row not in books.final if state == FAILED else None for row, state in enumerate(books.states)],
                pa.bool_(),
            ),
            "tokens": plan.tokens,
            "input_tokens": plan.input_tokens,
            "shard": pa.array(books.shards, pa.string()),
        }
    )
    write_parquet(path, table)


def records_digest(store: Store, records: list[Record]) -> str:
    """SHA-256 over all commit records: another one where any row was extracted anew."""
    names = {record_name(record.batch, record.part) for record in records}
    files = [path for path in record_paths(store) if path.name in names]
    return sha256_of_json({path.name: hashlib.sha256(data).hexdigest() for path, data in with_contents(files)})
