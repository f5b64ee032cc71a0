"""For a trainer's script: what a drafter was trained on, said in MLflow. No Prefect, PyTorch or SGLang is imported.

    from tasks.lineage.drafter import drafter_run

    with drafter_run(hidden_states="/data/hidden-states/my", name="my-eagle3", model_uri="/data/drafters/my") as run:
        ...                                                   # train
        run.log_metrics({"acceptance_length": 2.9}, step=1000)

or afterwards: `python -m flows lineage register --store /data/hidden-states/my --name my-eagle3`.
"""

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlflow.entities import LoggedModel, LoggedModelOutput, Metric, Param
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from tasks.errors import LineageError
from tasks.files import sha256_of
from tasks.lineage.client import (
    DRAFTER_MODEL,
    DRAFTER_NAME,
    DRAFTER_URI,
    KIND,
    MOST_METRICS,
    RECORD,
    STATES_DIGEST,
    TRAINED_ON,
    TRAINING,
    TRAINING_CONTEXT,
    connected,
    experiment_id,
    get_run,
    log_all,
    mlflow_digest,
    pages,
    the_run,
    tracking_uri,
)
from tasks.lineage.pages import refresh_training
from tasks.lineage.sources import HiddenStatesDataset, StoreSource, as_input
from tasks.state import mlflow_artifacts, mlflow_uri
from tasks.store.layout import read_extraction
from tasks.store.manifest import check_contents

MODEL_TYPE = "drafter"
Stores = str | Path | Sequence[str | Path]

logger = logging.getLogger(__name__)


@dataclass
class DrafterRun:
    """A training run that is going on."""

    client: MlflowClient
    run_id: str
    experiment_id: str
    name: str
    digests: list[str]
    """SHA-256 of each store's manifest."""
    model_uri: str | None = None
    """Where the trained drafter lies; may be set until the context ends."""
    waiting: list[Metric] = field(default_factory=list)
    """Metrics that MLflow has not taken yet."""
    version: str | None = None
    """That the drafter was registered as; set when the context ends."""

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log metrics. An MLflow that does not answer gets them with the next ones, or at the end."""
        at = int(time.time() * 1000)
        self.waiting += [Metric(name, float(value), at, step) for name, value in metrics.items()]
        try:
            self.send()
        except MlflowException as error:
            logger.warning("%d metrics wait for MLflow: %s", len(self.waiting), error)

    def send(self) -> None:
        """Log what waits; raises MlflowException."""
        while self.waiting:
            self.client.log_batch(self.run_id, metrics=self.waiting[:MOST_METRICS])
            del self.waiting[:MOST_METRICS]


@contextmanager
def drafter_run(
    hidden_states: Stores,
    name: str,
    model_uri: str | Path | None = None,
    *,
    aliases: Sequence[str] = (),
    params: Mapping[str, object] | None = None,
    experiment: str = "drillcore",
    uri: str | None = None,
    run_id: str | None = None,
    deep: bool = False,
) -> Iterator[DrafterRun]:
    """A training run on one store of hidden states or several; where it ends well, the drafter is registered.

    name: of the registered model, which gets a new version; aliases: that the version takes over. model_uri: where the
    drafter lies or will lie. uri: of MLflow; default: MLFLOW_TRACKING_URI or the state folder. run_id: of a training
    run that MLflow has already: it is continued, and not ended here; what it has registered is not registered again.
    deep: compare every shard's checksum, not only its size.

    Raises StoreError if a store is not what its manifest says, LineageError if MLflow fails; that at the end names the
    command that makes up for it. An exception from inside passes, and the run counts as failed.
    """
    stores = [hidden_states] if isinstance(hidden_states, (str, Path)) else list(hidden_states)
    datasets, digests = _datasets(stores, deep)
    where = tracking_uri(uri)
    with connected(where, "Nothing was begun.") as client:
        run = _begin(client, name, experiment, run_id, digests, mlflow_artifacts() if where == mlflow_uri() else None)
        run.model_uri = None if model_uri is None else str(model_uri)
        client.log_inputs(run.run_id, [as_input(dataset, TRAINING_CONTEXT) for dataset in datasets])
        if params:
            log_all(client, run.run_id, params=[Param(key, str(value)) for key, value in params.items()])
        if run_id is None:
            client.update_run(run.run_id, "RUNNING")
    try:
        yield run
    except BaseException:
        _mark_failed(run, where)
        raise
    with connected(where, _advice(run, stores, aliases)) as client:
        run.send()
        run.version = register(client, run, aliases)
        if run_id is None or client.get_run(run.run_id).data.tags.get(RECORD):
            client.set_terminated(run.run_id)


def register(client: MlflowClient, run: DrafterRun, aliases: Sequence[str]) -> str:
    """Register what a training run made, once however often it is called; returns the version."""
    model = _external_model(client, run)
    tags = {STATES_DIGEST: ",".join(run.digests), DRAFTER_MODEL: model.model_id}
    if run.model_uri:
        tags[DRAFTER_URI] = run.model_uri
    for key, value in tags.items():
        client.set_tag(run.run_id, key, value)
    version = _version(client, run, model, tags)
    outputs = client.get_run(run.run_id).outputs
    if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
        client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, step=0)])
    for digest in run.digests:
        client.set_registered_model_tag(run.name, TRAINED_ON + mlflow_digest(digest), str(version.version))
    for alias in aliases:
        client.set_registered_model_alias(run.name, alias, str(version.version))
    text = refresh_training(client, run.run_id, [mlflow_digest(digest) for digest in run.digests])
    client.update_model_version(run.name, str(version.version), text)
    return str(version.version)


def _datasets(stores: list[str | Path], deep: bool) -> tuple[list[HiddenStatesDataset], list[str]]:
    datasets, digests = [], []
    for where in stores:
        source = StoreSource(str(Path(str(where)).absolute()) if "://" not in str(where) else str(where))
        store = source.store
        manifest, extraction = check_contents(store, deep), read_extraction(store)
        assert extraction is not None  # there is no manifest without it
        digests.append(sha256_of(store.manifest))
        datasets.append(HiddenStatesDataset(extraction["config"]["name"], digests[-1], source, manifest))
    if not datasets:
        raise LineageError("A drafter's run needs a store of hidden states, at least one.")
    return datasets, digests


def _begin(
    client: MlflowClient, name: str, experiment: str, run_id: str | None, digests: list[str], artifacts: Path | None
) -> DrafterRun:
    tags = {KIND: TRAINING, DRAFTER_NAME: name, STATES_DIGEST: ",".join(digests)}
    if run_id is None:
        within = experiment_id(client, experiment, artifacts)
        run = the_run(client, within, secrets.token_hex(16), name, int(time.time() * 1000), tags)
    else:
        found = get_run(client, run_id)
        if found is None:
            raise LineageError(f"MLflow has no run {run_id!r}: give the id of the training run, or none for a new one.")
        run = found
        for key, value in tags.items():
            client.set_tag(run_id, key, value)
    return DrafterRun(client, run.info.run_id, run.info.experiment_id, name, digests)


def _external_model(client: MlflowClient, run: DrafterRun) -> LoggedModel:
    """The run's model, whose files lie outside MLflow."""
    query = f"source_run_id = '{run.run_id}'"
    found = client.search_logged_models([run.experiment_id], query)
    first, *others = sorted(found, key=lambda model: (model.creation_timestamp, model.model_id)) or [None]
    for other in others:
        client.delete_logged_model(other.model_id)
    if first is None:
        tags = {MLFLOW_MODEL_IS_EXTERNAL: "true", STATES_DIGEST: ",".join(run.digests)}
        tags |= {DRAFTER_URI: run.model_uri} if run.model_uri else {}
        first = client.create_logged_model(run.experiment_id, run.name, run.run_id, tags, model_type=MODEL_TYPE)
    if str(first.status) != "READY":
        client.finalize_logged_model(first.model_id, "READY")
    return first


