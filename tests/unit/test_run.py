"""The command line around a flow: what it prints, what a lost Prefect API changes, where a late record goes."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import Pause
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import run
from flows.__main__ import main
from flows.services import prefect_api
from tasks.config import LineageConfig
from tasks.errors import SetupError, StoppedError, WriteError
from tasks.lineage import record
from tasks.server.ports import free_port
from tasks.store.layout import Store, create_store

# As Prefect 3.9 logs it: prefect/task_engine.py, handle_retry.
RETRY = "Task run failed with %s: %r - Retry %s/%s will start %s"
FULL = WriteError("/data/out cannot be written: No space left on device (/data/out/x). Make room.")


def printed(capsys: pytest.CaptureFixture[str], level: int, text: str, *arguments: Any, step: str | None) -> str:
    line = logging.LogRecord("prefect.task_runs", level, __file__, 1, text, arguments, None)
    line.task_run_name = step
    run.StepLines().emit(line)
    return capsys.readouterr().err


def test_a_batch_that_is_tried_again_says_why_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    retry = ("exception", FULL, 1, 2, "15.0 second(s) from now")
    assert printed(capsys, logging.INFO, RETRY, *retry, step="extract-000003") == (
        "  extract    extract-000003: /data/out cannot be written: No space left on device (/data/out/x). Make room.\n"
        "             It is tried again in 15 s (1 of 2).\n"
    )


@pytest.mark.parametrize(
    ("level", "text", "step"),
    [
        (logging.INFO, "batch 000003: 4 rows", "extract-000003"),
        (logging.ERROR, f"Task run failed with exception: {FULL!r} - Retries are exhausted", "extract-000003"),
        (logging.INFO, "Finished in state Completed()", "verify"),
        (logging.INFO, "a line of nobody's step", None),
    ],
)
def test_what_the_bar_or_the_summary_says_is_not_printed_twice(
    capsys: pytest.CaptureFixture[str], level: int, text: str, step: str | None
) -> None:
    assert printed(capsys, level, text, step=step) == ""


def test_a_warning_of_a_batch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    line = printed(capsys, logging.ERROR, "batch %06d: row %d failed", 3, 7, step="extract-000003")
    assert line == "  extract    batch 000003: row 7 failed\n"


@pytest.mark.parametrize(
    ("options", "uri", "experiment"),
    [
        ([], "http://127.0.0.1:7777", "ours"),
        (["--tracking-uri", "sqlite:///other.db"], "sqlite:///other.db", "ours"),
        (["--experiment", "theirs"], "http://127.0.0.1:7777", "theirs"),
    ],
)
def test_a_record_made_later_goes_where_the_extraction_s_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], uri: str, experiment: str
) -> None:
    create_store(Store(tmp_path), {}, {"lineage": {"tracking_uri": "http://127.0.0.1:7777", "experiment": "ours"}})
    asked: list[LineageConfig] = []
    monkeypatch.setattr(record, "record_extraction", lambda store, config, *default: asked.append(config))
    assert main(["record", str(tmp_path), *options]) == 0
    assert asked == [LineageConfig(tracking_uri=uri, experiment=experiment)]


class LostPrefect:
    """A flow whose API goes away for good while it runs. A fake: the real client tries for a minute before it says so;
    tests/faults has the real one."""

    def __init__(self, fn: Callable[[str], str], begins: bool = True):
        self.fn, self.begins = fn, begins

    def with_options(self) -> "LostPrefect":
        return LostPrefect(self.fn, self.begins)

    def __call__(self, config: str, return_state: bool) -> None:
        if self.begins:
            with contextlib.suppress(WriteError):
                self.fn(config)
        raise httpx.ConnectError("Connection refused")


def full(config: str) -> str:
    raise FULL


@pytest.fixture
def no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "prefect_api", lambda port: contextlib.nullcontext("http://127.0.0.1:1/api"))


@pytest.mark.usefixtures("no_api")
def test_what_the_flow_came_to_outlives_the_prefect_api(capsys: pytest.CaptureFixture[str]) -> None:
    flow: Any = LostPrefect(lambda config: f"all of {config}")
    assert run.run_with_prefect(flow, "it", None) == "all of it"
    assert "The Prefect page may lack the last steps: ConnectError: Connection refused" in capsys.readouterr().err
    flow = LostPrefect(full)
    with pytest.raises(WriteError, match="No space left on device"):
        run.run_with_prefect(flow, "it", None)


@pytest.mark.usefixtures("no_api")
def test_a_flow_that_prefect_never_began_is_prefect_s_error() -> None:
    flow: Any = LostPrefect(str, begins=False)
    with pytest.raises(httpx.ConnectError):
        run.run_with_prefect(flow, "it", None)


def test_a_configured_prefect_api_that_is_not_there_is_wrong_input() -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    with pytest.raises(SetupError, match=f"The Prefect API at {url} does not answer: .*PREFECT_API_URL"):
        with temporary_settings({PREFECT_API_URL: url}), prefect_api():
            pytest.fail("it is there")


@pytest.mark.usefixtures("no_api")
def test_a_run_that_is_paused_on_prefect_s_page_says_how_to_go_on() -> None:
    class Paused(LostPrefect):
        def with_options(self) -> "Paused":
            return Paused(self.fn)

        def __call__(self, config: str, return_state: bool) -> None:
            self.fn(config)

    def paused(config: str) -> str:
        raise Pause("paused: what was committed stays")

    flow: Any = Paused(paused)
    with pytest.raises(StoppedError, match=r"Prefect's page: paused: .* The same command resumes\."):
        run.run_with_prefect(flow, "it", None)
