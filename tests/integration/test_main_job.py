"""The main job as a user runs it: one command, killed half-way, run again, and looked up afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from tasks.files import sha256_of
from tasks.lineage.client import mlflow_digest
from tasks.store.attempts import read_attempts
from tasks.store.layout import Store
from tests.conftest import ROOT
from tests.integration.serving import config_text, cpu_config, stored_states

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

ROWS = 48  # of the demo: enough for several shards
STEPS = {"preflight", "patch", "server", "probe", "extract", "verify", "record"}


@dataclass
class MainJob:
    """Three runs of one command: killed half-way, resumed, and once more."""

    home: Path
    config: Path
    store: Store
    dataset: Path
    environment: dict[str, str]
    committed: dict[str, str]
    """sha256 of each file in shards/ with a record, when the first run was killed."""
    outlived: list[str]
    """Commands of the killed run's processes that were still there 20 s later."""
    resumed: subprocess.CompletedProcess[str]
    repeated: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def job(demo_model: Path, demo_dataset: Path, staging: Path, tmp_path_factory: pytest.TempPathFactory) -> MainJob:
    folder = tmp_path_factory.mktemp("main-job")
    dataset = folder / "dataset.jsonl"
    dataset.write_text("".join(demo_dataset.read_text().splitlines(keepends=True)[:ROWS]))
    config = cpu_config(demo_model, dataset, folder / "output", staging, output={"shard_bytes": 8 << 20})
    path = folder / "config.yaml"
    path.write_text(config_text(config))
    environment = os.environ | {"DRILLCORE_HOME": str(folder / "home"), "NO_COLOR": "1"}
    environment.pop("PREFECT_API_URL", None)
    environment.pop("MLFLOW_TRACKING_URI", None)
    store = Store(config.output.path)

    first = subprocess.Popen(command(path), env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    while len(list(store.shards.glob("[0-9]*.json"))) < 3:
        assert first.poll() is None, "the first run ended before it could be killed"
        time.sleep(0.1)
    mine = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    committed = {
        file.name: sha256_of(file)
        for record in store.shards.glob("[0-9]*.json")
        for file in (record, record.with_suffix(".safetensors"))
    }
    _, alive = psutil.wait_procs(mine, timeout=20)
    outlived = [" ".join(process.cmdline()) for process in alive if process.is_running()]
    return MainJob(
        home=folder / "home",
        config=path,
        store=store,
        dataset=dataset,
        environment=environment,
        committed=committed,
        outlived=outlived,
        resumed=run(path, environment),
        repeated=run(path, environment),
    )


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "flows", "extract", str(config)]


def run(config: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(config), env=environment, cwd=ROOT, capture_output=True, text=True)


def test_nothing_outlives_a_killed_flow(job: MainJob) -> None:
    assert job.outlived == []


def test_the_same_command_resumes_and_ends_well(job: MainJob) -> None:
    assert job.resumed.returncode == 0, job.resumed.stderr
    rows = len(job.dataset.read_text().splitlines())
    assert f"{rows} done, 0 truncated, 0 skipped, 0 failed" in job.resumed.stdout
    there = sum(len(json.loads((job.store.shards / name).read_text())["rows"]) for name in job.committed if
                name.endswith(".json"))  # fmt: skip
    assert f"(resumed: {there} rows were there already)" in job.resumed.stdout
    assert f"{rows - there} rows, " in job.resumed.stdout


def test_the_report_says_what_was_proved(job: MainJob) -> None:
    page = (job.store.logs / "report.html").read_text()
    assert "The probe passed before anything was extracted" in page
    assert "A second extraction gives the same" in page


def test_what_was_committed_before_the_kill_is_untouched(job: MainJob) -> None:
    assert len(job.committed) >= 6
    assert {name: sha256_of(job.store.shards / name) for name in job.committed} == job.committed


def test_a_third_run_extracts_nothing_and_says_so(job: MainJob) -> None:
    assert job.repeated.returncode == 0, job.repeated.stderr
    assert "resumed: every row was there already, nothing was extracted" in job.repeated.stdout
    assert "server     " not in job.repeated.stderr
    digest = re.search(r"digest +([0-9a-f]{64})", job.resumed.stdout)
    assert digest
    assert digest[1] in job.repeated.stdout
    assert digest[1] == sha256_of(job.store.manifest)


