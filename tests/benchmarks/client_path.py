"""Our own path, without a model: from dumps in staging to committed shards, beside `cp` of the same dumps.

The dumps lie ready in shared memory, beside the staging. A stand-in server, a process of its own, gives the next one
its header and its name for each request. What is left is ours: HTTP, checks, copying, checksum, fsync,
records. Each time the same dumps are first copied by `cp` and made durable by `sync`. Printed as ratios of one run, on
the output's file system and on shared memory.

    python -m tests.benchmarks.client_path /data/scratch --gib 4
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config import ExtractionConfig
from tasks.dataset.rows import Row
from tasks.extraction.batch import extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.server.dumps import Captured
from tasks.server.launch import AttachedServer
from tasks.store.layout import Store
from tasks.store.lock import WriterLock
from tests.benchmarks.pretend_server import entries, head_of, listen, serving
from tests.unit.helpers import new_store, random_states, raw, rms_of

CAPTURED = Captured([1, 29, 57], "post", "bfloat16", 7168)  # Kimi-K2.5: 57,344 B a token
TOKENS = 2353  # a row of the reference dataset, on average
IDS = np.arange(TOKENS, dtype=np.int32)
ROW_BYTES = TOKENS * 4 * CAPTURED.hidden_size * 2
BATCHES = 8  # at a time, as in the flow
BATCH_ROWS = 2  # shards of 270 MB: many follow each other, as in a long run
HEAD = 4096  # bytes of a dump before its data
PREPARED, STAGING = "prepared", "staging"


class PreparedDumps:
    """The stand-in's dumps, whole but for the header."""

    def __init__(self, folder: Path, count: int):
        self.staging = folder / STAGING
        aux, last = random_states(1, TOKENS, CAPTURED)
        self.metadata = {"layers": CAPTURED.layers, "final_norm": CAPTURED.final_norm, "chunks": 1}
        self.metadata |= {"rms": rms_of(aux, last), "zero_rows": [0] * 4, "nonfinite_rows": [0] * 4}
        self.entries = entries(TOKENS, 3 * CAPTURED.hidden_size, CAPTURED.hidden_size, "BF16")
        self.left = [folder / PREPARED / f"{number:06d}" for number in range(count)]
        for path in self.left:
            with path.open("wb") as file:
                file.writelines([bytes(HEAD), raw(aux), raw(last), IDS])

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /generate."""
        path, request = self.left.pop(), body["rid"]
        with path.open("r+b") as file:
            file.write(head_of(self.metadata | {"request": request}, self.entries, HEAD))
        os.rename(path, self.staging / f"{request}.safetensors")
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the file system to measure")
    parser.add_argument("--gib", type=float, default=4, help="to write, each time (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="raw JSON")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(listen(PreparedDumps(options.folder, options.serve).generate, {}))
        return
    rows = max(BATCHES * BATCH_ROWS, round(options.gib * (1 << 30) / ROW_BYTES))
    result: dict[str, Any] = {"cores": os.cpu_count(), "load before": os.getloadavg()[0]}
    result |= {"rows": rows, "bytes": rows * ROW_BYTES}
    for name, folder in (("folder", options.folder), ("shared memory", Path("/dev/shm"))):
        runs = [measure(rows, folder) for _ in range(options.repeats)]
        result[name] = {"file system": file_system(folder)} | {key: [run[key] for run in runs] for key in runs[0]}
        result[name]["ours / cp"] = statistics.median(run["ours, GB/s"] / run["cp and sync, GB/s"] for run in runs)
        print(json.dumps({name: result[name]}, indent=1), flush=True)
    result["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(rows: int, folder: Path) -> dict[str, float]:
    """One copy by `cp` and one extraction of the same dumps to a folder."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(dir=folder) as output,
    ):
        for name in (PREPARED, STAGING):
            Path(memory, name).mkdir()
        with serving("tests.benchmarks.client_path", memory, "--serve", str(rows)) as (url, _):
            prepared, target = Path(memory, PREPARED), Path(output, "copy")
            copied = 0.0
            for _ in range(2):  # of which the second counts: the machine has its memory then, for both
                copied = seconds_of(lambda: copy(prepared, target))
                shutil.rmtree(target)
                os.sync()
            store = new_store(Store(Path(output, "store")), {"any": 1})
            before = resource.getrusage(resource.RUSAGE_SELF)
            ours = seconds_of(lambda: extract(AttachedServer(url, Path(memory, STAGING)), store, rows))
            after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "ours, GB/s": rows * ROW_BYTES / ours / 1e9,
        "cp and sync, GB/s": rows * ROW_BYTES / copied / 1e9,
        "processor, microseconds a token": 1e6 * used / (rows * TOKENS),
    }


def extract(server: AttachedServer, store: Store, rows: int) -> None:
    """All rows, BATCHES batches of them at a time, as the flow does it."""
    mask = np.ones(TOKENS, dtype=np.uint8)
    parts = [range(first, min(first + BATCH_ROWS, rows)) for first in range(0, rows, BATCH_ROWS)]
    with (
        WriterLock(store.lock) as lock,
        PrefillEngine([server], CAPTURED, ExtractionConfig(), 8 << 30) as engine,
        ThreadPoolExecutor(BATCHES) as threads,
    ):

        def one(batch: int) -> None:
            chosen = [Row(number, IDS, mask, str(number)) for number in parts[batch]]
            assert extract_batch(batch, chosen, engine, store, "f", lock).failed == []

        list(threads.map(one, range(len(parts))))


def copy(dumps: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(dumps), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)


def file_system(folder: Path) -> str:
    """Its kind, as ext4."""
    shown = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], check=True, capture_output=True, text=True)
    return shown.stdout.strip()


def seconds_of(work: Callable[[], None]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


if __name__ == "__main__":
    main()
