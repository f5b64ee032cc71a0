"""The figures of each run that wrote to a store, for people and for MLflow: a line a run."""

import json
from typing import Any

from tasks.files import append_line
from tasks.store.layout import Store

RUNS = "runs.jsonl"  # in the store's logs


def add_run(store: Store, figures: dict[str, Any]) -> None:
    """Append one run's figures."""
    append_line(store.logs / RUNS, json.dumps(figures))


def read_runs(store: Store) -> list[dict[str, Any]]:
    """The runs that ended; one that was killed leaves no line, or half of one, which does not count."""
    try:
        lines = (store.logs / RUNS).read_text().splitlines()
    except FileNotFoundError:
        return []
    runs = []
    for line in lines:
        try:
            runs.append(json.loads(line))
        except ValueError:
            continue
    return runs
