"""Puts everything into a Prefect server: work pool, queues, automations, deployments. Run it again after every change.

python -m deployments.deploy                                  # one extraction at a time
python -m deployments.deploy --extractions 4                  # four nodes with a worker each
python -m deployments.deploy --notify slack-webhook/operators # and say where to tell of trouble
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import WorkQueueFilter, WorkQueueFilterName
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.workers.process import ProcessWorker

import flows  # noqa: F401 - sets the environment that keeps Prefect quiet
from tasks.errors import DrillcoreError, SetupError

ROOT = Path(__file__).resolve().parent.parent
AUTOMATIONS = Path(__file__).with_name("automations.yaml")
POOL, GPU, CPU = "drillcore", "gpu", "cpu"  # as in prefect.yaml
CPU_RUNS = 8  # plans, verifications, exports and parent flows at a time
NOTIFICATION_BLOCK = "NOTIFICATION_BLOCK"  # in automations.yaml: the id of the block that --notify names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.deploy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extractions", type=int, default=1, metavar="N", help="at a time, on all nodes (default: 1)")
    parser.add_argument(
        "--notify", metavar="TYPE/NAME", help="a notification block of the server, as slack-webhook/operators"
    )
    options = parser.parse_args(arguments)
    try:
        deploy(options.extractions, options.notify)
    except DrillcoreError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def deploy(extractions: int = 1, notify: str | None = None) -> None:
    """Bring the server that Prefect is set up for (PREFECT_API_URL, a profile) up to date. Raises SetupError."""
    if not get_current_settings().api.url:
        raise SetupError("No Prefect server is named. Set PREFECT_API_URL, as in http://127.0.0.1:4200/api.")
    with get_client(sync_client=True) as client:
        try:
            make_pool(client, extractions)
            for name, what in put_automations(client, read_automations(_block_id(client, notify))):
                print(f"  {what:<10} {name}", flush=True)
            with schedules_kept(client):
                command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
                # prefect.yaml has the worker's folder from PWD, which only a shell sets.
                if code := subprocess.run(command, cwd=ROOT, env=os.environ | {"PWD": str(ROOT)}).returncode:
                    raise SetupError(f"`prefect deploy --all` failed with exit code {code}: see above.")
        except httpx.TransportError as error:
            raise SetupError(f"The Prefect server at {client.api_url} does not answer: {error}") from error
    print(f"\n  Now start a worker on each node, in {ROOT}:\n  prefect worker start --pool {POOL}")


def make_pool(client: SyncPrefectClient, extractions: int) -> None:
    """The work pool of local processes, with its queues and their limits."""
    limit = extractions + CPU_RUNS
    try:
        client.read_work_pool(POOL)
        client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=limit))
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=POOL, type=ProcessWorker.type, base_job_template=template, concurrency_limit=limit)
        )
    for priority, (name, most) in enumerate({GPU: extractions, CPU: CPU_RUNS}.items(), 1):
        named = WorkQueueFilter(name=WorkQueueFilterName(any_=[name]))
        queues = client.read_work_queues(work_pool_name=POOL, work_queue_filter=named)
        queue = queues[0] if queues else client.create_work_queue(name, work_pool_name=POOL, priority=priority)
        client.update_work_queue(queue.id, concurrency_limit=most)
    print(f"  pool       {POOL}: {extractions} extraction(s), {CPU_RUNS} others at a time")


def read_automations(block: str | None) -> list[AutomationCore]:
    """The automations; without the id of a notification block those that only notify are left out."""
    found: list[dict[str, Any]] = yaml.safe_load(AUTOMATIONS.read_text())["automations"]
    automations = []
    for values in found:
        actions = [
            action | {"block_document_id": block} if action.get("block_document_id") == NOTIFICATION_BLOCK else action
            for action in values["actions"]
        ]
        if block or actions == [action for action in actions if action["type"] != "send-notification"]:
            automations.append(AutomationCore.model_validate(values | {"actions": actions}))
    return automations


def put_automations(client: SyncPrefectClient, automations: list[AutomationCore]) -> list[tuple[str, str]]:
    """Create each, or bring the one of that name up to date; returns (name, what was done)."""
    done = []
    for automation in automations:
        if there := client.read_automations_by_name(automation.name):
            # Whoever paused it wants it to stay so.
            client.update_automation(there[0].id, automation.model_copy(update={"enabled": there[0].enabled}))
        else:
            client.create_automation(automation)
        done.append((automation.name, "updated" if there else "created"))
    return done


@contextlib.contextmanager
def schedules_kept(client: SyncPrefectClient) -> Iterator[None]:
    """What was set on the page stays: `prefect deploy` sets schedules back to what prefect.yaml says."""
    before = [one for one in client.read_deployments() if "drillcore" in one.tags]
    yield
    for deployment in before:
        there = {schedule.slug: schedule.id for schedule in client.read_deployment_schedules(deployment.id)}
        for old in deployment.schedules:
            # One that was made on the page has no slug, and is gone now.
            if old.slug is None or old.slug not in there:
                made = client.create_deployment_schedules(deployment.id, [(old.schedule, old.active)])
                now = made[0].id
            else:
                now = there[old.slug]
            client.update_deployment_schedule(
                deployment.id, now, active=old.active, schedule=old.schedule, parameters=old.parameters
            )


def _block_id(client: SyncPrefectClient, notify: str | None) -> str | None:
    if notify is None:
        return None
    kind, _, name = notify.partition("/")
    try:
        return str(client.read_block_document_by_name(name, kind).id)
    except ObjectNotFound as error:
        raise SetupError(
            f"Prefect at {client.api_url} has no block {notify} (--notify): make it on the page Blocks."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
