"""Decides when a row may go to a server, and to which: one limit for the whole run, whatever batch asks."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What a row takes up: at the server (requests, tokens) and in staging (bytes)."""

    requests: int
    tokens: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Turn:
    """Somebody who waits."""

    load: Load
    alone: bool
    comes: "asyncio.Future[int]"


@dataclass
class Usage:
    """Where the servers' time went, in seconds of one server, from the first row admitted to the last.

    What comes after the last row is no part of it: nothing was left to send.
    """

    full: float = 0.0
    """As many requests or tokens at the server as it may have, and rows waiting."""
    blocked: float = 0.0
    """Room at the server, rows waiting, but no room in staging, or in the spool of an upload: the output is slower
    than the server."""
    starved: float = 0.0
    """Room at the server and no row waiting: too few batches at a time, or reading the dataset is slow."""
    lost: float = 0.0
    """Dead or stuck, until it was back."""
    requests: float = 0.0
    """At the server, times seconds."""
    tokens: float = 0.0
    """The same."""

    @property
    def seconds(self) -> float:
        return self.full + self.blocked + self.starved + self.lost

    def add(self, other: "Usage") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def shares(self) -> dict[str, float]:
        """Shares of the time, and what was in flight on average; empty before a second row was admitted."""
        if not self.seconds:
            return {}
        return {name: value / self.seconds for name, value in vars(self).items()}


@dataclass
class Place:
    """One server as admission sees it."""

    requests: int = 0
    tokens: int = 0
    open: bool = True
    alone: bool = False
    """What is at the server wants nothing beside it."""


class Admission:
    """First come, first served, so that a long row is never overtaken for ever. For one event loop.

    A row goes to the server that has the fewest tokens. A row alone is always admitted, so that no row is too large to
    ever run: preflight has checked that it fits.
    """

    def __init__(self, limit: Load, servers: int = 1, clock: Callable[[], float] = time.monotonic):
        """limit: requests and tokens of each server, bytes of all together; clock: seconds."""
        self.limit = limit
        self.places = [Place() for _ in range(servers)]
        self.bytes = 0  # in staging, of all servers
        self.usage = Usage()
        self._held = 0  # batches whose rows wait elsewhere, for room in the spool
        self._waiting: deque[Turn] = deque()
        self._clock, self._since = clock, clock()
        self._begun, self._pending = False, Usage()  # whether a row was admitted; time since the last one was

    @property
    def used(self) -> Load:
        """Of all servers together."""
        places = self.places
        return Load(sum(place.requests for place in places), sum(place.tokens for place in places), self.bytes)

    def load_of(self, server: int) -> Load:
        """What is at one server; bytes: in staging, of all."""
        place = self.places[server]
        return Load(place.requests, place.tokens, self.bytes)

    async def enter(self, load: Load, alone: bool = False, first: bool = False) -> int:
        """Wait until `load` fits, then take it; returns the number of the server that it may go to.

        alone: with nothing else at the server. first: before all others that wait; so is who wants to be alone.
        """
        turn = Turn(load, alone, asyncio.get_running_loop().create_future())
        self._count_time()
        if alone or first:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        self._admit()
        try:
            return await turn.comes
        except asyncio.CancelledError:
            if turn.comes.done() and not turn.comes.cancelled():
                self.leave(turn.comes.result(), load)
            else:
                self._count_time()
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._admit()
            raise

    def leave(self, server: int, load: Load) -> None:
        """Give `load`, or a part of it, back."""
        self._count_time()
        place = self.places[server]
        place.requests -= load.requests
        place.tokens -= load.tokens
        self.bytes -= load.bytes
        if place.requests == 0:
            place.alone = False
        self._admit()

    def hold(self, change: int) -> None:
        """So many batches more, or fewer, cannot send their rows here: the output has no room for them."""
        self._count_time()
        self._held += change

    def close(self, server: int) -> None:
        """Send nothing more to a server, until `reopen`."""
        self._count_time()
        self.places[server].open = False

    def reopen(self, server: int) -> None:
        """The server is back."""
        self._count_time()
        self.places[server].open = True
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (server := self._place_for(self._waiting[0])) is not None:
            turn = self._waiting.popleft()
            if turn.comes.cancelled():
                continue
            place = self.places[server]
            place.requests += turn.load.requests
            place.tokens += turn.load.tokens
            place.alone = turn.alone
            self.bytes += turn.load.bytes
            if self._begun:
                self.usage.add(self._pending)
            self._begun, self._pending = True, Usage()
            turn.comes.set_result(server)

    def _place_for(self, turn: Turn) -> int | None:
        """The server for a turn; None if it has to wait."""
        if not self._fits_staging(turn.load):
            return None
        fitting = [server for server, place in enumerate(self.places) if self._fits(place, turn)]
        return min(fitting, key=lambda server: self.places[server].tokens, default=None)

    def _fits_staging(self, load: Load) -> bool:
        return not self.bytes or self.bytes + load.bytes <= self.limit.bytes

    def _fits(self, place: Place, turn: Turn) -> bool:
        if not place.open or place.alone:
            return False
        if not place.requests:
            return True
        return (
            not turn.alone
            and place.requests + turn.load.requests <= self.limit.requests
            and place.tokens + turn.load.tokens <= self.limit.tokens
        )

    def _count_time(self) -> None:
        """Account for the time since the last change; call it before every change."""
        now = self._clock()
        passed, self._since = now - self._since, now
        spent = self._pending
        for place in self.places:
            if not place.open:
                spent.lost += passed
            elif not self._waiting:
                if self._held:
                    spent.blocked += passed
                else:
                    spent.starved += passed
            elif self._fits(place, self._waiting[0]):
                spent.blocked += passed
            else:
                spent.full += passed
            spent.requests += place.requests * passed
            spent.tokens += place.tokens * passed
