"""Our own path, without a model: from dumps in staging to committed shards, beside `cp` of the same shards.

A stand-in server answers each request at memory speed: a dump made once is linked into staging under the request's
name. What is left is ours: HTTP, checks, copying, checksum, fsync, records. Printed as ratios of one run, on the
output's file system and on shared memory.

    python -m tests.benchmarks.client_path /data/scratch --gib 4
"""

import argparse
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
from tests.unit.helpers import FakeSGLang, Request, new_store, random_states, rms_of

CAPTURED = Captured([1, 29, 57], "post", "bfloat16", 7168)  # Kimi-K2.5: 57,344 B a token
TOKENS = 2353  # a row of the reference dataset, on average
BATCHES = 8  # at a time, as in the flow


class Linking(FakeSGLang):
    """Has one dump and gives it to everybody."""

    def prepare(self, ids: np.ndarray) -> Path:
        aux, last = random_states(1, len(ids), CAPTURED)
        request = Request("prepared", 0, ids, self.staging)
        self.prepared = request.write_dump(lambda metadata, tensors: fill(metadata, tensors, aux, last))
        return self.prepared

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        os.link(self.prepared, self.staging / f"{body['rid']}.safetensors")
        return 200, {}


def fill(metadata: dict[str, Any], tensors: dict[str, Any], aux: Any, last: Any) -> None:
    metadata |= {"layers": CAPTURED.layers, "rms": rms_of(aux, last), "zero_rows": [0] * 4, "nonfinite_rows": [0] * 4}
    tensors |= {"aux_hidden_states": aux, "last_hidden_state": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the file system to measure")
    parser.add_argument("--gib", type=float, default=4, help="to write, each time (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="raw JSON")
    options = parser.parse_args()
    ids = np.arange(TOKENS, dtype=np.int32)
    row_bytes = TOKENS * 4 * CAPTURED.hidden_size * 2
    rows = max(BATCHES, round(options.gib * (1 << 30) / row_bytes))
    result: dict[str, Any] = {"rows": rows, "bytes": rows * row_bytes}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, Linking(Path(memory, "staging")) as server:
        server.prepare(ids)
        for name, folder in (("folder", options.folder), ("shared memory", Path(memory))):
            ours, copies, processor = [], [], []
            for _ in range(options.repeats):
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    store = new_store(Store(Path(output, "store")), {"any": 1})
                    before = resource.getrusage(resource.RUSAGE_SELF)
                    ours.append(rows * row_bytes / seconds_of(lambda: extract(server, store, ids, rows)))  # noqa: B023
                    after = resource.getrusage(resource.RUSAGE_SELF)
                    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    processor.append(1e6 * used / (rows * TOKENS))
                    target = Path(output, "copy")
                    copies.append(rows * row_bytes / seconds_of(lambda: copy(store.shards, target)))  # noqa: B023
            result[name] = {
                "ours, GB/s": [rate / 1e9 for rate in ours],
                "cp and sync, GB/s": [rate / 1e9 for rate in copies],
                "ours / cp": statistics.median(one / other for one, other in zip(ours, copies, strict=True)),
                "processor, microseconds a token": statistics.median(processor),
            }
    result["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def extract(server: Linking, store: Store, ids: np.ndarray, rows: int) -> None:
    """All rows in BATCHES batches, as the flow does it."""
    mask = np.ones(len(ids), dtype=np.uint8)
    parts = [list(part) for part in np.array_split(np.arange(rows), BATCHES)]
    attached = AttachedServer(server.url, server.staging)
    with (
        WriterLock(store.lock) as lock,
        PrefillEngine([attached], CAPTURED, ExtractionConfig(), 8 << 30) as engine,
        ThreadPoolExecutor(BATCHES) as threads,
    ):

        def one(batch: int) -> None:
            chosen = [Row(int(number), ids, mask, str(number)) for number in parts[batch]]
            assert extract_batch(batch, chosen, engine, store, "f", lock).failed == []

        list(threads.map(one, range(BATCHES)))


def copy(shards: Path, target: Path) -> None:
    shutil.copytree(shards, target, copy_function=_cp)
    subprocess.run(["sync", "-f", str(target)], check=True)


def _cp(source: str, target: str) -> None:
    subprocess.run(["cp", source, target], check=True)


def seconds_of(work: Callable[[], None]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


if __name__ == "__main__":
    main()
