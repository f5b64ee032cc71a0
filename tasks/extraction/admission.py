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


class Admission:
    """First come, first served, so that a long row is never overtaken for ever. For one event loop.

    A row alone is always admitted, so that no row is too large to ever run: preflight has checked that it fits.
    """

    def __init__(self, limit: Load):
        self.limit = limit
        self.used = Load(0, 0, 0)
        self._waiting: deque[tuple[Load, asyncio.Future[None]]] = deque()

    async def enter(self, load: Load) -> None:
        """Wait until `load` fits, then take it."""
        if not self._waiting and self._fits(load):
            self._take(load)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((load, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(load)
            else:
                if (load, turn) in self._waiting:
                    self._waiting.remove((load, turn))
                self._admit()
            raise

    def leave(self, load: Load) -> None:
        """Give `load`, or a part of it, back."""
        used = self.used
        self.used = Load(used.requests - load.requests, used.tokens - load.tokens, used.bytes - load.bytes)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            load, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._take(load)
            turn.set_result(None)

    def _fits(self, load: Load) -> bool:
        used, limit = self.used, self.limit
        return used == Load(0, 0, 0) or (
            used.requests + load.requests <= limit.requests
            and used.tokens + load.tokens <= limit.tokens
            and used.bytes + load.bytes <= limit.bytes
        )

    def _take(self, load: Load) -> None:
        used = self.used
        self.used = Load(used.requests + load.requests, used.tokens + load.tokens, used.bytes + load.bytes)
