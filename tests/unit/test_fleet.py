"""What a fleet does about runs that fail, get lost or stand still: by a scheduler and a clock of the test's own."""

import json
import logging
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import nodes
from tasks.config import ExtractConfig, parse_config
from tasks.errors import ConfigError, FleetError
from tasks.fleet.conduct import Conductor, Run, Work
from tasks.fleet.settings import FleetConfig, load_fleet, node_configs
from tasks.fleet.signs import LockState, Phase, Pulse, RunState, Sight, judge
from tasks.processes import identity
from tasks.server.ports import free_port
from tasks.store.lock import STALE

PATIENCE = FleetConfig(nodes=[{"queue": "a"}, {"queue": "b"}], wait_for_worker=60, silence=900, stuck_after=7200)


def verdict(
    phase: Phase,
    lock: LockState = "absent",
    quiet: float = 0,
    still: float = 0,
    finished: bool = False,
    elsewhere: bool = False,
    message: str = "",
) -> tuple[str, str]:
    judged = judge(Sight(RunState(phase, message), lock, quiet, still, finished, elsewhere), PATIENCE)
    return judged.action, judged.reason


def test_a_run_that_ended_is_done_only_if_the_store_says_so() -> None:
    assert verdict("completed", finished=True) == ("done", "")
    assert verdict("completed") == ("retry", "it ended, but by the store it is not done")
    assert verdict("crashed", finished=True)[0] == "done"


@pytest.mark.parametrize("phase", ["failed", "crashed", "cancelled"])
def test_a_run_that_ended_badly_is_started_again(phase: Phase) -> None:
    assert verdict(phase, message="out of memory") == ("retry", f"{phase}: out of memory")
    assert verdict(phase, lock="dead")[0] == "retry"


@pytest.mark.parametrize("phase", ["crashed", "failed", "cancelled", "cancelling"])
def test_a_run_that_is_called_dead_but_renews_its_lock_is_let_go_on(phase: Phase) -> None:
    assert verdict(phase, lock="alive", quiet=10, still=100_000)[0] == "wait"


def test_a_run_that_is_called_alive_but_whose_lock_is_dead_is_started_again() -> None:
    assert verdict("running", lock="dead") == ("retry", "its process died, or its node was lost")


def test_a_run_without_a_lock_yet_is_given_time_and_then_started_again() -> None:
    assert verdict("running", quiet=899)[0] == "wait"
    assert verdict("running", quiet=900) == ("retry", "no sign of life for 900 s")
    assert verdict("pending", quiet=899)[0] == "wait"
    assert verdict("pending", quiet=900)[0] == "retry"


def test_a_run_that_lives_and_achieves_nothing_is_ended_first() -> None:
    assert verdict("running", lock="alive", still=7199)[0] == "wait"
    assert verdict("running", lock="alive", still=7200) == ("cancel", "it committed nothing for 7200 s")


def test_a_run_that_no_worker_takes_moves_only_where_another_node_is_free() -> None:
    assert verdict("scheduled", quiet=100_000)[0] == "wait"
    assert verdict("scheduled", quiet=59, elsewhere=True)[0] == "wait"
    assert verdict("scheduled", quiet=60, elsewhere=True) == ("move", "no worker took it for 60 s")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def write_lock(path: Path, beat: int = 0, **owner: object) -> None:
    content = {"owner": "one", **identity(), "since": "then", "beat": beat, **owner}
    path.write_text(json.dumps(content))


RUNNING = RunState("running")


