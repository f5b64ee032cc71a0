"""MLflow, or who talks to it, killed before, during and after a record: nothing lost, nothing twice, no run RUNNING."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from tasks.config import LineageConfig
from tasks.errors import LineageError
from tasks.files import sha256_of
from tasks.lineage.client import NOTE, RECORD, STATES_DIGEST, connected
from tasks.lineage.early import Preparation
from tasks.store.layout import Store
from tests.conftest import ROOT
from tests.faults.drill import Service, mlflow_service
from tests.integration.lineage import record, verified_store

WRITES = (
    *("create_experiment", "create_run", "set_terminated", "log_batch", "log_inputs", "log_artifact", "log_artifacts"),
    *("log_text", "set_tag"),
)


def contents(client: MlflowClient) -> list[dict[str, Any]]:
    """Everything that a record leaves of each run, but what differs between two databases."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return [content(client, run) for run in client.search_runs(experiments)]


def content(client: MlflowClient, run: Run) -> dict[str, Any]:
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "times": (run.info.start_time, run.info.end_time),
        "params": run.data.params,
        "tags": {name: value for name, value in run.data.tags.items() if name not in (RECORD, NOTE)},
        "metrics": {name: [(m.step, m.timestamp, m.value) for m in history] for name, history in histories.items()},
        "datasets": sorted(
            (each.dataset.name, each.dataset.digest, each.dataset.profile, each.tags[0].value)
            for each in run.inputs.dataset_inputs
        ),
        "artifacts": sorted(file.path for file in client.list_artifacts(run.info.run_id)),
        "plots": len(client.list_artifacts(run.info.run_id, "plots")),
    }


def database(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def die_at(number: int) -> Callable[[MlflowClient, str], Any]:
    """A stand-in for looking up the client's methods: the process is killed where the write `number` would be made."""
    count = itertools.count()
    find = object.__getattribute__

    def look_up(client: MlflowClient, name: str) -> Any:
        if name in WRITES and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return find(client, name)

    return look_up


def record_and_die(store: Store, uri: str, number: int) -> bool:
    """Record in a process of its own, killed at its write `number`; whether it came to an end before that."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            MlflowClient.__getattribute__ = die_at(number)  # type: ignore[method-assign, assignment]
            record(store, uri)
            status = 0
        finally:
            os._exit(status)
    _, code = os.waitpid(child, 0)
    assert code in (0, signal.SIGKILL), "the record failed by itself"
    return code == 0


def test_a_record_killed_at_any_of_its_writes_is_made_up_for_once(tmp_path: Path) -> None:
    store = verified_store(tmp_path / "one", "first")
    empty = tmp_path / "empty.db"
    MlflowClient(f"sqlite:///{empty}").search_experiments()
    expected, statuses = None, []
    for number in itertools.count(-1):  # -1: an undisturbed one
        (store.logs / "mlflow.json").unlink(missing_ok=True)
        uri = f"sqlite:///{shutil.copy(empty, tmp_path / f'{number}.db')}"
        client = MlflowClient(uri)
        ended = record_and_die(store, uri, number)
        statuses.append([run["status"] for run in contents(client)])
        record(store, uri)
        after = contents(client)
        expected = expected or after
        assert after == expected, number
        if ended and number >= 0:
            break
    assert [run["status"] for run in expected or []] == ["FINISHED"]
    undisturbed, *killed = statuses
    assert undisturbed == ["FINISHED"]
    # Before the experiment, before the run, and between the two calls that make the run. Then until all is there.
    assert killed[:3] == [[], [], ["RUNNING"]]
    assert killed[3:] == [["FAILED"]] * (len(killed) - 4) + [["FINISHED"]]
    assert len(killed) > 10


@pytest.mark.slow
def test_an_mlflow_server_killed_before_during_and_after_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    store = verified_store(tmp_path / "one", "first")
    with serving(tmp_path) as server:
        client = MlflowClient(server.url)
        server.kill()  # before
        refused(store, server.url)
        for name in ("log_inputs", "log_artifacts"):  # during
            server.start()
            with monkeypatch.context() as broken:
                broken.setattr(MlflowClient, name, kill_first(server.kill, getattr(MlflowClient, name)))
                refused(store, server.url)
        server.start()
        (half,) = contents(client)
        assert half["status"] == "FAILED"
        assert half["datasets"] != []
        run_id = record(store, server.url)
        (whole,) = contents(client)
        assert whole["status"] == "FINISHED"
        server.kill()  # after
        server.start()
        assert record(store, server.url) == run_id
        assert contents(client) == [whole]

        undisturbed = database(tmp_path)
        record(store, undisturbed)  # the same store on another tracking server: a run of its own there
        (expected,) = contents(MlflowClient(undisturbed))
        assert whole == expected
        assert expected["tags"][STATES_DIGEST] == sha256_of(store.manifest)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Service]:
    server = mlflow_service(folder / "server")
    try:
        server.start()
        yield server
    finally:
        server.stop()


def send(server: Service, number: int) -> None:
    """A signal to the server's processes."""
    assert server.process is not None
    for process in psutil.Process(server.process.pid).children(recursive=True):
        process.send_signal(number)


def kill_first(kill: Callable[[], None], method: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        kill()
        return method(*arguments, **named)

    return call


def refused(store: Store, uri: str) -> None:
    """The record fails, says how to make up for it, and leaves the data as it is."""
    before = sha256_of(store.manifest)
    with pytest.raises(LineageError, match=f"python -m flows record {store.root}"):
        record(store, uri)
    assert sha256_of(store.manifest) == before


@pytest.mark.slow
def test_an_mlflow_server_that_hangs_is_given_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    store = verified_store(tmp_path / "one", "first")
    with serving(tmp_path) as server:
        send(server, signal.SIGSTOP)
        started = time.monotonic()
        refused(store, server.url)
        # Three tries of a second each, and MLflow's pauses between them; with its own defaults it would be 246 s.
        assert time.monotonic() - started < 30
        send(server, signal.SIGCONT)
        record(store, server.url)
        assert [run["status"] for run in contents(MlflowClient(server.url))] == ["FINISHED"]


def test_an_mlflow_that_is_not_there_is_said_while_the_extraction_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = "http://127.0.0.1:9"  # nobody listens there
    started = time.monotonic()
    preparation = Preparation(LineageConfig(tracking_uri=uri), uri, tmp_path)
    assert time.monotonic() - started < 1
    assert "mlflow" in [thread.name for thread in threading.enumerate()]
    preparation.join()
    assert "MLflow at http://127.0.0.1:9 failed" in caplog.text
    assert "can be recorded later" in caplog.text


def test_a_database_whose_maker_is_killed_is_made_anew(tmp_path: Path) -> None:
    uri = database(tmp_path)
    code = f"from tasks.lineage.client import connected\nwith connected({uri!r}, ''): pass"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as maker:
        while not any(file.stat().st_size for file in tmp_path.glob(".mlflow-*/mlflow.db")):
            assert maker.poll() is None
            time.sleep(0.005)
        maker.kill()
    assert not (tmp_path / "mlflow.db").exists()
    with connected(uri, "") as client:
        assert client.search_experiments()
    assert (tmp_path / "mlflow.db").exists()
