"""Shows how far an extraction is: a bar in a terminal, lines in a log, a progress artifact in Prefect."""

import contextvars
import sys
import threading
import time
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tasks.extraction.engine import Progress as Done
from tasks.files import human_bytes, human_seconds

ARTIFACT_EVERY = 5.0  # seconds: each update is a request to the Prefect API
LOG_EVERY = 30.0  # seconds
LAST_UPDATE = 5.0  # seconds that the end waits for the artifact's last update


class ProgressReport:
    """A context manager around the extraction; `show` as often as you like."""

    def __init__(self, rows: int, tokens: int):
        self.rows, self.tokens = rows, tokens
        self.started = time.monotonic()
        self.next_artifact, self.next_log = 0.0, self.started + LOG_EVERY
        self.artifact: Any = None
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
        """Bring the bar up to date, and now and then the artifact and the log."""
        now = time.monotonic()
        seconds = now - self.started
        rate = done.tokens / seconds if seconds else 0.0
        finished = done.rows + done.failed == self.rows
        self.bar.update(self.line, completed=done.rows, rate=f"{rate:,.0f} tokens/s")
        text = self._describe(done, rate)
        if now >= self.next_artifact or finished:
            self._tell_prefect(100 * done.tokens / max(1, self.tokens), text, finished)
            self.next_artifact = now + ARTIFACT_EVERY
        if now >= self.next_log:
            get_run_logger().info("%s", text)
            self.next_log = now + LOG_EVERY

    def _tell_prefect(self, percent: float, text: str, last: bool) -> None:
        """In a thread: where the API is away, Prefect's client tries for a minute. One update at a time."""
        if self.update and last:
            self.update.join(LAST_UPDATE)
        if self.update and self.update.is_alive():
            return
        context = contextvars.copy_context()  # it says which flow run the artifact is of
        self.update = threading.Thread(target=context.run, args=(self._update_artifact, percent, text), daemon=True)
        self.update.start()

    def _update_artifact(self, percent: float, text: str) -> None:
        """The page shows less while the API is away; the extraction goes on."""
        try:
            if self.artifact is None:
                self.artifact = create_progress_artifact(percent, key="extraction", description=text)
            else:
                update_progress_artifact(self.artifact, percent, text)
        except Exception as error:
            get_run_logger().warning("the progress artifact could not be updated: %s", error)

    def _describe(self, done: Done, rate: float) -> str:
        left = f"{human_seconds((self.tokens - done.tokens) / rate)} left" if rate else "starting"
        return (
            f"{done.rows:,} of {self.rows:,} rows, {done.tokens:,} of {self.tokens:,} tokens, "
            f"{human_bytes(done.bytes)}, {rate:,.0f} tokens/s, {left}, "
            f"{done.in_flight} in flight, {done.retries} retries, {done.restarts} restarts, {done.failed} failed"
        )
