"""What the writing and the reading side share: a client that gives up soon, the names of tags, runs made only once."""

import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tasks.errors import DrillcoreError, LineageError
from tasks.state import mlflow_uri, state_home

DIGEST_LENGTH = 36  # characters: MLflow's limit
INPUT_CONTEXT, OUTPUT_CONTEXT, TRAINING_CONTEXT = "extraction-input", "extraction-output", "training"
KIND, EXTRACTION, TRAINING = "drillcore.kind", "extraction", "training"
RECORD = "drillcore.record"  # tag: a key that the writer made up before the run, so that there is one run for it
STATES_DIGEST, STATES_URI = "hidden_states.digest", "hidden_states.uri"
INPUT_DIGEST, INPUT_URI = "input.sha256", "input.uri"
DRAFTER_NAME, DRAFTER_URI, DRAFTER_MODEL = "drafter.name", "drafter.uri", "drafter.model_id"
TRAINED_ON = "trained_on."  # and a digest as MLflow has it; tag of a registered model: the version that was
NOTE = "mlflow.note.content"  # tag: the text at the top of a run's page, Markdown
SQLITE = "sqlite:///"
GONE = "RESOURCE_DOES_NOT_EXIST"
# A call takes 1,000 metrics, parameters and tags in all, at most 100 of the latter two each: MLflow's limits.
MOST_METRICS, MOST_PARAMS, MOST_TAGS = 800, 100, 100
PAGE = 500  # results a call

logger = logging.getLogger(__name__)


def mlflow_digest(sha256: str) -> str:
    """The part of a sha256 that MLflow takes as a dataset's digest."""
    return sha256[:DIGEST_LENGTH]


def tracking_uri(given: str | None = None, default: str | None = None) -> str:
    """The URI given, that of MLFLOW_TRACKING_URI, or the default (the state folder's database)."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or default or mlflow_uri()


@contextmanager
def connected(uri: str, advice: str) -> Iterator[MlflowClient]:
    """A client. Whatever MLflow raises becomes a LineageError with what to do."""
    try:
        if uri == mlflow_uri():
            state_home().mkdir(parents=True, exist_ok=True)
        _make_database(uri)
        yield MlflowClient(tracking_uri=uri, registry_uri=uri)
    except DrillcoreError:
        raise
    except Exception as error:  # its database, HTTP and artifact libraries each have errors of their own
        logger.debug("MLflow failed", exc_info=True)
        raise LineageError(f"MLflow at {without_secrets(uri)} failed: {error}\n{advice}") from error


def _make_database(uri: str) -> None:
    """Make a new SQLite database whole, or not at all: MLflow does not go on with one of which a part was made."""
    path = Path(uri.removeprefix(SQLITE))
    if not uri.startswith(SQLITE) or path.exists() or not path.parent.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-", ignore_cleanup_errors=True) as folder:
        made = Path(folder, path.name)
        MlflowClient(tracking_uri=f"{SQLITE}{made}").search_experiments(max_results=1)
        try:
            os.link(made, path)
        except FileExistsError:  # another process was faster
            pass


def experiment_id(client: MlflowClient, name: str, artifacts: Path | None = None) -> str:
    """Of the experiment with this name, made if there is none; artifacts: where a new one keeps its files."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name, artifact_location=artifacts.absolute().as_uri() if artifacts else None)
    except MlflowException:
        found = client.get_experiment_by_name(name)  # another writer was faster
        if found is None:
            raise
        return found.experiment_id


def the_run(client: MlflowClient, experiment: str, key: str, name: str, began: int, tags: dict[str, str]) -> Run:
    """The one run with this key, made if there is none; began: milliseconds since 1970.

    Runs are made before their answer is known: a writer that died, or a request that MLflow's client sent again, may
    leave a second one. The oldest stays. A new run counts as failed until its writer says otherwise.
    """
    if found := _runs_of(client, experiment, key):
        return found[0]
    made = client.create_run(experiment, start_time=began, run_name=name, tags={RECORD: key, **tags})
    client.set_terminated(made.info.run_id, "FAILED")
    first, *others = _runs_of(client, experiment, key) or [made]
    for other in others:
        client.delete_run(other.info.run_id)
    return first


def _runs_of(client: MlflowClient, experiment: str, key: str) -> list[Run]:
    found = search(client, f"tags.`{RECORD}` = '{key}'", [experiment])
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def get_run(client: MlflowClient, run_id: str) -> Run | None:
    """The run, or None where it does not exist (any more)."""
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == GONE:
            return None
        raise
    return None if run.info.lifecycle_stage == "deleted" else run


def search(client: MlflowClient, query: str, experiments: list[str] | None = None) -> list[Run]:
    """All runs that match, of these experiments or of all."""
    within = experiments or [experiment.experiment_id for experiment in client.search_experiments()]
    return pages(lambda token: client.search_runs(within, query, max_results=PAGE, page_token=token))


def pages(call: Callable[[str | None], Any]) -> list[Any]:
    """All results of a call that gives them page by page."""
    results, token = [], None
    while True:
        page = call(token)
        results += page
        token = page.token
        if not token:
            return results


def log_all(
    client: MlflowClient,
    run_id: str,
    metrics: Sequence[Metric] = (),
    params: Sequence[Param] = (),
    tags: Sequence[RunTag] = (),
) -> None:
    """Log any number of them in as few calls as MLflow allows."""
    parts = (_chunks(metrics, MOST_METRICS), _chunks(params, MOST_PARAMS), _chunks(tags, MOST_TAGS))
    for some_metrics, some_params, some_tags in itertools.zip_longest(*parts, fillvalue=()):
        client.log_batch(run_id, metrics=some_metrics, params=some_params, tags=some_tags)


def _chunks(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def run_link(experiment: str, run_id: str) -> str:
    """The address of a run inside MLflow's page."""
    return f"#/experiments/{experiment}/runs/{run_id}"


def version_link(name: str, version: str | int) -> str:
    """The address of a model's version inside MLflow's page."""
    return f"#/models/{name}/versions/{version}"


def without_secrets(uri: str) -> str:
    """The URI without a user's name and password."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
