"""Starts an SGLang server that captures, waits until it answers, and ends it."""

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tasks.config import ExtractConfig
from tasks.errors import ServerError
from tasks.patching import Installation, capture_settings, server_paths
from tasks.server import guardian
from tasks.server.ports import check_port, free_port

LOG_TAIL = 25  # lines of the server's log shown when it dies
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
CPU_ARGUMENTS = ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]

logger = logging.getLogger(__name__)


def launch_command(config: ExtractConfig, installation: Installation, port: int) -> list[str]:
    """The server's command line."""
    server = config.server
    return [
        *(installation.interpreter, "-m", "sglang.launch_server"),
        *("--model-path", str(config.model.path), "--host", server.host, "--port", str(port)),
        *("--device", server.device, "--dtype", server.dtype, "--tp", str(server.tensor_parallel)),
        *("--chunked-prefill-size", str(server.chunked_prefill_size)),
        # A prefix found in the cache is not computed, so its states would be missing; a CUDA graph's outputs are
        # buffers that the next pass overwrites; token ids are all that this server sees.
        *("--disable-radix-cache", "--disable-cuda-graph", "--skip-tokenizer-init", "--skip-server-warmup"),
        *(CPU_ARGUMENTS if server.device == "cpu" else []),
        *server.arguments,
    ]


def launch_environment(config: ExtractConfig, staging: Path, layers: list[int]) -> dict[str, str]:
    """What the server's environment needs beyond the one it inherits."""
    paths = [str(path) for path in server_paths(config.server.device)]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "DRILLCORE_CAPTURE": json.dumps(capture_settings(staging, layers, config.capture.final_norm)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **(CPU_ENVIRONMENT if config.server.device == "cpu" else {}),
    }


def shell_command(config: ExtractConfig, installation: Installation, layers: list[int]) -> str:
    """A line for a shell that starts the server an attached extraction with this config needs."""
    environment = launch_environment(config, config.staging.path, layers)
    command = launch_command(config, installation, config.server.port or 30000)
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


class ManagedServer:
    """A server of ours: its process, its log, its staging folder. Ends with this process, whatever happens to it."""

    def __init__(self, config: ExtractConfig, installation: Installation, layers: list[int], log: Path):
        self.port = config.server.port or free_port()
        check_port(config.server.host, self.port, "server.port")
        self.url = f"http://{config.server.host}:{self.port}"
        self.log = log
        self.staging = config.staging.path / f"server-{os.getpid()}-{self.port}"
        self.start_timeout = config.server.start_timeout
        self.command = launch_command(config, installation, self.port)
        self.environment = os.environ | launch_environment(config, self.staging, layers)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ServerError with the end of its log if it does not."""
        self.staging.mkdir(mode=0o700, parents=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        logger.info("starting %s, log in %s", shlex.join(self.command), self.log)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, guardian.__file__, *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + self.start_timeout
        while not self._answers():
            self.check_alive()
            if time.monotonic() > deadline:
                tail = self.log_tail()
                self.stop()
                raise ServerError(
                    f"The server did not answer within {self.start_timeout:.0f} s (server.start_timeout). Its log "
                    f"({self.log}) ends with:\n{tail}"
                )
            time.sleep(0.25)

    def check_alive(self) -> None:
        """Raises ServerError with exit code and log tail if the server is gone."""
        code = self.process.poll() if self.process else None
        if code is not None:
            raise ServerError(
                f"The server died with exit code {code}. Its log ({self.log}) ends with:\n{self.log_tail()}"
            )

    def stop(self) -> None:
        """End the server with all its processes and remove its staging folder."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(timeout=3 * guardian.GRACE)
            self.process = None
        shutil.rmtree(self.staging, ignore_errors=True)

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(f"  | {line[:300]}" for line in lines[-LOG_TAIL:])

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/model_info", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


class AttachedServer:
    """A server that somebody else runs. Only its address and its staging folder are ours to use."""

    def __init__(self, url: str, staging: Path):
        self.url = url.rstrip("/")
        self.staging = staging

    def start(self) -> None:
        """Raises ServerError if nobody answers."""
        self.check_alive()

    def check_alive(self) -> None:
        """Raises ServerError if the server does not answer."""
        try:
            httpx.get(f"{self.url}/model_info", timeout=30, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"The server at {self.url} does not answer: {error} (server.url).") from error

    def stop(self) -> None:
        """Nothing to end: the server is not ours."""


Server = ManagedServer | AttachedServer


def remove_leftovers(staging: Path) -> list[str]:
    """Remove staging folders whose flow process is gone; returns their names."""
    removed = []
    for folder in staging.glob("server-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed
