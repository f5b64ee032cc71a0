"""Decides when a row may go to the server: one limit for the whole run, whatever batch asks."""

import asyncio
from collections import deque
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
    comes: "asyncio.Future[None]"


class Admission:
    """First come, first served, so that a long row is never overtaken for ever. For one event loop.

    A row alone is always admitted, so that no row is too large to ever run: preflight has checked that it fits.
    """

    def __init__(self, limit: Load):
        self.limit = limit
        self.used = Load(0, 0, 0)
        self._waiting: deque[Turn] = deque()
        self._alone = False  # whether what is at the server wants nothing beside it

    async def enter(self, load: Load, alone: bool = False) -> None:
        """Wait until `load` fits, then take it. alone: before all others that wait, with nothing else at the server."""
        turn = Turn(load, alone, asyncio.get_running_loop().create_future())
        if alone:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        self._admit()
        try:
            await turn.comes
        except asyncio.CancelledError:
            if turn.comes.done() and not turn.comes.cancelled():
                self.leave(load)
            else:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._admit()
            raise

    def leave(self, load: Load) -> None:
        """Give `load`, or a part of it, back."""
        used = self.used
        self.used = Load(used.requests - load.requests, used.tokens - load.tokens, used.bytes - load.bytes)
        if self.used.requests == 0:
            self._alone = False
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            turn = self._waiting.popleft()
            if turn.comes.cancelled():
                continue
            used, load = self.used, turn.load
            self.used = Load(used.requests + load.requests, used.tokens + load.tokens, used.bytes + load.bytes)
            self._alone = turn.alone
            turn.comes.set_result(None)

    def _fits(self, turn: "Turn") -> bool:
        used, limit, load = self.used, self.limit, turn.load
        if self._alone or (turn.alone and used.requests):
            return False
        return used == Load(0, 0, 0) or (
            used.requests + load.requests <= limit.requests
            and used.tokens + load.tokens <= limit.tokens
            and used.bytes + load.bytes <= limit.bytes
        )
