"""What an operator counts on: a disturbed extraction ends complete without a hand, and stops when it is told to.

A real Prefect server with our deployments and automations, and real workers. The SGLang server is attached to.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.store.layout import Store
from tests.faults.drill import Run, Service, Site, hashes, prefect_service, wait_until
from tests.faults.operated import Operated, wait_for_commits, writers

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = prefect_service(tmp_path_factory.mktemp("operated") / "prefect")
    service.start()
    yield service
    service.stop()


@pytest.fixture
def operated(site: Site, service: Service) -> Operated:
    """Deployed anew each time, which must change nothing."""
    operated = Operated(service, site.environment(), site.folder)
    operated.deploy()
    return operated


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "output")


@pytest.fixture
def config(site: Site, store: Store) -> Path:
    assert isinstance(store.root, Path)
    return site.write_config(store.root)


def names(runs: list[dict[str, Any]]) -> list[str]:
    """The ends of the runs' names: which attempt each is."""
    return [name if (name := run["name"].rpartition("-attempt-")[2]).isdigit() else "1" for run in runs]


def states(runs: list[dict[str, Any]]) -> list[str]:
    return [run["state_type"] for run in runs]


def begin(operated: Operated, config: Path, store: Store, **parameters: Any) -> tuple[Run, str]:
    """A worker and a run that has committed two shards."""
    worker = operated.worker()
    flow_run = operated.submit("extract", config, **parameters)
    wait_for_commits(worker, store, 2)
    assert not store.manifest.exists(), "the flow ended too early for this drill"
    return worker, flow_run


def end(worker: Run) -> None:
    worker.process.send_signal(signal.SIGTERM)
    worker.wait(60)
    worker.assert_no_orphans()


def test_a_flow_that_is_killed_is_started_again(site: Site, operated: Operated, config: Path, store: Store) -> None:
    worker, flow_run = begin(operated, config, store)
    kept = hashes(store)
    os.kill(writers(store)[0], signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: any(run["start_time"] for run in operated.attempts(flow_run)[1:]), 120, "the second attempt")
    print(f"started again {time.monotonic() - killed:.1f} s after the kill")
    runs = operated.wait_for_completion(flow_run)
    print(f"complete {time.monotonic() - killed:.1f} s after the kill")
    assert (states(runs), names(runs)) == (["CRASHED", "COMPLETED"], ["1", "2"])
    assert len(writers(store)) == 2
    assert {name: digest for name, digest in hashes(store).items() if name in kept} == kept
    site.assert_complete(store)
    end(worker)


def test_a_worker_that_is_killed_costs_nothing(site: Site, operated: Operated, config: Path, store: Store) -> None:
    worker, flow_run = begin(operated, config, store)
    worker.kill()
    runs = operated.wait_for_completion(flow_run)
    assert states(runs) == ["COMPLETED"]
    assert len(writers(store)) == 1
    site.assert_complete(store)
    worker.assert_no_orphans()


def test_a_worker_that_is_told_to_end_costs_two_minutes(
    site: Site, operated: Operated, config: Path, store: Store
) -> None:
    worker, flow_run = begin(operated, config, store)
    end(worker)
    ended = time.monotonic()
    assert operated.state(flow_run) == "RUNNING"  # for ever, if nothing looked for heartbeats
    second = operated.worker()
    runs = operated.wait_for_completion(flow_run)
    print(f"complete {time.monotonic() - ended:.1f} s after the worker's end")
    assert (states(runs), names(runs)) == (["CRASHED", "COMPLETED"], ["1", "2"])
    site.assert_complete(store)
    end(second)


def test_an_api_that_is_restarted_costs_nothing(
    site: Site, operated: Operated, service: Service, config: Path, store: Store
) -> None:
    worker, flow_run = begin(operated, config, store)
    service.kill()
    time.sleep(15)
    service.start()
    runs = operated.wait_for_completion(flow_run)
    assert states(runs) == ["COMPLETED"]
    assert len(writers(store)) == 1
    site.assert_complete(store)
    end(worker)


def test_a_run_that_only_seems_to_have_crashed_has_no_second_writer_beside_it(
    site: Site, operated: Operated, config: Path, store: Store
) -> None:
    worker, flow_run = begin(operated, config, store)
    operated.set_state(flow_run, "CRASHED")
    runs = operated.wait_for_completion(flow_run)
    print(states(runs), names(runs))
    assert names(runs) == ["1", "2"]
    assert runs[1]["state_type"] == "COMPLETED"
    assert "This attempt goes on when it has ended." in operated.logs(runs[1]["id"])
    assert len(writers(store)) == 1
    site.assert_complete(store)
    end(worker)


def test_a_cancelled_run_ends_in_seconds_and_is_not_started_again(
    site: Site, operated: Operated, config: Path, store: Store
) -> None:
    worker, flow_run = begin(operated, config, store)
    (flow,) = writers(store)
    operated.set_state(flow_run, "CANCELLING")
    asked = time.monotonic()
    wait_until(lambda: not Path(f"/proc/{flow}").exists(), 30, "the flow's end")
    gone = time.monotonic() - asked
    wait_until(lambda: operated.state(flow_run) == "CANCELLED", 30, "the state")
    print(f"the flow was gone after {gone:.1f} s, the state said so after {time.monotonic() - asked:.1f} s")
    assert not store.manifest.exists()
    assert list(store.root.glob("lock.json*")) == []
    kept = hashes(store)
    time.sleep(5)
    assert states(operated.attempts(flow_run)) == ["CANCELLED"]
    again = operated.submit("extract", config)
    wait_until(lambda: operated.state(again) == "COMPLETED", 400, "the second run's end")
    assert {name: digest for name, digest in hashes(store).items() if name in kept} == kept
    site.assert_complete(store)
    end(worker)


def test_a_run_is_cancelled_without_its_worker(operated: Operated, config: Path, store: Store) -> None:
    worker, flow_run = begin(operated, config, store)
    worker.kill()
    operated.set_state(flow_run, "CANCELLING")
    asked = time.monotonic()
    wait_until(lambda: operated.state(flow_run) == "CANCELLED", 60, "the state")
    print(f"cancelled after {time.monotonic() - asked:.1f} s")
    worker.assert_no_orphans()
    assert not store.manifest.exists()


def test_a_paused_run_ends_and_goes_on_when_it_is_resumed(
    site: Site, operated: Operated, config: Path, store: Store
) -> None:
    worker, flow_run = begin(operated, config, store)
    (flow,) = writers(store)
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    operated.set_state(flow_run, "PAUSED", "Suspended", pause_timeout=later, pause_reschedule=True)
    asked = time.monotonic()
    wait_until(lambda: not Path(f"/proc/{flow}").exists(), 60, "the flow's end")
    print(f"the flow was gone after {time.monotonic() - asked:.1f} s")
    assert operated.state(flow_run) == "PAUSED"
    assert not store.manifest.exists()
    operated.post(f"flow_runs/{flow_run}/resume", {})
    wait_until(lambda: operated.state(flow_run) == "COMPLETED", 400, "the flow's end")
    assert states(operated.attempts(flow_run)) == ["COMPLETED"]
    assert len(writers(store)) == 2
    site.assert_complete(store)
    end(worker)