def test_a_lock_elsewhere_is_alive_as_long_as_it_changes(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "lock.json"
    pulse = Pulse(path, clock)
    assert pulse.look(RUNNING, 0)[0] == "absent"
    for beat in range(5):
        write_lock(path, beat, host="elsewhere")
        clock.now += STALE - 1
        assert pulse.look(RUNNING, 0)[0] == "alive"
    clock.now += STALE
    assert pulse.look(RUNNING, 0)[0] == "alive"
    clock.now += 1
    assert pulse.look(RUNNING, 0)[0] == "dead"


def test_a_lock_on_this_host_is_looked_up_by_its_process(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "lock.json"
    pulse = Pulse(path, clock)
    write_lock(path)
    clock.now += 10 * STALE
    assert pulse.look(RUNNING, 0)[0] == "alive"
    clock.now += 10 * STALE
    assert pulse.look(RUNNING, 0)[0] == "alive"
    write_lock(path, started=1)
    assert pulse.look(RUNNING, 0)[0] == "dead"


def test_what_a_dead_run_left_says_nothing_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    write_lock(path, started=1)
    pulse = Pulse(path, Clock(), left=path.read_bytes())
    assert pulse.look(RUNNING, 0)[0] == "absent"
    write_lock(path, beat=1, host="elsewhere")  # it was paused only, and wakes up
    assert pulse.look(RUNNING, 0)[0] == "alive"


def test_a_released_lock_in_a_bucket_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({"released": True, "owner": "one"}))
    assert Pulse(path, Clock()).look(RUNNING, 0)[0] == "absent"


def test_a_beat_is_a_sign_of_life_and_a_commit_is_progress(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "lock.json"
    pulse = Pulse(path, clock)
    write_lock(path)
    assert pulse.look(RUNNING, 0)[1:] == (0, 0)
    clock.now += 50
    assert pulse.look(RUNNING, 0)[1:] == (50, 50)
    write_lock(path, beat=1)
    assert pulse.look(RUNNING, 0)[1:] == (0, 50)
    clock.now += 7
    assert pulse.look(RUNNING, 0)[1:] == (7, 57)
    assert pulse.look(RUNNING, 1)[1:] == (0, 0)


@dataclass
class Scheduler:
    """Runs that are only states; the test sets them."""

    queues: list[str]
    started: list[tuple[str, str, int]] = field(default_factory=list)
    """Work, queue and attempt, in the order in which they were asked for."""
    states: dict[str, RunState] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    polled: set[str] = field(default_factory=set)
    away: bool = False

    def start(self, work: Work, node: int, attempt: int) -> Run | None:
        if self.away:
            return None
        self.started.append((work.key, self.queues[node], attempt))
        name = f"{work.key} {attempt}"
        self.states[name] = RunState("scheduled")
        return Run(name, self.queues[node])

    def state(self, run: Run) -> RunState | None:
        return None if self.away else self.states[run.id]

    def ready(self, node: int) -> bool:
        return self.queues[node] in self.polled

    def cancel(self, run: Run) -> None:
        self.cancelled.append(run.id)


class Fleet:
    """A conductor over the nodes a, b, ... and works w0, w1, ..."""

    def __init__(self, folder: Path, nodes: int, works: int, **settings: float):
        queues = [chr(ord("a") + node) for node in range(nodes)]
        self.folder, self.clock, self.runs = folder, Clock(), Scheduler(queues, polled=set(queues))
        self.finished: set[str] = set()
        self.hopeless: str | None = None
        fleet = FleetConfig.model_validate({"nodes": [{"queue": queue} for queue in queues], **settings})
        works_ = [self.work(f"w{number}", number) for number in range(works)]
        self.conductor = Conductor(works_, fleet, self.runs, logging.getLogger("test"), self.clock)
        self.step()

    def work(self, key: str, number: int) -> Work:
        lock = self.folder / f"{key}.json"
        return Work(key, number, lock, lambda phase: key in self.finished, hopeless=lambda: self.hopeless)

    def step(self, seconds: float = 5) -> list[tuple[str, str, int]]:
        """What was started."""
        before = len(self.runs.started)
        self.clock.now += seconds
        self.conductor.step()
        return self.runs.started[before:]

    def end(self, run: str, phase: Phase = "completed", message: str = "") -> list[tuple[str, str, int]]:
        if phase == "completed":
            self.finished.add(run.split()[0])
        self.runs.states[run] = RunState(phase, message)
        return self.step()


def test_each_node_has_one_run_and_gets_the_next_when_it_is_free(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=3)
    assert fleet.runs.started == [("w0", "a", 0), ("w1", "b", 0)]
    assert fleet.step() == []
    assert fleet.end("w1 0") == [("w2", "b", 0)]
    fleet.end("w0 0")
    fleet.end("w2 0")
    assert not fleet.conductor.busy
    fleet.conductor.raise_failures()
    assert fleet.conductor.retries == 0


def test_the_work_of_a_lost_node_goes_to_another_as_soon_as_one_is_free(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=2)
    fleet.runs.states |= {"w0 0": RUNNING, "w1 0": RUNNING}
    write_lock(tmp_path / "w0.json", started=1)
    assert fleet.step() == []  # a is away, b is busy
    assert fleet.runs.cancelled == ["w0 0"]
    assert fleet.end("w1 0") == [("w0", "b", 1)]
    fleet.runs.states["w0 1"] = RUNNING
    assert fleet.step(300) == []  # the dead run's lock is still there
    (tmp_path / "w0.json").unlink()
    fleet.end("w0 1")
    assert not fleet.conductor.busy
    fleet.conductor.raise_failures()
    assert fleet.conductor.retries == 1


def test_a_lost_node_that_is_back_gets_work_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=2)
    fleet.runs.states["w1 0"] = RUNNING
    assert fleet.end("w0 0", "crashed") == []
    assert fleet.step(100) == [("w0", "a", 1)]


def test_the_only_node_is_asked_again_at_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=1, works=1)
    assert fleet.end("w0 0", "crashed") == [("w0", "a", 1)]


