"""The engine and the batches on it, with every fault of a server: what is retried, what is not, what is left behind."""

import errno
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tasks.config import ExtractionConfig
from tasks.dataset.rows import Row
from tasks.errors import LostLockError, RowError, ServerError, TransientPrefillError, WriteError
from tasks.extraction import engine as engine_module
from tasks.extraction import lane as lane_module
from tasks.extraction.admission import Load
from tasks.extraction.batch import BatchResult, extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.extraction.lane import Lane
from tasks.processes import start_of
from tasks.server.dumps import Dump, open_dump
from tasks.server.launch import AttachedServer
from tasks.store.layout import Store
from tasks.store.lock import WriterLock
from tasks.store.record import read_records
from tests.unit.helpers import (
    CAPTURED,
    HIDDEN,
    Answer,
    FakeSGLang,
    Request,
    good,
    new_store,
    random_states,
    rms_of,
    seed_of,
    status,
    wait_for,
)

IDS = np.array([5, 6, 7, 8, 9], dtype=np.int32)
ATTEMPTS = 3


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(engine_module, "LONGEST_WAIT", 0.002)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSGLang]:
    with FakeSGLang(tmp_path / "staging") as fake:
        yield fake


def engine_on(fake: FakeSGLang, **limits: int) -> PrefillEngine:
    config = ExtractionConfig(attempts=ATTEMPTS, **limits)
    return PrefillEngine([AttachedServer(fake.url, fake.staging)], CAPTURED, config, staging_bytes=1 << 20)


@pytest.fixture
def engine(fake: FakeSGLang) -> Iterator[PrefillEngine]:
    with engine_on(fake) as engine:
        yield engine


def assert_idle(engine: PrefillEngine, fake: FakeSGLang) -> None:
    """Nothing is in flight, nothing is left in staging, and every limit is free again."""
    wait_for(lambda: engine._admission.used == Load(0, 0, 0))
    assert engine.progress.in_flight == 0
    assert list(fake.staging.iterdir()) == []


