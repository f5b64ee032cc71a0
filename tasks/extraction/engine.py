"""Sends rows to the server and hands back their dumps. One event loop in one thread serves all batches."""

import asyncio
import functools
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import orjson
import tenacity

from tasks.config import ExtractionConfig
from tasks.errors import DrillcoreError, RowError, ServerError, ServerLostError, TransientPrefillError
from tasks.extraction.admission import Admission, Load
from tasks.model import ITEMSIZE
from tasks.server.dumps import Captured, Dump, is_behind, open_dump
from tasks.server.launch import Server
from tasks.server.supervisor import NO_RESTART, Restarts, Supervisor

DUMP_DEADLINE = 60.0  # seconds from the server's answer to the dump; seen: at most 0.1
SLOWEST_STAGING = 50e6  # bytes a second: dumps of everything in flight may be written before this one
BASE_TIMEOUT = 120.0  # seconds, for the shortest row
LATE = 60.0  # seconds after which the dump of a prefill that was given up is looked for once more
BEHIND, MOST_BEHIND = 0.02, 600.0  # seconds between looks whether the plugin's writers have caught up; in all
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between the tries of a prefill
# A server is looked at when nothing came back for as long as this, and for so many times the longest prefill so far.
SILENCE, SILENCE_FACTOR = 60.0, 10.0  # seconds; a number
LOOK = 1.0  # seconds between looks at the clock
# So often may the server die while a row is there; then the row is tried with nothing else beside it.
MOST_DEATHS = 2


@dataclass
class Progress:
    """What was done so far, for people to see. Written by the engine and the batches, read by anybody."""

    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    failed: int = 0
    retries: int = 0
    in_flight: int = 0
    restarts: int = 0


