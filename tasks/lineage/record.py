"""Records a verified store in MLflow: one run an extraction, its input and its output as datasets.

Everything comes from the output directory, so that a record that failed can be made later (`python -m flows record`).
The run's id is kept there too: recording again continues the same run and logs nothing twice. A key of our own is kept
before the run is made, and tagged on it, so that a run whose maker died before it could keep the id is found, too.
"""

import json
import os
import uuid
from pathlib import Path
from typing import Any

from tasks.config import LineageConfig
from tasks.errors import LineageError
from tasks.files import sha256_of, write_json
from tasks.store.layout import Store, read_extraction
from tasks.store.runs import read_runs
from tasks.verification import read_manifest

# MLflow's HTTP client retries for 246 s by default when its server is down; nobody should wait for that.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

DIGEST_LENGTH = 36  # characters: MLflow's limit
INPUT_CONTEXT, OUTPUT_CONTEXT = "extraction-input", "extraction-output"
KEY_TAG = "drillcore.key"


def mlflow_digest(sha256: str) -> str:
    """The part of a sha256 that MLflow takes as a dataset's digest."""
    return sha256[:DIGEST_LENGTH]


def record_extraction(store: Store, config: LineageConfig, default_uri: str, artifacts: Path) -> str:
    """Write the run of a verified store to MLflow; returns the run's id.

    default_uri, artifacts: used where the config and MLFLOW_TRACKING_URI name no tracking server. Raises LineageError
    if MLflow fails; the store is not touched then.
    """
    extraction, manifest = read_extraction(store), read_manifest(store)
    assert extraction is not None  # there is no manifest without it
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri
    note = store.logs / "mlflow.json"
    try:
        client = MlflowClient(tracking_uri=uri)
        experiment = _experiment(client, config.experiment, artifacts if uri == default_uri else None)
        kept = _read_note(note, uri)
        run = _find_run(client, experiment, kept)
        digest = sha256_of(store.manifest)
        if run and kept.get("digest") == digest:
            return run.info.run_id
        if run is None:
            kept = {"tracking_uri": uri, "key": uuid.uuid4().hex}
            write_json(note, kept)
            began = int(store.extraction.stat().st_mtime * 1000)
            run = client.create_run(experiment, began, {KEY_TAG: kept["key"]}, extraction["config"]["name"])
        run_id = run.info.run_id
        kept = {name: value for name, value in kept.items() if name != "digest"} | {"run_id": run_id}
        write_json(note, kept)
        _log(client, run_id, store, extraction, manifest, digest)
        client.set_terminated(run_id)
        write_json(note, kept | {"digest": digest})
        return run_id
    except (MlflowException, OSError) as error:
        raise LineageError(
            f"MLflow at {_without_secrets(uri)} did not take the record: {error}\nThe data is complete and verified. "
            f"When MLflow is back: python -m flows record {store.root}"
        ) from error


def _log(
    client: MlflowClient, run_id: str, store: Store, extraction: dict[str, Any], manifest: dict[str, Any], digest: str
) -> None:
    config, parts = extraction["config"], manifest["parts"]
    dataset = Path(config["dataset"]["path"])
    profile = {name: manifest[name] for name in ("rows", "tokens", "bytes")}
    inputs = [
        _dataset(
            dataset.name, parts["input_sha256"], str(dataset.absolute()), INPUT_CONTEXT, {"rows": manifest["rows"]}
        ),
        _dataset(config["name"], digest, str(store.root.absolute()), OUTPUT_CONTEXT, profile),
    ]
    client.log_inputs(run_id, inputs)
    runs = read_runs(store)
    metrics = {"tokens": manifest["tokens"], "bytes": manifest["bytes"], "shards": manifest["shards"]}
    metrics |= {f"rows_{state}": count for state, count in manifest["rows_by_state"].items()}
    metrics |= {"extraction_seconds": sum(run["seconds"] for run in runs), "runs": len(runs)}
    if metrics["extraction_seconds"]:
        metrics["tokens_per_second"] = sum(run["tokens"] for run in runs) / metrics["extraction_seconds"]
    now = int(store.manifest.stat().st_mtime * 1000)
    tags = {
        "hidden_states.digest": digest,
        "hidden_states.uri": str(store.root.absolute()),
        "input.sha256": parts["input_sha256"],
        "fingerprint": manifest["fingerprint"],
        "model.identity": parts["model_identity"],
    }
    client.log_batch(
        run_id,
        metrics=[Metric(name, float(value), now, 0) for name, value in metrics.items()],
        params=[Param(name, str(value)) for name, value in _flat(config)],
        tags=[RunTag(name, value) for name, value in tags.items()],
    )
    logs = sorted([*store.logs.glob("*.json"), *store.logs.glob("*.html")])
    for file in (store.extraction, store.manifest, store.ledger, *logs):
        client.log_artifact(run_id, str(file))


def _dataset(name: str, digest: str, path: str, context: str, profile: dict[str, int]) -> DatasetInput:
    source = json.dumps({"uri": path})
    dataset = Dataset(name, mlflow_digest(digest), source_type="local", source=source, profile=json.dumps(profile))
    return DatasetInput(dataset=dataset, tags=[InputTag("mlflow.data.context", context)])


def _experiment(client: MlflowClient, name: str, artifacts: Path | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    return client.create_experiment(name, artifact_location=artifacts.absolute().as_uri() if artifacts else None)


def _read_note(note: Path, uri: str) -> dict[str, Any]:
    """What the store keeps of its run on this tracking server; nothing if it keeps nothing, or that of another one."""
    try:
        kept = json.loads(note.read_bytes())
        return kept if kept["tracking_uri"] == uri else {}
    except (FileNotFoundError, ValueError, KeyError):
        return {}


def _find_run(client: MlflowClient, experiment: str, kept: dict[str, Any]) -> Run | None:
    """The run of a note, if it still exists."""
    try:
        if "run_id" in kept:
            return client.get_run(kept["run_id"])
        if "key" in kept:
            return next(iter(client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{kept['key']}'")), None)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
    return None


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    lines = []
    for name, value in config.items():
        lines += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return lines


def _without_secrets(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
