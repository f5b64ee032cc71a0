"""Runs a flow from the command line: with a Prefect API, with its steps shown in the terminal."""

import atexit
import contextlib
import functools
import logging
import os
import re
import sys
import time
from concurrent.futures import Future
from typing import Any, NoReturn
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterId
from prefect.events.worker import EventsWorker
from prefect.exceptions import Abort, Pause
from prefect.logging.handlers import APILogWorker

from flows.logs import FROM_CORE
from flows.services import prefect_api
from flows.summary import as_lines
from tasks.errors import StoppedError

PAGE = 200  # task runs that the API returns at most
RECORDING_DEADLINE = 20.0  # seconds for the server to write down the last task runs
SENDING_DEADLINE = 20.0  # seconds for Prefect's client to send its last events and logs
PREFECTS_OWN = (
    "Beginning flow run",
    "Created task run",
    "Finished in state",
    "View at",
    "Task run failed",
    "Encountered",
)


# Prefect's line, at the level of things that went well, when a task that failed waits for its next try.
RETRY = re.compile(r"Task run failed with exception: .* - Retry (\d+)/(\d+) will start (\d+)\.\d+ second", re.DOTALL)


class StepLines(logging.Handler):
    """Prints what the steps log. Batches have the progress bar: of them only what went wrong is printed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.task_runs: set[UUID] = set()

    def emit(self, record: logging.LogRecord) -> None:
        own = "fleet" if getattr(record, "flow_name", None) == "extract-fleet" else "extract"
        step = getattr(record, "task_run_name", None) or (own if hasattr(record, "flow_run_name") else None)
        if run := getattr(record, "task_run_id", None):
            self.task_runs.add(UUID(str(run)))
        if step is None or hasattr(record, FROM_CORE):
            return
        message = record.getMessage()
        if (retry := RETRY.match(message)) and isinstance(record.args, tuple):
            number, most, seconds = retry.groups()
            message = f"{step}: {record.args[1]}\nIt is tried again in {seconds} s ({number} of {most})."
        elif message.startswith(PREFECTS_OWN) or (step.startswith("extract-") and record.levelno < logging.WARNING):
            return
        first, *rest = message.splitlines() or [""]
        text = as_lines([(step.partition("-")[0], first), *(("", line) for line in rest)])
        print(text, file=sys.stderr, flush=True)


def run_with_prefect(flow: Flow[Any, Any], config: Any, port: int | None, **parameters: Any) -> Any:
    """Run a flow; returns its result or raises what it raised, once the API knows of every task run.

    port: of the Prefect server, if one is started; parameters: of the flow, beside the config. An API that goes away
    while the flow runs, for a while or for good, changes neither the result nor the error: only the page lacks it.
    """
    resources = contextlib.ExitStack()
    # Prefect's client sends its last logs and events when the interpreter ends, before the handlers of atexit: a server
    # of ours must be there until then.
    atexit.register(resources.close)
    url = resources.enter_context(prefect_api(port))
    print(as_lines([("Prefect", f"{url.removesuffix('/api')} while this runs")]), file=sys.stderr, flush=True)
    lines = StepLines()
    logging.getLogger("prefect").addHandler(lines)
    ended: Future[Any] = Future()
    try:
        _watched(flow, ended)(config, **parameters, return_state=True)
        _wait_until_recorded(lines.task_runs)
    except (Abort, Pause) as order:
        raise StoppedError(f"Ended from Prefect's page: {order}. The same command resumes.") from order
    except Exception as error:
        if not ended.done():
            raise
        print(f"  The Prefect page may lack the last steps: {type(error).__name__}: {error}", file=sys.stderr)
    return ended.result()


def end_process(code: int) -> NoReturn:
    """Leave with this exit code. Prefect gets SENDING_DEADLINE seconds to send what it still holds.

    By itself it would try for 7 s with each event, some four a task run, one after the other, where the API is gone.
    """
    deadline = time.monotonic() + SENDING_DEADLINE
    for service in (EventsWorker, APILogWorker):
        drained: Any = service.drain_all(timeout=max(0.1, deadline - time.monotonic()))
        if drained[1]:  # not done
            print("  Prefect's last events or logs could not be sent: its page lacks them.", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # what was started ends, too: its guardian's pipe closes
    sys.exit(code)


def _watched(flow: Flow[Any, Any], ended: "Future[Any]") -> Flow[Any, Any]:
    """The flow, which puts into `ended` how it ended, whatever Prefect makes of it."""

    @functools.wraps(flow.fn)
    def body(*arguments: Any, **parameters: Any) -> Any:
        try:
            ended.set_result(flow.fn(*arguments, **parameters))
        except BaseException as error:
            ended.set_exception(error)
        return ended.result()

    watched = flow.with_options()
    watched.fn = body
    return watched


def _wait_until_recorded(task_runs: set[UUID]) -> None:
    """Task runs reach the server as events: give it the time to write them down before it may be stopped."""
    deadline = time.monotonic() + RECORDING_DEADLINE
    left = set(task_runs)
    with get_client(sync_client=True) as client:
        while left and time.monotonic() < deadline:
            page = list(left)[:PAGE]
            runs = client.read_task_runs(task_run_filter=TaskRunFilter(id=TaskRunFilterId(any_=page)))
            final = {run.id for run in runs if run.state and run.state.is_final()}
            left -= final
            if not final:
                time.sleep(0.3)
