"""Signs of life of one run, and what is to be done about it.

What a scheduler says of a run is only a hint: it calls runs dead that write on, and alive that are gone. A run that
holds its lock and renews it is alive, whatever is said of it.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tasks.fleet.settings import FleetConfig
from tasks.processes import is_dead
from tasks.storage import Location
from tasks.store.lock import STALE, parse_lock, read_lock

Phase = Literal["scheduled", "pending", "running", "cancelling", "completed", "failed", "crashed", "cancelled"]
FINAL = ("completed", "failed", "crashed", "cancelled")
LockState = Literal["absent", "alive", "dead"]
Action = Literal["wait", "done", "retry", "move", "cancel"]


@dataclass(frozen=True)
class RunState:
    """What the scheduler says of a run."""

    phase: Phase
    message: str = ""


@dataclass(frozen=True)
class Sight:
    """All that is known of a run at one moment."""

    state: RunState
    lock: LockState
    quiet: float
    """Seconds since anything changed: state, lock or commit records."""
    still: float
    """Seconds since something was achieved: state, lock taken or given back, commit records."""
    finished: bool = False
    """Whether what the run was for is done, by the store. Looked up of ended runs only."""
    elsewhere: bool = False
    """Whether another node is free."""


@dataclass(frozen=True)
class Verdict:
    action: Action
    """retry: a new run, which counts as an attempt. move: a new run, as this one never began. cancel: end this one
    first."""
    reason: str = ""


def judge(sight: Sight, patience: FleetConfig) -> Verdict:
    """What to do about a run."""
    phase, message = sight.state.phase, sight.state.message.strip()
    if phase in FINAL:
        if sight.lock == "alive":
            return Verdict("wait", f"it is called {phase}, but its process goes on")
        if sight.finished:
            return Verdict("done")
        if phase == "completed":
            return Verdict("retry", "it ended, but by the store it is not done")
        return Verdict("retry", f"{phase}: {message}" if message else phase)
    if phase == "cancelling":
        return Verdict("wait") if sight.lock == "alive" else Verdict("retry", "it was cancelled")
    if phase == "scheduled":
        if sight.quiet >= patience.wait_for_worker and sight.elsewhere:
            return Verdict("move", f"no worker took it for {sight.quiet:.0f} s")
        return Verdict("wait")
    if sight.lock == "dead":
        return Verdict("retry", "its process died, or its node was lost")
    if sight.lock == "absent" and sight.quiet >= patience.silence:
        return Verdict("retry", f"no sign of life for {sight.quiet:.0f} s")
    if sight.lock == "alive" and sight.still >= patience.stuck_after:
        return Verdict("cancel", f"it committed nothing for {sight.still:.0f} s")
    return Verdict("wait")


class Pulse:
    """Watches one run's state, lock and commit records by the clock of whoever watches."""

    def __init__(self, lock: Location, clock: Callable[[], float] = time.monotonic, left: bytes | None = None):
        """left: what the lock held when its owner before was found dead; it says nothing of this run."""
        self.lock, self._clock, self._left = lock, clock, left
        self.content: bytes | None = None
        """Of the lock, when it was looked at last."""
        self._achieved: tuple[object, ...] = ()
        self._beat = self._changed = self._progress = clock()

    def look(self, state: RunState, records: int) -> tuple[LockState, float, float]:
        """Lock, `quiet` and `still` of a Sight; records: commit records of the run's batches."""
        now, content = self._clock(), _held(self.lock)
        achieved = (state.phase, content is None, records)
        if content != self.content:
            self.content, self._beat, self._changed = content, now, now
        if achieved != self._achieved:
            self._achieved, self._progress, self._changed = achieved, now, now
        return self._lock_state(now), now - self._changed, now - self._progress

    def _lock_state(self, now: float) -> LockState:
        if self.content is None or self.content == self._left:
            return "absent"
        owner = parse_lock(self.content)
        dead = is_dead(owner) if owner else None
        if dead is None:  # of another host: by its heartbeat
            dead = now - self._beat > STALE
        return "dead" if dead else "alive"


def _held(lock: Location) -> bytes | None:
    """A lock's content; None where nobody holds it: in a bucket it stays, and says so."""
    content = read_lock(lock)
    if content is None:
        return None
    try:
        return None if json.loads(content).get("released") is True else content
    except (ValueError, AttributeError):
        return content
