"""A Prefect server with our deployments, and workers that run them: what an operator has."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from deployments.deploy import POOL
from tasks.store.layout import Store
from tests.faults.drill import Run, Service, committed, prefect_service, wait_until

FINAL = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}


@dataclass
class Operated:
    """A Prefect server and the environment of all that talks to it."""

    service: Service
    environment: dict[str, str]
    folder: Path
    """Where the processes' output goes."""
    deployments: dict[str, str] = field(default_factory=dict)
    """Ids by name."""

    @classmethod
    @contextlib.contextmanager
    def cold(cls, folder: Path) -> Iterator["Operated"]:
        """A Prefect server with a database and a state folder of its own, nothing deployed yet; ended afterwards."""
        service = prefect_service(folder / "prefect")
        environment = {
            **{name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"},
            "NO_COLOR": "1",
            "DRILLCORE_HOME": str(folder / "home"),
            "PREFECT_HOME": str(folder / "prefect-home"),
        }
        try:
            service.start()
            yield cls(service, environment, folder)
        finally:
            Run.end_all()
            service.stop()

    @property
    def api(self) -> str:
        return f"{self.service.url}/api"

    def run(self, *command: str) -> Run:
        """`python -m COMMAND...`."""
        changes = {"PREFECT_API_URL": self.api, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        return Run([sys.executable, "-m", *command], self.environment | changes, self.folder)

    def deploy(self) -> None:
        """Pool, queues, automations, deployments."""
        run = self.run("deployments.deploy")
        assert run.wait(120) == 0, run.out + run.err
        for name in ("extract", "extract-fleet", "plan", "verify", "export", "prepare"):
            self.deployments[name] = str(self.get(f"deployments/name/{name}/{name}")["id"])

    def worker(self) -> Run:
        return self.run("prefect", "worker", "start", "--pool", POOL)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.api}/{path}", timeout=30).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{self.api}/{path}", json=body, timeout=30)
        assert answer.is_success, answer.text
        return answer.json()

    def submit(self, name: str, config: Path | dict[str, Any], **parameters: Any) -> str:
        """Ask for a run of a deployment, as the form does; returns the flow run's id. config: values, or their file."""
        values = yaml.safe_load(config.read_text()) if isinstance(config, Path) else config
        body = {"parameters": {"config": values, **parameters}}
        return str(self.post(f"deployments/{self.deployments[name]}/create_flow_run", body)["id"])

    def state(self, flow_run: str) -> str:
        return str(self.get(f"flow_runs/{flow_run}")["state_type"])

    def set_state(self, flow_run: str, state: str, name: str | None = None, **details: Any) -> None:
        """As the page's buttons do."""
        values = {"type": state, "name": name or state.capitalize(), "state_details": details}
        self.post(f"flow_runs/{flow_run}/set_state", {"state": values, "force": True})

    def attempts(self, flow_run: str) -> list[dict[str, Any]]:
        """The runs of the same extraction as this one, in the order in which they were created."""
        config = self.get(f"flow_runs/{flow_run}")["parameters"]["config"]
        found = self.post("flow_runs/filter", {"sort": "ID_DESC"})
        same = [run for run in found if run["parameters"].get("config", {}).get("output") == config["output"]]
        return sorted(same, key=lambda run: str(run["created"]))

    def wait_for_completion(self, flow_run: str, seconds: float = 400) -> list[dict[str, Any]]:
        """Wait until one of the attempts is completed and none is on; returns them."""

        def done() -> bool:
            states = [run["state_type"] for run in self.attempts(flow_run)]
            return "COMPLETED" in states and set(states) <= FINAL

        wait_until(done, seconds, f"a completed attempt; the last were {self.attempts(flow_run)}")
        return self.attempts(flow_run)

    def logs(self, flow_run: str) -> str:
        body = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        return "\n".join(line["message"] for line in self.post("logs/filter", body))

    def artifacts(self, flow_run: str) -> dict[str, dict[str, Any]]:
        """The flow run's own and its tasks', the latest of each key."""
        body = {"artifacts": {"flow_run_id": {"any_": [flow_run]}}, "sort": "CREATED_DESC"}
        found = self.post("artifacts/filter", body)
        return {artifact["key"]: artifact for artifact in reversed(found)}


def wait_for_commits(worker: Run, store: Store, count: int) -> None:
    """Wait until so many commit records are there; fails if the worker ends before."""

    def there() -> bool:
        assert worker.process.poll() is None, worker.out + worker.err
        return len(committed(store)) >= count

    wait_until(there, 300, f"{count} commit records; the worker said {worker.out}")


def writers(store: Store) -> list[int]:
    """Process ids of the flows that committed something, in the order of their first commit."""
    records = sorted(committed(store), key=lambda path: path.stat().st_mtime_ns)
    pids = [int(json.loads(record.read_bytes())["written"]["by"].rpartition(":")[2]) for record in records]
    return list(dict.fromkeys(pids))
