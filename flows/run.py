"""Runs a flow from the command line: with a Prefect API, with its steps shown in the terminal."""

import atexit
import contextlib
import logging
import re
import sys
import time
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterId

from flows.services import prefect_api
from flows.summary import as_lines

PAGE = 200  # task runs that the API returns at most
RECORDING_DEADLINE = 20.0  # seconds for the server to write down the last task runs
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
        step = getattr(record, "task_run_name", None) or ("extract" if hasattr(record, "flow_run_name") else None)
        if run := getattr(record, "task_run_id", None):
            self.task_runs.add(UUID(str(run)))
        if step is None:
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

    port: of the Prefect server, if one is started; parameters: of the flow, beside the config.
    """
    resources = contextlib.ExitStack()
    # Prefect's client sends its last logs and events when the interpreter ends, before the handlers of atexit: a server
    # of ours must be there until then.
    atexit.register(resources.close)
    url = resources.enter_context(prefect_api(port))
    print(as_lines([("Prefect", f"{url.removesuffix('/api')} while this runs")]), file=sys.stderr, flush=True)
    lines = StepLines()
    logging.getLogger("prefect").addHandler(lines)
    state: Any = flow(config, **parameters, return_state=True)
    try:
        _wait_until_recorded(lines.task_runs)
    except Exception as error:
        print(f"  The Prefect page may lack the last steps: {error}", file=sys.stderr)
    return state.result()


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
