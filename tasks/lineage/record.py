"""Records a verified store in MLflow: one run an extraction, its input and its output as datasets.

Everything comes from the output directory, after the data is safe: an MLflow that is down, slow or killed costs an
extraction nothing, and a record that failed can be made later (`python -m flows record`). The course of the extraction
was sampled into the same directory while it went on, so nothing is lost by that, whoever was killed meanwhile.

There is one run for a store, however often it is recorded: its key is made up and written down before MLflow hears of
it. While a record is being made the run's status is FAILED; FINISHED is said last.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.tracking import MlflowClient

from tasks.config import LineageConfig
from tasks.dataset.plan import load_plan
from tasks.files import sha256_of, write_json
from tasks.lineage import plots
from tasks.lineage.client import (
    EXTRACTION,
    INPUT_CONTEXT,
    INPUT_DIGEST,
    INPUT_URI,
    KIND,
    OUTPUT_CONTEXT,
    STATES_DIGEST,
    STATES_URI,
    connected,
    experiment_id,
    get_run,
    log_all,
    the_run,
    tracking_uri,
    without_secrets,
)
from tasks.lineage.course import course_of
from tasks.lineage.pages import refresh_extraction
from tasks.lineage.sources import FileSource, HiddenStatesDataset, PromptsDataset, StoreSource, as_input
from tasks.storage import Location, S3Path, as_argument, side_folder
from tasks.store.attempts import ATTEMPTS, Attempt, read_attempts
from tasks.store.layout import Store, read_extraction
from tasks.store.manifest import read_manifest
from tasks.store.record import RowRecords, read_records
from tasks.store.runs import read_runs

NOTE_FILE, LOCK = "mlflow.json", "mlflow.lock"  # in the store's logs: the key and the run's id a tracking server
REPORTS = (".json", ".jsonl", ".html", ".md", ".svg")  # of the store's logs, what people read
TAIL = 64 << 10  # bytes of a server's log

logger = logging.getLogger(__name__)


def record_extraction(store: Store, config: LineageConfig, default_uri: str, artifacts: Path) -> str:
    """Write the run of a verified store to MLflow; returns the run's id.

    default_uri, artifacts: used where the config and MLFLOW_TRACKING_URI name no tracking server. Raises LineageError
    if MLflow fails; the store is not touched then.
    """
    extraction, manifest = read_extraction(store), read_manifest(store)
    assert extraction is not None  # there is no manifest without it
    uri = tracking_uri(config.tracking_uri, default_uri)
    advice = f"The data is complete and verified. When MLflow is back: python -m flows record {as_argument(store.root)}"
    with connected(uri, advice) as client, _alone(store):
        note, server, digest = _read_note(store), without_secrets(uri), sha256_of(store.manifest)
        known = note["records"].get(server, {})
        run = get_run(client, known["run_id"]) if known else None
        if run and known["digest"] == digest and run.info.status == "FINISHED":
            return run.info.run_id
        if run is None:
            write_json(store.logs / NOTE_FILE, note)
            experiment = experiment_id(client, config.experiment, artifacts if uri == default_uri else None)
            name, began = extraction["config"]["name"], _began(store)
            run = the_run(client, experiment, note["key"], name, began, {KIND: EXTRACTION})
        _log(client, run, store, extraction, manifest, digest)
        client.set_terminated(run.info.run_id, "FINISHED", int(store.manifest.stat().st_mtime * 1000))
        note["records"][server] = {"run_id": run.info.run_id, "digest": digest}
        write_json(store.logs / NOTE_FILE, note)
        return run.info.run_id


def recorded_run(store: Store) -> str | None:
    """The id of the MLflow run that has the store as it is; None if it was not recorded."""
    try:
        digest, note = sha256_of(store.manifest), _read_note(store)
    except FileNotFoundError:
        return None
    return next((known["run_id"] for known in note["records"].values() if known["digest"] == digest), None)


def prepare(config: LineageConfig, default_uri: str, artifacts: Path) -> None:
    """Have MLflow ready before it is needed: a new database takes seconds. Raises LineageError if it is not there."""
    uri = tracking_uri(config.tracking_uri, default_uri)
    with connected(uri, "The extraction goes on without it and can be recorded later.") as client:
        experiment_id(client, config.experiment, artifacts if uri == default_uri else None)


def _log(
    client: MlflowClient, run: Run, store: Store, extraction: dict[str, Any], manifest: dict[str, Any], digest: str
) -> None:
    run_id, config, attempts = run.info.run_id, extraction["config"], read_attempts(store)
    if run.info.status != "FAILED":
        client.set_terminated(run_id, "FAILED")  # a new record of an old run: see the module's text
    tags = {
        STATES_DIGEST: digest,
        STATES_URI: str(store.root.absolute()),
        INPUT_DIGEST: manifest["parts"]["input_sha256"],
        INPUT_URI: config["dataset"]["path"],
        "fingerprint": manifest["fingerprint"],
        "model.identity": manifest["parts"]["model_identity"],
        **_tags_of(attempts),
    }
    params = dict([*_flat(config), *_flat(manifest["parts"], "parts.")])
    at = int(store.manifest.stat().st_mtime * 1000)
    totals = [Metric(name, float(value), at, 0) for name, value in _totals(store, manifest).items()]
    log_all(
        client,
        run_id,
        metrics=[*totals, *course_of(attempts)],
        # A parameter never changes in MLflow, and what decided a store's bytes does not either.
        params=[Param(name, str(value)) for name, value in params.items() if name not in run.data.params],
        tags=[RunTag(name, value) for name, value in tags.items()],
    )
    client.log_inputs(run_id, [_states(store, config, manifest, digest), _prompts(store, config, manifest)])
    _log_artifacts(client, run_id, store, config, attempts)
    refresh_extraction(client, run_id)


def _prompts(store: Store, config: dict[str, Any], manifest: dict[str, Any]) -> Any:
    path, plan = Path(config["dataset"]["path"]), load_plan(store.plan)
    profile = {"rows": len(plan), "tokens": int(plan.input_tokens.sum(dtype=np.int64))}
    if path.exists():
        profile["bytes"] = path.stat().st_size
    dataset = PromptsDataset(path.name, manifest["parts"]["input_sha256"], FileSource(str(path)), profile)
    return as_input(dataset, INPUT_CONTEXT)


def _states(store: Store, config: dict[str, Any], manifest: dict[str, Any], digest: str) -> Any:
    source = StoreSource(str(store.root.absolute()))
    return as_input(HiddenStatesDataset(config["name"], digest, source, manifest), OUTPUT_CONTEXT)


def _totals(store: Store, manifest: dict[str, Any]) -> dict[str, float]:
    runs = read_runs(store)
    totals = {name: manifest[name] for name in ("tokens", "bytes", "shards")}
    totals |= {f"rows_{state}": count for state, count in manifest["rows_by_state"].items()}
    totals |= {"runs": len(runs), "extraction_seconds": sum(run["seconds"] for run in runs)}
    if totals["extraction_seconds"]:
        totals["tokens_per_second"] = sum(run["tokens"] for run in runs) / totals["extraction_seconds"]
    return totals | {name: sum(run[name] for run in runs) for name in ("retries", "restarts") if runs}


def _tags_of(attempts: list[Attempt]) -> dict[str, str]:
    """What the last run was, by MLflow's own names where it has some."""
    tags = {"mlflow.source.name": "python -m flows extract", "mlflow.source.type": "LOCAL"}
    if attempts:
        origin = attempts[-1].header["origin"]
        if git := origin.get("git"):
            tags |= {"mlflow.source.git.commit": git["commit"], "git.changed": str(git["changed"])}
        if flow := origin.get("prefect"):
            tags |= {"prefect.flow_run": flow["url"] or flow["id"], "prefect.flow_run_name": flow["name"]}
    return tags


