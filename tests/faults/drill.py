"""What the drills share: a flow as a process of its own, services that can be killed, and what complete means.

The SGLang server is attached to, so that it need not start anew with each run: tests/faults/conftest.py.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
import torch

from flows import services
from tasks.files import sha256_of
from tasks.server import guardian
from tasks.server.ports import free_port
from tasks.store.layout import Store
from tasks.verification import read_manifest
from tests.conftest import ROOT
from tests.integration.serving import Serving, config_text, cpu_config, stored_states

ROWS, LONGEST = 96, 700
SHARD_BYTES = 1 << 20
LARGEST_ERROR = 1e-4  # relative (L2) over a state: what float32 rounds otherwise in another batch
MARK = "DRILLCORE_DRILL"  # in the environment of a run and of all that it starts: how its orphans are found


class Run:
    """`python -m flows ...`, or another command, in a process of its own."""

    started_here: ClassVar[list["Run"]] = []
    """All of them, so that a drill that fails leaves none behind."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path):
        self.mark = uuid.uuid4().hex
        self._out, self._err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        self.started = time.monotonic()
        self.started_here.append(self)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, env=environment | {MARK: self.mark}, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def wait(self, seconds: float = 600) -> int:
        """The exit code. Fails the test, and ends the process, if it takes longer than `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"still there after {seconds:.0f} s; it said:\n{self.out}\n{self.err}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()

    @classmethod
    def end_all(cls) -> None:
        while cls.started_here:
            for process in cls.started_here.pop().family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def family(self) -> list[psutil.Process]:
        """The processes of this run that live: whatever became of their parents."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_no_orphans(self, seconds: float = 40) -> None:
        """Nothing of an ended run is left a moment later."""
        _, alive = psutil.wait_procs(self.family(), timeout=seconds)
        assert [" ".join(process.cmdline()) for process in alive if process.is_running()] == []


