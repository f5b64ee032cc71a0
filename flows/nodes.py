"""The nodes of a fleet as Prefect knows them: deployment runs on work queues."""

import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling

from tasks.config import ExtractConfig
from tasks.errors import FleetError, SetupError
from tasks.fleet.conduct import Logger, Run, Work
from tasks.fleet.settings import FleetConfig
from tasks.fleet.signs import Phase, RunState

POLLED = 60.0  # seconds within which a worker that is there has asked its queue for work
PHASES: dict[StateType, Phase] = {
    StateType.SCHEDULED: "scheduled",
    StateType.PENDING: "pending",
    StateType.RUNNING: "running",
    StateType.PAUSED: "running",
    StateType.CANCELLING: "cancelling",
    StateType.COMPLETED: "completed",
    StateType.FAILED: "failed",
    StateType.CRASHED: "crashed",
    StateType.CANCELLED: "cancelled",
}
Result = TypeVar("Result")


def tag_of(fleet: str) -> str:
    """The tag of a fleet's runs, and of the run that leads them."""
    return f"fleet-{fleet}"


class PrefectRuns:
    """`tasks.fleet.conduct.Runs`. While the API is away nothing is known and nothing started; the runs go on."""

    def __init__(self, configs: list[ExtractConfig], settings: FleetConfig, fleet: str, logger: Logger):
        """configs: a node's each. Raises SetupError if there is no such deployment."""
        self.configs, self.settings, self.fleet, self.logger = configs, settings, fleet, logger
        self._away = False
        with get_client(sync_client=True) as client:
            try:
                deployment = client.read_deployment_by_name(settings.deployment)
            except ObjectNotFound as error:
                raise SetupError(
                    f"Prefect at {client.api_url} has no deployment {settings.deployment} (fleet.deployment): "
                    "`prefect --no-prompt deploy --all` makes it."
                ) from error
        if deployment.work_pool_name is None:
            raise SetupError(f"The deployment {settings.deployment} has no work pool, so no queues (fleet.deployment).")
        self.pool = deployment.work_pool_name

    def start(self, work: Work, node: int, attempt: int) -> Run | None:
        parameters: dict[str, Any] = {"config": json.loads(self.configs[node].model_dump_json())}
        if work.partition is not None:
            parameters["partition"] = {"fleet": self.fleet, "number": work.partition}
        queue = self.settings.nodes[node].queue
        found: Any = self._ask(
            lambda: run_deployment(
                self.settings.deployment,
                parameters=parameters,
                timeout=0,
                flow_run_name=f"{self.configs[node].name}-{work.key}",
                tags=[tag_of(self.fleet), work.key],
                idempotency_key=f"{self.fleet} {work.key} {attempt}",
                work_queue_name=queue,
            )
        )
        return Run(str(found.id), found.work_queue_name or queue) if found else None

    def state(self, run: Run) -> RunState | None:
        def read() -> RunState:
            with get_client(sync_client=True) as client:
                try:
                    state = client.read_flow_run(UUID(run.id)).state
                except ObjectNotFound:
                    return RunState("crashed", "its flow run was deleted")
            if state is None:
                return RunState("scheduled")
            return RunState(PHASES[state.type], state.message or "")

        return self._ask(read)

    def ready(self, node: int) -> bool:
        def read() -> bool:
            with get_client(sync_client=True) as client:
                try:
                    queue = client.read_work_queue_by_name(self.settings.nodes[node].queue, self.pool)
                except ObjectNotFound:
                    return False
            polled = queue.last_polled
            return polled is not None and (datetime.now(UTC) - polled).total_seconds() < POLLED

        return bool(self._ask(read))

    def cancel(self, run: Run) -> None:
        """A worker that is there ends the process; where none is, Prefect calls the run cancelled after a while."""

        def ask() -> None:
            with get_client(sync_client=True) as client, contextlib.suppress(ObjectNotFound):
                client.set_flow_run_state(UUID(run.id), Cancelling(message="The fleet gave it up."))

        self._ask(ask)

    def _ask(self, question: Callable[[], Result]) -> Result | None:
        """The answer; None while the API is away. Raises FleetError where it refuses what is asked."""
        try:
            answer = question()
        except PrefectHTTPStatusError as error:
            if error.response.status_code < 500:
                raise FleetError(
                    f"Prefect refused what the fleet asked for: {error}. Nothing more is started."
                ) from error
            self._lost(error)
            return None
        except (httpx.HTTPError, OSError) as error:
            self._lost(error)
            return None
        if self._away:
            self.logger.info("the Prefect API is back")
            self._away = False
        return answer

    def _lost(self, error: Exception) -> None:
        if not self._away:
            self.logger.warning("the Prefect API does not answer: %s. The runs go on; asking again", error)
        self._away = True
