"""One server as the engine uses it: a prefill goes out, its dump comes back, and silence is noticed."""

import asyncio
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from tasks.config import ExtractionConfig
from tasks.errors import RowError, ServerError, ServerLostError, TransientPrefillError
from tasks.extraction.admission import Load
from tasks.model import ITEMSIZE
from tasks.server.dumps import Captured, Dump, is_behind, open_dump
from tasks.server.launch import Server
from tasks.server.supervisor import Restarts, Supervisor

DUMP_DEADLINE = 60.0  # seconds from the server's answer to the dump; seen: at most 0.1
SLOWEST_STAGING = 50e6  # bytes a second: dumps of everything in flight may be written before this one
CONNECT_TIMEOUT = 30.0  # seconds
IDLE = 4.0  # seconds after which a connection is not used again: the server closes its own after 5
BASE_TIMEOUT = 120.0  # seconds, for the shortest row
LATE = 60.0  # seconds after which the dump of a prefill that was given up is looked for once more
BEHIND, MOST_BEHIND = 0.02, 600.0  # seconds between looks whether the plugin's writers have caught up; in all
# A server is looked at when nothing came back for as long as this, and for so many times the longest prefill so far.
SILENCE, SILENCE_FACTOR = 60.0, 10.0  # seconds; a number
LOOK = 1.0  # seconds between looks at the clock
OPENED_AT_ONCE = 1 << 20  # bytes of a dump that is opened within the loop: another thread takes longer to wake up


@dataclass(frozen=True)
class Answer:
    """What the server says to a request."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The beginning, for people."""
        return self.content[:500].decode(errors="replace")


class Lane:
    """Sends prefills to one server. For one event loop, inside which it is opened and closed.

    What is in flight is the engine's to decide.
    """

    def __init__(
        self,
        server: Server,
        captured: Captured,
        config: ExtractionConfig,
        restarts: Restarts,
        in_flight: Callable[[], Load],
        on_change: Callable[[bool], None],
    ):
        """restarts: what to do when the server is lost. in_flight: what is at the server and in staging now; timeouts
        follow from it. on_change: told False when the server is lost, True when it is back.
        """
        self.server = server
        self.captured = captured
        self.supervisor = Supervisor(server, restarts, on_change)
        self.behind_seconds = 0.0
        """That the plugin's writers asked to be sent nothing new."""
        self._slowest = config.slowest_tokens_per_second
        self._token_bytes = (len(captured.layers) + 1) * captured.hidden_size * ITEMSIZE[captured.dtype]
        self._in_flight = in_flight
        self._looked, self._behind = -math.inf, False  # when the plugin's mark was looked for last; was it there
        self._last_sign = time.monotonic()  # of life: something came back from the server
        self._longest_prefill = 0.0  # seconds, from the sending to the dump
        self._client: aiohttp.ClientSession

    async def open(self) -> None:
        """Before anything is sent."""
        # With 64 requests in flight httpx takes 4 ms of processor time for each, this 0.2 (measured).
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE))

    async def prefill(self, request: str, ids: np.ndarray) -> Dump:
        """One try. `request` has the form of patches/capture/drillcore_capture.py's REQUEST_ID.

        Raises RowError, TransientPrefillError, ServerLostError, or ServerError if the server is gone for good.
        """
        generation = await self.supervisor.ready()
        path = self.server.staging / f"{request}.safetensors"
        try:
            await self._wait_for_writers()
            started = time.monotonic()
            await self.post(request, ids, {}, generation)
            await self._wait_for_dump(path, generation)
            self._longest_prefill = max(self._longest_prefill, time.monotonic() - started)
            if len(ids) * self._token_bytes <= OPENED_AT_ONCE:
                return open_dump(path, ids, self.captured)
            return await asyncio.to_thread(open_dump, path, ids, self.captured)
        except BaseException:
            for late in (path, _error_of(path)):
                late.unlink(missing_ok=True)
                asyncio.get_running_loop().call_later(LATE, functools.partial(late.unlink, missing_ok=True))
            raise

    async def post(self, request: str, ids: np.ndarray, extra: dict[str, Any], generation: int | None = None) -> Answer:
        """Send a prompt; `extra` goes into the request's body. Raises as `prefill`."""
        generation = self.supervisor.generation if generation is None else generation
        body = {
            "rid": request,
            "input_ids": np.ascontiguousarray(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            **extra,
        }
        timeout = BASE_TIMEOUT + (self._in_flight().tokens + len(ids)) / self._slowest
        try:
            async with self._client.post(
                f"{self.server.url}/generate",
                data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT),
            ) as response:
                answer = Answer(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = f"{type(error).__name__} after at most {timeout:.0f} s: {error}"
            await self.supervisor.suspect(generation, reason, self._patience())
            if self.supervisor.generation != generation:
                raise ServerLostError(reason) from error
            raise TransientPrefillError(reason) from error
        self._last_sign = time.monotonic()
        if answer.status == 400:
            raise RowError(f"the server refused the row: {answer.text}")
        if answer.status >= 500 or answer.status == 429:
            raise TransientPrefillError(f"HTTP {answer.status}: {answer.text}")
        if answer.status != 200:
            raise ServerError(f"The server answered HTTP {answer.status} to a prefill: {answer.text}")
        return answer

    async def watch_silence(self) -> None:
        """Suspect a server from which nothing comes back although it has work: it may hang without dying.

        Raises ServerError once the server is gone for good.
        """
        while True:
            await asyncio.sleep(LOOK)
            generation = await self.supervisor.ready()
            if not self._in_flight().requests:
                self._last_sign = time.monotonic()
            elif time.monotonic() - self._last_sign > self._patience():
                reason = f"nothing came back for {self._patience():.0f} s"
                await self.supervisor.suspect(generation, reason, self._patience())
                self._last_sign = time.monotonic()

    async def close(self, run: str) -> None:
        """Remove what is left of a run's dumps; `run` is the second part of its request ids."""
        for late in self.server.staging.glob(f"drillcore-{run}-*"):
            late.unlink(missing_ok=True)
        await self._client.close()

    async def _wait_for_dump(self, path: Path, generation: int) -> None:
        deadline = time.monotonic() + DUMP_DEADLINE + self._in_flight().bytes / SLOWEST_STAGING
        pause = 0.001
        while not path.exists():
            if (error_path := _error_of(path)).exists():
                raise TransientPrefillError(f"the capture failed: {orjson.loads(error_path.read_bytes())['error']}")
            if self.supervisor.generation != generation:
                raise ServerLostError("the server was lost before the dump came")
            if time.monotonic() > deadline:
                raise TransientPrefillError("the server answered, but no dump came")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)

    async def _wait_for_writers(self) -> None:
        """Wait while the plugin asks for it. One look serves all rows that wait."""
        deadline = time.monotonic() + MOST_BEHIND
        while True:
            if (now := time.monotonic()) > self._looked + BEHIND:
                if self._behind:
                    self.behind_seconds += min(now - self._looked, 2 * BEHIND)  # nobody may have been waiting
                self._looked, self._behind = now, is_behind(self.server.staging)
            if not self._behind:
                return
            if now > deadline:
                raise TransientPrefillError(f"the plugin's writers have been behind for {MOST_BEHIND:.0f} s")
            await asyncio.sleep(BEHIND)

    def _patience(self) -> float:
        """Seconds of silence that a healthy server does not reach."""
        return max(SILENCE, SILENCE_FACTOR * self._longest_prefill)


def _error_of(dump: Path) -> Path:
    """Where the plugin says why there is no dump."""
    return dump.with_suffix(".error.json")
