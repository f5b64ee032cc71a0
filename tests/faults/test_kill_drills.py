"""SIGKILL of the flow at any moment of its life; a writer of the store that is gone for good."""

import json
import random
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tasks.dataset.plan import load_plan
from tasks.store import lock
from tasks.store.layout import Store
from tests.faults.drill import Run, Site, committed, hashes, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(2400)]

SEED = 31
STEPS_LATE = {"start": 8.0, "batches": 0.3, "verify": 0.6, "record": 0.6}  # seconds that a kill may come after its cue


def cue(step: str, run: Run, store: Store, before: int) -> bool:
    """Whether `step` has begun, or the run has ended. before: commit records when it started."""
    if run.process.poll() is not None:
        return True
    if step == "start":
        return True
    if step == "batches":
        return len(committed(store)) > before
    if step == "verify":
        return store.plan.exists() and len(committed(store)) == load_plan(store.plan).batches
    return store.manifest.exists()


@pytest.mark.parametrize(
    "steps",
    [
        ["batches", "verify"],
        pytest.param([*["start"] * 3, *["batches"] * 4, "verify", "verify", "record"], marks=pytest.mark.slow),
    ],
    ids=["twice", "ten times"],
)
def test_a_flow_that_is_killed_again_and_again_ends_complete(site: Site, tmp_path: Path, steps: list[str]) -> None:
    config, store, home = site.write_config(tmp_path / "output"), Store(tmp_path / "output"), tmp_path / "home"
    choose = random.Random(SEED)
    kept: dict[str, str] = {}
    for step in steps:
        # A run that starts has most to leave behind: its own Prefect server, too.
        api = None if step == "start" else site.api
        before = len(committed(store))
        run = site.flows("extract", config, DRILLCORE_HOME=str(home), PREFECT_API_URL=api)
        wait_until(lambda step=step, run=run, before=before: cue(step, run, store, before), 180, f"the step {step}")
        time.sleep(choose.random() * STEPS_LATE[step])
        ended = run.process.poll()
        run.kill()
        run.assert_no_orphans()
        print(f"{step}: ended by {ended or 'SIGKILL'} after {run.seconds:.1f} s with {len(committed(store))} records")
        assert ended in (None, 0), run.err
        now = hashes(store)
        assert {name: now.get(name) for name in kept} == kept
        kept = now
    last = site.flows("extract", config, DRILLCORE_HOME=str(home))
    assert last.wait() == 0, last.err
    last.assert_no_orphans()
    now = hashes(store)
    assert {name: now.get(name) for name in kept} == kept
    site.assert_complete(store)
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("drillcore")
    assert experiment is not None
    (recorded,) = client.search_runs([experiment.experiment_id])
    assert recorded.info.status == "FINISHED"


@pytest.mark.slow
def test_a_lock_of_a_writer_on_a_dead_host_is_taken_over(site: Site, tmp_path: Path) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    first = site.flows("extract", config)
    wait_until(lambda: len(committed(store)) >= 2, 300, "two commit records")
    first.kill()
    kept = hashes(store)
    left = json.loads(store.lock.read_bytes())
    store.lock.write_text(json.dumps(left | {"host": "a-host-that-burned-down"}))
    second = site.flows("extract", config)
    assert second.wait() == 0, second.err
    assert second.seconds > lock.STALE
    assert "which cannot be looked up from here: watching it for 120 s" in second.err
    site.assert_complete(store)
    assert {name: digest for name, digest in hashes(store).items() if name in kept} == kept
