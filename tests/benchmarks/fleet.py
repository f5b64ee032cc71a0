"""Two nodes against one: how long the same extraction takes as a fleet of one node and as a fleet of two.

Real: a Prefect server, a worker a node with a queue of its own, `python -m flows fleet`, each partition's flow in its
own process, the locks, the store, verification. Stood in for: the SGLang servers, one a node (`pretend_server.py`),
whose time for a prompt is a wait. So a node's rate is prompts in flight / wait, and what is measured is what the fleet
adds to it, not how many cores this machine has.

Extraction: from the first batch's begin to the last one's end, over all nodes. Whole: the command, with starts, the
probes of each run, the second extraction and the verification.

    python -m tests.benchmarks.fleet --rows 2400 --out fleet.json
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tasks.store.layout import Store
from tasks.store.record import read_records
from tasks.store.runs import read_runs
from tests.benchmarks.orchestration import LONGEST, write_dataset
from tests.benchmarks.pretend_server import HIDDEN, LAYERS, serving, write_checkpoint
from tests.integration.nodes import Nodes, end, nodes

IN_FLIGHT, WAIT = 4, 0.2  # prompts at a server at a time, seconds that each takes
BATCHES = 60
TOLERANCE = 0.15  # of half the time
QUEUES = ("node-a", "node-b")


def write_configs(folder: Path, rows: int, servers: list[tuple[str, Path]]) -> None:
    """extract.yaml, and a fleet of the first node and one of both; servers: URL and staging."""
    tokens = write_dataset(folder / "dataset.jsonl", rows)
    token_bytes = (len(LAYERS) + 1) * HIDDEN * 4 + 5
    url, staging = servers[0]
    config = {
        "name": "fleet",
        "dataset": {"path": str(folder / "dataset.jsonl"), "max_seq_len": LONGEST},
        "model": {"path": str(folder / "model")},
        "capture": {"layers": LAYERS},
        "server": {"mode": "attached", "url": url, "dtype": "float32"},
        "staging": {"path": str(staging)},
        "extraction": {"requests_in_flight": IN_FLIGHT},
        "output": {"path": "set by --set", "shard_bytes": -(-tokens * token_bytes // BATCHES)},
    }
    (folder / "extract.yaml").write_text(yaml.safe_dump(config))
    members = [
        {"queue": queue, "settings": {"server": {"url": url}, "staging": {"path": str(staging)}}}
        for queue, (url, staging) in zip(QUEUES, servers, strict=True)
    ]
    for count in (1, 2):
        (folder / f"fleet-{count}.yaml").write_text(yaml.safe_dump({"nodes": members[:count]}))


def measure(site: Nodes, folder: Path, count: int, rows: int) -> dict[str, Any]:
    """One extraction by so many nodes."""
    store = Store(folder / f"store-{count}")
    began = time.monotonic()
    run = site.fleet(
        folder / "extract.yaml", "--set", f"output.path={store.root}", "--fleet", folder / f"fleet-{count}.yaml"
    )
    if run.wait():
        raise RuntimeError(f"{run.out}\n{run.err}")
    seconds = time.monotonic() - began
    records = read_records(store)
    stored = sorted(row.row for record in records for row in record.rows)
    assert stored == list(range(rows)), "a row is missing, or twice"
    writers = {record.written["by"] for record in records}
    assert len(writers) == count, writers
    figures = next(one for one in read_runs(store) if "fleet" in one)
    return {
        "nodes": count,
        "rows": rows,
        "batches": len(records),
        "extraction seconds": figures["seconds"],
        "seconds of each node": [part["seconds"] for part in figures["fleet"]["runs"]],
        "whole seconds": round(seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2400)
    parser.add_argument("--rounds", type=int, default=1, help="of one node and two nodes, in turns")
    parser.add_argument("--out", type=Path, help="raw JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "prompts in flight": IN_FLIGHT,
        "seconds a prompt": WAIT,
        "rounds": [],
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        write_checkpoint(folder / "model")
        servers = []
        for queue in QUEUES:
            staging = memory / queue
            arguments = ("tests.benchmarks.pretend_server", str(folder / "model"), str(staging), str(WAIT))
            servers.append((stack.enter_context(serving(*arguments))[0], staging))
        write_configs(folder, options.rows, servers)
        site = stack.enter_context(nodes(folder))
        workers = [site.worker(queue) for queue in QUEUES]
        for number in range(options.rounds):
            one, two = (measure(site, folder, count, options.rows) for count in (1, 2))
            for count in (1, 2):
                (folder / f"store-{count}").rename(folder / f"done-{number}-{count}")
            ratios = {name: two[name] / one[name] for name in ("extraction seconds", "whole seconds")}
            results["rounds"].append({"runs": [one, two], "two nodes against one": ratios})
            print(json.dumps(results["rounds"][-1], indent=1), flush=True)
        for worker in workers:
            end(worker)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    ratios = [one["two nodes against one"]["extraction seconds"] for one in results["rounds"]]
    if not all(abs(ratio / 0.5 - 1) <= TOLERANCE for ratio in ratios):
        sys.exit(f"Two nodes took {ratios} of one node's time, not half of it within {TOLERANCE:.0%}.")


if __name__ == "__main__":
    main()
