"""The flow `extract-fleet`: plan and split, run `extract` for each partition on the nodes, verify and record once.

The verification is a run of `extract`, too, without a partition, on one of the nodes: it finds every row there, starts
a server for the second extraction, verifies, records.
"""

import time
from datetime import UTC, datetime
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.logging import get_run_logger
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelling

from flows.extract import Attempt
from flows.nodes import PrefectRuns, tag_of
from flows.places import credentials_of
from flows.summary import FleetSummary
from tasks.config import ExtractConfig
from tasks.files import human_seconds, sha256_of
from tasks.fleet.conduct import Conductor, Work
from tasks.fleet.settings import FleetConfig, node_configs
from tasks.fleet.signs import Phase
from tasks.fleet.whole import Commits, Plans, account, check_sum, keep_fleet_run, open_fleet
from tasks.lineage.record import recorded_run
from tasks.preflight import describe
from tasks.steps import UNCACHED
from tasks.storage.bucket import CredentialsSource
from tasks.store.manifest import read_manifest
from tasks.store.partitions import Partition
from tasks.verification import outcome as outcomes
from tasks.verification import read_outcome

TICK = 5.0  # seconds between two looks at the runs
SHOW_EVERY = 30.0  # seconds


def _run_name() -> str:
    given = this_run.parameters
    config, attempt = given["config"], given.get("attempt", 1)
    name = config["name"] if isinstance(config, dict) else config.name
    again = f"-attempt-{attempt}" if attempt > 1 else ""
    return f"{name}-fleet-{datetime.now(UTC):%Y%m%d-%H%M%S}{again}"


def cancel_runs(flow: Any, flow_run: Any, state: Any) -> None:
    """When the fleet is cancelled, so are its runs: also those that an earlier run of this flow has started."""
    tags = [tag for tag in flow_run.tags if tag.startswith(tag_of(""))]
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(tags=FlowRunFilterTags(all_=tags))
        for run in client.read_flow_runs(flow_run_filter=chosen) if tags else []:
            if run.id != flow_run.id and not (run.state and run.state.is_final()):
                client.set_flow_run_state(run.id, Cancelling(message="The fleet was cancelled."))


@flow(name="extract-fleet", flow_run_name=_run_name, persist_result=False, on_cancellation=[cancel_runs])
def extract_fleet(config: ExtractConfig, fleet: FleetConfig, attempt: Attempt = 1) -> FleetSummary:
    """Extract with several nodes into one store; verify and record the whole once. Resumes what was begun.

    Each partition is a run of the flow `extract` on a node's work queue. One that fails, or whose node is lost,
    is given to another node.

    Args:
        config: What to extract, and how.
        fleet: The nodes, and how patient to be with them.
        attempt: Leave it at 1. An automation starts a fleet that crashed again, and counts here.
    """
    logger = get_run_logger()
    configs = node_configs(config, fleet)
    plans = plan_step(config, fleet.count, credentials_of(config.s3))
    runs = PrefectRuns(configs, fleet, plans.split.fleet, logger)
    _tag_this_run(plans.split.fleet)
    commits = Commits(plans.store, plans.split.partitions)
    works = [_partition_work(plans, partition, commits) for partition in plans.split.partitions]
    conductor = Conductor(works, fleet, runs, logger, refresh=commits.refresh)
    _conduct(conductor, plans, commits)
    figures = sum_step(plans, conductor.retries)
    conductor.add(_whole_work(plans))
    _conduct(conductor, plans, commits)
    manifest = read_manifest(plans.store)
    digest = sha256_of(plans.store.manifest)
    return FleetSummary(
        rows=manifest["rows_by_state"],
        tokens=manifest["tokens"],
        bytes=manifest["bytes"],
        shards=manifest["shards"],
        digest=digest,
        output=config.output.path,
        nodes=len(fleet.nodes),
        partitions=len(works),
        retries=conductor.retries,
        extracted_tokens=figures["tokens"],
        seconds=figures["seconds"],
        mlflow_run=recorded_run(plans.store),
    )


