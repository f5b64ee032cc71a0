"""The capture is exact on every path of the server: tiny models of each family against Transformers, in float32.

Each server splits nearly every prompt over several passes of CHUNK tokens and has up to 64 requests at once. Several
conditions share a server where they do not hide each other: starting one takes most of the time.
"""

import asyncio
import contextlib
import functools
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tasks.errors import ServerError, TransientPrefillError
from tasks.preflight import run_preflight
from tasks.probe import states_of
from tasks.server.dumps import open_dump
from tasks.server.launch import ManagedServer
from tests.conftest import ROOT
from tests.integration.serving import CPU_ARGUMENTS, Serving, cpu_config, serving
from tests.integration.tiny_models import CONTEXT, LAYERS, VOCABULARY, make_checkpoint, reference_states
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

VERSIONS = {"0.5.23": sys.executable, "0.5.17": str(ROOT / ".venv-sglang-0.5.17/bin/python")}
CAPTURED = list(range(LAYERS - 1))
CHUNK = 64
TOLERANCE = 1e-4  # relative error (L2) of any token's state; seen: up to 2e-5
SETTLED = 20  # passes after which the plugin has forgotten what does not go on
LONG = 1900  # tokens: 30 passes
DATA_PARALLEL_ATTENTION = ["--dp", "2", "--enable-dp-attention"]
TWO_RANKS = ("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # a core each


@dataclass(frozen=True)
class Family:
    """A checkpoint, prompts for it, and what Transformers makes of them."""

    model: Path
    dataset: Path
    prompts: list[list[int]]
    references: list[torch.Tensor]
    """[layers + 1, tokens, hidden] a prompt: all layers' outputs, then the final state after the norm."""

    def expected(self, number: int, final_norm: str) -> torch.Tensor:
        return self.references[number][[*CAPTURED, LAYERS if final_norm == "post" else LAYERS - 1]]


def make_prompts(count: int) -> list[list[int]]:
    """Lengths around a pass's and far above it. No two begin alike: with a radix cache on, nothing is found in it."""
    choose = random.Random(20)
    lengths = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
    lengths += [choose.randint(CHUNK + 1, 5 * CHUNK) for _ in range(count - len(lengths))]
    return [[first, *(choose.randrange(VOCABULARY) for _ in range(length - 1))] for first, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a family's checkpoint and references when they are first asked for."""

    @functools.cache
    def make(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        make_checkpoint(name, folder / "model")
        prompts = make_prompts(64 if name in ("llama", "qwen3") else 16)  # Transformers' DeepSeek is slow
        dataset = write_jsonl(folder / "dataset.jsonl", [{"input_ids": prompt} for prompt in prompts])
        return Family(folder / "model", dataset, prompts, reference_states(folder / "model", prompts))

    return make


def settings_of(
    one: Family, version: str, staging: Path, final_norm: str, arguments: list[str], tensor_parallel: int = 1
) -> Any:
    return cpu_config(
        one.model,
        one.dataset,
        staging / "unused",
        staging,
        server={
            "interpreter": VERSIONS[version],
            "dtype": "float32",
            "chunked_prefill_size": CHUNK,
            "tensor_parallel": tensor_parallel,
            "arguments": [*CPU_ARGUMENTS, *arguments],
        },
        capture={"layers": CAPTURED, "final_norm": final_norm},
    )


def assert_exact(running: Serving, one: Family, numbers: list[int] | None = None) -> None:
    """Prefill the family's prompts, 64 at once, and compare every token's every state."""
    numbers = list(range(len(one.prompts))) if numbers is None else numbers
    final_norm = running.preflight.captured.final_norm
    chunks, errors = 0, []
    with running.engine(requests_in_flight=64, attempts=1) as engine:
        futures = [engine.submit(number, np.array(one.prompts[number], dtype=np.int32)) for number in numbers]
        for number, future in zip(numbers, futures, strict=True):
            dump = future.result()
            chunks = max(chunks, dump.chunks)
            errors.append(largest_error(states_of(dump.aux, dump.last), one.expected(number, final_norm)))
            engine.release(dump)
    print(f"\nlargest relative error of a token's state: {max(errors):.2g}, at most {chunks} passes a prompt")
    assert all(error < TOLERANCE for error in errors)  # not so for what is no number
    assert chunks > 2


def largest_error(states: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((states - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def files(running: Serving) -> list[str]:
    """What is left in staging, apart from what says that the plugin is there."""
    return sorted(
        file.name for file in running.server.staging.iterdir() if not file.name.startswith(("ready.", "owner."))
    )


# Models and ways to share them


def slow(*values: Any) -> Any:
    """A case of `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("version", "name", "final_norm", "arguments", "tensor_parallel"),
    [
        slow("0.5.23", "qwen3", "pre", ["--disable-overlap-schedule"], 1),
        ("0.5.23", "deepseek-v3", "post", [], 1),
        slow("0.5.23", "kimi-k2.5", "pre", [], 2),
        slow("0.5.23", "deepseek-v3", "pre", DATA_PARALLEL_ATTENTION, 2),
        slow("0.5.23", "llama", "pre", ["--dp", "2"], 1),
        slow("0.5.17", "deepseek-v3", "post", [], 1),
        slow("0.5.17", "qwen3", "pre", ["--disable-overlap-schedule"], 1),
        slow("0.5.17", "kimi-k2.5", "pre", [], 2),
        slow("0.5.17", "deepseek-v3", "pre", DATA_PARALLEL_ATTENTION, 2),
        slow("0.5.17", "llama", "pre", ["--dp", "2"], 1),
    ],
)
def test_states_equal_transformers(
    family: Any,
    staging: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    name: str,
    final_norm: str,
    arguments: list[str],
    tensor_parallel: int,
) -> None:
    one = family(name)
    if tensor_parallel > 1 or ("--dp" in arguments and version != "0.5.17"):  # 0.5.17 counts tensor parallelism only
        monkeypatch.setenv(*TWO_RANKS)
    config = settings_of(one, version, staging, final_norm, arguments, tensor_parallel)
    with serving(config, tmp_path / "server.log") as running:
        replicas = 2 if "--dp" in arguments else 1
        assert len(list(running.server.staging.glob("ready.*"))) == replicas  # one writer each
        assert running.facts.sglang == version
        assert_exact(running, one)
        assert files(running) == []


# What else goes on in a server, on one Llama server a version


@pytest.fixture(scope="module", params=VERSIONS)
def busy_server(
    request: pytest.FixtureRequest, family: Any, staging: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A server that mixes prefill with decode in one pass."""
    config = settings_of(family("llama"), request.param, staging, "post", ["--enable-mixed-chunk"])
    with serving(config, tmp_path_factory.mktemp("busy") / "server.log") as running:
        yield running


def body_of(rid: str, ids: list[int], new_tokens: int = 0) -> dict[str, Any]:
    return {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True}}


@contextlib.asynccontextmanager
async def client_of(running: Serving) -> Any:
    async with httpx.AsyncClient(base_url=running.server.url, timeout=300, trust_env=False) as client:
        yield client


async def appears(folder: Path, pattern: str) -> Path:
    for _ in range(3000):
        if found := next(folder.glob(pattern), None):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{pattern} does not appear")


async def settle(client: httpx.AsyncClient, staging: Path) -> None:
    """Some more passes, so that the plugin has forgotten what does not go on."""
    for number in range(SETTLED):
        (await client.post("/generate", json=body_of(f"drillcore-settle-0-{number}-1", [3]))).raise_for_status()
        (await appears(staging, f"drillcore-settle-0-{number}-1.safetensors")).unlink()


def test_64_requests_at_once_are_exact(busy_server: Serving, family: Any) -> None:
    assert_exact(busy_server, family("llama"))
    assert files(busy_server) == []


def test_prefill_is_exact_beside_requests_of_others_that_decode(busy_server: Serving, family: Any) -> None:
    async def decode_meanwhile() -> None:
        async with client_of(busy_server) as client:
            others = [
                asyncio.create_task(client.post("/generate", json=body_of(f"chat-{number}", [7, 8, 9], 1500)))
                for number in range(4)
            ]
            await asyncio.sleep(1)
            await asyncio.to_thread(assert_exact, busy_server, family("llama"))
            assert not any(other.done() for other in others)
            for number in range(4):
                await client.post("/abort_request", json={"rid": f"chat-{number}"})
            await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(decode_meanwhile())
    assert re.search(r"Prefill batch.*#running-req: [1-9]", busy_server.server.log.read_text())
    assert files(busy_server) == []


def test_an_aborted_request_leaves_nothing_and_can_be_sent_again(busy_server: Serving, family: Any) -> None:
    staging, ids = busy_server.server.staging, (family("llama").prompts[-1] * 30)[:LONG]
    (expected,) = reference_states(family("llama").model, [ids])
    rid = f"drillcore-abort-0-0-{LONG}"

    async def abort_and_send_again() -> Path:
        async with client_of(busy_server) as client:
            first = asyncio.create_task(client.post("/generate", json=body_of(rid, ids)))
            await appears(staging, f"{rid}.*.part")
            await client.post("/abort_request", json={"rid": rid})
            await asyncio.gather(first, return_exceptions=True)
            (await client.post("/generate", json=body_of(rid, ids))).raise_for_status()
            dump = await appears(staging, f"{rid}.safetensors")
            await settle(client, staging)
            return dump

    dump = open_dump(asyncio.run(abort_and_send_again()), np.array(ids, np.int32), busy_server.preflight.captured)
    dump.delete()
    states, wanted = states_of(dump.aux, dump.last), expected[[*CAPTURED, LAYERS]]
    errors = (states - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    wrong = (~(errors < TOLERANCE)).any(dim=0).nonzero().flatten().tolist()
    assert wrong == [], f"{len(wrong)} tokens from {wrong[:3]} on are off by up to {errors.max():.2g}"
    assert files(busy_server) == []


def test_two_requests_of_one_id_give_one_whole_dump(busy_server: Serving, family: Any) -> None:
    ids = family("llama").prompts[-1]
    rid = f"drillcore-twice-0-0-{len(ids)}"

    async def send_twice() -> list[int]:
        async with client_of(busy_server) as client:
            answers = await asyncio.gather(*(client.post("/generate", json=body_of(rid, ids)) for _ in range(2)))
            await appears(busy_server.server.staging, f"{rid}.safetensors")
            await settle(client, busy_server.server.staging)
            return sorted(answer.status_code for answer in answers)

    assert asyncio.run(send_twice()) in ([200, 400], [200, 200])  # 200 twice where the first was done in time
    path = busy_server.server.staging / f"{rid}.safetensors"
    dump = open_dump(path, np.array(ids, np.int32), busy_server.preflight.captured)
    number = len(family("llama").prompts) - 1
    assert largest_error(states_of(dump.aux, dump.last), family("llama").expected(number, "post")) < TOLERANCE
    dump.delete()
    assert files(busy_server) == []


@pytest.mark.parametrize("tokens", [CONTEXT - 2, CONTEXT + 50])
def test_a_prompt_over_the_limit_is_refused_and_its_stub_becomes_no_dump(busy_server: Serving, tokens: int) -> None:
    rid = f"drillcore-long-0-0-{tokens}"

    async def send() -> int:
        async with client_of(busy_server) as client:
            answer = await client.post("/generate", json=body_of(rid, [5] * tokens))
            await settle(client, busy_server.server.staging)
            return answer.status_code

    assert asyncio.run(send()) == 400
    left = files(busy_server)
    assert set(left) <= {f"{rid}.error.json"}
    for name in left:
        (busy_server.server.staging / name).unlink()


def test_a_health_check_in_between_changes_nothing(busy_server: Serving, family: Any) -> None:
    async def check_meanwhile() -> list[int]:
        async with client_of(busy_server) as client:
            work = asyncio.create_task(asyncio.to_thread(assert_exact, busy_server, family("llama")))
            checks = []
            while not work.done():
                checks.append((await client.get("/health_generate")).status_code)
            await work
            return checks

    assert set(asyncio.run(check_meanwhile())) == {200}
    assert files(busy_server) == []


@pytest.mark.parametrize(
    "rid",
    ["../escaped-0-0-3", "/tmp/drillcore-x-0-0-3", "drillcore-x/../../y-0-0-3", "drillcore-" + "a" * 10_000 + "-0-0-3"],
)
def test_an_id_that_is_not_ours_creates_no_file(busy_server: Serving, rid: str) -> None:
    staging = busy_server.server.staging
    before = sorted(path for path in staging.parent.rglob("*"))

    async def send() -> None:
        async with client_of(busy_server) as client:
            (await client.post("/generate", json=body_of(rid, [1, 2, 3]))).raise_for_status()
            await settle(client, staging)

    asyncio.run(send())
    assert sorted(path for path in staging.parent.rglob("*")) == before
    assert list(Path("/tmp").glob("drillcore-x-*")) == []
    assert staging.stat().st_mode & 0o777 == 0o700


# What cannot be exact is refused


@pytest.mark.parametrize("version", ["0.5.23", slow("0.5.17")])
def test_rows_from_a_radix_cache_are_an_error_of_that_request_and_tensor_parallel_states_are_exact(
    family: Any, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    one = family("llama")
    monkeypatch.setenv(*TWO_RANKS)
    config = settings_of(one, version, staging, "post", [], tensor_parallel=2)
    preflight = run_preflight(config)
    server = ManagedServer(config, preflight.installation, preflight.layers, tmp_path / "server.log")
    server.command.remove("--disable-radix-cache")
    running = Serving(preflight, server, facts=None)
    try:
        server.start()
        assert_exact(running, one)
        with running.engine(attempts=1) as engine:
            again = [engine.submit(number, np.array(one.prompts[number], np.int32)) for number in range(8, 16)]
            for future in again:
                with pytest.raises(TransientPrefillError, match="is the server's radix cache on"):
                    future.result()
        assert files(running) == []
        server.check_alive()
    finally:
        server.stop()


@pytest.mark.slow
def test_a_server_that_would_give_other_states_does_not_start_and_says_why(
    family: Any, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*TWO_RANKS)
    config = settings_of(family("llama"), "0.5.23", staging, "post", DATA_PARALLEL_ATTENTION, 2)
    with pytest.raises(ServerError, match="enable_dp_attention is on: SGLang computes LlamaForCausalLM wrongly"):
        with serving(config, tmp_path / "server.log"):
            pass
    assert os.listdir(staging) == []
