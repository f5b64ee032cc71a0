"""The writer's lock: one writer a store, whoever dies, wherever it runs."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.errors import LostLockError, OutputError
from tasks.processes import identity
from tasks.store import lock as lock_module
from tasks.store.lock import STALE, WriterLock

HOST = socket.gethostname()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "lock.json"


def write_owner(path: Path, **owner: Any) -> None:
    """A lock file as another writer leaves it; a living one, unless said otherwise."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"owner": "another", "heartbeat": time.time(), **identity()} | owner))


def owner_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def ended_process() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.002)


def test_a_lock_names_its_owner_and_is_gone_after_use(path: Path) -> None:
    with WriterLock(path) as lock:
        lock.check()
        owner = owner_of(path)
        assert (owner["owner"], owner["host"], owner["pid"]) == (lock.owner, HOST, os.getpid())
        assert owner["started"] == psutil.Process().create_time()
        assert abs(owner["heartbeat"] - time.time()) < 5
    assert list(path.parent.iterdir()) == []


def test_a_lock_is_gone_after_an_error(path: Path) -> None:
    def fail() -> None:
        with WriterLock(path):
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        fail()
    assert list(path.parent.iterdir()) == []


def test_a_second_writer_is_refused_naming_the_first(path: Path) -> None:
    with WriterLock(path) as first:
        with pytest.raises(OutputError, match=f"is being written by process {os.getpid()} on {HOST}"):
            WriterLock(path).__enter__()
        first.check()
    with WriterLock(path) as third:
        third.check()


def test_a_living_owner_on_this_host_is_respected_however_old_its_heartbeat(path: Path) -> None:
    write_owner(path, heartbeat=0)
    with pytest.raises(OutputError, match=f"process {os.getpid()}"):
        WriterLock(path).__enter__()


def test_the_lock_of_a_dead_process_is_taken_over(path: Path) -> None:
    write_owner(path, pid=ended_process())
    with WriterLock(path) as lock:
        lock.check()
        assert owner_of(path)["pid"] == os.getpid()
        assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_process_number_that_was_given_anew_is_not_the_owner(path: Path) -> None:
    write_owner(path, started=psutil.Process().create_time() - 3600)
    with WriterLock(path) as lock:
        lock.check()