def spoiled(edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Answer:
    """A dump that the client must refuse."""

    def answer(request: Request) -> tuple[int, Any]:
        request.write_dump(edit)
        return 200, {}

    return answer


def truncated(request: Request) -> tuple[int, Any]:
    path = request.write_dump()
    path.write_bytes(path.read_bytes()[:-1])
    return 200, {}


def with_a_byte_more(request: Request) -> tuple[int, Any]:
    path = request.write_dump()
    path.write_bytes(path.read_bytes() + b"x")
    return 200, {}


def error_record(request: Request) -> tuple[int, Any]:
    (request.staging / f"{request.rid}.error.json").write_text('{"error": "CaptureError: the radix cache is on"}')
    return 200, {}


def not_finite(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata["nonfinite_rows"][1] = 2


def all_zero(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata["zero_rows"][2] = 1


def other_ids(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["input_ids"] = tensors["input_ids"].flip(0).contiguous()


def other_request(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata["request"] = "drillcore-earlier-0-0-5"


def wrong_layers(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata["layers"] = [1, 3]


def wrong_norm(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata["final_norm"] = "pre"


def one_layer_less(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["aux_hidden_states"] = tensors["aux_hidden_states"][:, :HIDDEN].contiguous()


def one_token_less(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["last_hidden_state"] = tensors["last_hidden_state"][:-1].contiguous()


def other_dtype(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["last_hidden_state"] = tensors["last_hidden_state"].half()


def no_number(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata["rms"][1] = math.nan


def no_ids(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["input_ids"]


PASSING_FAULTS: list[tuple[str, Answer, str]] = [
    ("HTTP 503", status(503, "overloaded"), "HTTP 503: .*overloaded"),
    ("HTTP 500", status(500), "HTTP 500"),
    ("HTTP 429", status(429), "HTTP 429"),
    ("hang up", lambda request: None, "ServerDisconnectedError"),
    ("error record", error_record, "the capture failed: CaptureError: the radix cache is on"),
    ("truncated dump", truncated, r"\.safetensors cannot be read"),
    ("longer dump", with_a_byte_more, r"\.safetensors cannot be read: its tensors have"),
    ("RMS not finite", spoiled(no_number), r"\.safetensors cannot be read"),
    ("other ids", spoiled(other_ids), "holds other token ids than were sent"),
    ("another run's", spoiled(other_request), "has the wrong request: drillcore-earlier-0-0-5, expected drillcore-"),
    ("not finite", spoiled(not_finite), "is damaged at layer 4: 2 tokens not finite, 0 all zero"),
    ("all zero", spoiled(all_zero), "is damaged at the final state: 0 tokens not finite, 1 all zero"),
    ("wrong layers", spoiled(wrong_layers), r"has the wrong layers: \[1, 3\], expected \[1, 4\]"),
    ("wrong norm", spoiled(wrong_norm), "has the wrong final norm: pre, expected post"),
    ("one layer less", spoiled(one_layer_less), r"wrong shape of aux_hidden_states: \(5, 4\), expected \(5, 8\)"),
    ("one token less", spoiled(one_token_less), r"wrong shape of last_hidden_state: \(4, 4\), expected \(5, 4\)"),
    ("other dtype", spoiled(other_dtype), "has the wrong dtype"),
    ("no ids", spoiled(no_ids), r"\.safetensors cannot be read: 'input_ids'"),
]


def test_a_good_dump_holds_the_states_of_the_prompt(engine: PrefillEngine, fake: FakeSGLang) -> None:
    dump = engine.submit(3, IDS).result(5)
    aux, last = random_states(seed_of(IDS), len(IDS))
    assert torch.equal(dump.aux, aux)
    assert torch.equal(dump.last, last)
    assert dump.rms == rms_of(aux, last)
    assert fake.rids == [f"drillcore-{engine.run}-3-0-5"]
    assert engine.progress.retries == 0
    states_bytes = dump.aux.nbytes + dump.last.nbytes
    wait_for(lambda: engine._admission.used == Load(0, 0, states_bytes))  # in staging until it is released
    engine.release(dump)
    assert_idle(engine, fake)


@pytest.mark.parametrize(
    ("answer", "message"), [fault[1:] for fault in PASSING_FAULTS], ids=[f[0] for f in PASSING_FAULTS]
)
def test_a_fault_that_may_pass_is_tried_again(
    engine: PrefillEngine, fake: FakeSGLang, answer: Answer, message: str
) -> None:
    fake.answers[0] = [answer, answer]
    dump = engine.submit(0, IDS).result(5)
    assert torch.equal(dump.last, random_states(seed_of(IDS), len(IDS))[1])
    assert fake.tries(0) == 3
    assert len(set(fake.rids)) == 3
    assert engine.progress.retries == 2
    engine.release(dump)
    assert_idle(engine, fake)


@pytest.mark.parametrize(
    ("answer", "message"), [fault[1:] for fault in PASSING_FAULTS], ids=[f[0] for f in PASSING_FAULTS]
)
def test_a_fault_that_does_not_pass_ends_with_its_reason(
    engine: PrefillEngine, fake: FakeSGLang, answer: Answer, message: str
) -> None:
    fake.answers[0] = [answer] * ATTEMPTS
    with pytest.raises(TransientPrefillError, match=message):
        engine.submit(0, IDS).result(5)
    assert fake.tries(0) == ATTEMPTS
    assert_idle(engine, fake)


def test_a_refused_row_is_not_tried_again(engine: PrefillEngine, fake: FakeSGLang) -> None:
    fake.answers[0] = [status(400, "input is too long")]
    with pytest.raises(RowError, match=r"the server refused the row: .*input is too long"):
        engine.submit(0, IDS).result(5)
    assert fake.tries(0) == 1
    assert engine.progress.retries == 0
    assert_idle(engine, fake)


def test_an_answer_that_no_sglang_gives_is_an_error_of_the_server(engine: PrefillEngine, fake: FakeSGLang) -> None:
    fake.answers[0] = [status(404)]
    with pytest.raises(ServerError, match="HTTP 404"):
        engine.submit(0, IDS).result(5)
    assert fake.tries(0) == 1
    assert_idle(engine, fake)


def test_an_answer_without_a_dump_is_given_up(
    engine: PrefillEngine, fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "DUMP_DEADLINE", 0.02)
    fake.answers[0] = [lambda request: (200, {})] * ATTEMPTS
    with pytest.raises(TransientPrefillError, match="the server answered, but no dump came"):
        engine.submit(0, IDS).result(5)
    assert fake.tries(0) == ATTEMPTS
    assert_idle(engine, fake)


def test_a_dump_may_come_a_little_after_the_answer(engine: PrefillEngine, fake: FakeSGLang) -> None:
    def late(request: Request) -> tuple[int, Any]:
        threading.Timer(0.1, request.write_dump).start()
        return 200, {}

    fake.answers[0] = [late]
    engine.release(engine.submit(0, IDS).result(5))
    assert fake.tries(0) == 1
    assert_idle(engine, fake)


def test_a_dead_server_is_an_error_of_the_server_at_once(tmp_path: Path) -> None:
    with FakeSGLang(tmp_path / "staging") as fake:
        pass
    with engine_on(fake) as engine:
        with pytest.raises(ServerError, match=f"The server at {fake.url} does not answer"):
            engine.submit(0, IDS).result(5)
        assert engine.progress.retries == 0
        assert_idle(engine, fake)


def test_limits_hold_at_the_server(fake: FakeSGLang) -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def counted(request: Request) -> tuple[int, Any]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.005)
        with lock:
            now[0] -= 1
        return good(request)

    fake.answers = {row: [counted] for row in range(30)}
    with engine_on(fake, requests_in_flight=4) as engine:
        for future in [engine.submit(row, IDS + row) for row in range(30)]:
            engine.release(future.result(5))
        assert_idle(engine, fake)
    assert most[0] == 4


def test_nothing_is_sent_while_the_plugin_asks_to_wait(engine: PrefillEngine, fake: FakeSGLang) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    # What servers left behind that were killed asks for nothing, though its number be another process's now.
    (fake.staging / f"busy.{dead.pid}").write_text("1")
    (fake.staging / f"busy.{os.getppid()}").write_text("1")
    engine.release(engine.submit(0, IDS).result(timeout=5))
    busy = fake.staging / f"busy.{os.getpid()}"
    busy.write_text(str(start_of(os.getpid())))
    time.sleep(2 * lane_module.BEHIND)
    outcome = engine.submit(1, IDS)
    with pytest.raises(TimeoutError):
        outcome.result(timeout=0.2)
    assert fake.tries(1) == 0
    busy.unlink()
    engine.release(outcome.result(timeout=5))
    assert fake.tries(1) == 1


def test_dumps_that_nobody_released_hold_back_the_next_rows(fake: FakeSGLang) -> None:
    one_row = len(IDS) * 3 * HIDDEN * 2
    config = ExtractionConfig(attempts=1)
    with PrefillEngine([AttachedServer(fake.url, fake.staging)], CAPTURED, config, 2 * one_row) as engine:
        futures = [engine.submit(row, IDS) for row in range(3)]
        first, second = futures[0].result(5), futures[1].result(5)
        time.sleep(0.05)
        assert fake.tries(2) == 0
        engine.release(first)
        third = futures[2].result(5)
        for dump in (second, third):
            engine.release(dump)
        assert_idle(engine, fake)


@pytest.fixture
def gate(fake: FakeSGLang) -> Iterator[threading.Event]:
    """Rows 0 to 9 hang at the server until the event is set."""
    event = threading.Event()

    def hang(request: Request) -> tuple[int, Any] | None:
        event.wait(20)
        return None

    fake.answers = {row: [hang] for row in range(10)}
    yield event
    event.set()


def test_leaving_the_context_ends_what_is_in_flight_at_once(fake: FakeSGLang, gate: threading.Event) -> None:
    with engine_on(fake, requests_in_flight=2) as engine:
        futures = [engine.submit(row, IDS) for row in range(6)]
        wait_for(lambda: len(fake.rids) == 2)
        started = time.monotonic()
    assert time.monotonic() - started < 2
    for future in futures:
        with pytest.raises(ServerError, match="the extraction was ended"):
            future.result(0)
    assert engine._admission.used == Load(0, 0, 0)
    assert engine.progress.in_flight == 0
    assert len(fake.rids) == 2
    assert list(fake.staging.iterdir()) == []


def test_a_closed_engine_gives_every_future_the_reason(fake: FakeSGLang, gate: threading.Event) -> None:
    with engine_on(fake, requests_in_flight=1) as engine:
        at_server, waiting = engine.submit(0, IDS), engine.submit(1, IDS)
        wait_for(lambda: len(fake.rids) == 1)
        engine.close(ServerError("the reason"))
        for future in (at_server, waiting, engine.submit(20, IDS)):
            with pytest.raises(ServerError, match="the reason"):
                future.result(5)
        assert len(fake.rids) == 1
        assert_idle(engine, fake)


def test_many_failures_in_a_row_are_an_error_of_the_server(fake: FakeSGLang) -> None:
    fake.answers = {row: [status(400, "no")] for row in (0, 1, 3, 4, 5)}
    with engine_on(fake, max_failures_in_a_row=3) as engine:
        for row, error in enumerate((RowError, RowError, None, RowError, RowError, ServerError)):
            future = engine.submit(row, IDS)
            if error is None:  # a success in between: it is the rows, not the server
                engine.release(future.result(5))
            else:
                assert type(future.exception(5)) is error
        assert "3 rows failed one after the other, at last: the server refused the row" in str(future.exception())
        assert_idle(engine, fake)


def test_what_is_given_back_after_the_engine_was_left_is_no_error(fake: FakeSGLang) -> None:
    with engine_on(fake) as engine:
        dump, other = engine.submit(0, IDS).result(5), engine.submit(1, IDS)
        other.result(5)
    engine.release(dump)
    engine.discard(other)
    assert list(fake.staging.iterdir()) == []


def test_a_discarded_prefill_gives_back_what_it_held(fake: FakeSGLang, gate: threading.Event) -> None:
    with engine_on(fake, requests_in_flight=1) as engine:
        at_server, waiting = engine.submit(0, IDS), engine.submit(1, IDS)
        wait_for(lambda: len(fake.rids) == 1)
        engine.discard(waiting)
        engine.discard(at_server)
        assert_idle(engine, fake)
        engine.release(engine.submit(10, IDS).result(5))
        assert fake.tries(1) == 0


def test_a_prefill_discarded_after_its_end_leaves_no_dump(engine: PrefillEngine, fake: FakeSGLang) -> None:
    future = engine.submit(0, IDS)
    wait_for(future.done)
    engine.discard(future)
    assert_idle(engine, fake)


def test_a_prefill_discarded_in_the_moment_of_its_end_leaves_no_dump(
    engine: PrefillEngine, fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_dump, discarded = threading.Event(), threading.Event()
    original = engine._with_retries

    async def stop_at_the_end(lane: Lane, row: int, ids: np.ndarray) -> Dump:
        dump = await original(lane, row, ids)
        has_dump.set()
        assert discarded.wait(5)  # holds the event loop: nothing happens between here and the task's end
        return dump

    monkeypatch.setattr(engine, "_with_retries", stop_at_the_end)
    future = engine.submit(0, IDS)
    assert has_dump.wait(5)
    engine.discard(future)
    discarded.set()
    wait_for(lambda: engine._admission.used == Load(0, 0, 0), seconds=1)
    assert list(fake.staging.iterdir()) == []


def test_top_tokens_are_read_from_the_log_probabilities(engine: PrefillEngine, fake: FakeSGLang) -> None:
    tops = [None, [[-0.1, 11, None]], [[-0.2, 12, None]]]
    fake_answer = {"meta_info": {"input_top_logprobs": tops, "output_top_logprobs": [[[-0.3, 13, None]]]}}
    fake.answer = lambda body: (200, fake_answer)  # type: ignore[method-assign]
    assert engine.top_tokens(IDS[:3]) == [11, 12, 13]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(Store(tmp_path / "store"), {"any": 1})


@pytest.fixture
def lock(store: Store) -> Iterator[WriterLock]:
    with WriterLock(store.lock) as lock:
        yield lock


def sample(number: int, tokens: int) -> Row:
    ids = np.arange(tokens, dtype=np.int32) + number
    return Row(number, ids, (ids % 2).astype(np.uint8), f"sample-{number}")


def assert_stored(store: Store, name: str, rows: list[Row]) -> None:
    """The shard holds exactly these rows, bit for bit."""
    tensors = load_file(store.shards / name)
    assert len(tensors) == 4 * len(rows)
    for row in rows:
        aux, last = random_states(seed_of(row.input_ids), len(row.input_ids))
        assert torch.equal(tensors[f"r{row.number:06d}.aux_hidden_states"], aux)
        assert torch.equal(tensors[f"r{row.number:06d}.last_hidden_state"], last)
        assert tensors[f"r{row.number:06d}.input_ids"].tolist() == row.input_ids.tolist()
        assert tensors[f"r{row.number:06d}.loss_mask"].tolist() == row.loss_mask.tolist()


def test_a_batch_becomes_a_shard_and_its_record(
    engine: PrefillEngine, fake: FakeSGLang, store: Store, lock: WriterLock
) -> None:
    rows = [sample(20, 3), sample(21, 9), sample(22, 1)]
    result = extract_batch(4, rows, engine, store, "f" * 64, lock)
    assert_stored(store, "000004.safetensors", rows)
    (record,) = read_records(store)
    assert (record.batch, record.part, record.file, record.codec) == (4, 0, "000004.safetensors", "raw")
    assert record.fingerprint == "f" * 64
    assert record.bytes == (store.shards / "000004.safetensors").stat().st_size
    assert [(row.row, row.tokens) for row in record.rows] == [(20, 3), (21, 9), (22, 1)]
    for row, stored in zip(rows, record.rows, strict=True):
        assert stored.rms == pytest.approx(rms_of(*random_states(seed_of(row.input_ids), len(row.input_ids))))
        assert stored.zero_rows == [0, 0, 0]
    assert record.failed == []
    assert result == BatchResult(4, 3, 13, record.bytes, [])
    assert (engine.progress.rows, engine.progress.tokens, engine.progress.failed) == (3, 13, 0)
    assert engine.progress.bytes == 13 * 3 * HIDDEN * 2
    assert_idle(engine, fake)


def test_of_a_long_batch_only_so_many_rows_wait_at_a_time_longest_first(
    engine: PrefillEngine, fake: FakeSGLang, store: Store, lock: WriterLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.most_waiting = 3
    submitted: list[tuple[int, int]] = []
    released = 0

    def counted(row: int, ids: np.ndarray) -> Any:
        submitted.append((len(ids), len(submitted) - released))
        return submit(row, ids)

    def counted_release(dump: Dump) -> None:
        nonlocal released
        released += 1
        release(dump)

    submit, release = engine.submit, engine.release
    monkeypatch.setattr(engine, "submit", counted)
    monkeypatch.setattr(engine, "release", counted_release)
    rows = [sample(number, 1 + number % 7) for number in range(40)]
    assert extract_batch(0, rows, engine, store, "f", lock).rows == 40
    assert [tokens for tokens, _ in submitted] == sorted((len(row.input_ids) for row in rows), reverse=True)
    assert max(others for _, others in submitted) == 2
    assert_stored(store, "000000.safetensors", rows)
    assert_idle(engine, fake)


@pytest.mark.parametrize("at_once", [0, 1 << 20])
def test_a_dump_is_the_same_in_the_loop_and_in_another_thread(
    engine: PrefillEngine, fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    threads: list[str] = []

    def noted(*arguments: Any) -> Dump:
        threads.append(threading.current_thread().name)
        return open_dump(*arguments)

    monkeypatch.setattr(lane_module, "OPENED_AT_ONCE", at_once)
    monkeypatch.setattr(lane_module, "open_dump", noted)
    dump = engine.submit(0, IDS).result(5)
    assert torch.equal(dump.last, random_states(seed_of(IDS), len(IDS))[1])
    assert (threads == ["prefill-engine"]) is (at_once > 0)
    engine.release(dump)
    assert_idle(engine, fake)


def test_a_shard_that_cannot_be_written_is_a_named_error_and_the_next_try_stores_it(
    engine: PrefillEngine, fake: FakeSGLang, store: Store, lock: WriterLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake: the file system that is full when the shard is made durable."""

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = [sample(20, 3), sample(21, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match=r"cannot be written: No space left on device .* make room, and start"):
            extract_batch(0, rows, engine, store, "f", lock)
    assert list(store.shards.iterdir()) == []
    assert_idle(engine, fake)
    extract_batch(0, rows, engine, store, "f", lock)
    assert_stored(store, "000000.safetensors", rows)


def test_a_failing_row_is_named_and_the_others_are_stored(
    engine: PrefillEngine, fake: FakeSGLang, store: Store, lock: WriterLock
) -> None:
    rows = [sample(0, 3), sample(1, 9), sample(2, 1)]
    fake.answers = {1: [status(400, "too long")], 2: [status(503, "busy")] * ATTEMPTS}
    result = extract_batch(0, rows, engine, store, "f" * 64, lock)
    assert_stored(store, "000000.safetensors", rows[:1])
    (record,) = read_records(store)
    assert [row.row for row in record.rows] == [0]
    reasons = {failure.row: failure.reason for failure in record.failed}
    assert sorted(reasons) == [1, 2]
    assert "the server refused the row" in reasons[1]
    assert "HTTP 503" in reasons[2]
    assert result.failed == record.failed
    assert engine.progress.failed == 2
    assert_idle(engine, fake)


def test_a_batch_of_which_every_row_fails_leaves_a_record_without_a_shard(
    engine: PrefillEngine, fake: FakeSGLang, store: Store, lock: WriterLock
) -> None:
    fake.answers = {0: [status(400)], 1: [status(400)]}
    extract_batch(0, [sample(0, 3), sample(1, 2)], engine, store, "f" * 64, lock)
    assert [path.name for path in store.shards.iterdir()] == ["000000.json"]
    (record,) = read_records(store)
    assert (record.file, record.bytes, record.rows) == (None, 0, [])
    assert [failure.row for failure in record.failed] == [0, 1] or [f.row for f in record.failed] == [1, 0]


def test_a_second_try_of_a_batch_is_its_next_part(
    engine: PrefillEngine, fake: FakeSGLang, store: Store, lock: WriterLock
) -> None:
    rows = [sample(0, 3), sample(1, 9)]
    fake.answers = {1: [status(400)]}
    extract_batch(0, rows, engine, store, "f" * 64, lock)
    extract_batch(0, rows[1:], engine, store, "f" * 64, lock)
    assert_stored(store, "000000.safetensors", rows[:1])
    assert_stored(store, "000000.1.safetensors", rows[1:])
    assert [(record.part, [row.row for row in record.rows]) for record in read_records(store)] == [(0, [0]), (1, [1])]


def test_a_server_that_dies_commits_nothing_and_leaves_nothing(
    engine: PrefillEngine, fake: FakeSGLang, gate: threading.Event, store: Store, lock: WriterLock
) -> None:
    fake.answers[0] = [status(404)]  # ends the batch like a dead server, with the other rows in flight
    with pytest.raises(ServerError):
        extract_batch(0, [sample(row, 2 + row) for row in range(8)], engine, store, "f" * 64, lock)
    assert list(store.shards.iterdir()) == []
    assert_idle(engine, fake)


def test_a_writer_that_lost_its_lock_commits_nothing(
    engine: PrefillEngine, fake: FakeSGLang, store: Store, lock: WriterLock
) -> None:
    store.lock.write_text(store.lock.read_text().replace(lock.owner, "another"))
    with pytest.raises(LostLockError, match="taken over by another writer"):
        extract_batch(0, [sample(0, 3)], engine, store, "f" * 64, lock)
    assert list(store.shards.iterdir()) == []
    assert_idle(engine, fake)


def test_a_batch_ends_when_the_engine_is_closed(
    fake: FakeSGLang, gate: threading.Event, store: Store, lock: WriterLock
) -> None:
    ended: list[BaseException] = []

    def run(engine: PrefillEngine) -> None:
        try:
            extract_batch(0, [sample(row, 3) for row in range(4)], engine, store, "f" * 64, lock)
        except BaseException as error:
            ended.append(error)

    with engine_on(fake) as engine:
        thread = threading.Thread(target=run, args=(engine,))
        thread.start()
        wait_for(lambda: len(fake.rids) == 4)
        engine.close()
        thread.join(5)
    assert not thread.is_alive()
    assert isinstance(ended[0], ServerError)
    assert list(store.shards.iterdir()) == []


def test_a_dump_outlives_its_file_while_it_is_mapped(engine: PrefillEngine, fake: FakeSGLang) -> None:
    dump: Dump = engine.submit(0, IDS).result(5)
    engine.release(dump)
    assert not dump.path.exists()
    assert torch.equal(dump.last, random_states(seed_of(IDS), len(IDS))[1])
