"""What a flow keeps in memory of a store of many rows: plan, books, records and figures, step by step.

Replays, in one process with everything that a flow imports, what a resumed flow does with a store after its shards were
read: preflight's part, the verification's, the report. Plan and commit records are real files, as an extraction leaves
them; shards there are none, so the rows' figures are made up. `orchestration.py --stored` has the whole flow, which
takes as long as reading the shards does.

    python -m tests.benchmarks.books_memory --rows 1000000 --out books-memory.json
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import flows.extract
from tasks.dataset.plan import ACTIONS, EXTRACT, Plan, assign_batches, give_back_memory, load_plan, save_plan
from tasks.report.facts import reasons_of, throughput_of
from tasks.store.books import balance, write_ledger
from tasks.store.inspection import inspect_store
from tasks.store.layout import Store
from tasks.store.record import Record, RowRecord, RowRecords, read_records, write_record
from tasks.verification.distribution import describe, find_outliers
from tasks.verification.duplicates import find_duplicates
from tasks.verification.shards import Figures, join
from tasks.verification.stored import StoredRows

STATES = ["layer 1", "layer 2", "layer 3", "final"]
TOKEN_BYTES, SHARD_BYTES, MEAN_TOKENS = 57_349, 2 << 30, 64


def make(store: Store, rows: int) -> None:
    """Plan and records of so many rows, all done."""
    random = np.random.default_rng(0)
    tokens = np.clip(random.exponential(MEAN_TOKENS, rows), 1, 512).astype(np.int32)
    batch = assign_batches(tokens, np.zeros(rows, dtype=bool), TOKEN_BYTES, SHARD_BYTES)
    size = 10 * tokens.astype(np.int64)
    ids = pa.chunked_array([[f"sample-{row}" for row in range(rows)]], pa.string())
    action = np.full(rows, ACTIONS.index(EXTRACT), dtype=np.uint8)
    plan = Plan(np.cumsum(size), size, tokens, tokens, action, batch, [""] * rows, ids)
    store.shards.mkdir(parents=True)
    save_plan(plan, store.plan)
    for number, numbers in enumerate(plan.rows_by_batch()):
        rms = random.uniform(0.5, 2.0, (len(numbers), len(STATES))).tolist()
        done = [RowRecord(row, int(tokens[row]), values, [0] * 4) for row, values in zip(numbers.tolist(), rms)]
        written = {"at": "2026-11-30T00:00:00+00:00", "seconds": 1.0}
        write_record(store, Record("f", number, 0, None, 0, "", "raw", done, [], written))


def figures_of(record: Record) -> Figures:
    rows = RowRecords.of(record.rows)
    hashes = rows.numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return Figures(
        rows.numbers, rows.rms.astype(np.float32), rows.rms.astype(np.float32), hashes, hashes + np.uint64(1)
    )


def replay(store: Store) -> dict[str, Any]:
    """Peak memory in MB after each step."""
    peaks = {"imports": peak()}
    planned, inspection = load_plan(store.plan), inspect_store(store, "f")
    in_preflight = balance(planned, inspection.records)
    kept = planned, inspection.without_rows()
    del planned, inspection
    peaks["preflight"] = peak()
    read = load_plan(store.plan)
    plan = kept[0] if kept[0].same(read) else read
    del read
    give_back_memory()
    records = read_records(store)
    books, stored = balance(plan, records), StoredRows(store, records, len(plan))
    peaks["books"] = peak()
    figures = join(map(figures_of, records), sum(len(record.rows) for record in records), len(STATES))
    describe(STATES, figures.median, figures.largest)
    find_outliers(STATES, figures.row, plan.tokens[figures.row], figures.median)
    several = plan.tokens[figures.row] > 1
    rows, last, ids = figures.row[several], figures.last[several], figures.ids[several]
    del figures
    find_duplicates(rows, last, ids)
    del rows, last, ids, several
    peaks["figures"] = peak()
    write_ledger(store.ledger, plan, books)
    assert len(stored) == len(books) == len(in_preflight) == len(plan)
    del records, books, stored
    peaks["ledger"] = peak()
    again = read_records(store)
    reasons_of(balance(load_plan(store.plan), again)), throughput_of(again)
    peaks["report"] = peak()
    return peaks


def peak() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", help="may be given several times (default: 10000)")
    parser.add_argument("--out", type=Path, help="raw JSON")
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        assert flows.extract.extract  # what a flow imports is imported
        print(json.dumps(replay(Store(options.replay))))
        return
    result: dict[str, Any] = {"cores": os.cpu_count(), "states": len(STATES), "peak MB": {}}
    for rows in options.rows or [10_000]:
        with tempfile.TemporaryDirectory() as folder:
            make(Store(Path(folder)), rows)
            command = [sys.executable, "-m", "tests.benchmarks.books_memory", "--replay", folder]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result["peak MB"][f"{rows} rows"] = json.loads(found)
        print(json.dumps(result), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
