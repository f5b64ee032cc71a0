"""From nothing to a verified output as an operator does it: a Prefect server, one command, a worker, a form."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.store.layout import Store
from tasks.verification import read_manifest
from tests.faults.drill import Run, make_rows, wait_until
from tests.faults.operated import Operated, wait_for_commits
from tests.integration.serving import CPU_ARGUMENTS, cpu_config
from tests.integration.tiny_models import VOCABULARY, make_checkpoint
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ROWS = 96


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Operated, Run]]:
    """All that is needed, started cold; and its worker."""
    began = time.monotonic()
    with Operated.cold(tmp_path_factory.mktemp("operated")) as operated:
        operated.deploy()
        worker = operated.worker()
        print(f"server, deployments and worker after {time.monotonic() - began:.1f} s")
        yield operated, worker
        worker.process.send_signal(signal.SIGTERM)
        worker.wait(60)
        worker.assert_no_orphans()


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory, staging: Path) -> dict[str, Any]:
    """What somebody fills in: a managed server on this CPU, and an output for each test to choose."""
    folder = tmp_path_factory.mktemp("input")
    make_checkpoint("llama", folder / "model")
    dataset = write_jsonl(folder / "dataset.jsonl", list(make_rows(VOCABULARY, ROWS)))
    config = cpu_config(
        folder / "model",
        dataset,
        folder / "output",
        staging,
        server={"dtype": "float32", "chunked_prefill_size": 256, "arguments": CPU_ARGUMENTS},
        capture={"layers": [0, 2, 4]},
        output={"shard_bytes": 1 << 20},
    )
    values: dict[str, Any] = json.loads(config.model_dump_json(exclude_unset=True))
    return values


def outcome(operated: Operated, flow_run: str, seconds: float = 500) -> dict[str, Any]:
    """The flow run, once it has ended."""
    wait_until(lambda: operated.state(flow_run) in {"COMPLETED", "FAILED", "CRASHED"}, seconds, "the run's end")
    found: dict[str, Any] = operated.get(f"flow_runs/{flow_run}")
    return found


def test_an_extraction_from_the_form_ends_verified(operated: tuple[Operated, Run], form: dict[str, Any]) -> None:
    prefect, _ = operated
    began = time.monotonic()
    flow_run = prefect.submit("extract", form)
    run = outcome(prefect, flow_run)
    assert run["state_type"] == "COMPLETED", prefect.logs(flow_run)
    print(f"extracted and verified in {time.monotonic() - began:.1f} s")
    store = Store(Path(form["output"]["path"]))
    assert read_manifest(store)["rows_by_state"] == {"done": ROWS, "truncated": 0, "skipped": 0, "failed": 0}

    assert run["name"].startswith(f"{form['name']}-20")
    assert f"batch 000000: {len(json.loads((store.shards / '000000.json').read_bytes())['rows'])} rows" in prefect.logs(
        flow_run
    )
    shown = prefect.artifacts(flow_run)
    assert {"extraction", "verification", "summary"} <= set(shown)
    assert "trouble" not in shown
    assert shown["extraction"]["data"] == 100
    for figure in (f"{ROWS} of {ROWS} rows", "tokens/s", "B/s", "retries", "restarts", "free in the output"):
        assert figure in shown["extraction"]["description"]

    checked = prefect.submit("verify", {"output": str(store.root)})
    run = outcome(prefect, checked)
    assert run["state_type"] == "COMPLETED", prefect.logs(checked)
    assert run["name"] == "verify-output"
    assert "verification" in prefect.artifacts(checked)


def test_a_plan_from_the_form_says_what_there_is_to_do(operated: tuple[Operated, Run], form: dict[str, Any]) -> None:
    prefect, _ = operated
    flow_run = prefect.submit("plan", form, rate=100)
    run = outcome(prefect, flow_run)
    assert run["state_type"] == "COMPLETED", prefect.logs(flow_run)
    table = prefect.artifacts(flow_run)["plan"]["data"]
    assert f"| rows | {ROWS}: 0 truncated, 0 skipped |" in table
    assert "at 100/s |" in table


def test_what_no_schema_can_say_is_refused_by_the_run(operated: tuple[Operated, Run], form: dict[str, Any]) -> None:
    prefect, _ = operated
    flow_run = prefect.submit("extract", form | {"server": {"mode": "attached"}})
    run = outcome(prefect, flow_run)
    assert run["state_type"] == "FAILED"
    assert "server.mode is 'attached', so server.url must be set" in run["state"]["message"]


@pytest.mark.slow
def test_a_cancelled_run_takes_its_server_with_it(operated: tuple[Operated, Run], form: dict[str, Any]) -> None:
    prefect, worker = operated
    output = Path(form["output"]["path"]).with_name("cancelled")
    values = form | {"output": form["output"] | {"path": str(output)}, "extraction": {"requests_in_flight": 1}}
    flow_run = prefect.submit("extract", values)
    wait_for_commits(worker, Store(output), 1)
    assert len(worker.family()) > 3  # the flow, the guardian, the SGLang server's processes
    prefect.set_state(flow_run, "CANCELLING")
    asked = time.monotonic()
    wait_until(lambda: len(worker.family()) == 1, 40, f"the worker alone: {worker.family()}")
    print(f"the flow and its server were gone after {time.monotonic() - asked:.1f} s")
    wait_until(lambda: prefect.state(flow_run) == "CANCELLED", 30, "the state")
    assert not Store(output).manifest.exists()
    assert list(Path(form["staging"]["path"]).glob("server-*")) == []
    shutil.rmtree(output)
