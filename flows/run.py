"""Runs a flow from the command line: with a Prefect API, with its steps shown in the terminal."""

import atexit
import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from flows.services import prefect_api

RECORDING_DEADLINE = 20.0  # seconds for the server to write down the last task runs
PREFECTS_OWN = (
    "Beginning flow run",
    "Created task run",
    "Finished in state",
    "View at",
    "Task run failed",
    "Encountered",
)


class StepLines(logging.Handler):
    """Prints what the steps log. Batches have the progress bar: of them only what went wrong is printed."""

    def emit(self, record: logging.LogRecord) -> None:
        step = getattr(record, "task_run_name", None) or ("extract" if hasattr(record, "flow_run_name") else None)
        message = record.getMessage()
        if step is None or message.startswith(PREFECTS_OWN):
            return
        if step.startswith("extract-") and record.levelno < logging.WARNING:
            return
        name = step.partition("-")[0]
        first, *rest = message.splitlines() or [""]
        print(f"  {name:<10} {first}", *(f"  {'':<10} {line}" for line in rest), sep="\n", file=sys.stderr, flush=True)


def run_with_prefect(flow: Flow[Any, Any], config: Any, port: int | None) -> Any:
    """Run `flow(config)`; returns its result or raises what it raised, once the API knows of every task run."""
    resources = contextlib.ExitStack()
    # Prefect's client sends its last logs and events when the interpreter ends, before the handlers of atexit: a server
    # of ours must be there until then.
    atexit.register(resources.close)
    url = resources.enter_context(prefect_api(port))
    print(f"  Prefect    {url.removesuffix('/api')} while this runs", file=sys.stderr, flush=True)
    logging.getLogger("prefect").addHandler(StepLines(logging.INFO))
    state: Any = flow(config, return_state=True)
    _wait_until_recorded(state.state_details.flow_run_id)
    return state.result()


def _wait_until_recorded(flow_run: UUID | None) -> None:
    """Task runs reach the server as events: give it the time to write them down before it may be stopped."""
    if flow_run is None:
        return
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    _poll(lambda: _all_final(mine), RECORDING_DEADLINE)


def _all_final(mine: FlowRunFilter) -> bool:
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=mine)
    return bool(runs) and all(run.state and run.state.is_final() for run in runs)


def _poll(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)
