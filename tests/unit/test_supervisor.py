"""A server that is lost: had back, within limits; its rows tried again; the row it dies of set aside.

Fakes: a stand-in server that dies, hangs or comes back otherwise when a test says so.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.config import ExtractionConfig
from tasks.errors import RowError, ServerError
from tasks.extraction import lane as lane_module
from tasks.extraction.engine import PrefillEngine
from tasks.server.dumps import Dump
from tasks.server.launch import AttachedServer, Server
from tasks.server.supervisor import Restarts
from tests.unit.helpers import CAPTURED, FakeSGLang, Request, good, wait_for

IDS = np.array([5, 6, 7, 8, 9], dtype=np.int32)


class Mortal(FakeSGLang):
    """Dies when told to: every request is hung up until it is started again."""

    lives = 1
    dead = False

    def answer(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        answer = None if self.dead else super().answer(body)
        return None if self.dead else answer

    def die(self, request: Request) -> None:
        self.dead = True

    def revive(self) -> None:
        self.dead = False
        self.lives += 1


class Revivable(AttachedServer):
    """Whoever restarts it has it back at once."""

    def __init__(self, fake: Mortal):
        super().__init__(fake.url, fake.staging)
        self.fake = fake

    def restart(self) -> None:
        self.fake.revive()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Mortal]:
    with Mortal(tmp_path / "staging") as fake:
        fake.health = lambda: not fake.dead
        yield fake


def engine_on(
    fake: Mortal, most: int = 10, check: Callable[[Server], object] = lambda server: None, **limits: int
) -> PrefillEngine:
    settings = ExtractionConfig(attempts=1, **limits)
    return PrefillEngine([Revivable(fake)], CAPTURED, settings, 1 << 20, Restarts(most, 60, check))


def submit(engine: PrefillEngine, rows: range) -> dict[int, "Future[Dump]"]:
    return {row: engine.submit(row, IDS + row) for row in rows}


def release_all(engine: PrefillEngine, futures: dict[int, "Future[Dump]"]) -> None:
    for future in futures.values():
        engine.release(future.result(timeout=10))


def test_rows_in_flight_when_the_server_dies_are_done_when_it_is_back(fake: Mortal) -> None:
    fake.answers = {5: [fake.die]}
    with engine_on(fake, requests_in_flight=4) as engine:
        release_all(engine, submit(engine, range(20)))
        wait_for(lambda: engine.progress.restarts == 1)
    assert fake.lives == 2
    assert fake.tries(5) == 2


def test_a_row_that_the_server_dies_of_is_tried_alone_and_set_aside(fake: Mortal) -> None:
    now, beside = 0, []
    lock = threading.Lock()

    def counted(request: Request) -> tuple[int, Any] | None:
        nonlocal now
        with lock:
            now += 1
        time.sleep(0.01)
        with lock:
            now -= 1
        return good(request)

    def deadly(request: Request) -> None:
        beside.append(now)
        fake.die(request)

    fake.answers = {row: [counted] * 9 for row in range(20)} | {7: [deadly] * 9}
    with engine_on(fake, requests_in_flight=8) as engine:
        futures = submit(engine, range(20))
        with pytest.raises(RowError, match="the server was lost 2 times while this row was there, and once more with"):
            futures.pop(7).result(timeout=10)
        release_all(engine, futures)
    assert fake.tries(7) == 3
    assert beside[2] == 0
    assert fake.lives == 4


def test_restarts_are_limited(fake: Mortal) -> None:
    fake.answers = {row: [fake.die] * 9 for row in range(10)}
    with engine_on(fake, most=2, requests_in_flight=1) as engine:
        futures = submit(engine, range(3))
        with pytest.raises(
            ServerError, match=r"restarted 2 times within 60 s and is lost again \(server\.max_restarts"
        ):
            futures[0].result(timeout=10)
    assert fake.lives == 3


def test_a_server_that_hangs_is_found_by_its_silence_and_restarted(
    fake: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "SILENCE", 0.3)
    monkeypatch.setattr(lane_module, "LOOK", 0.05)
    hanging = threading.Event()

    def hang(request: Request) -> None:
        fake.health = lambda: not hanging.wait(1) and False
        hanging.wait(20)

    def revive() -> None:
        hanging.set()
        fake.health = lambda: True
        Mortal.revive(fake)

    monkeypatch.setattr(fake, "revive", revive)
    fake.answers = {3: [hang]}
    with engine_on(fake, requests_in_flight=1) as engine:
        release_all(engine, submit(engine, range(6)))
    assert fake.lives == 2


def test_a_slow_server_that_still_answers_is_left_alone(fake: Mortal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "SILENCE", 0.1)
    monkeypatch.setattr(lane_module, "LOOK", 0.02)

    def slow(request: Request) -> tuple[int, Any]:
        time.sleep(0.5)
        return good(request)

    fake.answers = {0: [slow]}
    with engine_on(fake) as engine:
        release_all(engine, submit(engine, range(1)))
    assert fake.lives == 1
    assert fake.tries(0) == 1


def test_a_server_that_comes_back_otherwise_ends_the_run(fake: Mortal) -> None:
    def check(server: Server) -> None:
        raise ServerError("The server runs with layers = [1]; the config asks for [2].")

    fake.answers = {0: [fake.die]}
    with engine_on(fake, check=check) as engine:
        with pytest.raises(ServerError, match="the config asks for"):
            submit(engine, range(1))[0].result(timeout=10)


def test_a_server_that_does_not_come_back_is_tried_again_within_the_limit(
    fake: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail_twice() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ServerError("The server did not answer within 1 s.")
        Mortal.revive(fake)

    monkeypatch.setattr(fake, "revive", fail_twice)
    fake.answers = {0: [fake.die]}
    with engine_on(fake, most=3) as engine:
        release_all(engine, submit(engine, range(4)))
    assert len(tries) == 3


def test_an_attached_server_is_waited_for(fake: Mortal) -> None:
    server = AttachedServer(fake.url, fake.staging, patience=5)
    assert server.ailment(1) is None
    fake.dead = True
    assert "does not answer a prefill" in str(server.ailment(1))
    fake.server.shutdown()
    fake.server.server_close()
    with pytest.raises(ServerError, match="did not come back within 0 s"):
        AttachedServer(fake.url, fake.staging, patience=0).restart()
