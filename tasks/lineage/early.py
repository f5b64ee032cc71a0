"""Has MLflow imported and its database ready while the server starts: each takes seconds, and nobody waits for them."""

import logging
import threading
from pathlib import Path

from tasks.config import LineageConfig
from tasks.errors import LineageError

logger = logging.getLogger(__name__)


class Preparation:
    """A thread that begins at once. It says it if MLflow is not there, and stops nothing."""

    def __init__(self, config: LineageConfig, default_uri: str, artifacts: Path):
        """As for `tasks.lineage.record.record_extraction`."""
        self._arguments = (config, default_uri, artifacts)
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it is done. It gives up by itself."""
        self._thread.join()

    def _run(self) -> None:
        from tasks.lineage.record import prepare

        try:
            prepare(*self._arguments)
        except LineageError as error:
            logger.warning("%s", error)
