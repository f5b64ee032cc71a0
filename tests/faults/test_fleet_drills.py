"""Two nodes of one fleet: a worker process each, on a queue of its own, with an SGLang server of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mlflow.tracking import MlflowClient

from tasks.store.layout import Store, batch_of
from tasks.store.record import read_records
from tasks.store.runs import read_runs
from tests.faults.drill import ROWS, Site, committed, hashes, wait_until
from tests.integration.nodes import Nodes, end, lose, nodes, wait_for
from tests.integration.serving import Serving, serving

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path) as site:
        yield site


@pytest.fixture(scope="module")
def second(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server beside the site's, as on another machine."""
    folder = tmp_path_factory.mktemp("second")
    with serving(site.running.preflight.config, folder / "server.log") as running:
        yield running


def settings_of(running: Serving) -> dict[str, Any]:
    """Of a node that attaches to this server."""
    server = running.server
    return {"server": {"url": server.url}, "staging": {"path": str(server.staging)}}


def written_by(store: Store) -> dict[str, list[int]]:
    """Rows by the process that wrote them."""
    found: dict[str, list[int]] = {}
    for record in read_records(store):
        found.setdefault(record.written["by"], []).extend(row.row for row in record.rows)
    return found


def assert_verified_and_recorded_once(fleet: Nodes, store: Store) -> None:
    (whole,) = fleet.runs_of("whole")
    assert whole["state_type"] == "COMPLETED"
    task_runs = httpx.post(f"{fleet.api}/task_runs/filter", json={}, timeout=30).json()
    by_step = {step: [run["flow_run_id"] for run in task_runs if run["name"] == step] for step in ("verify", "record")}
    assert by_step == {"verify": [whole["id"]], "record": [whole["id"]]}
    client = MlflowClient(f"sqlite:///{fleet.folder / 'home' / 'mlflow.db'}")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (run.info.status, run.data.metrics["rows_done"]) == ("FINISHED", ROWS)


def test_two_nodes_extract_every_row_once_and_the_whole_is_verified_and_recorded_once(
    site: Site, second: Serving, fleet: Nodes, tmp_path: Path
) -> None:
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    members = [{"queue": "node-a"}, {"queue": "node-b", "settings": settings_of(second)}]
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"nodes": members}))
    workers = [fleet.worker(queue) for queue in ("node-a", "node-b")]
    run = fleet.fleet(config, "--fleet", tmp_path / "fleet.yaml")
    assert run.wait() == 0, run.out + run.err
    assert f"{ROWS} done, 0 truncated, 0 skipped, 0 failed" in run.out
    assert "2 partitions on 2 nodes" in run.out
    site.assert_complete(store)
    assert_verified_and_recorded_once(fleet, store)
    rows = sorted(map(sorted, written_by(store).values()))
    assert len(rows) == 2
    assert [row for part in rows for row in part] == list(range(ROWS))  # each a stretch of its own
    for number in (0, 1):
        (one,) = fleet.runs_of(f"partition-{number:04d}")
        assert (one["state_type"], one["work_queue_name"]) == ("COMPLETED", f"node-{'ab'[number]}")
    (figures,) = [one for one in read_runs(store) if "fleet" in one]
    assert (figures["rows"], figures["fleet"]["lost"], len(figures["fleet"]["runs"])) == (ROWS, 0, 2)
    for worker in workers:
        end(worker)
        worker.assert_no_orphans()


def test_a_node_that_is_lost_half_way_is_made_up_for_by_the_other(site: Site, fleet: Nodes, tmp_path: Path) -> None:
    """The lost one had started its server itself. The fleet is a deployment, too, as an operator runs it."""
    config, store = site.write_config(tmp_path / "output"), Store(tmp_path / "output")
    managed = {"server": {"mode": "managed", "url": None}, "staging": {"path": str(site.running.server.staging.parent)}}
    parameters = {
        "config": yaml.safe_load(config.read_text()),
        "fleet": {"nodes": [{"queue": "node-b", "settings": managed}, {"queue": "node-a"}], "wait_for_worker": 5},
    }
    leader, healthy, lost = (fleet.worker(queue) for queue in ("cpu", "node-a", "node-b"))
    flow_run = fleet.submit(parameters)

    def of_lost() -> int:
        return sum(batch_of(path) < half for path in committed(store))

    wait_for(leader, lambda: (store.logs / "fleet.json").exists(), 120, "the split")
    partitions = json.loads((store.logs / "fleet.json").read_text())["partitions"]
    half = partitions[0]["end"]
    wait_for(lost, lambda: of_lost() >= 2, 300, "two batches of the node that is to be lost")
    lose(lost)
    kept = hashes(store)
    assert of_lost() < half, "the partition was finished before the node was lost"
    assert not store.manifest.exists()

    wait_until(lambda: fleet.state_of(flow_run) not in ("SCHEDULED", "PENDING", "RUNNING"), 600, "the fleet's end")
    assert fleet.state_of(flow_run) == "COMPLETED", leader.out + leader.err
    site.assert_complete(store)
    assert_verified_and_recorded_once(fleet, store)
    assert {name: digest for name, digest in hashes(store).items() if name in kept} == kept
    assert [run["work_queue_name"] for run in fleet.runs_of("partition-0000")] == ["node-b", "node-a"]
    assert len(fleet.runs_of("partition-0001")) == 1
    assert len(written_by(store)) == 3
    (figures,) = [one for one in read_runs(store) if "fleet" in one]
    assert (figures["rows"], figures["fleet"]["lost"]) == (ROWS, 1)
    lost.assert_no_orphans(0)
    for worker in (leader, healthy):
        end(worker)
        worker.assert_no_orphans()
