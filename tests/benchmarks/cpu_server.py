"""What the extraction keeps of a real server's rate, on this machine's CPU: the engine against a plain client.

Two servers of one model are up, one with the capture plugin, one without. In turn, `--pairs` times: the same prompts
through the engine, 64 in flight, every dump checked and released; then by a plain HTTP client to the bare server, 64 in
flight. At last a part of the prompts through the engine one at a time. Shards are not written: `client_path.py` does.

    python -m tests.benchmarks.cpu_server smollm2 --out cpu-server-smollm2.json
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from deployments import demo
from tasks.dataset.rows import Row
from tasks.extraction.engine import PrefillEngine
from tasks.server.launch import ManagedServer
from tests.benchmarks.gpu_server import REQUESTS_IN_FLIGHT, prefill_all, prepare_server, running
from tests.integration.serving import cpu_config, serving
from tests.integration.tiny_models import VOCABULARY, make_checkpoint

MODELS = {"tiny-llama": lambda path: make_checkpoint("llama", path), "smollm2": demo.make_checkpoint}
ONE_AT_A_TIME = 4  # of so many prompts, one is also prefilled with nothing beside it


def through_engine(engine: PrefillEngine, rows: list[Row]) -> float:
    """Tokens a second of all rows at once, within the engine's limits."""
    started = time.monotonic()
    for future in [engine.submit(row.number, row.input_ids) for row in rows]:
        engine.release(future.result())
    return _tokens(rows) / (time.monotonic() - started)


def by_plain_client(server: ManagedServer, name: str, rows: list[Row]) -> float:
    """Tokens a second of the same rows, without an engine."""
    seconds, _ = prefill_all(server.url, name, [row.input_ids.tolist() for row in rows])
    return _tokens(rows) / seconds


def _tokens(rows: list[Row]) -> int:
    return sum(len(row.input_ids) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--prompts", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--longest", type=int, default=64, help="tokens of a prompt; the shortest has half (%(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=3, help="alternating runs (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="raw JSON")
    options = parser.parse_args()
    random = np.random.default_rng(20)
    lengths = random.integers(options.longest // 2, options.longest + 1, options.prompts)
    lines = [json.dumps({"input_ids": random.integers(0, VOCABULARY, length).tolist()}) for length in lengths]
    rates: dict[str, list[float]] = {"engine": [], "bare": []}
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
        folder = Path(name)
        (folder / "dataset.jsonl").write_text("\n".join(lines) + "\n")
        MODELS[options.model](folder / "model")
        # Three layers, as EAGLE-3 has; of the tiny model's six its own rule would take one twice.
        capture = {"layers": [1, 2, 4]} if options.model == "tiny-llama" else {}
        files = folder / "model", folder / "dataset.jsonl", folder / "output", Path(staging)
        config = cpu_config(*files, capture=capture)
        with serving(config, folder / "capture.log") as up, contextlib.ExitStack() as stack:
            bare = prepare_server(config, up.preflight.layers, folder / "bare.log", bare=True)
            stack.enter_context(running([bare]))
            rows = up.rows()
            with up.engine(requests_in_flight=REQUESTS_IN_FLIGHT) as engine:
                through_engine(engine, rows[:REQUESTS_IN_FLIGHT])  # kernels and caches warm up
                by_plain_client(bare, "warm", rows[:REQUESTS_IN_FLIGHT])
                for pair in range(options.pairs):
                    rates["engine"].append(through_engine(engine, rows))
                    rates["bare"].append(by_plain_client(bare, f"pair{pair}", rows))
            with up.engine(requests_in_flight=1) as engine:
                alone = through_engine(engine, rows[::ONE_AT_A_TIME])
    kept = [ours / bare for ours, bare in zip(rates["engine"], rates["bare"], strict=True)]
    result: dict[str, Any] = {
        "model": options.model,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "prompts": len(rows),
        "tokens": _tokens(rows),
        "in flight": REQUESTS_IN_FLIGHT,
        "tokens a second": rates | {"engine, one in flight": alone},
        "kept": kept,
        "median kept": statistics.median(kept),
        "in flight against one at a time": statistics.median(rates["engine"]) / alone,
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
