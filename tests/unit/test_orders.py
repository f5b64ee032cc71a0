"""What is asked of a flow from outside, and the core's warnings on its page."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import Abort, Pause
from prefect.states import Cancelled, Cancelling, Crashed, Paused, Running

from flows import extract, logs, orders, progress
from flows.orders import Orders
from flows.progress import ProgressReport
from flows.run import StepLines
from tasks.config import ExtractConfig
from tasks.errors import WriterAliveError
from tasks.extraction.engine import Progress


@pytest.mark.parametrize("state", [Running(), Crashed(), None])
def test_a_run_goes_on_while_nobody_asks_otherwise(state: Any) -> None:
    """Crashed, too: it lives, whatever Prefect takes it for, and the attempt after it waits."""
    told = Orders()
    told._follow(state)
    assert told.order is None


def test_a_paused_run_ends_as_prefect_wants_it() -> None:
    told, state = Orders(), Paused(reschedule=True)
    told._follow(state)
    assert isinstance(told.order, Pause)
    assert told.order.state is state


def test_a_worker_has_its_turn_before_a_cancelled_run_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Orders()
    now = [100.0]
    monkeypatch.setattr(orders.time, "monotonic", lambda: now[0])
    told._follow(Cancelling())
    now[0] += orders.WORKERS_TURN - 1
    told._follow(Cancelling())
    assert told.order is None
    now[0] += 2
    told._follow(Cancelling())
    assert isinstance(told.order, Abort)


def test_a_run_that_is_cancelled_already_ends_at_once() -> None:
    told = Orders()
    told._follow(Cancelled())
    assert isinstance(told.order, Abort)


def test_an_order_ends_the_extraction(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "get_run_logger", lambda: logging.getLogger("test"))
    report = ProgressReport(4, 40)
    report.next_artifact = float("inf")
    report.orders.order = Abort("cancelled")
    with report, pytest.raises(Abort):
        report.show(Progress(rows=1, tokens=10))
    assert "cancelled" in caplog.text


def test_the_core_s_warnings_reach_the_run_s_log_from_any_thread_and_the_terminal_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[logging.LogRecord] = []
    run_log = logging.Logger("prefect.flow_runs")
    run_log.addHandler(StepLines())
    run_log.addFilter(lambda record: records.append(record) or True)  # type: ignore[func-returns-value]
    monkeypatch.setattr(logs, "get_run_logger", lambda: run_log)
    core = logging.getLogger("tasks.server.supervisor")
    with logs.warnings_on_the_page():
        thread = threading.Thread(target=core.warning, args=("the server at %s is lost", "http://x"))
        thread.start()
        thread.join()
        core.info("of no interest")
    core.warning("after the flow")
    assert [record.getMessage() for record in records] == ["the server at http://x is lost"]
    records[0].flow_run_name = "demo"  # as Prefect marks it
    StepLines().emit(records[0])
    assert capsys.readouterr().err == ""


def test_a_later_attempt_waits_for_the_writer_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    class Lock:
        def __enter__(self) -> None:
            tries.append(1)
            if len(tries) < 3:
                raise WriterAliveError("it is being written.")

        def __exit__(self, *exception: object) -> None: ...

    monkeypatch.setattr(extract, "writer_lock", lambda store: Lock())
    monkeypatch.setattr(extract, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(extract, "LOOK", 0.0)
    config = ExtractConfig.model_validate(
        {
            "name": "test",
            "dataset": {"path": "/data/x.jsonl", "max_seq_len": 8},
            "model": {"path": "/data/model"},
            "output": {"path": str(tmp_path)},
        }
    )
    extract._wait_for_writer(config)
    assert len(tries) == 3
    assert caplog.text.count("This attempt goes on when it has ended.") == 2