def _log_artifacts(
    client: MlflowClient, run_id: str, store: Store, config: dict[str, Any], attempts: list[Attempt]
) -> None:
    paths: list[Location] = sorted(store.logs.iterdir())
    reports = [path for path in paths if path.suffix in REPORTS and path.name != NOTE_FILE]
    with tempfile.TemporaryDirectory() as name:
        for file in (store.extraction, store.manifest, store.ledger, *reports):
            if isinstance(file, S3Path):
                copy = Path(name, file.name)
                copy.write_bytes(file.read_bytes())
                client.log_artifact(run_id, str(copy))
                copy.unlink()
            else:
                client.log_artifact(run_id, str(file))
        made = Path(name)
        (made / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        origins = [attempt.header for attempt in attempts]
        (made / "environment.json").write_text(json.dumps(origins, indent=1))
        (made / "plots").mkdir()
        for plot, text in _plots(store, attempts).items():
            (made / "plots" / f"{plot}.svg").write_text(text)
        (made / ATTEMPTS).mkdir()
        for attempt in attempts:
            (made / ATTEMPTS / attempt.path.name).write_bytes(attempt.path.read_bytes())
        for log in store.beside.parent.glob(f"{store.beside.name}.server*.log"):
            (made / f"{log.name}.tail.txt").write_bytes(_tail(log))
        client.log_artifacts(run_id, name)


def _plots(store: Store, attempts: list[Attempt]) -> dict[str, str]:
    plan, parts = load_plan(store.plan), read_manifest(store)["parts"]
    rms = np.concatenate([rows.rms for record in read_records(store) if len(rows := RowRecords.of(record.rows))])
    names = [*(f"layer {layer}" for layer in parts["layers"]), "final"]
    low, middle, high = (np.quantile(rms, share, axis=0).tolist() for share in (0.0, 0.5, 1.0))
    drawn = {
        "row-lengths": plots.histogram("Lengths of the rows", plan.tokens[plan.tokens > 0], "tokens"),
        "rms-by-layer": plots.ranges("RMS of the rows: smallest, median, largest", names, low, middle, high, "RMS"),
    }
    rates = [metric for metric in course_of(attempts) if metric.key == "progress/tokens_per_second"]
    if rates:
        steps, values = [metric.step for metric in rates], [metric.value for metric in rates]
        drawn["throughput"] = plots.line("Throughput", steps, values, "seconds of extraction", "tokens/s")
    return drawn


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read()


def _began(store: Store) -> int:
    """Milliseconds since 1970."""
    if attempts := read_attempts(store):
        return int(datetime.fromisoformat(attempts[0].header["at"]).timestamp() * 1000)
    return int(store.extraction.stat().st_mtime * 1000)


@contextlib.contextmanager
def _alone(store: Store) -> Iterator[None]:
    """One record of a store at a time, on this host."""
    folder = store.logs if isinstance(store.logs, Path) else side_folder(store.root)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_note(store: Store) -> dict[str, Any]:
    """`key`: of this store's run; `records`: run_id and digest on each tracking server."""
    try:
        note = json.loads((store.logs / NOTE_FILE).read_bytes())
    except FileNotFoundError:
        note = {}
    except ValueError:
        logger.warning("%s is damaged: the store is recorded as if for the first time", store.logs / NOTE_FILE)
        note = {}
    return note if "key" in note else {"key": secrets.token_hex(16), "records": {}}


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
