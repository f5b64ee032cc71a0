"""Drills on a real server: killed, stopped, poisoned while it works. Each ends in complete data, or names its row."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tasks.errors import RowError
from tasks.extraction import lane as lane_module
from tasks.extraction.batch import extract_batch
from tasks.extraction.engine import PrefillEngine
from tasks.preflight import open_output, run_preflight, staging_limit
from tasks.probe import probe, states_of
from tasks.server.facts import check_server
from tasks.server.launch import Server
from tasks.server.supervisor import Restarts
from tasks.store.lock import WriterLock
from tasks.verification import verify_store
from tests.faults.drill import make_rows
from tests.integration.serving import CPU_ARGUMENTS, Serving, cpu_config, serving
from tests.integration.tiny_models import VOCABULARY, make_checkpoint
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

ROWS, LONGEST, CHUNK = 240, 900, 256


@pytest.fixture(scope="module")
def running(staging: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("drills")
    make_checkpoint("llama", folder / "model")
    config = cpu_config(
        folder / "model",
        write_jsonl(folder / "dataset.jsonl", make_rows(VOCABULARY, ROWS, LONGEST)),
        folder / "unused",
        staging,
        server={"dtype": "float32", "chunked_prefill_size": CHUNK, "arguments": CPU_ARGUMENTS},
        capture={"layers": [0, 2, 4]},
        output={"shard_bytes": 32 << 20},
        extraction={"requests_in_flight": 32},
    )
    with serving(config, folder / "server.log") as up:
        yield up


def supervised(running: Serving) -> PrefillEngine:
    """An engine whose server is restarted, as the flow's is."""
    preflight = running.preflight
    config = preflight.config

    def check(server: Server) -> object:
        return check_server(server, config, preflight.model, preflight.layers, preflight.plan.longest)

    restarts = Restarts(config.server.max_restarts, config.server.restart_window, check)
    return PrefillEngine([running.server], preflight.captured, config.extraction, staging_limit(config), restarts)


def schedulers(running: Serving) -> list[psutil.Process]:
    """The processes that hold the model: those that the plugin's READY files name."""
    return [psutil.Process(int(file.name.split(".")[1])) for file in running.server.staging.glob("ready.*.json")]


def extract_under(running: Serving, output: Path, trouble: Callable[[PrefillEngine], None]) -> Any:
    """Extract all rows while `trouble` is made beside it; returns what verify says of the output."""
    config = running.preflight.config.model_copy(
        update={"output": running.preflight.config.output.model_copy(update={"path": output})}
    )
    preflight = run_preflight(config)
    rows = {row.number: row for row in running.rows()}
    with WriterLock(preflight.store.lock) as lock, supervised(running) as engine:
        probe(engine, preflight.model, running.facts, config.dataset.max_seq_len)
        open_output(preflight)
        maker = threading.Thread(target=trouble, args=(engine,))
        maker.start()
        for batch, numbers in preflight.missing.items():
            chosen = [rows[number] for number in numbers]
            result = extract_batch(batch, chosen, engine, preflight.store, preflight.fingerprint, lock)
            assert result.failed == []
        maker.join()
        restarts = engine.progress.restarts
        verified = verify_store(preflight.store, config.dataset.path, 0.0, config.verify, engine)
    return verified, restarts


def wait_for_rows(engine: PrefillEngine, rows: int) -> None:
    while engine.progress.rows < rows:
        time.sleep(0.01)


def kill_at(running: Serving, moments: list[int]) -> Callable[[PrefillEngine], None]:
    """SIGKILL the scheduler when so many rows are done."""

    def trouble(engine: PrefillEngine) -> None:
        for rows in moments:
            wait_for_rows(engine, rows)
            for process in schedulers(running):
                process.kill()

    return trouble


@pytest.mark.parametrize("moments", [[60], pytest.param([20, 60, 100, 140, 180], marks=pytest.mark.slow)])
def test_a_server_that_is_killed_while_it_works_costs_nothing(
    running: Serving, tmp_path: Path, moments: list[int]
) -> None:
    verified, restarts = extract_under(running, tmp_path / "output", kill_at(running, moments))
    assert verified.rows["done"] == ROWS
    assert restarts == len(moments)
    assert len(schedulers(running)) == 1
    assert list(running.server.staging.glob("drillcore-*")) == []


@pytest.mark.slow
def test_a_server_that_hangs_is_restarted(running: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "SILENCE", 10.0)
    monkeypatch.setattr(lane_module, "SILENCE_FACTOR", 1.0)

    def stop(engine: PrefillEngine) -> None:
        wait_for_rows(engine, 60)
        for process in schedulers(running):
            process.send_signal(signal.SIGSTOP)

    verified, restarts = extract_under(running, tmp_path / "output", stop)
    assert verified.rows["done"] == ROWS
    assert restarts == 1


@pytest.mark.slow
def test_a_row_that_the_server_dies_of_is_set_aside_and_the_others_are_done(running: Serving) -> None:
    """A token id beyond the vocabulary kills SGLang's scheduler; preflight never lets one through."""
    rows = running.rows()[:40]
    with supervised(running) as engine:
        futures = {row.number: engine.submit(row.number, row.input_ids) for row in rows}
        poison = engine.submit(999_999, np.full(50, VOCABULARY + 5000, dtype=np.int32))
        for future in futures.values():
            engine.release(future.result(timeout=600))
        with pytest.raises(RowError, match="the server was lost 2 times while this row was there, and once more"):
            poison.result(timeout=600)
        assert engine.progress.restarts == 3
        states = []
        for _ in range(2):  # and the server that came back still works
            dump = engine.submit(rows[0].number, rows[0].input_ids).result(timeout=60)
            states.append(states_of(dump.aux, dump.last))
            engine.release(dump)
    assert torch.allclose(*states)
