"""The books: what became of every row of the plan, by the commit records."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.dataset.plan import ACTIONS, SKIP, TRUNCATE, Plan
from tasks.files import sha256_of_json, write_parquet
from tasks.storage import Location
from tasks.store.layout import Store
from tasks.store.record import Record, RowRecords, record_name, record_paths, with_contents

DONE, TRUNCATED, SKIPPED, FAILED = "done", "truncated", "skipped", "failed"
STATES = (DONE, TRUNCATED, SKIPPED, FAILED)
MISSING = "missing"  # not in the books at all: never tried, or its shard was lost
ALL_STATES = (*STATES, MISSING)
CODES = {state: code for code, state in enumerate(ALL_STATES)}
OPEN = (CODES[MISSING], CODES[FAILED])
NOWHERE = -1


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
    """State, reason and shard of each row; 5 bytes a row, and the reasons."""

    codes: np.ndarray
    """uint8 [rows]: index into ALL_STATES."""
    why: dict[int, str]
    """Reasons by row; what is missing without one was not extracted yet."""
    at: np.ndarray
    """int32 [rows]: index into files, NOWHERE where the row is in no shard."""
    files: list[str | None]
    final: frozenset[int]
    """Failed rows that no other try can heal."""
    contradictions: list[Contradiction]
    """Between plan and records."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def states(self) -> list[str]:
        """Of each row."""
        return [ALL_STATES[code] for code in self.codes.tolist()]

    def reason(self, row: int) -> str:
        """Why a row is not in the store as it is in the dataset; empty where it is."""
        return self.why.get(row, "not extracted yet" if self.codes[row] == CODES[MISSING] else "")

    @property
    def reasons(self) -> list[str]:
        """Of each row."""
        return [self.reason(row) for row in range(len(self))]

    @property
    def shards(self) -> list[str | None]:
        """File name of each row's shard."""
        return [None if at == NOWHERE else self.files[at] for at in self.at.tolist()]

    @property
    def problems(self) -> list[str]:
        """The contradictions, for people."""
        return [contradiction.text for contradiction in self.contradictions]

    def counts(self) -> dict[str, int]:
        """Rows by final state."""
        return {state: int(np.count_nonzero(self.codes == CODES[state])) for state in STATES}

    def rows(self, state: str) -> list[int]:
        """The rows in this state, in order."""
        return np.flatnonzero(self.codes == CODES[state]).tolist()

    def due(self) -> np.ndarray:
        """The rows that a resumed run extracts, in order: never tried, lost, or failed in a way that may heal."""
        due = np.isin(self.codes, [CODES[MISSING], CODES[FAILED]])
        due[list(self.final)] = False
        return np.flatnonzero(due)


def balance(plan: Plan, records: Iterable[Record]) -> Books:
    """Find each row of the plan in the records."""
    codes = np.full(len(plan), CODES[MISSING], dtype=np.uint8)
    shards, files = np.full(len(plan), NOWHERE, dtype=np.int32), list[str | None]()
    why: dict[int, str] = {}
    final: set[int] = set()
    problems: list[Contradiction] = []
    for row in np.flatnonzero(plan.action == ACTIONS.index(SKIP)).tolist():
        codes[row], why[row] = CODES[SKIPPED], plan.reason[row]
    for record in records:
        name = f"{record.batch:06d}.{record.part}"
        file_name = record_name(record.batch, record.part)
        stored = RowRecords.of(record.rows).numbers.tolist()
        listed = stored + [row.row for row in record.failed]
        if strange := [row for row in listed if not 0 <= row < len(plan) or plan.batch[row] != record.batch]:
            text = f"record {name} lists rows that the plan does not have in that batch: {strange[:5]}"
            problems.append(Contradiction(text, file_name))
            continue
        if len(set(listed)) < len(listed):
            problems.append(Contradiction(f"record {name} lists a row more than once", file_name))
        for failure in record.failed:
            if codes[failure.row] in OPEN:  # a later part may have it, and an earlier one may have had
                codes[failure.row], why[failure.row] = CODES[FAILED], failure.reason
                (final.discard if failure.may_heal else final.add)(failure.row)
        for withdrawn in record.withdrawn:
            if 0 <= withdrawn.row < len(plan) and codes[withdrawn.row] == CODES[MISSING]:
                why[withdrawn.row] = f"withdrawn: {withdrawn.reason}"
        files.append(record.file)
        for row in stored:
            if codes[row] not in OPEN:
                text = f"row {row} is in the books twice, again in record {name}"
                problems.append(Contradiction(text, file_name, row))
            truncated = ACTIONS[plan.action[row]] == TRUNCATE
            codes[row], shards[row] = CODES[TRUNCATED if truncated else DONE], len(files) - 1
            final.discard(row)
            if reason := plan.reason[row]:
                why[row] = reason
            else:
                why.pop(row, None)
    problems += [
        Contradiction(f"row {row} is {ALL_STATES[codes[row]]} without a reason")
        for row in np.flatnonzero(~np.isin(codes, [CODES[DONE], CODES[MISSING]])).tolist()
        if not why.get(row)
    ]
    return Books(codes, why, shards, files, frozenset(final), problems)


def write_ledger(path: Location, plan: Plan, books: Books) -> None:
    """Write a line a row as Parquet, atomically."""
    table = pa.table(
        {
            "row": np.arange(len(plan), dtype=np.int64),
            "id": plan.id,
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
