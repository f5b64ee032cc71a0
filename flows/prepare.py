"""The flow `prepare`: conversations or token ids in, one dataset with its manifest out."""

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from flows.summary import as_lines
from tasks.dataset.manifest import manifest_path
from tasks.dataset.prepare.run import Progress, prepare_dataset
from tasks.dataset.prepare.settings import PrepareConfig
from tasks.files import human_bytes

LOG_EVERY = 30.0  # seconds


class Prepared(BaseModel):
    """A dataset that was written, by its manifest."""

    output: Path
    manifest: dict[str, Any]
    seconds: float

    def text(self) -> str:
        """Lines of name and value."""
        made = self.manifest
        dropped = [f"{count:,} {reason}" for reason, count in Counter(made["dropped"]).most_common()]
        template = made["template"]
        return as_lines(
            [
                ("read", f"{made['read']:,} records of {len(made['sources'])} source(s) in {self.seconds:.1f} s"),
                ("dropped", ", ".join(dropped) or "none"),
                ("written", f"{made['rows']:,} rows, {made['tokens']:,} tokens, {made['loss_tokens']:,} of them count"),
                ("", f"{made['truncated']:,} cut to {made['max_seq_len']:,} tokens; longest row {made['longest']:,}"),
                ("mask", f"by {template['mask']}" if template else "as the sources have it"),
                ("dataset", f"{self.output} ({human_bytes(made['bytes'])}, sha256 {made['sha256'][:12]}...)"),
                ("manifest", str(manifest_path(self.output))),
            ]
        )


def _run_name() -> str:
    config = flow_run.parameters["config"]
    return f"prepare-{Path(config['output'] if isinstance(config, dict) else config.output).stem}"


@flow(name="prepare", flow_run_name=_run_name, persist_result=False)
def prepare(config: PrepareConfig) -> Prepared:
    """Tokenize, mask, merge, drop duplicates, shuffle; write the dataset and its manifest.

    Args:
        config: What to prepare, and how.
    """
    return prepare_step(config)


@task(name="prepare", task_run_name="prepare", cache_policy=NO_CACHE, persist_result=False)
def prepare_step(config: PrepareConfig) -> Prepared:
    """All of it: what is between is no state that anything could go on from."""
    started = time.monotonic()
    with _Report() as report:
        manifest = prepare_dataset(config, report.show)
    dropped: Counter[str] = Counter(manifest["dropped"])
    get_run_logger().info(
        "%d records read, %d rows written, %d dropped", manifest["read"], manifest["rows"], dropped.total()
    )
    return Prepared(output=config.output, manifest=manifest, seconds=time.monotonic() - started)


class _Report:
    """How far it is: a line in a terminal, and now and then one in the log."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.next_log = self.started + LOG_EVERY
        self.bar = Bar(
            TextColumn("  prepare"),
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self.line = self.bar.add_task("loading the tokenizer")

    def __enter__(self) -> "_Report":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def show(self, done: Progress) -> None:
        now = time.monotonic()
        rate = done.read / (now - self.started)
        text = f"{done.read:,} records, {done.tokens:,} tokens, {done.dropped:,} dropped, {rate:,.0f} records/s"
        if done.rows:
            text = f"{done.written:,} of {done.rows:,} rows written"
        self.bar.update(self.line, description=text)
        if now >= self.next_log:
            get_run_logger().info("%s", text)
            self.next_log = now + LOG_EVERY
