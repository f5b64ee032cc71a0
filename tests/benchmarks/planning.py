"""How fast a dataset is planned: `scan_dataset` on a JSONL file, beside what it cannot do without.

Each pass is a process of its own: the scan, a bare loop of `orjson.loads` over the lines, SHA-256 of the file. Rates
are per second of processor time, all threads together: what one core does, whatever else the machine is busy with.
Files are written as `prepare_conversations` writes them, and deleted afterwards.

    python -m tests.benchmarks.planning --shape long --out planning.json
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tasks.config import DatasetConfig
from tasks.dataset.plan import save_plan
from tasks.dataset.scan import scan_dataset
from tasks.files import checksum_of, sha256_of

VOCABULARY = 163_840  # Kimi-K2.5's
TOKEN_BYTES = 57_349  # four states of its hidden size 7168 in bfloat16, an id and a mask
SHARD_BYTES = 2 << 30
LONGEST = 8192


@dataclass(frozen=True)
class Shape:
    rows: int
    mean_tokens: int


SHAPES = {
    "short-100k": Shape(100_000, 64),
    "short-1m": Shape(1_000_000, 64),
    "long": Shape(37_312, 2_353),  # the reference dataset
}
SUBJECTS = ("scan", "orjson", "sha256")


def write_dataset(path: Path, shape: Shape, vocabulary: int = VOCABULARY) -> int:
    """Rows of exponentially distributed length, random ids, the first third masked. Returns the tokens."""
    random, tokens = np.random.default_rng(0), 0
    with path.open("w") as file:
        for row in range(shape.rows):
            length = int(np.clip(random.exponential(shape.mean_tokens), 1, LONGEST))
            ids = random.integers(0, vocabulary, length).tolist()
            mask = [0] * (length // 3) + [1] * (length - length // 3)
            file.write(json.dumps({"id": f"sample-{row}", "input_ids": ids, "loss_mask": mask}) + "\n")
            tokens += length
    return tokens


def measure(subject: str, path: Path) -> dict[str, float]:
    """Seconds, processor seconds and peak memory of one pass, in this process."""
    checksum_of(path)  # into the page cache: the disk is not what is measured
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    if subject == "scan":
        scan = scan_dataset(DatasetConfig(path=path, max_seq_len=LONGEST), VOCABULARY, TOKEN_BYTES, SHARD_BYTES)
    elif subject == "orjson":
        with path.open("rb") as file:
            for line in file:
                orjson.loads(line)
    else:
        sha256_of(path)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    if subject == "scan":
        save_plan(scan.plan, path.with_suffix(".plan.parquet"))
    return {
        "seconds": seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Most memory that this process had. Not ru_maxrss: that one begins with the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure_apart(subject: str, path: Path) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "tests.benchmarks.planning", "--subject", subject, "--file", str(path)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def run(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure one shape; of several repeats, taken in turn, the cheapest counts."""
    shape, path = SHAPES[name], folder / f"{name}.jsonl"
    tokens = write_dataset(path, shape)
    size = path.stat().st_size
    print(f"{name}: {shape.rows:,} rows, {tokens:,} tokens, {size / 1e6:,.0f} MB")
    passes: dict[str, list[dict[str, float]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(repeats):
        for subject in SUBJECTS:
            passes[subject].append(measure_apart(subject, path))
    path.unlink()
    best = {subject: min(passes[subject], key=lambda one: one["processor_seconds"]) for subject in SUBJECTS}
    for subject, one in best.items():
        seconds = one["processor_seconds"]
        print(
            f"  {subject:7} {size / seconds / 1e6:6,.0f} MB/s {shape.rows / seconds:10,.0f} rows/s of processor time, "
            f"{one['seconds']:6.1f} s by the clock, {one['peak_bytes'] / 1e6:4,.0f} MB peak; "
            f"the scan has {seconds / best['scan']['processor_seconds']:.0%} of its rate"
        )
    return {"shape": name, "rows": shape.rows, "tokens": tokens, "bytes": size, "passes": passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be given several times (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the raw figures there")
    parser.add_argument("--subject", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.subject:
        print(json.dumps(measure(options.subject, options.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [run(name, Path(folder), options.repeats) for name in options.shape or SHAPES]
    if options.out:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "orjson": orjson.__version__,
            "numpy": np.__version__,
        }
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
