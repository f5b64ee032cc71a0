"""The MLflow record of a store is one run, at whatever point the process that makes it dies."""

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tasks.config import LineageConfig
from tasks.files import write_json
from tasks.lineage import record
from tasks.store.books import records_digest
from tasks.store.layout import Store
from tests.unit.helpers import new_store


class DiedError(BaseException):
    """As SIGKILL: nothing cleans up."""


def verified_store(folder: Path) -> Store:
    """The least that a record is made of."""
    parts = {"input_sha256": "a" * 64, "model_identity": "b" * 64}
    store = new_store(
        Store(folder / "store"), parts, {"name": "small", "dataset": {"path": str(folder / "data.jsonl")}}
    )
    totals = {"rows": 3, "tokens": 30, "bytes": 300, "shards": 1, "rows_by_state": {"done": 3}}
    write_json(
        store.manifest, totals | {"parts": parts, "fingerprint": "c", "records_sha256": records_digest(store, [])}
    )
    store.ledger.write_bytes(b"ledger")
    return store


def test_a_record_that_was_cut_off_anywhere_is_continued_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, uri = verified_store(tmp_path), f"sqlite:///{tmp_path / 'mlflow.db'}"
    steps = ["create_run", "log_inputs", "log_batch", "log_artifact", "set_terminated", None]

    def attempt(last: str | None) -> str:
        """Make the record, and die as soon as MLflow has done the step `last`."""
        with monkeypatch.context() as patch:
            if last:
                real = getattr(MlflowClient, last)

                def die(*arguments: object, **named: object) -> None:
                    real(*arguments, **named)
                    raise DiedError

                patch.setattr(MlflowClient, last, die)
            return record.record_extraction(store, LineageConfig(), uri, tmp_path / "artifacts")

    for last in steps[:-1]:
        with pytest.raises(DiedError):
            attempt(last)
    made = attempt(None)
    assert attempt(None) == made  # and nothing is logged once more
    client = MlflowClient(uri)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (run.info.run_id, run.info.status) == (made, "FINISHED")
    assert len(run.inputs.dataset_inputs) == 2
    assert run.data.metrics["rows_done"] == 3
    assert json.loads((store.logs / "mlflow.json").read_bytes())["run_id"] == made
