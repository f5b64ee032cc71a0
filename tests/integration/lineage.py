"""Verified stores with the figures of their runs, for tests of the lineage."""

import json
from pathlib import Path
from typing import Any

from tasks.config import LineageConfig
from tasks.lineage.record import record_extraction
from tasks.store.attempts import ATTEMPTS
from tasks.store.layout import Store
from tasks.store.runs import add_run
from tasks.verification import verify_store
from tests.unit.helpers import make_store

SAMPLES = 4  # of each run
EPOCH = 1_790_000_000.0  # of the first sample, seconds since 1970


def verified_store(folder: Path, name: str, model: str = "model-a") -> Store:
    """A store that passed, of 7 rows, with probe report, server log and the course of two runs."""
    folder.mkdir()
    config: dict[str, Any] = {
        "name": name,
        "dataset": {"path": str(folder / "dataset.jsonl"), "max_seq_len": 6},
        "model": {"path": f"/models/{model}"},
        "extraction": {"tokens_in_flight": 16, "max_failed_share": 0.0},
        "lineage": {"tracking_uri": None, "experiment": "drillcore"},
    }
    parts = {"model_identity": model.ljust(64, "0"), "sglang": "0.5.23", "plugin": "2"}
    small = make_store(folder, more_parts=parts, kept=config)
    for number in range(2):
        add_attempt(small.store, number)
        counts = {"failed": 0, "retries": 3, "restarts": 1}
        add_run(small.store, {"seconds": 8.0, "rows": 3, "tokens": 10, "bytes": 500, **counts})
    (small.store.logs / "probe.json").write_text("[]")
    (folder / "store.server.log").write_text("The server is fired up\n")
    verify_store(small.store, small.dataset, 0.0)
    return small.store


def add_attempt(store: Store, number: int) -> None:
    """What the sampler leaves of a run of 8 seconds: 5 tokens a second, the third row at its end."""
    git = {"commit": f"{number:040x}", "changed": False}
    flow = {
        "id": f"flow-{number}",
        "name": f"run-{number}",
        "url": f"http://127.0.0.1:4200/runs/flow-run/flow-{number}",
    }
    header = {
        "at": f"2026-09-21T13:5{number}:20+00:00",
        "origin": {"python": "3.11", "packages": {"torch": "2.13.0"}, "git": git, "prefect": flow},
        "there": 3 * number,
    }
    samples = [
        {
            "at": EPOCH + 60 * number + 2 * at,
            "seconds": 2.0 * at,
            "rows": at if at < SAMPLES else 3,
            "tokens": 10 * at,
            "bytes": 1000 * at,
            "failed": 0,
            "retries": at,
            "restarts": 0,
            "in_flight": 2,
            "machine": {"cpu_utilization_percentage": 50.0 + at},
        }
        for at in range(1, SAMPLES + 1)
    ]
    path = store.logs / ATTEMPTS / f"2026092{number}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *samples]))


def record(store: Store, uri: str) -> str:
    """Record a store in the MLflow at `uri`; returns the run's id."""
    return record_extraction(store, LineageConfig(tracking_uri=uri), uri, store.root.parent / "artifacts")
