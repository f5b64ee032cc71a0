"""MLflow in a process of its own: it records as this process would, and whatever ends it is one named error."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tasks.config import LineageConfig
from tasks.errors import LineageError
from tasks.lineage.early import Preparation
from tests.conftest import ROOT
from tests.integration.lineage import record, verified_store
from tests.unit.helpers import wait_for


def test_it_records_once_what_this_process_then_finds_recorded(tmp_path: Path) -> None:
    store = verified_store(tmp_path / "one", "first")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with Preparation(LineageConfig(), uri, tmp_path / "artifacts") as mlflow:
        run_id = mlflow.record(store)
        process = psutil.Process(mlflow._process.pid)
    assert not process.is_running()
    assert record(store, uri) == run_id


def test_a_store_that_cannot_be_recorded_is_an_error_of_the_record(tmp_path: Path) -> None:
    store = verified_store(tmp_path / "one", "first")
    store.manifest.unlink()
    with Preparation(LineageConfig(), f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "artifacts") as mlflow:
        with pytest.raises(LineageError, match=r"StoreError: .* has no readable manifest"):
            mlflow.record(store)


def test_a_process_that_is_killed_is_a_named_error_with_what_to_do(tmp_path: Path) -> None:
    store = verified_store(tmp_path / "one", "first")
    with Preparation(LineageConfig(), f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "artifacts") as mlflow:
        os.kill(mlflow._process.pid, signal.SIGKILL)
        with pytest.raises(LineageError, match=f"ended .*later: python -m flows record {store.root}"):
            mlflow.record(store)


def test_it_ends_with_whoever_started_it_however_that_ends(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from tasks.config import LineageConfig
from tasks.lineage.early import Preparation
preparation = Preparation(LineageConfig(), "sqlite:///{tmp_path}/mlflow.db", Path("{tmp_path}"))
print(preparation._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as flow:
        assert flow.stdout is not None
        process = psutil.Process(int(flow.stdout.readline()))
        flow.kill()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 20)


def test_a_flow_imports_no_mlflow() -> None:
    code = "import sys, flows.extract, flows.run; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
