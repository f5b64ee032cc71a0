"""The progress that people see never holds up the extraction."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flows import progress
from flows.progress import ProgressReport
from tasks.extraction.batch import BatchResult
from tasks.extraction.engine import Progress
from tasks.extraction.trouble import Trouble, troubles_of
from tasks.steps import Session
from tasks.store.record import FailedRow
from tests.unit.helpers import wait_for


def test_a_prefect_api_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client tries for a minute where nobody listens; this one waits until the test lets it go."""
    gate, calls = threading.Event(), []

    def create(percent: float, key: str, description: str) -> str:
        calls.append(percent)
        gate.wait(30)
        return "artifact"

    monkeypatch.setattr(progress, "create_progress_artifact", create)
    monkeypatch.setattr(progress, "update_progress_artifact", lambda artifact, percent, text: calls.append(percent))
    monkeypatch.setattr(progress, "ARTIFACT_EVERY", 0.0)
    monkeypatch.setattr(progress, "LAST_UPDATE", 0.2)
    began = time.monotonic()
    with ProgressReport(4, 40) as report:
        for rows in range(5):
            report.show(Progress(rows=rows, tokens=10 * rows))
    assert time.monotonic() - began < 3
    assert calls == [0.0]  # one at a time
    gate.set()
    wait_for(lambda: not report.update.is_alive())
    report.show(Progress(rows=4, tokens=40))
    wait_for(lambda: calls == [0.0, 100.0])


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page would show; no API."""
    shown: dict[str, Any] = {}

    def show(key: str, value: Any) -> str:
        shown[key] = value
        return key

    monkeypatch.setattr(
        progress, "create_progress_artifact", lambda percent, key, description: show(key, (percent, description))
    )
    monkeypatch.setattr(
        progress, "update_progress_artifact", lambda artifact, percent, text: show(artifact, (percent, text))
    )
    monkeypatch.setattr(
        progress, "create_table_artifact", lambda table, key, description: show(key, (description, table))
    )
    return shown


def test_an_operator_sees_rates_room_and_troubles(page: dict[str, Any], tmp_path: Path) -> None:
    troubles = [Trouble(3, "1 row(s) failed; the next run leaves them", "7", "too long")]
    with ProgressReport(4, 40, [("output", tmp_path)], troubles) as report:
        report.show(Progress(rows=4, tokens=40, bytes=1 << 20, retries=2, restarts=1))
    percent, text = page["extraction"]
    assert percent == 100
    for figure in ("4 of 4 rows", "tokens/s", "B/s", "0.0 s left", "2 retries", "1 restarts", "free in the output"):
        assert figure in text
    about, lines = page["trouble"]
    assert about == "Batches with trouble in this run"
    assert lines == [{"batch": "000003", "what": troubles[0].what, "rows": "7", "reason": "too long"}]


def test_a_long_table_of_troubles_says_what_it_leaves_out(page: dict[str, Any]) -> None:
    troubles = [Trouble(batch, "stopped the run", "", "full") for batch in range(progress.SHOWN + 5)]
    with ProgressReport(4, 40, [], troubles) as report:
        report.show(Progress(rows=4, tokens=40))
    about, lines = page["trouble"]
    assert about == "Batches with trouble in this run; 5 more are in the log"
    assert len(lines) == progress.SHOWN


@pytest.mark.parametrize(
    ("rate", "text"), [(1.5e9, "1.50 GB/s"), (1e7, "0.01 GB/s"), (250_000, "0.25 MB/s"), (0, "0.00 MB/s")]
)
def test_bytes_a_second_are_readable_at_any_speed(rate: float, text: str) -> None:
    assert progress._bytes_rate(rate) == text


def test_failures_of_one_reason_are_one_trouble() -> None:
    failed = [FailedRow(row, "too long", may_heal=False) for row in range(12)] + [
        FailedRow(40, "timeout", may_heal=True)
    ]
    first, second = troubles_of(BatchResult(5, rows=3, tokens=30, bytes=300, failed=failed))
    assert (first.batch, first.rows) == (5, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more")
    assert first.what == "12 row(s) failed; the next run leaves them"
    assert (second.rows, second.what) == ("40", "1 row(s) failed; the next run tries them again")


def test_what_stops_one_batch_stops_all_and_is_said_once() -> None:
    session: Any = Session.__new__(Session)
    session.troubles = []
    for batch in range(3):
        session.add_trouble(Trouble(batch, "stopped the run", "", "the disk is full"))
        session.add_trouble(Trouble(batch, "1 row(s) failed", str(batch), "timeout"))
    assert [(one.batch, one.reason) for one in session.troubles] == [
        (0, "the disk is full"),
        (0, "timeout"),
        (1, "timeout"),
        (2, "timeout"),
    ]