def test_what_failed_on_one_node_waits_for_another(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=2)
    fleet.runs.states["w1 0"] = RUNNING
    assert fleet.end("w0 0", "failed", "no GPU") == []
    assert fleet.step(800) == []
    assert fleet.end("w1 0") == [("w0", "b", 1)]
    assert fleet.end("w0 1", "failed", "no GPU") == [("w0", "a", 2)]  # it failed everywhere


def test_after_so_many_attempts_the_fleet_fails_when_the_others_have_ended(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=2, attempts=1)
    fleet.end("w0 0", "failed", "no GPU")
    assert fleet.conductor.busy
    fleet.end("w1 0")
    assert not fleet.conductor.busy
    with pytest.raises(
        FleetError, match=r"(?s)1 of 2 could not be finished.*w0: failed: no GPU \(on a\).*start the fleet"
    ):
        fleet.conductor.raise_failures()


def test_what_would_fail_everywhere_is_not_tried_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=1)
    fleet.hopeless = "row 7 is damaged"
    assert fleet.end("w0 0", "failed", "VerificationError") == []
    with pytest.raises(FleetError, match="row 7 is damaged"):
        fleet.conductor.raise_failures()


def test_a_run_that_ends_well_without_having_done_its_work_is_no_success(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=1, works=1, attempts=2)
    fleet.runs.states["w0 0"] = RunState("completed")
    assert fleet.step() == [("w0", "a", 1)]
    fleet.runs.states["w0 1"] = RunState("completed")
    fleet.step()
    with pytest.raises(FleetError, match="by the store it is not done"):
        fleet.conductor.raise_failures()


def test_a_run_that_nobody_takes_moves_to_a_node_with_a_worker_and_is_no_attempt(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=1, attempts=1)
    fleet.runs.polled.clear()
    fleet.step()
    assert fleet.step(1000) == []  # nobody is there at all
    fleet.runs.polled.add("b")
    assert fleet.step() == [("w0", "b", 1)]
    assert fleet.runs.cancelled == ["w0 0"]
    fleet.end("w0 1")
    fleet.conductor.raise_failures()
    assert fleet.conductor.retries == 0


def test_work_goes_first_to_a_node_whose_worker_is_there(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=1)
    fleet.end("w0 0")
    fleet.runs.polled.remove("a")
    fleet.conductor.add(fleet.work("w1", 1))
    assert fleet.step() == [("w1", "b", 0)]
    fleet.end("w1 0")
    fleet.runs.polled.clear()
    fleet.conductor.add(fleet.work("w2", 2))
    assert fleet.step() == [("w2", "a", 0)]


def test_a_stuck_run_is_cancelled_once_and_replaced_when_it_has_let_go(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=1)
    fleet.runs.states["w0 0"] = RUNNING
    write_lock(tmp_path / "w0.json")
    fleet.step()
    assert fleet.step(7200) == []
    assert fleet.step() == []
    assert fleet.runs.cancelled == ["w0 0"]
    fleet.runs.states["w0 0"] = RunState("cancelling")
    assert fleet.step() == []
    (tmp_path / "w0.json").unlink()
    assert fleet.end("w0 0", "cancelled") == [("w0", "b", 1)]


