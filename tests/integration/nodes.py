"""A Prefect server with this repository's deployments, and workers that stand for nodes, each with its own queue."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.faults.drill import Run, Service, prefect_service, wait_until
from tests.integration.seaweed import KEY, SECRET

POOL = "drillcore"  # prefect.yaml's


@dataclass
class Nodes:
    """Workers and fleets in processes of their own, with one Prefect server and one state folder."""

    folder: Path
    service: Service
    """The Prefect server."""

    @property
    def api(self) -> str:
        return f"{self.service.url}/api"

    def environment(self) -> dict[str, str]:
        values = {
            **os.environ,
            "NO_COLOR": "1",
            "DRILLCORE_HOME": str(self.folder / "home"),
            "PREFECT_HOME": str(self.folder / "prefect-home"),
            "PREFECT_API_URL": self.api,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
        return {name: value for name, value in values.items() if name != "MLFLOW_TRACKING_URI"}

    def prefect(self, *arguments: str) -> Run:
        return Run([sys.executable, "-m", "prefect", "--no-prompt", *arguments], self.environment(), self.folder)

    def worker(self, queue: str) -> Run:
        """A node's worker: one run at a time."""
        return self.prefect("worker", "start", "--pool", POOL, "--work-queue", queue, "--limit", "1", "--name", queue)

    def fleet(self, *arguments: str | Path) -> Run:
        """`python -m flows fleet ARGUMENT...`."""
        command = [sys.executable, "-m", "flows", "fleet", *map(str, arguments)]
        return Run(command, self.environment(), self.folder)

    def submit(self, parameters: dict[str, Any]) -> str:
        """Ask for a run of the deployment `extract-fleet`; returns the flow run's id."""
        deployment = httpx.get(f"{self.api}/deployments/name/extract-fleet/extract-fleet", timeout=30).json()["id"]
        url = f"{self.api}/deployments/{deployment}/create_flow_run"
        answer = httpx.post(url, json={"parameters": parameters}, timeout=30)
        assert answer.is_success, answer.text
        return str(answer.json()["id"])

    def state_of(self, flow_run: str) -> str:
        return str(httpx.get(f"{self.api}/flow_runs/{flow_run}", timeout=30).json()["state_type"])

    def flow_runs(self) -> list[dict[str, Any]]:
        """All of them, as the API has them."""
        answer = httpx.post(f"{self.api}/flow_runs/filter", json={"sort": "START_TIME_ASC"}, timeout=30)
        return list(answer.json())

    def runs_of(self, key: str) -> list[dict[str, Any]]:
        """The runs of one work of a fleet, as `partition-0000`."""
        return [run for run in self.flow_runs() if key in run["tags"]]


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    """Everything that it starts is ended with it."""
    service = prefect_service(folder / "prefect")
    try:
        service.start()
        site = Nodes(folder, service)
        for arguments in (["work-pool", "create", POOL, "--type", "process"], ["deploy", "--all"]):
            run = site.prefect(*arguments)
            assert run.wait() == 0, run.out + run.err
        yield site
    finally:
        Run.end_all()
        service.stop()


def end(worker: Run) -> None:
    """Tell a worker to end, as systemd would."""
    worker.process.send_signal(signal.SIGTERM)
    worker.wait(60)


def lose(node: Run) -> None:
    """A node goes at once: its worker, the flow and a server that it started, and what guards them."""
    for process in node.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.process.wait()


def wait_for(run: Run, condition: Any, seconds: float, what: str) -> None:
    """Wait until something holds; fails if the run ends before."""

    def there() -> bool:
        assert run.process.poll() is None, f"the run ended before:\n{run.out}\n{run.err}"
        return bool(condition())

    wait_until(there, seconds, what)
