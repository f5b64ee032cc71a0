"""The Prefect and MLflow servers of this machine, for those who have none elsewhere.

State lies in the state folder (`tasks/state.py`).
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tasks.errors import SetupError
from tasks.files import write_json
from tasks.server import guardian
from tasks.server.ports import check_port, free_port
from tasks.state import mlflow_artifacts as mlflow_artifacts
from tasks.state import mlflow_uri as mlflow_uri
from tasks.state import state_home

HOST = "127.0.0.1"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
START_TIMEOUT = 120.0  # seconds
# By default the server records task runs one by one and drops some of a burst for good; in groups it keeps up.
PREFECT_SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
}


@contextlib.contextmanager
def prefect_api(port: int | None = None) -> Iterator[str]:
    """A Prefect API for the time of the context; yields its URL.

    The one that the user has configured (PREFECT_API_URL, a profile); else one of this state folder that runs already
    (that of `python -m flows ui`); else a new one on loopback, which ends with the context.
    `port`: of the new one; default 4200, or any free port where that is taken. Raises SetupError if the configured one
    is not there.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    if configured := get_current_settings().api.url:
        _check_configured(configured)
        yield configured
        return
    url = _running(_note())
    with contextlib.ExitStack() as stack:
        if url is None:
            chosen = port or (PREFECT_PORT if _is_free(PREFECT_PORT) else free_port())
            url = stack.enter_context(_prefect_server(chosen))
        os.environ["PREFECT_API_URL"] = url
        refresh_global_settings_context()
        try:
            yield url
        finally:
            del os.environ["PREFECT_API_URL"]
            refresh_global_settings_context()


def find_api() -> str | None:
    """The URL of the Prefect API that `prefect_api` would take without starting one."""
    from prefect.settings import get_current_settings

    return get_current_settings().api.url or _running(_note())


@contextlib.contextmanager
def mlflow_server(port: int = MLFLOW_PORT) -> Iterator[str]:
    """An MLflow server over the state folder's database; yields its URL."""
    check_port(HOST, port, "--mlflow-port")
    home = state_home()
    home.mkdir(parents=True, exist_ok=True)
    url = f"http://{HOST}:{port}"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", mlflow_uri(), "--default-artifact-root", mlflow_artifacts().as_uri()),
    ]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # job runners take 2 GiB and are not used
    with _service("MLflow", command, environment, home / "mlflow-server.log", f"{url}/health"):
        yield url


def serve_pages(prefect_port: int, mlflow_port: int) -> None:
    """Serve the Prefect and MLflow pages until Ctrl-C or SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    note = _note()
    with prefect_api(prefect_port) as prefect, mlflow_server(mlflow_port) as mlflow, contextlib.ExitStack() as stack:
        write_json(note, {"url": prefect})
        stack.callback(note.unlink, missing_ok=True)
        print(f"  Prefect    {prefect.removesuffix('/api')}\n  MLflow     {mlflow}\n  Ctrl-C ends both.", flush=True)
        signal.pause()


@contextlib.contextmanager
def _prefect_server(port: int) -> Iterator[str]:
    check_port(HOST, port, "--prefect-port")
    home = state_home() / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    url = f"http://{HOST}:{port}/api"
    environment = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        **PREFECT_SERVER_SETTINGS,
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    with _service("Prefect", command, environment, home / "server.log", f"{url}/health"):
        yield url


@contextlib.contextmanager
def _service(name: str, command: list[str], environment: dict[str, str], log: Path, health: str) -> Iterator[None]:
    """Run a server under a guardian until the context ends; wait until `health` answers."""
    log.unlink(missing_ok=True)
    process = guardian.start(command, environment, log)
    assert process.stdin is not None
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(health):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise SetupError(f"The {name} server did not start. Its log ({log}) ends with:\n{tail}")
            time.sleep(0.2)
        yield
    finally:
        process.stdin.close()
        process.wait()


def _note() -> Path:
    """Where `python -m flows ui` says that its Prefect server is there to be used by others."""
    return state_home() / "prefect" / "pages.json"


def _running(note: Path) -> str | None:
    try:
        url = json.loads(note.read_bytes())["url"]
    except (OSError, ValueError, KeyError):
        return None
    return url if _answers(f"{url}/health") else None


def _check_configured(url: str) -> None:
    """Raises SetupError if nobody answers: a flow does not begin without its API."""
    try:
        httpx.get(f"{url}/health", timeout=30)  # whatever it answers, to us without a key
    except httpx.HTTPError as error:
        raise SetupError(
            f"The Prefect API at {url} does not answer: {error}. Start it, or choose another one (PREFECT_API_URL, or "
            "the profile); without one, this command starts its own."
        ) from error


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _is_free(port: int) -> bool:
    try:
        check_port(HOST, port, "")
    except SetupError:
        return False
    return True