def test_a_zombie_is_waited_for_and_what_it_finishes_counts(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=2, works=1)
    write_lock(tmp_path / "w0.json")
    assert fleet.end("w0 0", "crashed") == []
    assert fleet.step(100) == []
    fleet.finished.add("w0")
    (tmp_path / "w0.json").unlink()
    assert fleet.step() == []
    assert not fleet.conductor.busy
    fleet.conductor.raise_failures()


def test_while_the_scheduler_is_away_nothing_is_judged_and_nothing_started(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=1, works=2)
    fleet.runs.states["w0 0"] = RUNNING
    write_lock(tmp_path / "w0.json", started=1)
    fleet.runs.away = True
    assert fleet.step(10_000) == []
    fleet.runs.away = False
    assert fleet.step() == [("w1", "a", 0)]


def test_a_store_that_cannot_be_read_is_put_up_with_for_a_while(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, nodes=1, works=1)
    (tmp_path / "w0.json").mkdir()
    assert fleet.step() == []
    assert fleet.step(899) == []
    with pytest.raises(IsADirectoryError):
        fleet.step(1)
    (tmp_path / "w0.json").rmdir()
    fleet.end("w0 0")
    assert not fleet.conductor.busy


def test_runs_of_an_earlier_fleet_keep_their_node(tmp_path: Path) -> None:
    """A run of the name is there already, on a queue that this fleet has not: its node is nobody's."""
    fleet = Fleet(tmp_path, nodes=1, works=0)
    fleet.runs.queues = ["elsewhere"]
    conductor = Conductor(
        [fleet.work("w0", 0), fleet.work("w1", 1)], fleet.conductor.fleet, fleet.runs, logging.getLogger("test")
    )
    conductor.step()
    assert [(job.work.key, job.run.queue, job.node) for job in conductor.jobs] == [
        ("w0", "elsewhere", None),
        ("w1", "elsewhere", None),
    ]


def test_while_the_prefect_api_is_away_nothing_is_known_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes.PrefectRuns, "__init__", lambda self: None)
    runs = nodes.PrefectRuns()  # type: ignore[call-arg]
    runs.settings, runs.pool, runs.logger, runs._away = PATIENCE, "pool", logging.getLogger("test"), False
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        assert runs.state(Run(str(uuid.uuid4()), "a")) is None
        assert runs.ready(0) is False
    assert [record.message.partition(":")[0] for record in caplog.records if record.name == "test"] == [
        "the Prefect API does not answer"
    ]


@pytest.fixture
def config(tmp_path: Path) -> ExtractConfig:
    values = {
        "name": "test",
        "dataset": {"path": "/data.jsonl", "max_seq_len": 8},
        "model": {"path": "/model"},
        "output": {"path": "/output"},
    }
    return parse_config(values, "test")


def test_a_node_s_settings_change_the_config_that_it_gets(config: ExtractConfig) -> None:
    nodes = [{"queue": "a"}, {"queue": "b", "settings": {"server": {"count": 2}, "staging": {"path": "/ram"}}}]
    first, second = node_configs(config, FleetConfig.model_validate({"nodes": nodes}))
    assert first == config
    assert (second.server.count, second.staging.path, second.output) == (2, Path("/ram"), config.output)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [{"queue": "a", "settings": {"server": {"cuont": 2}}}],
            r"of the node a.*server\.cuont: unknown field.*'count'",
        ),
        ([{"queue": "a", "settings": {"servers": {"count": 2}}}], "node a sets 'servers', which is no section"),
        ([{"queue": "a"}, {"queue": "a"}], "Two nodes have the same queue"),
    ],
)
def test_a_wrong_node_is_named(config: ExtractConfig, nodes: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        node_configs(config, FleetConfig.model_validate({"nodes": nodes}))


def test_a_fleet_is_read_from_a_file_or_from_queues(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"nodes": [{"queue": "a"}], "attempts": 5}))
    fleet = load_fleet(path, ["b"], partitions=7)
    assert ([node.queue for node in fleet.nodes], fleet.attempts, fleet.count) == (["a", "b"], 5, 7)
    assert load_fleet(None, ["a", "b"], None).count == 2
    with pytest.raises(ConfigError, match=r"nodes: List should have at least 1 item"):
        load_fleet(None, [], None)
    path.write_text(yaml.safe_dump({"nodes": [{"queue": "a"}], "atempts": 5}))
    with pytest.raises(ConfigError, match="atempts"):
        load_fleet(path, [], None)
