"""The steps of an extraction as Prefect tasks: a thin layer over the core, which knows nothing of Prefect.

No result is cached or persisted: the store is the truth. What the steps share lives in a `Session` in the flow's
process.
"""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import task_run

from tasks.config import ExtractConfig
from tasks.dataset.rows import read_planned
from tasks.errors import LineageError, WriteError
from tasks.extraction.batch import BatchResult, extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.extraction.trouble import Trouble, troubles_of
from tasks.files import human_bytes, write_json
from tasks.fleet.settings import PartitionOf
from tasks.fleet.whole import keep_partition_run
from tasks.lineage.early import Preparation
from tasks.origin import describe_origin
from tasks.patching import check_signatures, server_paths
from tasks.preflight import Preflight, describe, open_output, run_preflight, staging_limit
from tasks.probe import ProbeReport, probe
from tasks.report import markdown_report, write_report
from tasks.server.facts import ServerFacts, check_server
from tasks.server.launch import AttachedServer, ManagedServer, Server, attached_staging
from tasks.server.leftovers import remove_leftovers
from tasks.server.supervisor import Restarts
from tasks.storage.bucket import CredentialsSource
from tasks.store.attempts import Sampler
from tasks.store.books import DONE, TRUNCATED
from tasks.store.bucket_lock import writer_lock
from tasks.store.layout import Store
from tasks.store.lock import WriterLock
from tasks.store.partitions import read_split
from tasks.store.runs import add_run
from tasks.verification import Verified, comparison_due, verify_store

RETRY_DELAYS = [15.0, 60.0]  # seconds before a batch whose shard could not be written is tried again
UNCACHED: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


class Session:
    """One extraction in progress: what its steps share. A context manager: leaving it ends engine and server.

    Not a dataclass on purpose: Prefect looks into every field of a dataclass that is given to a task.
    """

    def __init__(self, preflight: Preflight):
        self.preflight = preflight
        self.config = preflight.config
        self.store = preflight.store
        self.lock: WriterLock
        self.servers: list[Server] = []
        self.facts: list[ServerFacts] = []
        self.engine: PrefillEngine | None = None
        self.troubles: list[Trouble] = []
        self.mlflow: Preparation | None = None
        self.resources = contextlib.ExitStack()

    def __enter__(self) -> "Session":
        self.lock = self.resources.enter_context(writer_lock(self.store, self.preflight.partition))
        return self

    def __exit__(self, *exception: object) -> None:
        self.resources.close()

    def add_trouble(self, trouble: Trouble) -> None:
        """Remember it for the page; what stops one batch stops all, and is said once."""
        if trouble.rows or all(trouble.reason != other.reason or other.rows for other in self.troubles):
            self.troubles.append(trouble)

    def needs_server(self) -> bool:
        """Whether rows are missing, or a share of them was not extracted a second time yet."""
        return bool(self.preflight.missing) or comparison_due(self.store, self.config.verify)


@task(name="preflight", task_run_name="preflight", **UNCACHED)
def preflight_step(
    config: ExtractConfig,
    only_failed: bool = False,
    deep: bool = False,
    credentials: CredentialsSource | None = None,
    partition: PartitionOf | None = None,
) -> Session:
    """Check config, model, environment, dataset, output and space; plan, or take a fleet's plan."""
    chosen = (partition.fleet, partition.number) if partition else None
    preflight = run_preflight(config, only_failed=only_failed, deep=deep, credentials=credentials, partition=chosen)
    for name, value in describe(preflight):
        get_run_logger().info("%s: %s", name, value)
    return Session(preflight)


@task(name="patch", task_run_name="patch", **UNCACHED)
def patch_step(session: Session) -> None:
    """Check that the hooked functions are the ones that the capture plugin fits; the plugin then goes on the path."""
    installation = session.preflight.installation
    if installation is None:
        get_run_logger().info("the server is attached: the plugin's READY file is checked in the next step")
        return
    proof = check_signatures(installation)
    paths = ", ".join(str(path) for path in server_paths(session.config.server.device))
    basis = f", {proof.text()}" if proof else ""
    get_run_logger().info("SGLang %s%s takes the capture plugin from %s", installation.sglang, basis, paths)


