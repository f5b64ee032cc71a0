"""How fast verification reads, beside `xxhsum` on the same files, and how much memory it takes.

    python -m tests.benchmarks.verify_speed FOLDER [--gib 1] [--out FILE]

Makes a store of that size in FOLDER, and then one of four times the size, to see whether memory grows (hidden 7168,
three layers and the final state, bfloat16, rows of 512 to 4,096 tokens). Alternates: `xxhsum -H2` of the shards, the
whole of `verify_store` in a process of its own, the same with one thread. All files stay in the page cache. The stores
are removed afterwards. `xxhsum` is Debian's package xxhash.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from tasks.config import DatasetConfig, VerifyConfig
from tasks.dataset.plan import save_plan
from tasks.dataset.rows import read_planned
from tasks.dataset.scan import scan_dataset
from tasks.store.layout import Store, create_store, fingerprint_of
from tasks.store.record import Record, RowRecord, write_record
from tasks.store.shard import ShardWriter, row_bytes
from tasks.verification import reading, verify_store

HIDDEN, LAYERS, VOCABULARY = 7168, [1, 29, 57], 160_000
SHARDS = 4 * (os.cpu_count() or 1)  # at least: a real store has more of them than any machine has cores
ROUNDS = 5


def make_store(folder: Path, size: int) -> Store:
    """A valid store of about `size` bytes."""
    token_bytes = row_bytes(1, len(LAYERS) + 1, HIDDEN, 2)
    random = np.random.default_rng(7)
    folder.mkdir(parents=True)
    dataset, tokens = folder / "dataset.jsonl", 0
    with dataset.open("w") as file:
        while tokens * token_bytes < size:
            length = int(random.integers(512, 4097))
            file.write(json.dumps({"input_ids": random.integers(0, VOCABULARY, length).tolist()}) + "\n")
            tokens += length
    scan = scan_dataset(
        DatasetConfig(path=dataset, max_seq_len=4096), VOCABULARY, token_bytes, min(256 << 20, size // SHARDS)
    )
    parts = {
        "input_sha256": scan.sha256,
        "layers": LAYERS,
        "final_norm": "post",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
    }
    store = Store(folder / "store")
    create_store(store, parts, {})
    store.shards.mkdir()
    save_plan(scan.plan, store.plan)
    # Every token's states are another window of one pool of random values.
    pool = torch.randn(64 << 20, generator=torch.Generator().manual_seed(3)).bfloat16().view(torch.int16).numpy()
    width = (len(LAYERS) + 1) * HIDDEN
    fingerprint = fingerprint_of(parts)
    for batch, numbers in enumerate(scan.plan.rows_by_batch()):
        path, rows = store.shard(batch, 0), []
        with ShardWriter(path, len(numbers), "bfloat16", {"fingerprint": fingerprint}) as writer:
            for row in read_planned(dataset, scan.plan, numbers, VOCABULARY):
                length = len(row.input_ids)
                starts = random.integers(0, len(pool) - width, length)
                states = np.stack([pool[start : start + width] for start in starts]).reshape(length, -1, HIDDEN)
                values = torch.from_numpy(states).view(torch.bfloat16)
                squares = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32).double().square()
                rms = (squares.mean(0) / HIDDEN).sqrt().tolist()
                aux = np.ascontiguousarray(states[:, :-1]).reshape(length, -1).view(np.uint8)
                last = np.ascontiguousarray(states[:, -1]).view(np.uint8)
                writer.add(row.number, aux, last, row.input_ids, row.loss_mask)
                rows.append(RowRecord(row.number, length, rms, [0] * (len(LAYERS) + 1)))
            written = writer.finish()
        write_record(
            store, Record(fingerprint, batch, 0, path.name, written.bytes, written.checksum, "raw", rows, [], {})
        )
    return store


def verify(store: Store, threads: int | None) -> dict[str, float]:
    """In this process: seconds and the process's largest memory (bytes)."""
    if threads:
        reading.THREADS = threads
    before = peak_memory()
    started = time.perf_counter()
    verified = verify_store(store, store.root.parent / "dataset.jsonl", 0.0, VerifyConfig())
    seconds = time.perf_counter() - started
    peak = peak_memory()
    return {"bytes": verified.bytes, "seconds": seconds, "peak": peak, "grown": peak - before}


def peak_memory() -> int:
    """Bytes that this process has used at most. (The figure of getrusage begins with that of its parent.)"""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def verify_apart(store: Store, threads: int = 0) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.verify_speed", "--store", str(store.root)]
    command += ["--threads", str(threads)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def xxhsum(store: Store) -> float:
    """Seconds that the system's tool takes for all shards."""
    files = sorted(store.shards.glob("*.safetensors"))
    started = time.perf_counter()
    subprocess.run(["xxhsum", "-H2", *map(str, files)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(folder: Path, gib: float) -> dict[str, object]:
    store = make_store(folder / f"verify-speed-{gib:g}", int(gib * (1 << 30)))
    try:
        verify_apart(store), xxhsum(store)  # everything is in the page cache now
        rounds = [(xxhsum(store), verify_apart(store), verify_apart(store, threads=1)) for _ in range(ROUNDS)]
    finally:
        shutil.rmtree(store.root.parent)
    size = rounds[0][1]["bytes"]
    rates = {
        "xxhsum": [size / seconds / 1e9 for seconds, _, _ in rounds],
        "verify": [size / ours["seconds"] / 1e9 for _, ours, _ in rounds],
        "verify_one_thread": [size / ours["seconds"] / 1e9 for _, _, ours in rounds],
    }
    return {
        "bytes": size,
        **{f"{name}_gb_s": [round(rate, 2) for rate in found] for name, found in rates.items()},
        "verify_of_xxhsum": round(statistics.median(rates["verify"]) / statistics.median(rates["xxhsum"]), 3),
        "peak_mib": round(max(ours["peak"] for _, ours, _ in rounds) / (1 << 20)),
        "grown_mib": round(max(ours["grown"] for _, ours, _ in rounds) / (1 << 20)),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store:
        print(json.dumps(verify(Store(options.store), options.threads)))
        return
    results = []
    for gib in (options.gib, 4 * options.gib):
        results.append(measure(options.folder, gib))
        print(json.dumps(results[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
