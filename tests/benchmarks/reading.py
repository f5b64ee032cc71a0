"""How long a store of 100,000 rows takes to open, and how fast rows are read: `HiddenStates` on tiny states.

The first open reads the commit records and keeps an index; the second one reads that. Each is a process of its own.

    python -m tests.benchmarks.reading --rows 100000
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tasks.config import DatasetConfig
from tasks.dataset.plan import save_plan
from tasks.dataset.scan import scan_dataset
from tasks.store.layout import Store, fingerprint_of
from tasks.store.record import Record, RowRecord, write_record
from tasks.store.shard import ShardWriter, row_bytes
from tests.unit.helpers import CAPTURED, HIDDEN, VOCAB, SmallStore, new_store
from tests.unit.verified import mark_verified

TOKENS, ROWS_A_SHARD = 8, 50
RANDOM_ROWS = 20_000


def write_store(folder: Path, rows: int) -> Path:
    """A store that counts as verified; returns its directory."""
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (rows, TOKENS), dtype=np.int32)
    dataset = folder / "dataset.jsonl"
    dataset.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids))
    token_bytes = row_bytes(1, len(CAPTURED.layers) + 1, HIDDEN, 2)
    scan = scan_dataset(
        DatasetConfig(path=dataset, max_seq_len=TOKENS), VOCAB, token_bytes, ROWS_A_SHARD * TOKENS * token_bytes
    )
    parts = {
        "layers": CAPTURED.layers,
        "final_norm": CAPTURED.final_norm,
        "dtype": CAPTURED.dtype,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
    }
    store = new_store(Store(folder / "store"), parts)
    save_plan(scan.plan, store.plan)
    fingerprint = fingerprint_of(parts)
    aux = random.integers(0, 255, (TOKENS, len(CAPTURED.layers) * HIDDEN * 2), dtype=np.uint8)
    last, mask = aux[:, : HIDDEN * 2].copy(), np.ones(TOKENS, dtype=np.uint8)
    for batch, numbers in enumerate(scan.plan.rows_by_batch()):
        path = store.shard(batch, 0)
        with ShardWriter(path, len(numbers), CAPTURED.dtype, {}) as writer:
            for number in numbers:
                writer.add(number, aux, last, ids[number], mask)
            written = writer.finish()
        stored = [RowRecord(number, TOKENS, random.random(3).tolist(), [0, 0, 0]) for number in numbers]
        write_record(
            store, Record(fingerprint, batch, 0, path.name, written.bytes, written.checksum, "raw", stored, [], {})
        )
    return mark_verified(SmallStore(store, dataset, scan.plan, fingerprint)).store.root


def measure(store: Path) -> dict[str, float]:
    """In this process: to open the store; then rows a second, at random."""
    from tasks.store.reader import HiddenStates

    started = time.perf_counter()
    states = HiddenStates.open(store)
    opened = time.perf_counter()
    places = np.random.default_rng(1).integers(0, len(states), min(RANDOM_ROWS, len(states))).tolist()
    touched = sum(int(states[place].last_hidden_state[0, 0] > 0) for place in places)
    ended = time.perf_counter()
    assert 0 <= touched <= len(places)
    return {"rows": len(states), "open_seconds": opened - started, "rows_per_second": len(places) / (ended - opened)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store:
        print(json.dumps(measure(options.store)))
        return
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), options.rows)
        for what in ("without an index", "with one", "with one, again"):
            command = [sys.executable, "-m", "tests.benchmarks.reading", "--store", str(store)]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            print(
                f"{found['rows']:,} rows, {what}: open in {found['open_seconds'] * 1000:,.0f} ms, then "
                f"{found['rows_per_second']:,.0f} rows/s at random"
            )


if __name__ == "__main__":
    main()
