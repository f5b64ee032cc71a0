"""Sends rows to the servers and hands back their dumps. One event loop in one thread serves all batches."""

import asyncio
import functools
import itertools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import tenacity

from tasks.config import ExtractionConfig
from tasks.errors import (
    DrillcoreError,
    ExtractionError,
    RowError,
    ServerError,
    ServerGoneError,
    ServerLostError,
    TransientPrefillError,
)
from tasks.extraction.admission import Admission, Load, Usage
from tasks.extraction.lane import Lane
from tasks.model import ITEMSIZE
from tasks.server.dumps import Captured, Dump
from tasks.server.launch import Server
from tasks.server.supervisor import NO_RESTART, Restarts

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between the tries of a prefill
# So often may a server die while a row is there; then the row is tried with nothing else beside it.
MOST_DEATHS = 2

logger = logging.getLogger(__name__)


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
    usage: Usage = field(default_factory=Usage)


class PrefillEngine:
    """Prefills within limits, on whichever server is free. A context manager: leaving it cancels what is not done."""

    def __init__(
        self,
        servers: Sequence[Server],
        captured: Captured,
        config: ExtractionConfig,
        staging_bytes: int,
        restarts: Restarts = NO_RESTART,
        most_failed: float = math.inf,
    ):
        """staging_bytes: most bytes of dumps at once, of all servers. restarts: what to do when a server is lost.
        most_failed: rows that may fail; one more ends everything.
        """
        self.captured = captured
        self.config = config
        self.run = secrets.token_hex(4)  # dumps of an earlier run in the same staging directory are not ours
        self.most_failed = most_failed
        # Rows of one batch that are worth submitting at a time: more than that only take memory while they wait.
        self.most_waiting = 2 * config.requests_in_flight * len(servers)
        self._numbers = itertools.count()
        self._failed = self._failures_in_a_row = 0
        self._closed: Exception | None = None
        self._tasks: dict[Future[Dump], asyncio.Task[Dump]] = {}
        self._lock = threading.Lock()
        limit = Load(config.requests_in_flight, config.tokens_in_flight, staging_bytes)
        self._admission = Admission(limit, len(servers))
        self.progress = Progress(usage=self._admission.usage)
        self._lanes = [
            Lane(
                *(server, captured, config, restarts),
                functools.partial(self._admission.load_of, number),
                functools.partial(self._server_changed, number),
            )
            for number, server in enumerate(servers)
        ]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prefill-engine", daemon=True)

    def __enter__(self) -> "PrefillEngine":
        self._thread.start()
        for lane in self._lanes:
            asyncio.run_coroutine_threadsafe(lane.open(), self._loop).result()
        self._watches = [asyncio.run_coroutine_threadsafe(self._watch(lane), self._loop) for lane in self._lanes]
        return self

    def __exit__(self, *exception: object) -> None:
        for watch in self._watches:
            watch.cancel()
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
        self._call(self._admission.leave, 0, Load(0, 0, dump.aux.nbytes + dump.last.nbytes))

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
        """The first server's own most likely next token after each position of a prompt.

        By its input log-probabilities.
        """
        body = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        # An id of its own: SGLang refuses one that it has at this moment, also of another run on the same server.
        post = self._lanes[0].post(f"probe-{self.run}-{next(self._numbers)}", ids, body)
        answer = asyncio.run_coroutine_threadsafe(post, self._loop).result()
        meta = orjson.loads(answer.content)["meta_info"]
        tops = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
        return [position[0][1] for position in tops]

    def usage(self) -> dict[str, float]:
        """Where the servers' time went, as shares, and what was in flight on average; `behind`: the plugin's writers
        asked to be sent nothing. Empty where nothing was extracted."""
        shares = self.progress.usage.shares()
        if shares:
            shares["behind"] = sum(lane.behind_seconds for lane in self._lanes) / self.progress.usage.seconds
        return shares

    def held(self, change: int) -> None:
        """Batches that wait for room for their shards: `change` more of them. Their rows are not submitted yet."""
        self._call(self._admission.hold, change)

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
                # One died twice while this row was there. Alone, the row is the cause or it is not.
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
        self._failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self.config.max_failures_in_a_row:
            raise ServerError(
                f"{self._failures_in_a_row} rows failed one after the other, at last: {failure}"
            ) from failure
        if self._failed > self.most_failed:
            raise ExtractionError(
                f"{self._failed} rows failed, which is more than extraction.stop_failed_share allows; at last: "
                f"{failure}. What was committed stays; the same command goes on from there."
            ) from failure
        raise failure

    async def _admitted(self, load: Load, row: int, ids: np.ndarray, alone: bool) -> Dump:
        """Prefill within the limits; again when the server was lost meanwhile, MOST_DEATHS times or, alone, once."""
        for death in itertools.count(1):
            server = await self._admission.enter(load, alone, first=death > 1)
            self.progress.in_flight += 1
            done = False
            try:
                dump = await self._with_retries(self._lanes[server], row, ids)
                done = True
                return dump
            except ServerGoneError as error:
                if all(lane.supervisor.gone for lane in self._lanes):
                    raise
                lost: ServerError | ServerLostError = error
            except ServerLostError as error:
                lost = error
            finally:
                self.progress.in_flight -= 1
                # A dump stays until it is released.
                self._admission.leave(server, Load(load.requests, load.tokens, 0 if done else load.bytes))
            if alone or death == MOST_DEATHS:
                raise ServerLostError(str(lost)) from lost
        raise AssertionError("unreachable")

    async def _with_retries(self, lane: Lane, row: int, ids: np.ndarray) -> Dump:
        try:
            return await self._once(lane, row, ids)
        except TransientPrefillError as error:
            first = [error]

        async def again() -> Dump:
            if first:
                raise first.pop()  # that counts, too
            return await self._once(lane, row, ids)

        # Only a row that failed pays for this: 0.3 ms of processor time.
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(TransientPrefillError),
            wait=tenacity.wait_exponential_jitter(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
            stop=tenacity.stop_after_attempt(self.config.attempts),
            before_sleep=lambda state: self.count(retries=1),
            reraise=True,
        )
        return await retrying(again)

    async def _once(self, lane: Lane, row: int, ids: np.ndarray) -> Dump:
        # A number of its own for each try: a late dump of an earlier one is never taken for this one's.
        return await lane.prefill(f"drillcore-{self.run}-{row}-{next(self._numbers) % 1_000_000}-{len(ids)}", ids)

    def _server_changed(self, number: int, there: bool) -> None:
        self.progress.restarts = sum(lane.supervisor.generation for lane in self._lanes)
        if there:
            self._admission.reopen(number)
        else:
            self._admission.close(number)

    async def _watch(self, lane: Lane) -> None:
        """End everything when the last server is gone."""
        try:
            await lane.watch_silence()
        except ServerGoneError as error:
            if not all(lane.supervisor.gone for lane in self._lanes):
                logger.warning("going on without the server at %s: %s", lane.server.url, error)
                return
            self._closed = self._closed or error
            await self._cancel_all()

    async def _close(self) -> None:
        await self._cancel_all()
        for lane in self._lanes:
            await lane.close(self.run)

    async def _cancel_all(self) -> None:
        while tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the tasks' callbacks run now and take them out