@task(name="server", task_run_name="server", **UNCACHED)
def server_step(session: Session) -> None:
    """Start the servers, or find the attached ones, and check their settings."""
    logger, preflight, config = get_run_logger(), session.preflight, session.config
    for name in remove_leftovers(config.staging.path):
        logger.warning("removed %s from the staging: a dead run's", name)
    for number in range(config.server.servers):
        if preflight.installation is None:
            server: Server = AttachedServer(
                config.server.urls[number], attached_staging(config, number), config.server.start_timeout
            )
        else:
            log = server_log(session, number)
            server = ManagedServer(config, preflight.installation, preflight.layers, log, number)
        session.resources.callback(server.stop)
        session.servers.append(server)
    with ThreadPoolExecutor(len(session.servers), thread_name_prefix="server-start") as threads:
        starts = [threads.submit(server.start) for server in session.servers]
        for start in as_completed(starts):
            if start.exception():
                for server in session.servers:
                    server.stop()  # the others may need minutes more to start
            start.result()
    for server in session.servers:
        facts = _check(session, server)
        session.facts.append(facts)
        logger.info("SGLang %s answers at %s", facts.sglang, server.url)


@task(name="probe", task_run_name="probe", **UNCACHED)
def probe_step(session: Session) -> None:
    """Prove the capture with test dumps. Nothing is extracted, and the output not touched, if this fails."""
    preflight, config = session.preflight, session.config
    restarts = Restarts(config.server.max_restarts, config.server.restart_window, functools.partial(_check, session))
    limits = (preflight.captured, config.extraction, staging_limit(config), restarts)

    def prove(server: Server, facts: ServerFacts) -> ProbeReport:
        with PrefillEngine([server], *limits) as engine:
            return probe(engine, preflight.model, facts, config.dataset.max_seq_len)

    with ThreadPoolExecutor(len(session.servers), thread_name_prefix="probe") as threads:
        reports = list(threads.map(prove, session.servers, session.facts))
    for server, report in zip(session.servers, reports, strict=True):
        get_run_logger().info("%s: %s", server.url, report.text())
    open_output(preflight)
    name = f"probe-{part.number:04d}.json" if (part := preflight.partition) else "probe.json"
    write_json(session.store.logs / name, [asdict(report) for report in reports])
    engine = PrefillEngine(session.servers, *limits, preflight.most_failed)
    session.engine = session.resources.enter_context(engine)


def _may_pass(task: Any, run: Any, state: Any) -> bool:
    """Prefect's retry condition: an output that is full may be freed."""
    return isinstance(state.data, WriteError)


@task(
    name="extract",
    task_run_name="extract-{batch:06d}",
    retries=len(RETRY_DELAYS),
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=_may_pass,
    **UNCACHED,
)
def extract_step(batch: int, session: Session) -> BatchResult:
    """Extract the missing rows of one batch and commit its shard.

    An output that cannot be written is tried again. What stops a batch then stops all: they share the cause.
    """
    assert session.engine is not None
    logger, preflight = get_run_logger(), session.preflight
    numbers = preflight.missing[batch]
    try:
        rows = list(read_planned(session.config.dataset.path, preflight.plan, numbers, preflight.model.vocab_size))
        result = extract_batch(batch, rows, session.engine, session.store, preflight.fingerprint, session.lock)
    except Exception as error:
        again = isinstance(error, WriteError) and task_run.run_count <= len(RETRY_DELAYS)
        what = f"tried again in {RETRY_DELAYS[task_run.run_count - 1]:.0f} s" if again else "stopped the run"
        session.add_trouble(Trouble(batch, what, "", str(error)))
        if not again:
            session.engine.close(error)
        raise
    for trouble in troubles_of(result):
        session.add_trouble(trouble)
    for failure in result.failed:
        logger.error("batch %06d: row %d failed: %s", batch, failure.row, failure.reason)
    logger.info("batch %06d: %d rows, %d tokens, %s", batch, result.rows, result.tokens, human_bytes(result.bytes))
    return result


