"""Keeps a server alive: finds out whether it is well when something failed, and has it back if it is not.

For one event loop. Everybody who was waiting for the server waits here, on one ready event; one look at the server and
one restart at a time, whoever asks.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tasks.errors import ServerError, ServerGoneError
from tasks.server.launch import Server

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restarts:
    """What to do when a server is lost."""

    most: int
    """So many restarts within `window`; the next loss ends the run."""
    window: float
    """Seconds."""
    check: Callable[[Server], object]
    """Looks whether the server that came back is set up as before; raises ServerError if not."""


NO_RESTART = Restarts(0, 1.0, lambda server: None)


class Supervisor:
    """One server's lives. `generation` counts them: who sees another one than before knows that the server was lost."""

    def __init__(self, server: Server, restarts: Restarts, on_change: Callable[[bool], None] = lambda there: None):
        """on_change: told False when the server is lost, True when it is back."""
        self.server = server
        self.restarts = restarts
        self.generation = 0
        self.gone: ServerGoneError | None = None
        """Why the server cannot be had back."""
        self._on_change = on_change
        self._ready = asyncio.Event()
        self._ready.set()
        self._healing: asyncio.Task[None] | None = None
        self._recent: deque[float] = deque()  # moments of restarts

    async def ready(self) -> int:
        """Wait until the server is there; returns its generation. Raises ServerGoneError if it cannot be had back."""
        await self._ready.wait()
        if self.gone is not None:
            raise self.gone
        return self.generation

    async def suspect(self, generation: int, reason: str, deadline: float) -> None:
        """Something failed while the server lived its life `generation`: return when it is surely there.

        deadline: seconds in which a healthy server answers one more prefill. Raises ServerGoneError if it cannot be
        had back: too many restarts, or it came back set up otherwise.
        """
        if self._healing is None:
            if generation != self.generation:
                return  # it was lost and has come back since
            self._healing = asyncio.create_task(self._heal(reason, deadline))
        await asyncio.shield(self._healing)

    async def _heal(self, reason: str, deadline: float) -> None:
        try:
            ailment = await asyncio.to_thread(self.server.ailment, deadline)
            if ailment is None:
                return
            logger.warning("the server at %s is lost (%s): %s", self.server.url, reason, ailment)
            self._ready.clear()
            self.generation += 1
            self._on_change(False)
            while True:
                self._count_restart(ailment)
                try:
                    await asyncio.to_thread(self.server.restart)
                    break
                except ServerError as error:
                    ailment = str(error)
                    logger.warning("the server did not come back: %s", ailment)
            await asyncio.to_thread(self.restarts.check, self.server)
            logger.warning("the server is back at %s (restart %d)", self.server.url, self.generation)
            self._on_change(True)
        except Exception as error:  # whatever it is, nobody may wait for this server any more
            self.gone = ServerGoneError(str(error) if isinstance(error, ServerError) else repr(error))
            raise self.gone from error
        finally:
            self._ready.set()  # who waits goes on, or is told
            self._healing = None

    def _count_restart(self, ailment: str) -> None:
        if not self.restarts.most:
            raise ServerError(ailment)
        now = time.monotonic()
        while self._recent and self._recent[0] < now - self.restarts.window:
            self._recent.popleft()
        if len(self._recent) >= self.restarts.most:
            raise ServerError(
                f"The server was restarted {len(self._recent)} times within {self.restarts.window:.0f} s and is lost "
                f"again (server.max_restarts, server.restart_window). {ailment}"
            )
        self._recent.append(now)