class Service:
    """A server of Prefect or MLflow on a port of its own, which can be killed and started again over the same data."""

    def __init__(self, command: list[str], environment: dict[str, str], port: int, folder: Path):
        self.command, self.environment, self.log = command, environment, folder / "server.log"
        self.url = f"http://{services.HOST}:{port}"
        self.health = f"{self.url}/api/health" if "prefect" in command else f"{self.url}/health"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = guardian.start(self.command, self.environment, self.log)
        wait_until(self._answers, 120, f"{self.command} did not start, see {self.log}")

    def kill(self) -> None:
        """SIGKILL, as a machine without memory would do it."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.health, timeout=5, trust_env=False).status_code == 200
        return False


def prefect_service(folder: Path) -> Service:
    """A Prefect server with a database of its own; its API is at `.url` + "/api"."""
    folder.mkdir(parents=True)
    port = free_port()
    environment = services.PREFECT_SERVER_SETTINGS | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://{services.HOST}:{port}/api",
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", services.HOST, "--port", str(port)]
    return Service(command, environment, port, folder)


def mlflow_service(folder: Path) -> Service:
    """An MLflow server with a database of its own."""
    folder.mkdir(parents=True)
    port = free_port()
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", services.HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder / "files")),
    ]
    return Service(command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, port, folder)


@dataclass
class Site:
    """A server that runs, a dataset, and what an undisturbed extraction of it gives."""

    folder: Path
    running: Serving
    api: str
    """URL of a Prefect API that every run may use."""
    reference: dict[int, torch.Tensor]
    """float32 [layers + 1, tokens, hidden] by row."""
    staging_bytes: int | None
    """Size of the file system that the staging has for itself; None where it shares one."""

    def write_config(self, output: Path, **sections: dict[str, Any]) -> Path:
        """A config that attaches to the server and stores at `output`; `sections` change it."""
        config = self.running.preflight.config
        values: dict[str, dict[str, Any]] = {
            "server": {"mode": "attached", "url": self.running.server.url, "dtype": config.server.dtype},
            "capture": config.capture.model_dump(),
            "output": {"shard_bytes": SHARD_BYTES},
            "extraction": {"requests_in_flight": 4},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section
        made = cpu_config(config.model.path, config.dataset.path, output, self.running.server.staging, **values)
        path = output.with_name(f"{output.name}.yaml")
        path.write_text(config_text(made))
        return path

    def environment(self, **changes: str | None) -> dict[str, str]:
        """For a run: the site's state folder and Prefect API, or others; None leaves a variable out."""
        values = {
            **os.environ,
            "NO_COLOR": "1",
            "DRILLCORE_HOME": str(self.folder / "home"),
            "PREFECT_HOME": str(self.folder / "prefect-home"),
            "PREFECT_API_URL": self.api,
            **changes,
        }
        return {name: value for name, value in values.items() if value is not None and name != "MLFLOW_TRACKING_URI"}

    def flows(self, *arguments: str | Path, **environment: str | None) -> Run:
        """Start `python -m flows ARGUMENT...`."""
        command = [sys.executable, "-m", "flows", *map(str, arguments)]
        return Run(command, self.environment(**environment), self.folder)

    def assert_right(self, row: int, states: torch.Tensor) -> None:
        """float32 states [layers + 1, tokens, hidden] are the undisturbed extraction's, but for rounding."""
        wanted = self.reference[row]
        assert states.shape == wanted.shape
        error, size = (torch.linalg.vector_norm(value, dim=(1, 2)) for value in (states - wanted, wanted))
        assert (error / size).max() < LARGEST_ERROR, f"row {row}"

    def assert_complete(self, store: Store) -> None:
        """Every row is stored once, verified, and as the undisturbed extraction has it; nobody holds the lock."""
        assert read_manifest(store)["rows_by_state"] == {"done": ROWS, "truncated": 0, "skipped": 0, "failed": 0}
        assert [line["state"] for line in pq.read_table(store.ledger).to_pylist()] == ["done"] * ROWS
        stored = list(stored_states(store))
        assert sorted(row for row, _ in stored) == list(range(ROWS))
        for row, states in stored:
            self.assert_right(row, states)
        assert list(store.root.glob("lock.json*")) == []


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} (within {seconds:.0f} s)"
        time.sleep(0.02)


def committed(store: Store) -> list[Path]:
    """The commit records."""
    return sorted(store.shards.glob("[0-9]*.json"))


def wait_for_commits(run: Run, store: Store, count: int, seconds: float = 300) -> None:
    """Wait until so many commit records are there; fails if the run ends before."""

    def there() -> bool:
        assert run.process.poll() is None, f"the run ended before:\n{run.out}\n{run.err}"
        return len(committed(store)) >= count

    wait_until(there, seconds, f"{count} commit records")


def hashes(store: Store) -> dict[str, str]:
    """sha256 of each commit record and its shard, by name."""
    files = [file for record in committed(store) for file in (record, record.with_suffix(".safetensors"))]
    return {file.name: sha256_of(file) for file in files}


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """A file system of its own, of `size` bytes, at `path`. Skips the test where mounting is refused."""
    path.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class Ballast:
    """A foreign file that takes all the room of a file system, and gives it back."""

    def __init__(self, folder: Path):
        self.path = folder / "ballast"

    def fill(self) -> None:
        """Again and again for a moment: what the others free meanwhile is taken, too."""
        with self.path.open("ab") as file:
            for _ in range(20):
                facts = os.statvfs(self.path.parent)
                if room := facts.f_bavail * facts.f_frsize:
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), room)
                time.sleep(0.01)

    def free(self) -> None:
        self.path.unlink(missing_ok=True)


def make_rows(vocabulary: int, rows: int = ROWS, longest: int = LONGEST) -> list[dict[str, list[int]]]:
    choose = random.Random(5)
    return [
        {"input_ids": [choose.randrange(vocabulary) for _ in range(choose.randint(20, longest))]} for _ in range(rows)
    ]