def test_a_process_that_died_and_was_not_collected_is_not_the_owner(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        zombie = psutil.Process(process.pid)
        wait_for(lambda: zombie.status() == psutil.STATUS_ZOMBIE)
        write_owner(path, pid=process.pid, started=zombie.create_time())
        with WriterLock(path) as lock:
            lock.check()
    finally:
        process.wait()


ELSEWHERE = pytest.mark.parametrize("elsewhere", [{"host": "elsewhere"}, {"world": "container"}], ids=str)


@ELSEWHERE
def test_an_owner_elsewhere_with_a_fresh_heartbeat_is_respected(path: Path, elsewhere: dict[str, str]) -> None:
    write_owner(path, pid=ended_process(), heartbeat=time.time() - STALE / 2, **elsewhere)
    host = elsewhere.get("host", HOST)
    with pytest.raises(OutputError, match=rf"by process \d+ on {host} \(last sign of life 60 s ago\)"):
        WriterLock(path).__enter__()
    assert owner_of(path)["owner"] == "another"


@ELSEWHERE
def test_an_owner_elsewhere_with_a_stale_heartbeat_is_replaced(path: Path, elsewhere: dict[str, str]) -> None:
    write_owner(path, heartbeat=time.time() - STALE - 1, **elsewhere)
    with WriterLock(path) as lock:
        lock.check()
        assert owner_of(path)["owner"] == lock.owner


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_a_lock_that_says_nothing_is_taken_over(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    os.utime(path, (0, 0))
    with WriterLock(path) as lock:
        lock.check()


def test_a_writer_that_lost_its_lock_is_told_and_leaves_the_new_owner_alone(path: Path) -> None:
    with WriterLock(path) as lock:
        write_owner(path, owner="the next one")
        with pytest.raises(LostLockError, match="was taken over by another writer; this run commits nothing more"):
            lock.check()
    assert owner_of(path)["owner"] == "the next one"


def test_a_writer_whose_lock_file_was_deleted_is_told(path: Path) -> None:
    with WriterLock(path) as lock:
        path.unlink()
        with pytest.raises(LostLockError):
            lock.check()


def test_a_folder_that_cannot_be_written_is_named(path: Path) -> None:
    path.parent.write_text("a file")
    with pytest.raises(OutputError, match=r"store cannot be written: .* \(output\.path\)"):
        WriterLock(path).__enter__()


def test_the_heartbeat_is_renewed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT", 0.01)
    with WriterLock(path) as lock:
        first = owner_of(path)["heartbeat"]
        wait_for(lambda: owner_of(path)["heartbeat"] > first)
        lock.check()
    assert list(path.parent.iterdir()) == []


def test_the_heartbeat_never_overwrites_another_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT", 0.05)
    with WriterLock(path) as lock:
        write_owner(path, owner="the next one")
        wait_for(lambda: not lock._thread.is_alive())
        assert owner_of(path)["owner"] == "the next one"


def holders(*attempts: Callable[[], object]) -> int:
    """How many of these attempts to take a lock believe that they have it."""
    count = 0
    for attempt in attempts:
        try:
            attempt()
            count += 1
        except OutputError:
            pass
    return count


def test_of_two_writers_that_start_together_one_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = WriterLock(path), WriterLock(path)
    seconds: list[int] = []
    content = first._content

    def content_while_the_second_starts() -> dict[str, Any]:
        if not seconds:
            seconds.append(holders(second.__enter__))
        return content()

    monkeypatch.setattr(first, "_content", content_while_the_second_starts)
    assert holders(first.__enter__) + seconds[0] == 1


def test_of_two_writers_that_find_a_dead_owner_one_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_owner(path, pid=ended_process())
    first, second = WriterLock(path), WriterLock(path)
    seconds: list[int] = []
    gone = lock_module._gone

    def gone_and_the_second_was_faster(owner: dict[str, Any]) -> bool:
        monkeypatch.setattr(lock_module, "_gone", gone)
        seconds.append(holders(second.__enter__))
        return gone(owner)

    monkeypatch.setattr(lock_module, "_gone", gone_and_the_second_was_faster)
    assert (holders(first.__enter__), seconds) == (0, [1])
    second.check()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_dead_owner_whose_lock_another_writer_removed_meanwhile_is_no_crash(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(path, pid=ended_process())
    gone = lock_module._gone

    def gone_in_the_meantime(owner: dict[str, Any]) -> bool:
        path.unlink()
        return gone(owner)

    monkeypatch.setattr(lock_module, "_gone", gone_in_the_meantime)
    first = holders(WriterLock(path).__enter__)  # it may take the lock, or be told to try again
    assert first == 1 or holders(WriterLock(path).__enter__) == 1


def race(path: Path, barrier: Any, outcomes: Any, rounds: int) -> None:
    """Try to take the lock at the same moment as another process, in each round; for a process of its own."""
    for number in range(rounds):
        lock = WriterLock(path.with_name(f"{number}.json"))
        barrier.wait()
        try:
            lock.__enter__()
            outcome = "holds"
        except OutputError:
            outcome = "refused"
        except Exception as error:
            outcome = repr(error)
        barrier.wait()
        if outcome == "holds":
            try:
                lock.check()
            except OutputError:
                outcome = "believed"
        barrier.wait()
        outcomes.put((number, outcome))


def race_of_two(path: Path, rounds: int) -> list[list[str]]:
    """The outcomes of two processes, by round."""
    context = multiprocessing.get_context("spawn")
    barrier, outcomes = context.Barrier(2, timeout=30), context.SimpleQueue()
    processes = [context.Process(target=race, args=(path, barrier, outcomes, rounds)) for _ in range(2)]
    for process in processes:
        process.start()
    by_round: list[list[str]] = [[] for _ in range(rounds)]
    for _ in range(2 * rounds):
        number, outcome = outcomes.get()
        by_round[number].append(outcome)
    for process in processes:
        process.join(10)
        assert process.exitcode == 0
    return [sorted(outcome) for outcome in by_round]


def test_of_two_processes_that_race_for_a_dead_lock_one_wins(path: Path) -> None:
    rounds, dead = 30, ended_process()
    for number in range(rounds):
        write_owner(path.with_name(f"{number}.json"), pid=dead)
    assert race_of_two(path, rounds) == [["holds", "refused"]] * rounds


def test_of_two_processes_that_race_for_a_new_store_one_wins(path: Path) -> None:
    assert race_of_two(path, 30) == [["holds", "refused"]] * 30
