"""What people ask of a flow that runs: to pause, to be cancelled. It looks at its own state, since nobody tells it.

A cancelled run is ended by its worker; where that is gone, the flow does it. `Pause` on Prefect's page only writes a
state: the flow ends because it sees it, and `Resume` has a worker start the same run again.
"""

import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, Pause
from prefect.runtime import flow_run
from prefect.states import Cancelled

WORKERS_TURN = 15.0  # seconds that a worker has to end a cancelled run


class Orders:
    """Looks at the state of the flow run that this is; `look` as often as you like, in any thread with its context."""

    def __init__(self) -> None:
        self.order: Pause | Abort | None = None
        """What the flow must raise to end as it was asked to; None while nobody asked."""
        self._cancelled: float | None = None

    def look(self) -> None:
        """Ask the API. Raises what its client raises."""
        if flow_run.id is None:
            return
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run.id).state
            self._follow(state)
            if isinstance(self.order, Abort) and state and state.is_cancelling():
                client.set_flow_run_state(
                    flow_run.id, Cancelled(message="No worker was there, so the flow ended itself.")
                )

    def _follow(self, state: State | None) -> None:
        if state is None:
            return
        if state.is_paused():
            self.order = Pause("paused: what was committed stays, Resume goes on from there", state=state)
        elif state.is_cancelled():
            self.order = Abort("cancelled: what was committed stays")
        elif state.is_cancelling():
            self._cancelled = self._cancelled or time.monotonic()
            if time.monotonic() - self._cancelled > WORKERS_TURN:
                self.order = Abort("cancelled: what was committed stays")