@task(name="plan", task_run_name="plan", **UNCACHED)
def plan_step(config: ExtractConfig, partitions: int, credentials: CredentialsSource | None) -> Plans:
    """Plan once, for all nodes, and split what is missing."""
    plans, logger = open_fleet(config, partitions, credentials), get_run_logger()
    for name, value in describe(plans.preflight):
        logger.info("%s: %s", name, value)
    if plans.adopted:
        logger.warning("runs of an earlier fleet are extracting: they are watched, and not started again")
    for partition in plans.split.partitions:
        logger.info("partition %04d: batches %d to %d", partition.number, partition.first, partition.end - 1)
    return plans


@task(name="sum", task_run_name="sum", **UNCACHED)
def sum_step(plans: Plans, retries: int) -> dict[str, Any]:
    """Check that the partitions add up to the whole, and keep the figures."""
    preflight = plans.preflight
    whole = check_sum(plans.store, preflight.plan, preflight.fingerprint, plans.split.partitions)
    get_run_logger().info("%d rows are stored, %d failed, none is missing", whole.stored, whole.failed)
    return keep_fleet_run(plans, retries)


def _partition_work(plans: Plans, partition: Partition, commits: Commits) -> Work:
    preflight = plans.preflight

    def finished(phase: Phase) -> bool:
        return account(plans.store, preflight.plan, preflight.fingerprint, partition).missing == 0

    return Work(
        f"partition-{partition.number:04d}",
        partition.number,
        plans.store.partition_lock(partition.number),
        finished,
        lambda: commits.count(partition.number),
    )


def _whole_work(plans: Plans) -> Work:
    store, before = plans.store, read_outcome(plans.store)

    def hopeless() -> str | None:
        found = read_outcome(store)
        if found is None or found == before or found.verdict not in (outcomes.FAILED, outcomes.INCOMPLETE):
            return None
        problems = [str(problem["text"]) for problem in found.problems[:3]]
        return found.incomplete or f"the verification did not pass: {'; '.join(problems)}"

    return Work(
        "whole", None, store.lock, lambda phase: phase == "completed" and store.manifest.exists(), hopeless=hopeless
    )


def _conduct(conductor: Conductor, plans: Plans, commits: Commits) -> None:
    """Until all is done, or can be no more. Raises FleetError."""
    logger, began = get_run_logger(), time.monotonic()
    shown: tuple[str, ...] = ()
    next_line = began + SHOW_EVERY
    tokens = plans.preflight.tokens_by_batch
    first = None
    try:
        while True:
            conductor.step()
            done = int(tokens[commits.batches].sum())
            first = done if first is None else first
            now = time.monotonic()
            if now >= next_line:
                rate = (done - first) / (now - began)
                left = f", {human_seconds((tokens.sum() - done) / rate)} left" if rate and done < tokens.sum() else ""
                logger.info("%d of %d tokens, %.0f tokens/s%s; %s", done, tokens.sum(), rate, left, "; ".join(shown))
                next_line = now + SHOW_EVERY
            if (rows := _table(conductor)) != shown:
                shown = rows
                _show(rows, plans)
            if not conductor.busy:
                break
            time.sleep(TICK)
    except KeyboardInterrupt:
        conductor.cancel()
        raise
    conductor.raise_failures()


def _table(conductor: Conductor) -> tuple[str, ...]:
    return (
        *(f"{job.work.key}: {job.run.queue}, attempt {job.attempt + 1}" for job in conductor.jobs),
        *(f"{waiting.work.key}: waits for a node" for waiting in conductor.waiting),
        *(f"{key}: done" for key in conductor.done),
        *(f"{key}: given up, {why}" for key, why in conductor.failures.items()),
    )


def _show(lines: tuple[str, ...], plans: Plans) -> None:
    """A table on the page; its failure is a warning."""
    try:
        table = [dict(zip(("work", "state"), line.split(": ", 1))) for line in sorted(lines)]
        create_table_artifact(table, key="fleet", description=f"Who extracts what into {plans.store.root}")
    except Exception as error:
        get_run_logger().warning("the page's table could not be written: %s", error)


def _tag_this_run(fleet: str) -> None:
    with get_client(sync_client=True) as client:
        client.update_flow_run(this_run.id, tags=[*this_run.tags, tag_of(fleet)])
