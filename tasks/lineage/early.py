"""MLflow in a process of its own: its imports and its database take seconds, for which nobody waits while the server
starts, and 160 MB, which the flow need not have.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tasks.config import LineageConfig
from tasks.errors import DrillcoreError, LineageError
from tasks.storage import as_argument, is_remote
from tasks.store.layout import Store

ROOT = Path(__file__).resolve().parents[2]
ENDING = 5.0  # seconds for the process to end by itself

logger = logging.getLogger(__name__)


class Preparation:
    """Begins at once. It says it if MLflow is not there, and stops nothing. A context manager: leaving it ends it."""

    def __init__(self, config: LineageConfig, default_uri: str, artifacts: Path):
        """As for `tasks.lineage.record.record_extraction`."""
        self._arguments = (config, default_uri, artifacts)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.lineage.apart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )
        asked = {"config": config.model_dump(mode="json"), "default_uri": default_uri, "artifacts": str(artifacts)}
        self._thread = threading.Thread(target=self._prepare, args=(asked,), name="mlflow", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Preparation":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def join(self) -> None:
        """Wait until MLflow is ready, or is known not to be. It gives up by itself."""
        self._thread.join()

    def record(self, store: Store) -> str:
        """`record_extraction`, once. Raises LineageError if that fails, for whatever reason."""
        self.join()
        if is_remote(store.root):
            return self._record_here(store)
        run_id: str = self._ask({"store": str(Path(str(store.root)).absolute())}, store)
        return run_id

    def _record_here(self, store: Store) -> str:
        """A store in a bucket: its keys may be known to this process only, and are told to no other."""
        from tasks.lineage.record import record_extraction

        try:
            return record_extraction(store, *self._arguments)
        except LineageError:
            raise
        except DrillcoreError as error:
            raise LineageError(f"{error} Later: python -m flows record {as_argument(store.root)}") from error

    def close(self) -> None:
        """End the process, whatever it is at. A record that it cuts short can be made up for."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _prepare(self, asked: dict[str, Any]) -> None:
        try:
            self._ask(asked)
        except LineageError as error:
            logger.warning("%s", error)

    def _ask(self, what: dict[str, Any], store: Store | None = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except (OSError, ValueError):  # it is dead, or was closed
            reply = ""
        if not reply:
            later = f"; later: python -m flows record {store.root}" if store else ""
            raise LineageError(f"The process that speaks to MLflow ended ({self._process.poll()}){later}.")
        outcome = json.loads(reply)
        if "error" in outcome:
            raise LineageError(outcome["error"])
        return outcome["value"]