def _version(client: MlflowClient, run: DrafterRun, model: LoggedModel, tags: dict[str, str]) -> ModelVersion:
    """The run's version of the registered model. MLflow takes no path outside its own folders as the source."""
    try:
        client.create_registered_model(run.name, tags={KIND: MODEL_TYPE})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if not _versions(client, run):
        client.create_model_version(run.name, model.artifact_location, run.run_id, tags, model_id=model.model_id)
    first, *others = _versions(client, run)  # a request that was sent again makes two
    for other in others:
        client.delete_model_version(run.name, str(other.version))
    return first


def _versions(client: MlflowClient, run: DrafterRun) -> list[ModelVersion]:
    query = f"run_id = '{run.run_id}'"
    found = pages(lambda token: client.search_model_versions(query, page_token=token))
    return sorted((version for version in found if version.name == run.name), key=lambda one: int(one.version))


def _mark_failed(run: DrafterRun, where: str) -> None:
    """What went wrong in the training is what the caller must see, not MLflow's trouble with it."""
    try:
        with connected(where, f"The run {run.run_id} is not marked as failed.") as client:
            run.send()
            client.set_terminated(run.run_id, "FAILED")
    except LineageError as error:
        logger.warning("%s", error)


def _advice(run: DrafterRun, stores: list[str | Path], aliases: Sequence[str]) -> str:
    words = ["python -m flows lineage register", *(f"--store {store}" for store in stores), f"--name {run.name}"]
    words += [f"--run {run.run_id}", *([f"--model-uri {run.model_uri}"] if run.model_uri else [])]
    words += [f"--alias {alias}" for alias in aliases]
    words += [f"--metric {metric.key}={metric.value}" for metric in run.waiting]
    return f"The drafter is trained, but not registered. When MLflow is back: {' '.join(words)}"
