"""Gives work to nodes, watches it, and gives it to another node when one fails or is lost.

Knows no Prefect: `Runs` is what it needs of a scheduler. A run's name is made of the fleet, the work and the attempt,
so that a fleet that is started again finds the runs of the one before instead of starting them twice.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tasks.errors import FleetError
from tasks.fleet.settings import FleetConfig
from tasks.fleet.signs import FINAL, Phase, Pulse, RunState, Sight, Verdict, judge
from tasks.storage import Location

Logger = logging.Logger | logging.LoggerAdapter[Any]
AWAY = 90.0  # seconds for which a node that lost a run, or did not take one, gets none that another may have


@dataclass(frozen=True)
class Run:
    """One run that a scheduler has."""

    id: str
    queue: str
    """Of the node that it is for; of an earlier fleet's run, one that this fleet may not have."""


@dataclass(frozen=True)
class Work:
    """What one run is to do."""

    key: str
    """Its name in the fleet, as `partition-0003`."""
    partition: int | None
    """None: verify the whole, and record it."""
    lock: Location
    finished: Callable[[Phase], bool]
    """Whether it is done, by the store, where a run has ended so."""
    records: Callable[[], int] = lambda: 0
    """Commit records that are there."""
    hopeless: Callable[[], str | None] = lambda: None
    """Why another node would fail in the same way; asked when a run failed."""


class Runs(Protocol):
    """A scheduler, as far as it is used here."""

    def start(self, work: Work, node: int, attempt: int) -> Run | None:
        """Ask for a run on a node; the one of that name, if there is one already. None: it cannot be asked now."""

    def state(self, run: Run) -> RunState | None:
        """None: it cannot be asked now."""

    def ready(self, node: int) -> bool:
        """Whether a worker of the node asks for work."""

    def cancel(self, run: Run) -> None: ...


@dataclass
class Job:
    """Work in progress."""

    work: Work
    attempt: int
    run: Run
    node: int | None
    """None: one that this fleet does not have."""
    pulse: Pulse
    said: str = ""
    cancelling: bool = False


@dataclass
class Waiting:
    """Work that no node has."""

    work: Work
    attempt: int = 0
    losses: int = 0
    """Attempts that counted."""
    failed_on: set[int] = field(default_factory=set)
    """Nodes on which a run ended with an error: others are asked first."""
    left: bytes | None = None
    """What a dead run left in the lock."""


