"""Several servers behind one engine: work goes to whoever is free, and one that is lost costs no row.

Fakes: stand-in servers, of which one dies when a test says so.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.config import ExtractionConfig
from tasks.errors import ExtractionError, ServerError
from tasks.extraction import lane as lane_module
from tasks.extraction.engine import PrefillEngine
from tasks.server.launch import AttachedServer
from tests.unit.helpers import CAPTURED, Answer, FakeSGLang, Request, good, status, wait_for

IDS = np.array([5, 6, 7, 8, 9], dtype=np.int32)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[FakeSGLang]]:
    with FakeSGLang(tmp_path / "0") as first, FakeSGLang(tmp_path / "1") as second:
        yield [first, second]


def engine_on(fakes: list[FakeSGLang], most_failed: int = 1000, **limits: int) -> PrefillEngine:
    servers = [AttachedServer(fake.url, fake.staging) for fake in fakes]
    settings = ExtractionConfig(attempts=1, **limits)
    return PrefillEngine(servers, CAPTURED, settings, 1 << 20, most_failed=most_failed)


def extract(engine: PrefillEngine, rows: int) -> None:
    """All rows, every dump looked at."""
    futures = {row: engine.submit(row, IDS + row) for row in range(rows)}
    for future in futures.values():
        engine.release(future.result(timeout=20))


def test_both_servers_work(two: list[FakeSGLang]) -> None:
    with engine_on(two, requests_in_flight=2) as engine:
        extract(engine, 40)
        shares = engine.usage()
    assert len(two[0].rids) + len(two[1].rids) == 40
    assert min(len(fake.rids) for fake in two) >= 10
    assert shares["full"] + shares["starved"] + shares["blocked"] + shares["lost"] == pytest.approx(1)
    assert shares["requests"] <= 4


def test_a_slow_server_gets_less(two: list[FakeSGLang]) -> None:
    release = threading.Event()

    def hold(request: Request) -> tuple[int, Any]:
        release.wait(10)
        return good(request)

    answers: dict[int, list[Answer]] = {row: [hold] for row in range(60)}
    two[0].answers = answers
    with engine_on(two, requests_in_flight=2) as engine:
        futures = [engine.submit(row, IDS + row) for row in range(60)]
        wait_for(lambda: len(two[1].rids) == 58)
        assert len(two[0].rids) == 2
        release.set()
        for future in futures:
            engine.release(future.result(timeout=20))


def test_the_others_go_on_when_a_server_is_gone_for_good(
    two: list[FakeSGLang], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lane_module, "LOOK", 0.02)
    two[0].health = lambda: False
    two[0].answers = {row: [lambda request: None] for row in range(30)}
    with engine_on(two, requests_in_flight=2) as engine:
        extract(engine, 30)
        assert engine.progress.restarts == 1
        wait_for(lambda: "going on without the server at" in caplog.text)
    assert len(two[1].rids) == 30


def test_the_run_ends_when_all_are_gone(two: list[FakeSGLang], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "LOOK", 0.02)
    for fake in two:
        fake.health = lambda: False
        fake.answers = {row: [lambda request: None] for row in range(30)}
    with engine_on(two, requests_in_flight=2) as engine:
        futures = [engine.submit(row, IDS + row) for row in range(30)]
        for future in futures:
            with pytest.raises(ServerError, match="does not answer a prefill"):
                future.result(timeout=20)


def test_too_many_failed_rows_end_the_run_early(two: list[FakeSGLang]) -> None:
    answers: dict[int, list[Answer]] = {row: [status(400)] for row in range(0, 40, 4)}
    for fake in two:
        fake.answers = answers
    with engine_on(two, most_failed=3, requests_in_flight=1) as engine:
        futures = [engine.submit(row, IDS + row) for row in range(40)]
        errors = [future.exception(timeout=20) for future in futures]
        for future, error in zip(futures, errors):
            if error is None:
                engine.release(future.result())
    stops = [error for error in errors if isinstance(error, ExtractionError)]
    assert stops
    assert "4 rows failed, which is more than extraction.stop_failed_share allows" in str(stops[0])
