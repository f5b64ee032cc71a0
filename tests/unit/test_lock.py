"""The writer's lock: one writer a store, whoever dies, wherever it runs."""

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.errors import LostLockError, OutputError
from tasks.processes import _state_and_start, identity
from tasks.store import lock as lock_module
from tasks.store.lock import WriterLock

HOST = socket.gethostname()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "lock.json"


def write_owner(path: Path, **owner: Any) -> None:
    """A lock file as another writer leaves it; a living one, unless said otherwise."""
    path.parent.mkdir(exist_ok=True)
    values = {"owner": "another", **identity(), "since": "2026-11-29T10:00:00+00:00", "beat": 7}
    path.write_text(json.dumps(values | owner))


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
        assert abs(datetime.fromisoformat(owner["since"]).timestamp() - time.time()) < 5
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


def test_a_living_owner_on_this_host_is_respected_though_its_heartbeat_stands_still(path: Path) -> None:
    write_owner(path)
    with pytest.raises(OutputError, match=f"process {os.getpid()}"):
        WriterLock(path).__enter__()


def test_the_lock_of_a_dead_process_is_taken_over(path: Path) -> None:
    write_owner(path, pid=ended_process())
    with WriterLock(path) as lock:
        lock.check()
        assert owner_of(path)["pid"] == os.getpid()
        assert sorted(path.parent.iterdir()) == [path, lock.workspace]


def test_a_process_number_that_was_given_anew_is_not_the_owner(path: Path) -> None:
    write_owner(path, started=identity()["started"] - 100)
    with WriterLock(path) as lock:
        lock.check()


