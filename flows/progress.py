"""Shows how far an extraction is: a bar in a terminal, lines in a log, artifacts in Prefect; obeys `Orders`."""

import contextvars
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from flows.orders import Orders
from tasks.extraction.engine import Progress as Done
from tasks.extraction.trouble import Trouble
from tasks.files import free_bytes, human_bytes, human_seconds

ARTIFACT_EVERY = 5.0  # seconds: each update is a request to the Prefect API
LOG_EVERY = 30.0  # seconds
LAST_UPDATE = 5.0  # seconds that the end waits for the artifacts' last update
SHOWN = 200  # lines of the table of troubles


class ProgressReport:
    """A context manager around the extraction; `show` as often as you like."""

    def __init__(
        self,
        rows: int,
        tokens: int,
        places: Sequence[tuple[str, Path]] = (),
        troubles: Sequence[Trouble] = (),
    ):
        """rows, tokens: to do. places: whose free room is shown, by name. troubles: a list that grows meanwhile."""
        self.rows, self.tokens, self.places, self.troubles = rows, tokens, places, troubles
        self.orders = Orders()
        self.started = time.monotonic()
        self.next_artifact, self.next_log = 0.0, self.started + LOG_EVERY
        self.artifact: Any = None
        self.table: Any = None
        self.told = 0  # troubles
        self.update: threading.Thread | None = None
        self.bar = Progress(
            TextColumn("  extract"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn("rows  {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self.line = self.bar.add_task("extract", total=rows, rate="")

    def __enter__(self) -> "ProgressReport":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()
        if self.update:
            self.update.join(LAST_UPDATE)

    def show(self, done: Done) -> None:
        """Bring the bar up to date, and now and then the artifacts and the log.

        Raises Pause or Abort, which end a flow as Prefect wants it, once somebody has asked for that.
        """
        now = time.monotonic()
        seconds = now - self.started
        rate = done.tokens / seconds if seconds else 0.0
        finished = done.rows + done.failed == self.rows
        self.bar.update(self.line, completed=done.rows, rate=f"{rate:,.0f} tokens/s")
        if now >= self.next_artifact or finished:
            percent = round(100 * done.tokens / max(1, self.tokens), 1)
            self._tell_prefect(percent, "\n\n".join(self._describe(done, rate)), finished)  # Markdown
            self.next_artifact = now + ARTIFACT_EVERY
        if now >= self.next_log:
            get_run_logger().info("%s", ", ".join(self._describe(done, rate)))
            self.next_log = now + LOG_EVERY
        if self.orders.order is not None and not finished:
            get_run_logger().warning("%s", self.orders.order)
            raise self.orders.order

    def _tell_prefect(self, percent: float, text: str, last: bool) -> None:
        """In a thread: where the API is away, Prefect's client tries for a minute. One update at a time."""
        if self.update and last:
            self.update.join(LAST_UPDATE)
        if self.update and self.update.is_alive():
            return
        context = contextvars.copy_context()  # it says which flow run this is
        self.update = threading.Thread(target=context.run, args=(self._update, percent, text), daemon=True)
        self.update.start()

    def _update(self, percent: float, text: str) -> None:
        """The page shows less while the API is away; the extraction goes on."""
        try:
            if self.artifact is None:
                self.artifact = create_progress_artifact(percent, key="extraction", description=text)
            else:
                update_progress_artifact(self.artifact, percent, text)
            self._update_table()
            self.orders.look()
        except Exception as error:
            get_run_logger().warning("the progress on the page could not be updated: %s", error)

    def _update_table(self) -> None:
        if (count := len(self.troubles)) == self.told:
            return
        lines: list[dict[str, Any]] = [trouble.as_line() for trouble in self.troubles[:SHOWN]]
        more = f"; {count - SHOWN:,} more are in the log" if count > SHOWN else ""
        about = f"Batches with trouble in this run{more}"
        if self.table is None:
            self.table = create_table_artifact(lines, key="trouble", description=about)
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(self.table, ArtifactUpdate(data=json.dumps(lines), description=about))
        self.told = count

    def _describe(self, done: Done, rate: float) -> list[str]:
        """Groups of figures; rate: tokens a second."""
        bytes_rate = _bytes_rate(done.bytes * rate / max(1, done.tokens))
        left = f"{human_seconds((self.tokens - done.tokens) / rate)} left" if rate else "starting"
        free = [f"{human_bytes(free_bytes(path))} free in the {name}" for name, path in self.places]
        tokens = f"{done.tokens:,} of {self.tokens:,} tokens"
        return [
            f"{done.rows:,} of {self.rows:,} rows, {tokens}, {human_bytes(done.bytes)}",
            f"{rate:,.0f} tokens/s, {bytes_rate}, {left}",
            f"{done.in_flight} in flight, {done.retries} retries, {done.restarts} restarts, {done.failed} failed",
            *([", ".join(free)] if free else []),
        ]


def _bytes_rate(rate: float) -> str:
    """Bytes a second, in powers of ten as disks and networks are sold."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e7 else f"{rate / 1e6:.2f} MB/s"
