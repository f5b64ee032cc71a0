"""An SGLang server on a GPU for benchmarks, with or without the capture plugin, and a client that keeps it full."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PLUGIN = Path(__file__).resolve().parents[2] / "patches" / "capture"
IN_FLIGHT = 64
START_TIMEOUT = 400.0  # seconds
ARGUMENTS = (
    "--skip-tokenizer-init --skip-server-warmup --host 127.0.0.1 --disable-cuda-graph --disable-radix-cache "
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none"
)


@dataclass(frozen=True)
class GpuServer:
    """A server that is up; staging is None where it does not capture."""

    url: str
    staging: Path | None


@contextlib.contextmanager
def gpu_server(model: Path, port: int, arguments: list[str], capture: dict[str, Any] | None) -> Iterator[GpuServer]:
    """Start a server and end it afterwards. capture: layers and final_norm of the plugin, or None for a bare server."""
    url = f"http://127.0.0.1:{port}"
    if _answers(url):
        raise RuntimeError(f"a server answers at {url} already: end it first")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that a benchmark that is ended ends its servers
    environment, staging = dict(os.environ), None
    if capture:
        staging = Path(f"/dev/shm/drillcore-benchmark-{port}")
        shutil.rmtree(staging, ignore_errors=True)
        environment["DRILLCORE_CAPTURE"] = json.dumps({"staging": str(staging), **capture})
        environment["PYTHONPATH"] = f"{PLUGIN}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    log = Path(f"/tmp/server-{port}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *shlex.split(ARGUMENTS), *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)
        yield GpuServer(url, staging)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if staging:
            shutil.rmtree(staging, ignore_errors=True)


def prefill_all(server: GpuServer, run: str, prompts: list[list[int]], keep: bool = False) -> tuple[float, list[Path]]:
    """Prefill all prompts, IN_FLIGHT at a time; returns seconds and the dumps, which are deleted unless `keep`.

    A prompt is done when its dump is there, or, without a plugin, when the server has answered.
    """

    async def one(client: httpx.AsyncClient, slots: asyncio.Semaphore, number: int) -> Path | None:
        ids = prompts[number]
        rid = f"drillcore-{run}-{number}-0-{len(ids)}"
        body = {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        async with slots:
            (await client.post(f"{server.url}/generate", json=body)).raise_for_status()
            if server.staging is None:
                return None
            dump, error = (server.staging / f"{rid}{suffix}" for suffix in (".safetensors", ".error.json"))
            while not dump.exists():
                if error.exists():
                    raise RuntimeError(error.read_text())
                await asyncio.sleep(0.002)
            if not keep:
                dump.unlink()
            return dump

    async def everything() -> tuple[float, list[Path | None]]:
        slots = asyncio.Semaphore(IN_FLIGHT)
        limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
            started = time.monotonic()
            dumps = await asyncio.gather(*(one(client, slots, number) for number in range(len(prompts))))
            return time.monotonic() - started, dumps

    seconds, dumps = asyncio.run(everything())
    return seconds, [dump for dump in dumps if dump]


def facts() -> dict[str, str]:
    """Card, versions, date: what every figure is to be read with."""
    import importlib.metadata

    import torch

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "card": torch.cuda.get_device_name(),
        "sglang": importlib.metadata.version("sglang"),
        "torch": torch.__version__,
        "in flight": str(IN_FLIGHT),
    }


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/model_info", timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
