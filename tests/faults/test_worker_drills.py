"""The flow as a deployment: its Prefect worker is killed, or told to end, in mid-run."""

import json
import signal
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tasks.store.layout import Store
from tests.faults.drill import Run, Site, committed, hashes, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]

POOL = "drillcore"  # prefect.yaml's


def prefect(site: Site, *arguments: str) -> Run:
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    return Run(command, site.environment(PREFECT_WORKER_QUERY_SECONDS="1"), site.folder)


@pytest.fixture(scope="module")
def deployed(site: Site) -> str:
    """The deployment's id."""
    for arguments in (["work-pool", "create", POOL, "--type", "process"], ["deploy", "--all"]):
        run = prefect(site, *arguments)
        assert run.wait() == 0, run.out + run.err
    return str(httpx.get(f"{site.api}/deployments/name/extract/extract", timeout=30).json()["id"])


def submit(site: Site, deployment: str, config: Path) -> str:
    """Ask for a run of the deployment; returns the flow run's id."""
    parameters = {"config": yaml.safe_load(config.read_text())}
    url = f"{site.api}/deployments/{deployment}/create_flow_run"
    answer = httpx.post(url, json={"parameters": parameters}, timeout=30)
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def state_of(site: Site, flow_run: str) -> str:
    return str(httpx.get(f"{site.api}/flow_runs/{flow_run}", timeout=30).json()["state_type"])


def wait_for_commits(worker: Run, store: Store, count: int) -> None:
    def there() -> bool:
        assert worker.process.poll() is None, worker.out + worker.err
        return len(committed(store)) >= count

    wait_until(there, 300, f"{count} commit records; the worker said {worker.out}")


def test_a_worker_that_is_killed_takes_no_flow_with_it(site: Site, deployed: str, tmp_path: Path) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    worker = prefect(site, "worker", "start", "--pool", POOL)
    flow_run = submit(site, deployed, config)
    wait_for_commits(worker, store, 2)
    worker.kill()
    assert not store.manifest.exists(), "the flow ended too early for this drill"
    wait_until(lambda: state_of(site, flow_run) == "COMPLETED", 400, "the flow's end")
    site.assert_complete(store)
    worker.assert_no_orphans()


def test_a_worker_that_is_told_to_end_ends_its_flow_and_the_next_one_resumes(
    site: Site, deployed: str, tmp_path: Path
) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    first = prefect(site, "worker", "start", "--pool", POOL)
    flow_run = submit(site, deployed, config)
    wait_for_commits(first, store, 2)
    first.process.send_signal(signal.SIGTERM)
    first.wait(60)
    first.assert_no_orphans()
    assert not store.manifest.exists()
    kept = hashes(store)
    print(f"the first flow run is {state_of(site, flow_run)} with {len(kept) // 2} shards")

    second = prefect(site, "worker", "start", "--pool", POOL)
    again = submit(site, deployed, config)
    wait_until(lambda: state_of(site, again) == "COMPLETED", 400, "the flow's end")
    second.process.send_signal(signal.SIGTERM)
    second.wait(60)
    site.assert_complete(store)
    assert {name: digest for name, digest in hashes(store).items() if name in kept} == kept
    records = [json.loads(record.read_bytes()) for record in committed(store)]
    assert len({record["written"]["by"] for record in records}) == 2