def test_a_process_that_died_and_was_not_collected_is_not_the_owner(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        zombie = psutil.Process(process.pid)
        wait_for(lambda: zombie.status() == psutil.STATUS_ZOMBIE)
        write_owner(path, pid=process.pid, started=_state_and_start(process.pid)[1])
        with WriterLock(path) as lock:
            lock.check()
    finally:
        process.wait()


def test_a_clock_of_this_host_that_was_set_kills_no_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting the clock moves the kernel's boot time, and with it each process's start by the wall clock."""
    with WriterLock(path):
        boot = psutil.boot_time()
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + 5 * 3600)
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + 5 * 3600)
        with pytest.raises(OutputError, match="which is alive"):
            WriterLock(path).__enter__()


ELSEWHERE = pytest.mark.parametrize("elsewhere", [{"host": "elsewhere"}, {"world": "container"}], ids=str)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second without a sign of life is death."""
    monkeypatch.setattr(lock_module, "HEARTBEAT", 0.05)
    monkeypatch.setattr(lock_module, "STALE", 0.5)
    monkeypatch.setattr(lock_module, "LOOK", 0.01)


@ELSEWHERE
def test_an_owner_elsewhere_is_respected_as_soon_as_it_gives_a_sign_of_life(
    path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: dict[str, str]
) -> None:
    monkeypatch.setattr(lock_module, "STALE", 30.0)
    monkeypatch.setattr(lock_module, "LOOK", 0.01)
    write_owner(path, pid=ended_process(), **elsewhere)
    beat = threading.Timer(0.1, write_owner, [path], {"beat": 8, **elsewhere})
    beat.start()
    began = time.monotonic()
    with pytest.raises(OutputError, match=rf"by process \d+ on {elsewhere.get('host', HOST)} \(since 2026-11-29T10:00"):
        WriterLock(path).__enter__()
    assert time.monotonic() - began < 10
    assert owner_of(path)["owner"] == "another"


@ELSEWHERE
def test_an_owner_elsewhere_is_replaced_after_it_gave_no_sign_of_life(
    path: Path, short: None, elsewhere: dict[str, str]
) -> None:
    write_owner(path, **elsewhere)
    began = time.monotonic()
    with WriterLock(path) as lock:
        assert 0.5 <= time.monotonic() - began < 5
        lock.check()
        assert owner_of(path)["owner"] == lock.owner


def test_a_lock_that_ends_while_it_is_watched_is_free(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "LOOK", 0.01)
    write_owner(path, host="elsewhere")
    threading.Timer(0.1, path.unlink).start()
    with WriterLock(path) as lock:
        lock.check()


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_a_lock_that_says_nothing_is_taken_over_if_it_stays_so(path: Path, short: None, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    began = time.monotonic()
    with WriterLock(path) as lock:
        lock.check()
        assert time.monotonic() - began >= 0.5


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


def test_a_writer_whose_workspace_was_removed_is_told(path: Path) -> None:
    with WriterLock(path) as lock:
        lock.workspace.rmdir()
        with pytest.raises(LostLockError):
            lock.check()


def test_a_folder_that_cannot_be_written_is_named(path: Path) -> None:
    path.parent.write_text("a file")
    with pytest.raises(OutputError, match=r"store cannot be written: .* \(output\.path\)"):
        WriterLock(path).__enter__()


def test_the_heartbeat_is_renewed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT", 0.01)
    with WriterLock(path) as lock:
        first = owner_of(path)["beat"]
        wait_for(lambda: owner_of(path)["beat"] > first)
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
    text = first._text

    def text_while_the_second_starts(beat: int) -> str:
        if not seconds:
            seconds.append(holders(second.__enter__))
        return text(beat)

    monkeypatch.setattr(first, "_text", text_while_the_second_starts)
    assert holders(first.__enter__) + seconds[0] == 1


def test_of_two_writers_that_find_a_dead_owner_one_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_owner(path, pid=ended_process())
    first, second = WriterLock(path), WriterLock(path)
    seconds: list[int] = []
    is_dead = lock_module.is_dead

    def dead_and_the_second_was_faster(owner: dict[str, Any]) -> bool | None:
        monkeypatch.setattr(lock_module, "is_dead", is_dead)
        seconds.append(holders(second.__enter__))
        return True

    monkeypatch.setattr(lock_module, "is_dead", dead_and_the_second_was_faster)
    assert (holders(first.__enter__), seconds) == (0, [1])
    second.check()
    assert sorted(path.parent.iterdir()) == [path, second.workspace]


def test_a_dead_owner_whose_lock_another_writer_removed_meanwhile_is_no_crash(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(path, pid=ended_process())

    def dead_in_the_meantime(owner: dict[str, Any]) -> bool:
        path.unlink()
        return True

    monkeypatch.setattr(lock_module, "is_dead", dead_in_the_meantime)
    with WriterLock(path) as lock:
        lock.check()


def test_a_link_that_nfs_made_and_called_a_failure_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_and_say_no(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_and_say_no)
    with WriterLock(path) as lock:
        lock.check()


def test_who_takes_over_shuts_the_writer_before_out_of_every_rename(path: Path) -> None:
    """Even one that was paused after its last look at the lock, with a finished file to rename."""
    with WriterLock(path) as old:
        draft = old.workspace / "000000.json"
        draft.write_text("{}")
        write_owner(path, owner=old.owner, pid=ended_process())  # as if it had died
        with WriterLock(path) as new:
            with pytest.raises(FileNotFoundError):
                os.replace(draft, path.parent / "000000.json")
            with pytest.raises(LostLockError):
                old.check()
            new.check()
    assert list(path.parent.iterdir()) == []


def test_a_heartbeat_on_its_way_while_another_takes_over_leaves_no_two_writers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(path, pid=ended_process())
    dead_lock = path.read_bytes()
    new = WriterLock(path)
    create = new._create

    def create_and_the_old_heartbeat_comes() -> bool:
        created = create()
        if created:
            path.write_bytes(dead_lock)
        return created

    monkeypatch.setattr(new, "_create", create_and_the_old_heartbeat_comes)
    with pytest.raises(OutputError, match="was taken by another writer just now"):
        new.__enter__()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def far_writer(path: Path, host: str, clock: float, commands: Any, answers: Any) -> None:
    """A writer in a process of its own that is, by its name and clock, on another host; commits when told."""
    lock_module.identity = lambda: identity() | {"host": host}  # type: ignore[attr-defined]
    now = time.time
    time.time = lambda: now() + clock  # type: ignore[assignment]
    lock_module.HEARTBEAT = 0.05
    lock = WriterLock(path)
    lock.__enter__()
    answers.put("holds")
    for name in iter(commands.get, None):
        draft = lock.workspace / "draft"
        try:
            lock.check()
            draft.write_text("x")
            answers.put("checked")
            commands.get()  # the moment between the check and the rename
            os.replace(draft, path.parent / name)
            answers.put("committed")
        except (LostLockError, OSError) as error:
            answers.put(type(error).__name__)
    lock.__exit__()


@pytest.mark.parametrize("clock", [-5 * 3600.0, 0.0, 5 * 3600.0])
def test_a_writer_on_another_host_is_respected_alive_replaced_when_it_stops_and_shut_out_when_it_wakes(
    path: Path, short: None, clock: float
) -> None:
    context = multiprocessing.get_context("spawn")
    commands, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=far_writer, args=(path, "elsewhere", clock, commands, answers))
    process.start()
    try:
        assert answers.get() == "holds"
        with pytest.raises(OutputError, match=rf"by process {process.pid} on elsewhere .* which is alive"):
            WriterLock(path).__enter__()
        for order, answer in (("a", "checked"), ("go", "committed"), ("b", "checked")):
            commands.put(order)
            assert answers.get() == answer
        os.kill(process.pid or 0, signal.SIGSTOP)
        with WriterLock(path) as lock:
            os.kill(process.pid or 0, signal.SIGCONT)
            for order, answer in (("go", "FileNotFoundError"), ("c", "LostLockError")):
                commands.put(order)
                assert answers.get() == answer
            lock.check()
            assert (path.parent / "a").exists()
            assert not (path.parent / "b").exists()
            commands.put(None)
            process.join(10)
            lock.check()
    finally:
        process.kill()
        process.join()


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
