"""SGLang servers for benchmarks, with the capture plugin or bare, and a client that keeps one full.

Servers are started as an extraction starts its own: same command, same guardian, which ends them with this process.
"""

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tasks.config import ExtractConfig
from tasks.errors import ServerError
from tasks.extraction.lane import IDLE
from tasks.patching import find_installation
from tasks.patching.plugin import CAPTURE
from tasks.server.launch import ManagedServer

REQUESTS_IN_FLIGHT = 64
# Kernels that need no download and no compiler where the benchmark runs.
GPU_ARGUMENTS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
GPU_ARGUMENTS += ["--mem-fraction-static", "0.9"]  # of what is free; the cache is limited by its tokens
CPU_ARGUMENTS = ["--mem-fraction-static", "0.5"]


def server_arguments(device: str, cache_tokens: int) -> list[str]:
    """What several servers on one device need beyond what every extraction's server is given."""
    return [*(CPU_ARGUMENTS if device == "cpu" else GPU_ARGUMENTS), "--max-total-tokens", str(cache_tokens)]


def prepare_server(
    config: ExtractConfig, layers: list[int], log: Path, number: int = 0, bare: bool = False
) -> ManagedServer:
    """A server that is not started yet; bare: without the plugin. number: which GPUs, where there are several."""
    server = ManagedServer(config, find_installation(config.server.interpreter), layers, log, number)
    if bare:
        del server.environment["DRILLCORE_CAPTURE"]
        paths = server.environment["PYTHONPATH"].split(os.pathsep)
        server.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != str(CAPTURE))
    return server


@contextlib.contextmanager
def running(servers: Sequence[ManagedServer]) -> Iterator[None]:
    """Start servers, all at once; one that does not come up is tried once more, alone. End them afterwards."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(servers), thread_name_prefix="server-start") as threads:
            failed = [server for server, error in zip(servers, threads.map(_start, servers)) if error]
        for server in failed:
            server.restart()
        yield


def _start(server: ManagedServer) -> ServerError | None:
    try:
        server.start()
    except ServerError as error:
        print(f"to be started once more: {error}", file=sys.stderr, flush=True)
        return error
    return None


def request_body(request: str, ids: list[int]) -> bytes:
    """A prefill, and nothing else, as JSON."""
    return orjson.dumps({"rid": request, "input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}})


def prefill_all(
    url: str, run: str, prompts: list[list[int]], staging: Path | None = None, keep: bool = False
) -> tuple[float, list[Path]]:
    """Prefill all prompts, REQUESTS_IN_FLIGHT at a time; returns seconds and the dumps, deleted unless `keep`.

    run: [a-z0-9]. A prompt is done when its dump is in `staging` or, without one, when the server has answered.
    """

    async def one(client: aiohttp.ClientSession, slots: asyncio.Semaphore, number: int) -> Path | None:
        request = f"drillcore-{run}-{number}-0-{len(prompts[number])}"
        async with slots:
            headers = {"content-type": "application/json"}
            body = request_body(request, prompts[number])
            async with client.post(f"{url}/generate", data=body, headers=headers) as answer:
                answer.raise_for_status()
                await answer.read()
            if staging is None:
                return None
            dump = staging / f"{request}.safetensors"
            while not dump.exists():
                check_no_error(dump)
                await asyncio.sleep(0.002)
            if not keep:
                dump.unlink()
            return dump

    async def everything() -> tuple[float, list[Path | None]]:
        slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT)
        # The extraction's own client: both sides of a comparison pay the same for a request.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as client:
            started = time.monotonic()
            dumps = await asyncio.gather(*(one(client, slots, number) for number in range(len(prompts))))
            return time.monotonic() - started, dumps

    seconds, dumps = asyncio.run(everything())
    return seconds, [dump for dump in dumps if dump]


def check_no_error(dump: Path) -> None:
    """Raises RuntimeError with what the plugin says if the capture failed."""
    error = dump.with_name(f"{dump.stem}.error.json")
    if error.exists():
        raise RuntimeError(error.read_text())


def facts(device: str) -> dict[str, Any]:
    """Card, versions, date: what every figure is to be read with."""
    import importlib.metadata
    import platform

    import torch

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "card": torch.cuda.get_device_name() if device == "cuda" else f"none, {platform.machine()} CPU",
        "driver": _driver(),
        "cores": len(os.sched_getaffinity(0)),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{
            package: importlib.metadata.version(package)
            for package in ("sglang", "transformers", "prefect", "mlflow", "safetensors")
        },
    }


def _driver() -> str | None:
    try:
        found = re.search(r"\d+\.\d+[.\d]*", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found and found[0]
