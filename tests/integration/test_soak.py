"""Thousands of requests, one in eight aborted at a random moment: each dump exact, nothing left, no memory lost."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from tasks.probe import states_of
from tasks.server.dumps import open_dump
from tests.integration.serving import CPU_ARGUMENTS, Serving, cpu_config, serving
from tests.integration.tiny_models import LAYERS, VOCABULARY, make_checkpoint, reference_states
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS, IN_FLIGHT, ABORTED = 5000, 64, 0.125
WARM = 1000  # requests after which memory should not grow any more
GROWTH = 40 << 20  # bytes that the scheduler's memory may still move by
CHUNK = 64
CAPTURED = list(range(LAYERS - 1))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    choose = random.Random(20)
    lengths = [choose.choice([1, 2, choose.randint(3, CHUNK), choose.randint(CHUNK, 6 * CHUNK)]) for _ in range(200)]
    return [[choose.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def running(prompts: list[list[int]], staging: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("soak")
    make_checkpoint("llama", folder / "model")
    dataset = write_jsonl(folder / "dataset.jsonl", [{"input_ids": prompt} for prompt in prompts])
    config = cpu_config(
        folder / "model",
        dataset,
        folder / "unused",
        staging,
        server={"dtype": "float32", "chunked_prefill_size": CHUNK, "arguments": CPU_ARGUMENTS},
        capture={"layers": CAPTURED},
    )
    with serving(config, folder / "server.log") as up:
        yield up


def test_a_soak_loses_nothing_and_leaves_nothing(running: Serving, prompts: list[list[int]]) -> None:
    expected = [
        states[[*CAPTURED, LAYERS]] for states in reference_states(running.preflight.config.model.path, prompts)
    ]
    outcome = asyncio.run(soak(running, prompts, expected))
    print(f"\n{outcome}")
    assert outcome["exact"] + outcome["aborted without a dump"] == REQUESTS
    assert outcome["aborted without a dump"] > 20  # they were aborted in time, many half-way
    assert outcome["left"] == []
    assert outcome["memory growth"] < GROWTH
    assert outcome["most bytes in staging"] <= outcome["most bytes in flight"]


async def soak(running: Serving, prompts: list[list[int]], expected: list[torch.Tensor]) -> dict[str, Any]:
    """Send REQUESTS requests, IN_FLIGHT at once, and check every dump that comes."""
    choose, staging, captured = random.Random(21), running.server.staging, running.preflight.captured
    (ready,) = staging.glob("ready.*")
    scheduler = psutil.Process(json.loads(ready.read_bytes())["pid"])
    token_bytes = (LAYERS * captured.hidden_size + 1) * 4
    seen = {"exact": 0, "aborted without a dump": 0, "largest error": 0.0, "most bytes in staging": 0}
    memory: list[int] = []
    slots = asyncio.Semaphore(IN_FLIGHT)

    def check(path: Path, number: int) -> None:
        dump = open_dump(path, np.array(prompts[number], np.int32), captured)
        error = (states_of(dump.aux, dump.last) - expected[number]).norm(dim=-1) / expected[number].norm(dim=-1)
        assert error.max() < 1e-4  # not so for what is no number
        seen["largest error"] = max(seen["largest error"], float(error.max()))
        seen["exact"] += 1
        if seen["exact"] == WARM:
            memory.append(scheduler.memory_info().rss)
        dump.delete()

    async def one(client: httpx.AsyncClient, request: int) -> tuple[Path, int] | None:
        number = choose.randrange(len(prompts))
        rid = f"drillcore-soak-{number}-{request}-{len(prompts[number])}"
        body = {"rid": rid, "input_ids": prompts[number], "sampling_params": {"max_new_tokens": 0}}
        path, abort = staging / f"{rid}.safetensors", choose.random() < ABORTED
        async with slots:
            answer = asyncio.create_task(client.post("/generate", json=body))
            if abort:
                await asyncio.sleep(choose.random() * 0.3)
                await client.post("/abort_request", json={"rid": rid})
                await asyncio.gather(answer, return_exceptions=True)
                await asyncio.sleep(1)
                if path.exists():
                    check(path, number)
                    return None
                return path, number  # whether its dump comes after all is known at the end
            (await answer).raise_for_status()
            while not path.exists():
                assert not path.with_name(f"{rid}.error.json").exists(), "an error record"
                await asyncio.sleep(0.005)
            seen["most bytes in staging"] = max(
                seen["most bytes in staging"], sum(file.stat().st_size for file in staging.glob("drillcore-*"))
            )
            check(path, number)
            return None

    async with httpx.AsyncClient(base_url=running.server.url, timeout=600, trust_env=False) as client:
        aborted = await asyncio.gather(*(one(client, request) for request in range(REQUESTS)))
        memory.append(scheduler.memory_info().rss)
        for number in range(20):  # some passes more, so that the plugin forgets what does not go on
            rid = f"drillcore-end-0-{number}-{len(prompts[0])}"
            body = {"rid": rid, "input_ids": prompts[0], "sampling_params": {"max_new_tokens": 0}}
            (await client.post("/generate", json=body)).raise_for_status()
            while not (staging / f"{rid}.safetensors").exists():
                await asyncio.sleep(0.005)
            (staging / f"{rid}.safetensors").unlink()
    for path, number in filter(None, aborted):
        if path.exists():
            check(path, number)
        else:
            seen["aborted without a dump"] += 1
    return seen | {
        "left": [file.name for file in staging.glob("drillcore-*")],
        "memory growth": memory[1] - memory[0],
        "most bytes in flight": IN_FLIGHT * (max(map(len, prompts)) * token_bytes + 8192),
    }
