"""Twenty faults, chosen and timed by chance (seeded), on one extraction with its own server, until it is complete."""

import contextlib
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tasks.preflight import SPARE
from tasks.store.layout import Store
from tests.faults.drill import (
    Ballast,
    Run,
    Service,
    Site,
    committed,
    mlflow_service,
    prefect_service,
    small_disk,
    wait_until,
)
from tests.integration.serving import CPU_ARGUMENTS

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(2400)]

SEED, FAULTS = 12, 20
AWAY = 3.0  # seconds that what comes back by itself is away
START = 300.0  # seconds in which a run must have done something: it may start a server, or wait for one
MOST_RUNS = 25


@dataclass
class Scene:
    """One extraction, all that it stands on, and what was done to it."""

    site: Site
    config: Path
    store: Store
    prefect: Service
    mlflow: Service
    ballast: Ballast
    staging: Path
    choose: random.Random
    runs: list[Run] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def run(self) -> Run:
        return self.runs[-1]

    def tell(self, what: str) -> None:
        line = f"{time.monotonic() - self.began:6.1f} s, {len(committed(self.store)):3d} records: {what}"
        self.told.append(line)
        print(line, flush=True)

    def start(self) -> None:
        """Start the same command; what a shard lost since the last look is found by --deep."""
        assert len(self.runs) < MOST_RUNS
        self.runs.append(self.site.flows("extract", self.config, "--deep", PREFECT_API_URL=f"{self.prefect.url}/api"))

    def has_ended(self) -> bool:
        """Whether the run has; one that failed must have said why, in a named error."""
        code = self.run.process.poll()
        if code is None:
            return False
        self.tell(f"the run ended with exit code {code}")
        assert code in (0, 1), self.run.err
        if code:
            reason = self.run.err.rpartition("\n\n")[2]  # the command line sets the error apart
            assert "Error: " in reason, self.run.err
            self.tell(reason.strip()[:300])
        self.run.assert_no_orphans()
        return True

    def schedulers(self) -> list[psutil.Process]:
        """The server's processes that hold the model."""
        found = []
        for file in self.staging.glob("server-*/ready.*.json"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(file.name.split(".")[1])))
        return found


def kill_flow(scene: Scene) -> None:
    scene.run.kill()
    scene.run.assert_no_orphans()


def interrupt_flow(scene: Scene) -> None:
    """As Ctrl-C does."""
    scene.run.process.send_signal(signal.SIGINT)
    assert scene.run.wait(60) == 130
    scene.run.assert_no_orphans()


def kill_server(scene: Scene) -> None:
    for process in scene.schedulers():
        process.kill()


def stop_server_for_a_while(scene: Scene) -> None:
    stopped = scene.schedulers()
    for process in stopped:
        process.suspend()
    time.sleep(AWAY)
    for process in stopped:
        process.resume()


def restart_prefect(scene: Scene) -> None:
    scene.prefect.kill()
    time.sleep(AWAY)
    scene.prefect.start()


def fill_output_for_a_while(scene: Scene) -> None:
    scene.ballast.fill()
    time.sleep(AWAY)
    scene.ballast.free()


def spoil_shard(scene: Scene) -> None:
    shard = scene.choose.choice(committed(scene.store)).with_suffix(".safetensors")
    with shard.open("r+b") as file:
        at = scene.choose.randrange(shard.stat().st_size)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << scene.choose.randrange(8))]))


def cut_record(scene: Scene) -> None:
    record = scene.choose.choice(committed(scene.store))
    record.write_bytes(record.read_bytes()[: scene.choose.randrange(record.stat().st_size)])


def lose_records(scene: Scene) -> None:
    records = committed(scene.store)
    for record in scene.choose.sample(records, len(records) // 3):
        record.unlink()


def kill_mlflow(scene: Scene) -> None:
    scene.mlflow.kill()
    scene.mlflow.start()


WHILE_IT_RUNS = [
    *(kill_flow, kill_flow, interrupt_flow, kill_server, kill_server, stop_server_for_a_while, restart_prefect),
    *(fill_output_for_a_while, spoil_shard, cut_record, kill_mlflow),
]
WHEN_IT_IS_COMPLETE = [spoil_shard, cut_record, lose_records]


@pytest.fixture
def scene(site: Site, tmp_path: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "disk", SPARE + (128 << 20)))
        staging = stack.enter_context(small_disk(tmp_path / "staging", 192 << 20))
        prefect, mlflow = prefect_service(tmp_path / "prefect"), mlflow_service(tmp_path / "mlflow")
        for service in (prefect, mlflow):
            stack.callback(service.stop)
            service.start()
        store = Store(disk / "output")
        config = site.write_config(
            store.root,
            server={"mode": "managed", "device": "cpu", "chunked_prefill_size": 256, "arguments": CPU_ARGUMENTS},
            staging={"path": str(staging)},
            extraction={"requests_in_flight": 1},
            lineage={"tracking_uri": mlflow.url},
        )
        yield Scene(site, config, store, prefect, mlflow, Ballast(disk), staging, random.Random(SEED))


def test_twenty_random_faults_end_in_the_same_data(site: Site, scene: Scene) -> None:
    scene.start()
    done = 0
    while done < FAULTS:
        before = {record: record.stat().st_mtime_ns for record in committed(scene.store)}

        def has_moved(before: dict[Path, int] = before) -> bool:
            now = {record: record.stat().st_mtime_ns for record in committed(scene.store)}
            return scene.run.process.poll() is not None or any(now[record] != before.get(record) for record in now)

        wait_until(has_moved, START, "a sign of life")
        if scene.has_ended():
            if scene.store.manifest.exists():
                fault = scene.choose.choice(WHEN_IT_IS_COMPLETE)
                fault(scene)
                done += 1
                scene.tell(f"fault {done}: {fault.__name__}")
            scene.start()
            continue
        time.sleep(scene.choose.random() * 0.5)
        fault = scene.choose.choice(WHILE_IT_RUNS)
        done += 1
        scene.tell(f"fault {done}: {fault.__name__}")
        fault(scene)
        if fault in (kill_flow, interrupt_flow):
            scene.start()
    while scene.run.wait(600) != 0:
        assert scene.has_ended()
        scene.start()
    scene.tell(f"complete after {len(scene.runs)} runs")
    scene.run.assert_no_orphans()
    site.assert_complete(scene.store)
    assert list(scene.staging.glob("server-*")) == []
