"""A fleet whose leader, scheduler or nodes go wrong: it ends well or says that it did not, and never in between.

Real: Prefect's server and workers, `python -m flows fleet` and the deployment `extract-fleet`, the flows' processes,
the locks, S3. Stood in for: the SGLang servers (tests/benchmarks/pretend_server.py), which take a while a prompt.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tasks.config import S3Config
from tasks.storage import as_location
from tasks.storage.bucket import Credentials
from tasks.store.layout import Store, batch_of
from tasks.store.manifest import read_manifest
from tasks.store.record import read_records, record_paths
from tests.benchmarks.orchestration import LONGEST, write_dataset
from tests.benchmarks.pretend_server import HIDDEN, LAYERS, serving, write_checkpoint
from tests.faults.drill import Run, wait_until
from tests.integration.nodes import Nodes, lose, nodes, wait_for
from tests.integration.seaweed import KEY, SECRET, Seaweed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS, BATCHES = 400, 40
IN_FLIGHT, MANY, WAIT = 2, 16, 0.25  # prompts at a server at a time, or where nobody waits; seconds that each takes
QUEUES = ("node-a", "node-b")


@dataclass
class Scene:
    """Two nodes with a stand-in server each."""

    folder: Path
    nodes: Nodes
    config: dict[str, Any]
    members: list[dict[str, Any]]
    workers: dict[str, Run]

    def write(
        self, name: str, output: str | None = None, in_flight: int = IN_FLIGHT, **fleet: Any
    ) -> tuple[Path, Path, Store]:
        """Config, fleet and store of a new extraction. in_flight: prompts at a server at a time."""
        place = output or str(self.folder / name)
        config, members = self.folder / f"{name}.yaml", self.folder / f"{name}-fleet.yaml"
        sections = {
            "output": self.config["output"] | {"path": place},
            "extraction": {"requests_in_flight": in_flight},
        }
        config.write_text(yaml.safe_dump(self.config | sections))
        members.write_text(yaml.safe_dump({"nodes": self.members, "wait_for_worker": 5, **fleet}))
        return config, members, Store(Path(place))

    def start(self, config: Path, members: Path) -> Run:
        return self.nodes.fleet(config, "--fleet", members)

    def runs_of(self, store: Store, key: str) -> list[dict[str, Any]]:
        """The runs of one work of this store's fleets."""
        wanted = str(store.root)
        return [run for run in self.nodes.runs_of(key) if run["parameters"]["config"]["output"]["path"] == wanted]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("fleet")
    tokens = write_dataset(folder / "dataset.jsonl", ROWS)
    write_checkpoint(folder / "model")
    shard_bytes = tokens * ((len(LAYERS) + 1) * HIDDEN * 4 + 5) // BATCHES
    with contextlib.ExitStack() as stack:
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drillcore-test-", dir="/dev/shm")))
        members = []
        for queue in QUEUES:
            command = ("tests.benchmarks.pretend_server", str(folder / "model"), str(memory / queue), str(WAIT))
            url, _ = stack.enter_context(serving(*command))
            members.append(
                {"queue": queue, "settings": {"server": {"url": url}, "staging": {"path": str(memory / queue)}}}
            )
        config = {
            "name": "fleet",
            "dataset": {"path": str(folder / "dataset.jsonl"), "max_seq_len": LONGEST},
            "model": {"path": str(folder / "model")},
            "capture": {"layers": LAYERS},
            "server": {"mode": "attached", "dtype": "float32", **members[0]["settings"]["server"]},
            "staging": members[0]["settings"]["staging"],
            "output": {"shard_bytes": shard_bytes},
        }
        site = stack.enter_context(nodes(folder))
        workers = {queue: site.worker(queue) for queue in (*QUEUES, "cpu")}
        yield Scene(folder, site, config, members, workers)


def commits(store: Store) -> int:
    return len(record_paths(store)) if store.shards.exists() else 0


def assert_complete(store: Store) -> None:
    """Every row once, verified; nobody holds a lock."""
    records = read_records(store)
    assert sorted(row.row for record in records for row in record.rows) == list(range(ROWS))
    assert read_manifest(store)["rows_by_state"] == {"done": ROWS, "truncated": 0, "skipped": 0, "failed": 0}
    held = [path for path in store.root.glob("lock*.json") if json.loads(path.read_bytes()).get("released") is not True]
    assert held == []


def test_a_fleet_whose_leader_is_killed_is_started_again_and_finds_its_runs(scene: Scene) -> None:
    config, members, store = scene.write("leader")
    first = scene.start(config, members)
    wait_for(first, lambda: commits(store) >= 2, 120, "two batches")
    first.kill()
    split = json.loads((store.logs / "fleet.json").read_text())
    again = scene.start(config, members)
    assert again.wait() == 0, again.out + again.err
    assert "runs of an earlier fleet are extracting" in again.err
    assert json.loads((store.logs / "fleet.json").read_text()) == split
    assert_complete(store)
    for number in (0, 1):
        assert len(scene.runs_of(store, f"partition-{number:04d}")) == 1


def test_the_prefect_server_is_killed_and_comes_back(scene: Scene) -> None:
    config, members, store = scene.write("scheduler")
    run = scene.start(config, members)
    wait_for(run, lambda: commits(store) >= 2, 120, "two batches")
    scene.nodes.service.kill()
    there = commits(store)
    wait_for(run, lambda: commits(store) > there + 2, 60, "batches without a Prefect server")
    scene.nodes.service.start()
    assert run.wait() == 0, run.out + run.err
    assert_complete(store)
    for number in (0, 1):
        assert len(scene.runs_of(store, f"partition-{number:04d}")) == 1


