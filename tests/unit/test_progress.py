"""The progress that people see never holds up the extraction."""

import threading
import time

import pytest

from flows import progress
from flows.progress import ProgressReport
from tasks.extraction.engine import Progress
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
