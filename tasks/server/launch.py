"""Starts an SGLang server that captures, waits until it answers, and ends it."""

import json
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from packaging.version import Version

from tasks.config import ExtractConfig
from tasks.errors import ServerError, SetupError
from tasks.files import write_json
from tasks.patching import Installation, capture_settings, server_paths
from tasks.processes import identity
from tasks.server import guardian
from tasks.server.ports import check_port, free_port

TAIL_LINES, TAIL_BYTES = 25, 1 << 16  # of the server's log, shown when it dies
ERROR_LINE = re.compile(r"[\w.]+(Error|Exception): .")  # the end of a traceback
DEFAULT_PORT = 30000  # SGLang's
DYING = 3.0  # seconds that a server whose scheduler has died may take to end itself
OWNER = "owner.json"  # in a staging folder: the process whose it is
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
CPU_ARGUMENTS = ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
PREFILL_GRAPH_OFF = ["--disable-piecewise-cuda-graph"]  # later versions mean both graphs by --disable-cuda-graph
# An all-reduce that is fused into the next layer's norm comes after the capture, or never (SGLang up to 0.5.20). It is
# for passes of at most 2,048 tokens, so it is nothing to an extraction.
REDUCE_BEFORE_CAPTURE = ["--enforce-disable-flashinfer-allreduce-fusion"]

logger = logging.getLogger(__name__)


def launch_command(config: ExtractConfig, installation: Installation, port: int, number: int = 0) -> list[str]:
    """A server's command line; `number`: of the server, where there are several on this machine."""
    server = config.server
    first_gpu = number * server.tensor_parallel
    return [
        *(installation.interpreter, "-m", "sglang.launch_server"),
        *("--model-path", str(config.model.path), "--host", server.host, "--port", str(port)),
        *("--device", server.device, "--dtype", server.dtype, "--tp", str(server.tensor_parallel)),
        *("--chunked-prefill-size", str(server.chunked_prefill_size)),
        # A prefix found in the cache is not computed, so its states would be missing; a CUDA graph's outputs are
        # buffers that the next pass overwrites; token ids are all that this server sees.
        *("--disable-radix-cache", "--disable-cuda-graph", "--skip-tokenizer-init", "--skip-server-warmup"),
        # An idle scheduler would spin, and the plugin's threads in its process wait for the interpreter: the last dumps
        # of a run came up to 1.8 s late on an H200, and with this flag within 0.1 s.
        "--sleep-on-idle",
        *(PREFILL_GRAPH_OFF if Version(installation.sglang) < Version("0.5.14") else []),
        *(REDUCE_BEFORE_CAPTURE if server.tensor_parallel > 1 else []),
        *(CPU_ARGUMENTS if server.device == "cpu" else []),
        *(["--base-gpu-id", str(first_gpu)] if first_gpu and server.device == "cuda" else []),
        *server.arguments,
    ]


def launch_environment(config: ExtractConfig, staging: Path, layers: list[int]) -> dict[str, str]:
    """What the server's environment needs beyond the one it inherits."""
    paths = [str(path) for path in server_paths(config.server.device)]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "DRILLCORE_CAPTURE": json.dumps(capture_settings(config, staging, layers)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **(CPU_ENVIRONMENT if config.server.device == "cpu" else {}),
    }


def shell_commands(config: ExtractConfig, installation: Installation, layers: list[int]) -> list[str]:
    """A line for a shell for each server that an attached extraction with this config needs."""
    lines, first = [], config.server.port or DEFAULT_PORT
    ports = [urlsplit(url).port or first + number for number, url in enumerate(config.server.urls)]
    for number, port in enumerate(ports or range(first, first + config.server.count)):
        environment = launch_environment(config, attached_staging(config, number), layers)
        command = launch_command(config, installation, port, number)
        settings = (f"{name}={shlex.quote(value)}" for name, value in environment.items())
        lines.append(" ".join([*settings, shlex.join(command)]))
    return lines


def attached_staging(config: ExtractConfig, number: int) -> Path:
    """Where an attached server leaves its dumps."""
    path = config.staging.path
    return path / f"attached-{number}" if config.server.servers > 1 else path


