"""What a row and a batch cost us when the model costs nothing: the whole flow over a stand-in server, with tiny states.

Real: `python -m flows extract` as its own process, a Prefect server with the settings of `flows/services.py`, MLflow on
SQLite, the HTTP between flow and server, preflight, probe, second extraction, verification. Stood in for: the SGLang
server (`pretend_server.py`: hidden 8, answers at memory speed). Each size is run with few batches and with many, which
shows the cost of a batch; a run of a few rows shows what is there once, whatever the rows.

A row counts by the extraction step's time, from the first request to the last commit record, the stand-in's part
included, since it has a core of its own; verification, which reads every value back, is stated beside it. `--stored`
shows the memory of more rows than one can wait for: their store is written at once, and the flow resumes on it,
verifies, reports and records it.

    python -m tests.benchmarks.orchestration --rows 10000 --rows 100000 --stored 1000000 --out orchestration.json
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from flows.services import prefect_api
from tasks.config import load_config
from tasks.dataset.rows import read_planned
from tasks.preflight import open_output, run_preflight
from tasks.store.layout import Store
from tasks.store.lock import WriterLock
from tasks.store.record import Record, RowRecord, read_records, write_record
from tasks.store.runs import read_runs
from tasks.store.shard import ShardWriter
from tests.benchmarks.pretend_server import HIDDEN, LAYERS, VOCABULARY, PretendModel, serving, write_checkpoint

MEAN_TOKENS, LONGEST = 64, 512
FEW_ROWS = 64
FEW_BATCHES, MANY_BATCHES = 8, 500
CONFIG = "config.yaml"


def write_dataset(path: Path, rows: int) -> int:
    """Rows of exponentially distributed length, random ids. Returns the tokens."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.exponential(MEAN_TOKENS, rows), 1, LONGEST).astype(int)
    with path.open("w") as file:
        for row, length in enumerate(lengths):
            ids = random.integers(0, VOCABULARY, length).tolist()
            file.write(json.dumps({"id": f"sample-{row}", "input_ids": ids, "loss_mask": [1] * length}) + "\n")
    return int(lengths.sum())


def measure(rows: int, batches: int, folder: Path) -> dict[str, Any]:
    """One extraction of so many rows, in about so many batches."""
    with pretended(folder, rows, batches) as (tokens, server):
        began, clock = time.monotonic(), time.time()
        used, peak = run_flow(folder)
        seconds, served = time.monotonic() - began, server.cpu_times()
    store = Store(folder / "store")
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
        "processor seconds": used,
        "processor seconds of the stand-in": served.user + served.system,
        "peak MB": peak,
    }


def measure_stored(rows: int, batches: int, folder: Path) -> dict[str, Any]:
    """A flow that resumes on a store that has all its rows."""
    with pretended(folder, rows, batches, verify={"reextract_rows": 0, "reextract_share": 0}) as (tokens, _):
        # In a process of its own: its memory is not what is measured.
        subprocess.run([sys.executable, "-m", "tests.benchmarks.orchestration", "--fill", str(folder)], check=True)
        began = time.monotonic()
        used, peak = run_flow(folder)
    seconds = time.monotonic() - began
    return {"stored rows": rows, "tokens": tokens, "seconds": seconds, "processor seconds": used, "peak MB": peak}


@contextlib.contextmanager
def pretended(folder: Path, rows: int, batches: int, **sections: Any) -> Iterator[tuple[int, psutil.Process]]:
    """Dataset, checkpoint, server and config for so many rows; yields tokens and the stand-in's process."""
    dataset, checkpoint = folder / "dataset.jsonl", folder / "model"
    tokens = write_dataset(dataset, rows)
    write_checkpoint(checkpoint)
    token_bytes = (len(LAYERS) + 1) * HIDDEN * 4 + 5
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        staging = Path(memory, "staging")
        with serving("tests.benchmarks.pretend_server", str(checkpoint), str(staging)) as (url, server):
            config = {
                "name": "orchestration",
                "dataset": {"path": str(dataset), "max_seq_len": LONGEST},
                "model": {"path": str(checkpoint)},
                "capture": {"layers": LAYERS},
                "server": {"mode": "attached", "url": url, "dtype": "float32"},
                "staging": {"path": str(staging)},
                "output": {"path": str(folder / "store"), "shard_bytes": -(-tokens * token_bytes // batches)},
                **sections,
            }
            (folder / CONFIG).write_text(yaml.safe_dump(config))
            yield tokens, server


def run_flow(folder: Path) -> tuple[float, float]:
    """`python -m flows extract`; returns its processor seconds and its largest memory in MB."""
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows", "extract", str(folder / CONFIG)],
            stdout=file,
            stderr=file,
            env=os.environ | {"DRILLCORE_HOME": str(folder / "home")},
        )
        peak = 0
        # Its own high-water mark, as long as it lives: the one that is left afterwards begins with its parent's.
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak = int(found[1]) if found else peak
            time.sleep(0.1)
    _, status, used = ended
    if status:
        raise RuntimeError(log.read_text()[-3000:])
    return used.ru_utime + used.ru_stime, peak * 1024 / 1e6


def fill(folder: Path) -> None:
    """Write the store of the config in `folder`, with the stand-in's states, as an extraction would."""
    preflight = run_preflight(load_config(folder / CONFIG))
    model, plan, store = PretendModel(preflight.config.staging.path), preflight.plan, preflight.store
    with WriterLock(store.lock):
        open_output(preflight)
        for batch, numbers in preflight.missing.items():
            path, rows = store.shard(batch, 0), []
            with ShardWriter(path, len(numbers), "float32", {"fingerprint": preflight.fingerprint}) as writer:
                for row in read_planned(preflight.config.dataset.path, plan, numbers, VOCABULARY):
                    aux, last, rms = model.states_of(row.input_ids)
                    writer.add(row.number, aux.view(np.uint8), last.view(np.uint8), row.input_ids, row.loss_mask)
                    rows.append(RowRecord(row.number, len(row.input_ids), rms, [0] * len(rms)))
                written = writer.finish()
            facts = (preflight.fingerprint, batch, 0, path.name, written.bytes, written.checksum, "raw")
            write_record(store, Record(*facts, rows=rows, failed=[], written={}))


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
    parser.add_argument("--rows", type=int, action="append", help="may be given several times")
    parser.add_argument("--stored", type=int, action="append", help="the same, stored beforehand")
    parser.add_argument("--out", type=Path, help="raw JSON")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill:
        fill(options.fill)
        return
    results: dict[str, Any] = {"cores": os.cpu_count(), "load before": os.getloadavg()[0], "runs": []}

    def one(rows: int, batches: int, run: Callable[[int, int, Path], dict[str, Any]] = measure) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            result = run(rows, batches, Path(folder))
        results["runs"].append(result)
        print(json.dumps(result), flush=True)
        return result

    with tempfile.TemporaryDirectory() as home:
        os.environ["DRILLCORE_HOME"] = home
        with prefect_api():
            for rows in options.stored or []:
                one(rows, MANY_BATCHES, measure_stored)
            base = one(FEW_ROWS, FEW_BATCHES) if options.rows else {}
            for rows in options.rows or []:
                results[f"{rows} rows"] = compare(one(rows, FEW_BATCHES), one(rows, MANY_BATCHES), base)
                print(json.dumps(results[f"{rows} rows"], indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