class Conductor:
    """Call `step` again and again until `busy` is no more; then `raise_failures`."""

    def __init__(
        self,
        works: Sequence[Work],
        fleet: FleetConfig,
        runs: Runs,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
        refresh: Callable[[], None] = lambda: None,
    ):
        """refresh: called before each look at the runs, for what the works read of the store together."""
        self.fleet, self.runs, self.logger, self._clock, self._refresh = fleet, runs, logger, clock, refresh
        self.waiting: list[Waiting] = []
        self.jobs: list[Job] = []
        self.failures: dict[str, str] = {}
        """Why, by work."""
        self.done: list[str] = []
        self.retries = 0
        self._histories: dict[str, Waiting] = {}
        self._away: dict[int, float] = {}  # until when, by node
        self._blind_since: float | None = None
        for work in works:
            self.add(work)

    def add(self, work: Work) -> None:
        """More work, for nodes of which something is known by now."""
        self._histories[work.key] = waiting = Waiting(work)
        self.waiting.append(waiting)

    @property
    def busy(self) -> bool:
        return bool(self.jobs or self.waiting)

    def step(self) -> None:
        """Look at each run once, then give work to the nodes that are free.

        A store that cannot be read is looked at again in the next step; raises its OSError where that goes on for
        `fleet.silence` seconds. The runs have their own patience with it.
        """
        try:
            self._refresh()
            for job in list(self.jobs):
                self._look(job)
        except OSError as error:
            now = self._clock()
            if self._blind_since is None:
                self._blind_since = now
                self.logger.warning("the store cannot be read: %s. The runs go on; looking again", error)
            if now - self._blind_since >= self.fleet.silence:
                raise
            return
        self._blind_since = None
        self._assign()

    def cancel(self) -> None:
        """End every run."""
        for job in self.jobs:
            self.runs.cancel(job.run)

    def raise_failures(self) -> None:
        """Raises FleetError if something came to no end."""
        if self.failures:
            lines = [f"  {key}: {why}" for key, why in sorted(self.failures.items())]
            raise FleetError(
                f"{len(self.failures)} of {len(self._histories)} could not be finished (fleet.attempts "
                f"{self.fleet.attempts}):\n" + "\n".join(lines) + "\nWhat was committed stays. Mend the cause, and "
                "start the fleet again: it extracts what is missing."
            )

    def _look(self, job: Job) -> None:
        state = self.runs.state(job.run)
        if state is None:
            return
        lock, quiet, still = job.pulse.look(state, job.work.records())
        ended = state.phase in FINAL and lock != "alive"
        late = state.phase == "scheduled" and quiet >= self.fleet.wait_for_worker
        sight = Sight(state, lock, quiet, still, ended and job.work.finished(state.phase), late and self._elsewhere())
        verdict = judge(sight, self.fleet)
        if verdict.reason and verdict.reason != job.said and verdict.action != "done":
            self.logger.warning("%s on %s: %s", job.work.key, job.run.queue, verdict.reason)
            job.said = verdict.reason
        if verdict.action == "cancel" and not job.cancelling:
            job.cancelling = True
            self.runs.cancel(job.run)
        elif verdict.action == "done":
            self.jobs.remove(job)
            self.done.append(job.work.key)
        elif verdict.action in ("retry", "move"):
            self._end(job, state, verdict)

    def _end(self, job: Job, state: RunState, verdict: Verdict) -> None:
        """Take a run from its node; its work waits for another one, or has failed."""
        self.jobs.remove(job)
        if state.phase not in FINAL:
            self.runs.cancel(job.run)
        history = self._histories[job.work.key]
        history.attempt, history.left = job.attempt + 1, job.pulse.content
        if job.node is not None:
            if state.phase == "failed":
                history.failed_on.add(job.node)
            else:
                self._away[job.node] = self._clock() + AWAY
        if verdict.action == "retry":
            self.retries += 1
            history.losses += 1
            hopeless = job.work.hopeless() if state.phase == "failed" else None
            if hopeless or history.losses >= self.fleet.attempts:
                self.failures[job.work.key] = f"{hopeless or verdict.reason} (on {job.run.queue})"
                return
        self.waiting.append(history)

    def _free(self) -> list[int]:
        """Nodes without a run."""
        taken = {job.node for job in self.jobs}
        return [node for node in range(len(self.fleet.nodes)) if node not in taken]

    def _elsewhere(self) -> bool:
        return any(self.runs.ready(node) for node in self._free())

    def _candidates(self, waiting: Waiting) -> list[int]:
        """Free nodes for this work. Nodes that failed it or were lost get it only where there are no others."""
        now = self._clock()
        free, away = self._free(), {node for node, until in self._away.items() if until > now}
        good = set(range(len(self.fleet.nodes))) - waiting.failed_on - away
        return [node for node in free if node in good] if good else sorted(free, key=lambda node: node in away)

    def _assign(self) -> None:
        for waiting in list(self.waiting):
            if not (nodes := self._candidates(waiting)):
                continue
            chosen = next((node for node in nodes if self.runs.ready(node)), nodes[0])
            run = self.runs.start(waiting.work, chosen, waiting.attempt)
            if run is None:
                return
            self.waiting.remove(waiting)
            queues = [node.queue for node in self.fleet.nodes]
            # Another one than was asked for, where an earlier fleet has asked already.
            node = queues.index(run.queue) if run.queue in queues else None
            pulse = Pulse(waiting.work.lock, self._clock, waiting.left)
            self.jobs.append(Job(waiting.work, waiting.attempt, run, node, pulse))
            self.logger.info("%s goes to %s", waiting.work.key, run.queue)