def test_the_readme_s_reader_reads_the_store(job: MainJob) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "safe_open" in block]
    code = code.replace(".drillcore/demo/hidden-states", str(job.store.root))
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 15
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    samples = [json.loads(line) for line in job.dataset.read_text().splitlines()]
    read = {int(line.split()[0]): [int(word) for word in line.split()[1:3]] for line in printed.splitlines()}
    assert read == {row: [len(s["input_ids"]), sum(s["loss_mask"])] for row, s in enumerate(samples)}
    assert "{1: " in printed
    assert ", 14: " in printed
    assert ", 26: " in printed


def test_every_row_is_stored_once_with_its_ids(job: MainJob) -> None:
    lengths = {
        number: len(json.loads(line)["input_ids"]) for number, line in enumerate(job.dataset.read_text().splitlines())
    }
    stored = [(row, state.shape[1]) for row, state in stored_states(job.store)]
    assert sorted(stored) == sorted(lengths.items())
    ledger = pq.read_table(job.store.ledger).to_pylist()
    assert [(line["row"], line["state"], line["tokens"]) for line in ledger] == [
        (row, "done", tokens) for row, tokens in lengths.items()
    ]


def test_mlflow_finds_the_run_by_input_and_by_output(job: MainJob) -> None:
    client = MlflowClient(f"sqlite:///{job.home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("drillcore")
    assert experiment is not None
    for context, file in (("extraction-input", job.dataset), ("extraction-output", job.store.manifest)):
        query = f"dataset.digest = '{mlflow_digest(sha256_of(file))}' AND dataset.context = '{context}'"
        (found,) = client.search_runs([experiment.experiment_id], query)
        assert found.data.tags["hidden_states.digest"] == sha256_of(job.store.manifest)
        assert found.data.metrics["rows_done"] == len(job.dataset.read_text().splitlines())
        assert found.data.params["dataset.path"] == str(job.dataset)
        assert found.info.status == "FINISHED"
        names = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
        assert {"manifest.json", "extraction.json", "ledger.parquet", "probe.json", "report.html"} <= names
        assert {"attempts", "plots"} <= names


def test_mlflow_has_the_course_of_both_runs_and_where_they_are_in_prefect(job: MainJob) -> None:
    """Of the killed run, too, which never came to record anything."""
    attempts = read_attempts(job.store)
    assert len(attempts) == 2
    killed, resumed = (list(attempt.samples()) for attempt in attempts)
    assert len(killed) > 0
    assert attempts[1].header["there"] + resumed[-1]["rows"] == len(job.dataset.read_text().splitlines())
    client = MlflowClient(f"sqlite:///{job.home / 'mlflow.db'}")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, "progress/rows_done")
    assert [metric.timestamp for metric in history] == [int(sample["at"] * 1000) for sample in [*killed, *resumed]]
    assert 0 < run.data.metrics["system/cpu_utilization_percentage"] <= 100
    flow_runs = {flow_run["id"] for flow_run in prefect_records(job, "flow_runs")}
    assert {attempt.header["origin"]["prefect"]["id"] for attempt in attempts} <= flow_runs
    assert run.data.tags["prefect.flow_run"].endswith(f"/runs/flow-run/{attempts[1].header['origin']['prefect']['id']}")
    assert attempts[1].header["origin"]["packages"]["torch"]
    assert attempts[1].header["origin"]["servers"][0]["sglang"] == run.data.params["parts.sglang"]


def test_prefect_shows_the_run_with_its_seven_steps(job: MainJob) -> None:
    task_runs = prefect_records(job, "task_runs")
    flow_runs = {flow_run["id"]: flow_run["state_type"] for flow_run in prefect_records(job, "flow_runs")}
    finished = {}
    for task_run in task_runs:
        if flow_runs[task_run["flow_run_id"]] == "COMPLETED":
            assert task_run["state_type"] == "COMPLETED"
            finished.setdefault(task_run["flow_run_id"], set()).add(task_run["name"].partition("-")[0])
    assert sorted(finished.values(), key=len) == [{"preflight", "verify", "record"}, STEPS]


def prefect_records(job: MainJob, kind: str) -> list[dict[str, Any]]:
    """All flow or task runs, asked of a real Prefect server over the state folder."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], env=job.environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout
        url = server.stdout.readline().decode().strip()
        records = httpx.post(f"{url}/{kind}/filter", json={}, timeout=30).json()
        server.communicate(b"\n")
    return records


SERVE = """
from flows.services import prefect_api
with prefect_api() as url:
    print(url, flush=True)
    input()
"""