def test_a_node_that_cannot_work_is_made_up_for_by_the_other(scene: Scene) -> None:
    broken = {"queue": "node-b", "settings": {"server": {"url": "http://127.0.0.1:9"}}}
    config, members, store = scene.write("broken", in_flight=MANY, nodes=[scene.members[0], broken])
    run = scene.start(config, members)
    assert run.wait() == 0, run.out + run.err
    assert "partition-0001 on node-b: failed: " in run.err
    assert "1 runs were lost or failed and made up for" in run.out
    assert_complete(store)
    assert [one["work_queue_name"] for one in scene.runs_of(store, "partition-0001")] == ["node-b", "node-a"]


def test_a_partition_that_fails_everywhere_fails_the_fleet_and_the_rest_stays(scene: Scene) -> None:
    broken = {"queue": "node-b", "settings": {"server": {"url": "http://127.0.0.1:9"}}}
    config, members, store = scene.write("failed", in_flight=MANY, nodes=[scene.members[0], broken], attempts=1)
    run = scene.start(config, members)
    assert run.wait() == 1, run.out + run.err
    assert "FleetError: 1 of 2 could not be finished" in run.err
    assert "The server at http://127.0.0.1:9 does not tell its settings" in run.err
    assert not store.manifest.exists()
    assert scene.runs_of(store, "whole") == []
    split = json.loads((store.logs / "fleet.json").read_text())["partitions"]
    there = {batch_of(path) for path in record_paths(store)}
    assert there == set(range(split[0]["first"], split[0]["end"]))
    config, members, store = scene.write("failed", in_flight=MANY)
    again = scene.start(config, members)
    assert again.wait() == 0, again.out + again.err
    assert_complete(store)


def test_a_worker_that_is_killed_takes_no_partition_with_it(scene: Scene) -> None:
    """Its flow goes on; the fleet's next work for that node waits for its next worker, or goes elsewhere."""
    config, members, store = scene.write("worker", partitions=3)
    run = scene.start(config, members)
    wait_for(run, lambda: commits(store) >= 2, 120, "two batches")
    scene.workers["node-b"].kill()
    assert run.wait() == 0, run.out + run.err
    scene.workers["node-b"] = scene.nodes.worker("node-b")
    assert_complete(store)
    assert len(scene.runs_of(store, "partition-0001")) == 1


def test_a_node_that_is_lost_half_way_is_made_up_for_by_the_other(scene: Scene) -> None:
    config, members, store = scene.write("lost")
    run = scene.start(config, members)
    wait_for(run, lambda: (store.logs / "fleet.json").exists(), 120, "the split")
    _, second = json.loads((store.logs / "fleet.json").read_text())["partitions"]

    def of(partition: dict[str, int]) -> int:
        return sum(batch_of(path) >= partition["first"] for path in record_paths(store))

    wait_for(run, lambda: of(second) >= 2, 200, "two batches of the node that is to be lost")
    lose(scene.workers["node-b"])
    there = of(second)
    assert run.wait() == 0, run.out + run.err
    scene.workers["node-b"] = scene.nodes.worker("node-b")
    assert there < second["end"] - second["first"], "the partition was finished before the node was lost"
    assert_complete(store)
    assert [one["work_queue_name"] for one in scene.runs_of(store, "partition-0001")] == ["node-b", "node-a"]
    (whole,) = scene.runs_of(store, "whole")
    assert whole["work_queue_name"] == "node-a"
    assert "1 runs were lost or failed and made up for" in run.out


def test_a_cancelled_fleet_ends_its_runs_within_seconds_and_resumes(scene: Scene) -> None:
    config, members, store = scene.write("cancelled")
    parameters = {name: yaml.safe_load(path.read_text()) for name, path in (("config", config), ("fleet", members))}
    flow_run = scene.nodes.submit(parameters)
    leader = scene.workers["cpu"]
    wait_for(leader, lambda: commits(store) >= 2, 120, "two batches")
    writers = [psutil.Process(json.loads(path.read_text())["pid"]) for path in store.root.glob("lock-*.json")]
    assert len(writers) == 2
    state = {"state": {"type": "CANCELLING"}}
    httpx.post(f"{scene.nodes.api}/flow_runs/{flow_run}/set_state", json=state, timeout=30).raise_for_status()
    _, alive = psutil.wait_procs(writers, timeout=45)
    assert alive == []
    wait_until(lambda: scene.nodes.state_of(flow_run) == "CANCELLED", 60, "the fleet's end")
    assert not store.manifest.exists()
    kept = {path.name for path in record_paths(store)}
    again = scene.start(config, members)
    assert again.wait() == 0, again.out + again.err
    assert_complete(store)
    assert kept <= {path.name for path in record_paths(store)}


def test_two_nodes_extract_into_a_bucket(scene: Scene, s3: Seaweed) -> None:
    place = s3.place()
    config, members, _ = scene.write("bucket", place, in_flight=MANY)
    values = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(values | {"s3": {"endpoint_url": s3.url}}))
    run = scene.start(config, members)
    assert run.wait() == 0, run.out + run.err
    store = Store(as_location(place, S3Config(endpoint_url=s3.url), lambda: Credentials(KEY, SECRET)))
    assert_complete(store)
    writers = {record.written["by"] for record in read_records(store)}
    assert len(writers) == 2
    assert list((scene.folder / "home").glob("**/*.work")) == []