class PrefillEngine:
    """Prefills within limits. A context manager: leaving it cancels what is not done."""

    def __init__(
        self,
        server: Server,
        captured: Captured,
        config: ExtractionConfig,
        staging_bytes: int,
        restarts: Restarts = NO_RESTART,
    ):
        """staging_bytes: most bytes of dumps at once. restarts: what to do when the server is lost."""
        self.server = server
        self.captured = captured
        self.config = config
        self.progress = Progress()
        self.run = secrets.token_hex(4)  # dumps of an earlier run in the same staging directory are not ours
        self._numbers = itertools.count()
        self._failures_in_a_row = 0
        self._looked, self._behind = -math.inf, False  # when the plugin's mark was looked for last; was it there
        self._closed: Exception | None = None
        self._tasks: dict[Future[Dump], asyncio.Task[Dump]] = {}
        self._lock = threading.Lock()
        self._admission = Admission(Load(config.requests_in_flight, config.tokens_in_flight, staging_bytes))
        self._supervisor = Supervisor(server, restarts)
        self._last_sign = time.monotonic()  # of life: something came back from the server
        self._longest_prefill = 0.0  # seconds, from the sending to the dump
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prefill-engine", daemon=True)
        self._client = httpx.AsyncClient(
            base_url=server.url,
            trust_env=False,  # a proxy between us and loopback helps nobody
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=config.requests_in_flight),
        )

    def __enter__(self) -> "PrefillEngine":
        self._thread.start()
        self._watch = asyncio.run_coroutine_threadsafe(self._watch_silence(), self._loop)
        return self

    def __exit__(self, *exception: object) -> None:
        self._watch.cancel()
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def close(self, reason: Exception | None = None) -> None:
        """Cancel what is in flight and refuse what comes: every future, old or new, raises `reason`."""
        self._closed = self._closed or reason or ServerError("the extraction was ended")
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    def submit(self, row: int, ids: np.ndarray) -> "Future[Dump]":
        """Prefill one row when there is room. `release` its dump when done with it.

        The future raises RowError (this row cannot be had), TransientPrefillError (all tries failed), or ServerError.
        """
        outcome: Future[Dump] = Future()
        if self._closed is not None:
            outcome.set_exception(self._closed)
            return outcome
        self._loop.call_soon_threadsafe(self._start, outcome, row, ids)
        return outcome

    def release(self, dump: Dump) -> None:
        """Delete a dump and give its staging bytes back."""
        dump.delete()
        self._call(self._admission.leave, Load(0, 0, dump.aux.nbytes + dump.last.nbytes))

    def discard(self, outcome: "Future[Dump]") -> None:
        """Cancel a prefill that nobody waits for any more; a dump that is there already is released."""
        if not self._call(self._discard, outcome):
            self._discard(outcome)  # the loop has ended, so nothing changes any more

    def _call(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Run something in the loop soon; False if the engine was left."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    def _start(self, outcome: "Future[Dump]", row: int, ids: np.ndarray) -> None:
        if self._closed is not None:
            outcome.set_exception(self._closed)
            return
        task = self._loop.create_task(self._prefill(row, ids))
        self._tasks[outcome] = task
        task.add_done_callback(functools.partial(self._finish, outcome))

    def _finish(self, outcome: "Future[Dump]", task: "asyncio.Task[Dump]") -> None:
        self._tasks.pop(outcome, None)
        error = ServerError("the prefill was cancelled") if task.cancelled() else task.exception()
        if not outcome.set_running_or_notify_cancel():  # discarded
            if error is None:
                self.release(task.result())
        elif error is not None:
            outcome.set_exception(self._closed or error)
        else:
            outcome.set_result(task.result())

    def _discard(self, outcome: "Future[Dump]") -> None:
        if outcome.cancel():
            if task := self._tasks.get(outcome):
                task.cancel()
        elif outcome.exception() is None:
            self.release(outcome.result())

    def top_tokens(self, ids: np.ndarray) -> list[int]:
        """The server's own most likely next token after each position of a prompt, by its input log-probabilities."""
        body = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        answer = asyncio.run_coroutine_threadsafe(
            self._post("probe-top-tokens", ids, body, self._supervisor.generation), self._loop
        ).result()
        meta = orjson.loads(answer.content)["meta_info"]
        tops = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
        return [position[0][1] for position in tops]

    def count(self, *, rows: int = 0, tokens: int = 0, bytes: int = 0, failed: int = 0, retries: int = 0) -> None:
        """Add to the progress; for any thread."""
        with self._lock:
            self.progress.rows += rows
            self.progress.tokens += tokens
            self.progress.bytes += bytes
            self.progress.failed += failed
            self.progress.retries += retries

    async def _prefill(self, row: int, ids: np.ndarray) -> Dump:
        states = len(self.captured.layers) + 1
        dump_bytes = len(ids) * states * self.captured.hidden_size * ITEMSIZE[self.captured.dtype]
        load = Load(1, len(ids), dump_bytes)
        try:
            try:
                dump = await self._admitted(load, row, ids, alone=False)
            except ServerLostError:
                # It died twice while this row was there. Alone, the row is the cause or it is not.
                dump = await self._admitted(load, row, ids, alone=True)
        except ServerLostError as error:
            failure: DrillcoreError = RowError(
                f"the server was lost {MOST_DEATHS} times while this row was there, and once more with nothing else "
                f"beside it: {error}"
            )
        except (RowError, TransientPrefillError) as error:
            failure = error
        else:
            self._failures_in_a_row = 0
            return dump
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self.config.max_failures_in_a_row:
            raise ServerError(
                f"{self._failures_in_a_row} rows failed one after the other, at last: {failure}"
            ) from failure
        raise failure

    async def _admitted(self, load: Load, row: int, ids: np.ndarray, alone: bool) -> Dump:
        """Prefill within the limits; again when the server was lost meanwhile, MOST_DEATHS times or, alone, once."""
        await self._admission.enter(load, alone)
        self.progress.in_flight += 1
        done = False
        try:
            for death in itertools.count(1):
                try:
                    dump = await self._with_retries(row, ids)
                    done = True
                    return dump
                except ServerLostError:
                    if alone or death == MOST_DEATHS:
                        raise
            raise AssertionError("unreachable")
        finally:
            self.progress.in_flight -= 1
            # A dump stays until it is released.
            self._admission.leave(Load(load.requests, load.tokens, 0 if done else load.bytes))

    async def _with_retries(self, row: int, ids: np.ndarray) -> Dump:
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(TransientPrefillError),
            wait=tenacity.wait_exponential_jitter(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
            stop=tenacity.stop_after_attempt(self.config.attempts),
            before_sleep=lambda state: self.count(retries=1),
            reraise=True,
        )
        return await retrying(self._once, row, ids)

    async def _once(self, row: int, ids: np.ndarray) -> Dump:
        generation = await self._supervisor.ready()
        # The form is patches/capture/drillcore_capture.py's REQUEST_ID. A number of its own for each try: a late dump
        # of an earlier one is never taken for this one's.
        request = f"drillcore-{self.run}-{row}-{next(self._numbers) % 1_000_000}-{len(ids)}"
        path = self.server.staging / f"{request}.safetensors"
        error_path = self.server.staging / f"{request}.error.json"
        try:
            await self._wait_for_writers()
            started = time.monotonic()
            await self._post(request, ids, {}, generation)
            deadline = time.monotonic() + DUMP_DEADLINE + self._admission.used.bytes / SLOWEST_STAGING
            pause = 0.001
            while not path.exists():
                if error_path.exists():
                    raise TransientPrefillError(f"the capture failed: {orjson.loads(error_path.read_bytes())['error']}")
                if self._supervisor.generation != generation:
                    raise ServerLostError("the server was lost before the dump came")
                if time.monotonic() > deadline:
                    raise TransientPrefillError("the server answered, but no dump came")
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.05)
            self._longest_prefill = max(self._longest_prefill, time.monotonic() - started)
            return await asyncio.to_thread(open_dump, path, ids, self.captured)
        except BaseException:
            path.unlink(missing_ok=True)
            for late in (path, error_path):
                self._loop.call_later(LATE, functools.partial(late.unlink, missing_ok=True))
            raise
        finally:
            error_path.unlink(missing_ok=True)

    async def _wait_for_writers(self) -> None:
        """Wait while the plugin asks for it. One look serves all rows that wait."""
        deadline = time.monotonic() + MOST_BEHIND
        while True:
            if (now := time.monotonic()) > self._looked + BEHIND:
                self._looked, self._behind = now, is_behind(self.server.staging)
            if not self._behind:
                return
            if now > deadline:
                raise TransientPrefillError(f"the plugin's writers have been behind for {MOST_BEHIND:.0f} s")
            await asyncio.sleep(BEHIND)

    async def _post(self, request: str, ids: np.ndarray, extra: dict[str, Any], generation: int) -> httpx.Response:
        body = {
            "rid": request,
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            **extra,
        }
        tokens = self._admission.used.tokens + len(ids)
        timeout = BASE_TIMEOUT + tokens / self.config.slowest_tokens_per_second
        try:
            answer = await self._client.post(
                "/generate",
                content=orjson.dumps(body),
                headers={"content-type": "application/json"},
                timeout=httpx.Timeout(timeout, connect=30, pool=None),
            )
        except httpx.TransportError as error:
            reason = f"{type(error).__name__} after at most {timeout:.0f} s: {error}"
            await self._supervisor.suspect(generation, reason, self._patience())
            if self._supervisor.generation != generation:
                raise ServerLostError(reason) from error
            raise TransientPrefillError(reason) from error
        self._last_sign = time.monotonic()
        if answer.status_code == 400:
            raise RowError(f"the server refused the row: {answer.text[:500]}")
        if answer.status_code >= 500 or answer.status_code == 429:
            raise TransientPrefillError(f"HTTP {answer.status_code}: {answer.text[:500]}")
        if answer.status_code != 200:
            raise ServerError(f"The server answered HTTP {answer.status_code} to a prefill: {answer.text[:500]}")
        return answer

    def _patience(self) -> float:
        """Seconds of silence that a healthy server does not reach."""
        return max(SILENCE, SILENCE_FACTOR * self._longest_prefill)

    async def _watch_silence(self) -> None:
        """Suspect a server from which nothing comes back although it has work: it may hang without dying."""
        while True:
            await asyncio.sleep(LOOK)
            self.progress.restarts = generation = await self._supervisor.ready()
            if not self.progress.in_flight:
                self._last_sign = time.monotonic()
            elif time.monotonic() - self._last_sign > self._patience():
                try:
                    await self._supervisor.suspect(
                        generation, f"nothing came back for {self._patience():.0f} s", self._patience()
                    )
                except ServerError as error:
                    self._closed = self._closed or error
                    await self._cancel_all()
                    return
                self._last_sign = time.monotonic()

    async def _close(self) -> None:
        await self._cancel_all()
        for late in self.server.staging.glob(f"drillcore-{self.run}-*"):
            late.unlink(missing_ok=True)
        await self._client.aclose()

    async def _cancel_all(self) -> None:
        while tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the tasks' callbacks run now and take them out