class ManagedServer:
    """A server of ours: its process, its log, its staging folder. Ends with this process, whatever happens to it.

    `staging` is another folder after each start: what a dead server left behind is never taken for a new one's.
    """

    def __init__(
        self, config: ExtractConfig, installation: Installation, layers: list[int], log: Path, number: int = 0
    ):
        """log: where its output goes. number: of the server, where there are several on this machine."""
        self.port = config.server.port + number if config.server.port else free_port()
        check_port(config.server.host, self.port, "server.port")
        self.url = f"http://{config.server.host}:{self.port}"
        self.log = log
        self.start_timeout = config.server.start_timeout
        self.command = launch_command(config, installation, self.port, number)
        self._config, self._layers = config, layers
        self._new_staging()
        self.environment = launch_environment(config, self.staging, layers)
        self.process: subprocess.Popen[bytes] | None = None
        self._lock, self._stopped = threading.Lock(), False

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ServerError with the end of its log if it does not."""
        self.log.unlink(missing_ok=True)
        self._start()

    def ailment(self, deadline: float) -> str | None:
        """What is wrong with the server, with the end of its log; None if it answers a real prefill in time.

        deadline: seconds.
        """
        if (death := self._death()) is not None:
            return death
        if (failure := failed_prefill(self.url, deadline)) is None:
            return None
        # A dying server takes seconds to end all its processes; its exit code says more than a refused prefill.
        time.sleep(DYING)
        return self._death() or self._with_log(f"The server is stuck: {failure}.")

    def restart(self) -> None:
        """End what is left of the server and start it anew, in a new staging folder. Raises ServerError as `start`."""
        self._end()
        self._new_staging()
        self.environment["DRILLCORE_CAPTURE"] = json.dumps(capture_settings(self._config, self.staging, self._layers))
        self._start()

    def check_alive(self) -> None:
        """Raises ServerError with exit code and log tail if the server is gone."""
        if (death := self._death()) is not None:
            raise ServerError(death)

    def stop(self) -> None:
        """End the server for good, with all its processes, and remove its staging folder."""
        with self._lock:
            self._stopped = True
        self._end()

    def _new_staging(self) -> None:
        self.staging = self._config.staging.path / f"server-{secrets.token_hex(6)}"

    def _start(self) -> None:
        try:
            self.staging.mkdir(mode=0o700, parents=True)
            write_json(self.staging / OWNER, identity())
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"{error.filename} cannot be written: {error.strerror} (staging.path).") from error
        logger.info("starting %s, log in %s", shlex.join(self.command), self.log)
        with self._lock:
            if self._stopped:  # meanwhile, by the thread that ends the run
                raise ServerError("the server was ended")
            self.process = guardian.start(self.command, self.environment, self.log)
        deadline = time.monotonic() + self.start_timeout
        while not answers(self.url):
            self.check_alive()
            if self._stopped:
                raise ServerError("the server was ended")
            if time.monotonic() > deadline:
                self._end()
                raise ServerError(
                    self._with_log(
                        f"The server did not answer within {self.start_timeout:.0f} s (server.start_timeout)."
                    )
                )
            time.sleep(0.25)

    def _death(self) -> str | None:
        """How the server died; None if it lives, or was never started."""
        code = self.process.poll() if self.process else None
        return None if code is None else self._with_log(f"The server died with exit code {code}.")

    def _with_log(self, what: str) -> str:
        return f"{what} Its log ({self.log}) ends with:\n{self.log_tail()}"

    def _end(self) -> None:
        process = self.process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                process.wait(timeout=4 * guardian.GRACE)
            except subprocess.TimeoutExpired:
                logger.warning("the server (guardian %d) is still ending", process.pid)
            self.process = None
        shutil.rmtree(self.staging, ignore_errors=True)

    def log_tail(self) -> str:
        """The last lines of the server's log; before them the first error, which others often follow."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        first_error = [line for line in lines[:-TAIL_LINES] if ERROR_LINE.match(line)][:1]
        shown = [*first_error, *(["..."] if first_error else []), *lines[-TAIL_LINES:]]
        return "\n".join(f"  | {line[:300]}" for line in shown)


class AttachedServer:
    """A server that somebody else runs. Only its address and its staging folder are ours to use."""

    def __init__(self, url: str, staging: Path, patience: float = 60):
        """patience: seconds in which somebody else may have it back when it is lost."""
        self.url = url.rstrip("/")
        self.staging = staging
        self.patience = patience

    def start(self) -> None:
        """Raises ServerError if nobody answers."""
        self.check_alive()

    def ailment(self, deadline: float) -> str | None:
        """What is wrong with the server; None if it answers a real prefill in time. deadline: seconds."""
        failure = failed_prefill(self.url, deadline)
        return failure and f"The server at {self.url} does not answer a prefill: {failure} (server.url)."

    def restart(self) -> None:
        """Wait until somebody else has restarted it. Raises ServerError if nobody does."""
        deadline = time.monotonic() + self.patience
        while not answers(self.url):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"The server at {self.url} did not come back within {self.patience:.0f} s (server.url)."
                )
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raises ServerError if the server does not answer."""
        try:
            httpx.get(f"{self.url}/model_info", timeout=30, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"The server at {self.url} does not answer: {error} (server.url).") from error

    def stop(self) -> None:
        """Nothing to end: the server is not ours."""


Server = ManagedServer | AttachedServer


def answers(url: str) -> bool:
    """Whether a server is there, loaded or busy."""
    try:
        return httpx.get(f"{url}/model_info", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def failed_prefill(url: str, deadline: float) -> str | None:
    """Send a real prefill of one token: None if it is answered within `deadline` seconds, or what came instead."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        answer = httpx.post(f"{url}/generate", json=body, timeout=deadline, trust_env=False)
    except httpx.TransportError as error:
        return f"{type(error).__name__} {error}".strip()
    return None if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:300]}"
