"""The flow `extract`: preflight, patch, server, probe, extract (mapped), verify, record.

Where the store is complete already, the steps that need a server are left out.
"""

import concurrent.futures
import contextvars
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, unmapped
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.urls import url_for
from pydantic import Field

from flows.logs import warnings_on_the_page
from flows.places import credentials_of
from flows.progress import LAST_UPDATE, ProgressReport
from flows.services import mlflow_artifacts, mlflow_uri
from flows.summary import Summary
from tasks.config import ExtractConfig
from tasks.errors import WriterAliveError
from tasks.fleet.settings import PartitionOf
from tasks.report import markdown_table
from tasks.steps import (
    Session,
    extract_step,
    keep_run,
    patch_step,
    preflight_step,
    prepare_mlflow,
    probe_step,
    record_step,
    sampler,
    server_step,
    verify_step,
)
from tasks.storage import as_argument, as_location
from tasks.store.bucket_lock import writer_lock
from tasks.store.layout import Store

TICK = 0.5  # seconds between two looks at the progress
LOOK = 30.0  # seconds between two looks whether the attempt before has ended
MOST_ATTEMPTS = 6  # the API refuses to create another one

Attempt = Annotated[int, Field(ge=1, le=MOST_ATTEMPTS)]


def _run_name() -> str:
    given = flow_run.parameters
    config, partition = given["config"], given.get("partition")
    name = config["name"] if isinstance(config, dict) else config.name
    if partition:
        name += f"-partition-{partition['number'] if isinstance(partition, dict) else partition.number:04d}"
    marks = ["failed-rows"] if given.get("only_failed") else []
    marks += ["deep"] if given.get("deep") else []
    marks += [f"attempt-{given['attempt']}"] if given.get("attempt", 1) > 1 else []
    return "-".join([name, f"{datetime.now(UTC):%Y%m%d-%H%M%S}", *marks])


def _flow_run() -> dict[str, str]:
    """This flow run and its page."""
    return {"id": str(flow_run.id), "name": str(flow_run.name), "url": url_for("flow-run", flow_run.id) or ""}


@flow(
    name="extract",
    flow_run_name=_run_name,
    persist_result=False,
)
def extract(
    config: ExtractConfig,
    only_failed: bool = False,
    deep: bool = False,
    attempt: Attempt = 1,
    partition: PartitionOf | None = None,
) -> Summary | None:
    """Extract the hidden states of a dataset, verify them, record where they came from. Resumes what was begun.

    Args:
        config: What to extract, and how.
        only_failed: Extract the rows that failed, also those that would fail again by themselves, and no others.
        deep: Before resuming, compare the checksum of every shard that is there, not only its size; the rows of damaged
            ones are extracted again.
        attempt: Leave it at 1. An automation starts a run that crashed again, and counts here. A later attempt waits
            while an earlier one, which Prefect took for crashed, is still writing.
        partition: Leave it empty. Of a fleet, which verifies and records the whole; there is no summary then.
    """
    if attempt > 1:
        _wait_for_writer(config)
    credentials = credentials_of(config.s3)
    with warnings_on_the_page(), preflight_step(config, only_failed, deep, credentials, partition) as session:
        run: dict[str, Any] = {"rows": 0, "tokens": 0, "seconds": 0.0, "usage": {}}
        if partition:
            if session.preflight.missing:
                _serve_and_extract(session)
            else:
                get_run_logger().info("nothing is left to extract of this partition")
            return None
        if session.needs_server():
            prepare_mlflow(session, mlflow_uri(), mlflow_artifacts())
            run = _serve_and_extract(session)
        else:
            get_run_logger().info("nothing is left to extract: no server is needed")
        verified = verify_step(session)
        run_id = record_step(session, mlflow_uri(), mlflow_artifacts())
    summary = Summary(
        rows=verified.rows,
        tokens=verified.tokens,
        bytes=verified.bytes,
        shards=verified.shards,
        digest=verified.digest,
        output=config.output.path,
        extracted_rows=run["rows"],
        extracted_tokens=run["tokens"],
        seconds=run["seconds"],
        usage=run["usage"],
        reextracted=verified.reextracted,
        mlflow_run=run_id,
        output_argument=as_argument(session.store.root),
    )
    # In a thread: where the API is away, Prefect's client tries for a minute.
    context = contextvars.copy_context()
    shown = threading.Thread(target=context.run, args=(_show_summary, config.name, summary), daemon=True)
    shown.start()
    shown.join(LAST_UPDATE)
    return summary


def _show_summary(name: str, summary: Summary) -> None:
    """On the page, as the terminal has it."""
    try:
        table = markdown_table(summary.lines())
        create_markdown_artifact(table, key="summary", description=f"What the extraction {name} came to")
    except Exception as error:
        get_run_logger().warning("the summary could not be shown: %s", error)


def _wait_for_writer(config: ExtractConfig) -> None:
    """Return when nobody writes to the output. Before preflight: the other run's server may have the port."""
    store = Store(as_location(config.output.path, config.s3, credentials_of(config.s3)))
    while True:
        try:
            with writer_lock(store):
                return
        except WriterAliveError as error:
            get_run_logger().warning("%s This attempt goes on when it has ended.", error)
            time.sleep(LOOK)


def _places(session: Session) -> list[tuple[str, Path]]:
    """Whose free room the page shows."""
    output, spool = session.store.root, session.preflight.spool
    places = [("spool", spool)] if spool else [("output", Path(str(output)))]
    return [*places, ("staging", session.config.staging.path)]


def _serve_and_extract(session: Session) -> dict[str, Any]:
    """Everything that needs a server; returns the run's figures."""
    patch_step(session)
    server_step(session)
    probe_step(session)
    return _extract_batches(session)


def _extract_batches(session: Session) -> dict[str, Any]:
    """Map the batches with missing rows over the servers; returns the run's figures."""
    assert session.engine is not None
    started = time.monotonic()
    progress = session.engine.progress
    preflight = session.preflight
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=preflight.batches_at_once)
    with runner:
        futures = runner.map(extract_step, {"batch": list(preflight.missing), "session": unmapped(session)})
        work: list[Any] = [future.wrapped_future for future in futures]  # type: ignore[attr-defined]  # of threads
        try:
            rows, tokens = preflight.missing_rows, preflight.missing_tokens
            report = ProgressReport(rows, tokens, _places(session), session.troubles)
            with sampler(session, _flow_run()), report:
                while concurrent.futures.wait(work, timeout=TICK).not_done:
                    report.show(progress)
                seconds = time.monotonic() - started  # what comes now tells Prefect about it
                report.show(progress)
        except BaseException:
            # Ctrl-C, a cancelled flow: no batch may still write when the lock is given back.
            session.engine.close()
            concurrent.futures.wait(work)
            raise
    try:
        return keep_run(session, seconds)
    finally:
        # Raises what stopped the batches: a dead server, a lost lock, or the full disk that leaves no room for the
        # run's figures either.
        for future in futures:
            future.result()
