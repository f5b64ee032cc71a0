"""The flow `extract`: preflight, patch, server, probe, extract (mapped), verify, record.

Where the store is complete already, the steps that need a server are left out.
"""

import concurrent.futures
import time
from datetime import UTC, datetime
from typing import Any

from prefect import flow, unmapped
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.urls import url_for

from flows.places import credentials_of
from flows.progress import ProgressReport
from flows.services import mlflow_artifacts, mlflow_uri
from flows.summary import Summary
from tasks.config import ExtractConfig
from tasks.fleet.settings import PartitionOf
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
from tasks.storage import as_argument

TICK = 0.5  # seconds between two looks at the progress


def _run_name() -> str:
    parameters = flow_run.parameters
    config, partition = parameters["config"], parameters.get("partition")
    name = config["name"] if isinstance(config, dict) else config.name
    if partition:
        name += f"-partition-{partition['number'] if isinstance(partition, dict) else partition.number:04d}"
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _flow_run() -> dict[str, str]:
    """This flow run and its page."""
    return {"id": str(flow_run.id), "name": str(flow_run.name), "url": url_for("flow-run", flow_run.id) or ""}


@flow(
    name="extract",
    flow_run_name=_run_name,
    persist_result=False,
)
def extract(
    config: ExtractConfig, only_failed: bool = False, deep: bool = False, partition: PartitionOf | None = None
) -> Summary | None:
    """Extract the hidden states of a dataset, verify them, record where they came from.

    only_failed: extract the rows that failed, and no others. deep: compare the checksums of what is stored first.
    partition: of a fleet, which verifies and records the whole; there is no summary then.
    """
    with preflight_step(config, only_failed, deep, credentials_of(config.s3), partition) as session:
        run: dict[str, Any] = {"rows": 0, "tokens": 0, "seconds": 0.0, "usage": {}}
        if partition:
            _extract_partition(session)
            return None
        if session.needs_server():
            prepare_mlflow(session, mlflow_uri(), mlflow_artifacts())
            patch_step(session)
            server_step(session)
            probe_step(session)
            run = _extract_batches(session)
        else:
            get_run_logger().info("nothing is left to extract: no server is needed")
        verified = verify_step(session)
        run_id = record_step(session, mlflow_uri(), mlflow_artifacts())
    return Summary(
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


def _extract_partition(session: Session) -> None:
    if not session.preflight.missing:
        get_run_logger().info("nothing is left to extract of this partition")
        return
    patch_step(session)
    server_step(session)
    probe_step(session)
    _extract_batches(session)


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
            with sampler(session, _flow_run()), ProgressReport(rows, tokens) as report:
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