@task(name="verify", task_run_name="verify", **UNCACHED)
def verify_step(session: Session) -> Verified:
    """Read everything back; write ledger and manifest if it is complete and right."""
    config = session.config
    try:
        verified = verify_store(
            session.store,
            config.dataset.path,
            config.extraction.max_failed_share,
            config.verify,
            session.engine,
            plan=session.preflight.plan,
            show=lambda progress: get_run_logger().info("%s", progress.text()),
        )
    finally:
        show_report(session.store)
    get_run_logger().info(
        "%d shards read, %d tokens, %s; %d rows extracted again, largest difference %s; digest %s",
        verified.shards,
        verified.tokens,
        human_bytes(verified.bytes),
        verified.reextracted,
        verified.largest_difference,
        verified.digest,
    )
    return verified


def show_report(store: Store) -> None:
    """Write the report of what was verified, passed or not, and show it in Prefect. Its failure is a warning."""
    try:
        path, text = write_report(store), markdown_report(store)
        if path and text:
            create_markdown_artifact(text, key="verification", description=f"Verification of {store.root}")
            get_run_logger().info("report: %s", path)
    except Exception as error:
        get_run_logger().warning("the report could not be written: %s", error)


def prepare_mlflow(session: Session, default_uri: str, artifacts: Path) -> None:
    """Have MLflow ready for the record."""
    preparation = Preparation(session.config.lineage, default_uri, artifacts)
    session.mlflow = session.resources.enter_context(preparation)


@task(name="record", task_run_name="record", **UNCACHED)
def record_step(session: Session, default_uri: str, artifacts: Path) -> str | None:
    """Tell MLflow; returns the run's id. Its failure is a warning: the data is safe, and `record` makes up for it."""
    if session.mlflow is None:
        prepare_mlflow(session, default_uri, artifacts)
    assert session.mlflow is not None
    try:
        run_id = session.mlflow.record(session.store)
    except LineageError as error:
        get_run_logger().warning("%s", error)
        return None
    get_run_logger().info("MLflow run %s", run_id)
    return run_id


def _check(session: Session, server: Server) -> ServerFacts:
    """Raises ServerError if the server is not set up as the config asks for."""
    preflight = session.preflight
    return check_server(server, session.config, preflight.model, preflight.layers, preflight.plan.longest)


def server_log(session: Session, number: int) -> Path:
    """A managed server's log: beside the output, since an output exists only after a passed probe."""
    beside, partition = session.store.beside, session.preflight.partition
    parts = [f"partition-{partition.number:04d}"] if partition else []
    name = ".".join([beside.name, "-".join(["server", *parts, *([str(number)] if number else [])]), "log"])
    return beside.with_name(name)


def sampler(session: Session, flow_run: dict[str, str]) -> Sampler:
    """Samples the extraction for as long as its context lasts; flow_run: Prefect's, for the record."""
    assert session.engine is not None
    origin = describe_origin() | {"servers": [asdict(facts) for facts in session.facts], "prefect": flow_run}
    if partition := session.preflight.partition:
        split = read_split(session.store)
        there = split.there["rows"] if split else 0
        origin["partition"] = {"fleet": session.preflight.fleet, "number": partition.number, "there": there}
    books = session.preflight.books.counts()
    return Sampler(session.store, session.engine.progress, origin, books[DONE] + books[TRUNCATED])


def keep_run(session: Session, seconds: float) -> dict[str, Any]:
    """Add this run's figures to the store; seconds: from the extraction's begin to the last commit record."""
    assert session.engine is not None
    progress = session.engine.progress
    run = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "rows": progress.rows,
        "tokens": progress.tokens,
        "bytes": progress.bytes,
        "failed": progress.failed,
        "retries": progress.retries,
        "restarts": progress.restarts,
        "usage": {name: round(value, 4) for name, value in session.engine.usage().items()},
    }
    preflight = session.preflight
    if preflight.partition:
        began = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
        keep_partition_run(session.store, preflight.fleet, preflight.partition.number, {"began": began, **run})
    else:
        add_run(session.store, run)
    return run
