"""What a row and a batch cost us when the model costs nothing: the whole flow over a stand-in server, with tiny states.

Real: `python -m flows extract` as its own process, a Prefect server with the settings of `flows/services.py`, MLflow on
SQLite, the HTTP between flow and server, preflight, probe, second extraction, verification. Stood in for: the SGLang
server (`pretend_server.py`: hidden 8, answers at memory speed). Each size is run with few batches and with many, which
shows the cost of a batch; a run of a few rows shows what is there once, whatever the rows.

    python -m tests.benchmarks.orchestration --rows 10000 --rows 100000 --out orchestration.json
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from flows.services import prefect_api
from tasks.store.layout import Store
from tasks.store.record import read_records
from tasks.store.runs import read_runs
from tests.benchmarks.pretend_server import LAYERS, VOCABULARY, write_checkpoint

MEAN_TOKENS, LONGEST = 64, 512
FEW_ROWS = 64
FEW_BATCHES, MANY_BATCHES = 8, 500


def write_dataset(path: Path, rows: int) -> int:
    """Rows of exponentially distributed length, random ids. Returns the tokens."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.exponential(MEAN_TOKENS, rows), 1, LONGEST).astype(int)
    with path.open("w") as file:
        for row, length in enumerate(lengths):
            ids = random.integers(0, VOCABULARY, length).tolist()
            file.write(json.dumps({"id": f"sample-{row}", "input_ids": ids, "loss_mask": [1] * length}) + "\n")
    return int(lengths.sum())


@contextlib.contextmanager
def pretend_server(checkpoint: Path, staging: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The stand-in's URL and process."""
    command = [sys.executable, "-m", "tests.benchmarks.pretend_server", str(checkpoint), str(staging)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", psutil.Process(process.pid)
        finally:
            process.stdin.close()


def measure(rows: int, batches: int, folder: Path) -> dict[str, Any]:
    """One extraction of so many rows, in about so many batches."""
    dataset, checkpoint, output = folder / "dataset.jsonl", folder / "model", folder / "store"
    tokens = write_dataset(dataset, rows)
    write_checkpoint(checkpoint)
    staging = Path(tempfile.mkdtemp(dir="/dev/shm"), "staging")
    with pretend_server(checkpoint, staging) as (url, server):
        token_bytes = (len(LAYERS) + 1) * 8 * 4 + 5
        config = {
            "name": "orchestration",
            "dataset": {"path": str(dataset), "max_seq_len": LONGEST},
            "model": {"path": str(checkpoint)},
            "capture": {"layers": LAYERS},
            "server": {"mode": "attached", "url": url, "dtype": "float32"},
            "staging": {"path": str(staging)},
            "output": {"path": str(output), "shard_bytes": -(-tokens * token_bytes // batches)},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        log = folder / "log"
        began, clock = time.monotonic(), time.time()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows", "extract", str(folder / "config.yaml")],
                stdout=file,
                stderr=file,
                env=os.environ | {"DRILLCORE_HOME": str(folder / "home")},
            )
            _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        if status:
            raise RuntimeError(log.read_text()[-3000:])
        served = server.cpu_times()
    for path in (*staging.iterdir(), staging):
        path.rmdir() if path.is_dir() else path.unlink()
    staging.parent.rmdir()
    store = Store(output)
    (run,), records = read_runs(store), read_records(store)
    assert sum(len(record.rows) for record in records) == rows
    probed, verified = (path.stat().st_mtime for path in (store.logs / "probe.json", store.manifest))
    return {
        "rows": rows,
        "tokens": tokens,
        "batches": len(records),
        "seconds": {
            "all": seconds,
            "until extraction": probed - clock,
            "extraction": run["seconds"],
            "verification": verified - probed - run["seconds"],
        },
        "processor seconds": used.ru_utime + used.ru_stime,
        "processor seconds of the stand-in": served.user + served.system,
        "peak MB": used.ru_maxrss * 1024 / 1e6,
    }


def compare(few: dict[str, Any], many: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a row and a batch, and memory a row, beyond what a run of a few rows takes."""

    def each(name: str, value: Any) -> dict[str, float]:
        rows, batches = few["rows"] - base["rows"], many["batches"] - few["batches"]
        return {
            f"{name} ms a row": 1e3 * (value(few) - value(base)) / rows,
            f"{name} ms a batch": 1e3 * (value(many) - value(few)) / batches,
        }

    return {
        **each("extraction", lambda run: run["seconds"]["extraction"]),
        **each("verification", lambda run: run["seconds"]["verification"]),
        **each("whole run", lambda run: run["seconds"]["all"]),
        **each("processor", lambda run: run["processor seconds"]),
        "stand-in's processor ms a row": 1e3 * few["processor seconds of the stand-in"] / few["rows"],
        "peak MB": max(few["peak MB"], many["peak MB"]),
        "kB a row": 1e3 * (few["peak MB"] - base["peak MB"]) / few["rows"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", help="may be given several times (default: 10000)")
    parser.add_argument("--out", type=Path, help="raw JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {"cores": os.cpu_count(), "load before": os.getloadavg()[0], "runs": []}

    def one(rows: int, batches: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(rows, batches, Path(folder))
        results["runs"].append(result)
        print(json.dumps(result), flush=True)
        return result

    with tempfile.TemporaryDirectory() as home:
        os.environ["DRILLCORE_HOME"] = home
        with prefect_api():
            base = one(FEW_ROWS, FEW_BATCHES)
            for rows in options.rows or [10_000]:
                results[f"{rows} rows"] = compare(one(rows, FEW_BATCHES), one(rows, MANY_BATCHES), base)
                print(json.dumps(results[f"{rows} rows"], indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
