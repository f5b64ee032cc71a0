"""The flow `export`: a verified store as a trainer's files, one mapped task a shard."""

import concurrent.futures
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

from prefect import flow, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel, Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flows.summary import as_lines
from tasks.config import AbsolutePath, EndpointUrl, OutputPlace, Section
from tasks.export.run import ExportJob, export_shard, finish_export, open_export
from tasks.files import human_bytes
from tasks.store.lock import WriterLock

THREADS = 8  # that write shards at once; PyTorch and safetensors write outside the interpreter's lock
UNCACHED: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


class ExportConfig(Section):
    """What to export, and as what."""

    store: OutputPlace = Field(
        description="The verified store: a directory, or s3://BUCKET/PREFIX.",
        examples=["/data/hidden-states/kimi-k2.5"],
    )
    endpoint_url: EndpointUrl = Field(
        default=None, description="URL of a bucket's store that is not AWS. Default: AWS_ENDPOINT_URL_S3, or AWS."
    )
    to: Literal["specforge", "speculators", "modelopt", "torchspec", "pt"] = Field(description="Whose files to write.")
    output: AbsolutePath = Field(
        description="Folder of the export. The same command resumes one that was ended.",
        examples=["/data/training/kimi-k2.5"],
    )
    rows: str | None = Field(
        default=None,
        description="START:STOP, places among the stored rows: a part, as for training and evaluation.",
        examples=[":36000"],
    )
    draft_vocab_size: int | None = Field(
        default=None,
        gt=0,
        description="Write the mapping of a draft vocabulary of the ids that count most often.",
        examples=[32000],
    )
    model: AbsolutePath | None = Field(
        default=None,
        description="The model's folder, if it moved: its final norm is applied where the store has the states before "
        "it and the trainer wants those after it.",
    )


class Exported(BaseModel):
    """An export that is complete."""

    output: Path
    mark: dict[str, Any]
    rows: int
    """Written by this run; the others were there already."""
    bytes: int
    seconds: float

    def text(self) -> str:
        """Lines of name and value."""
        made = self.mark
        rate = f"{human_bytes(self.bytes / self.seconds)}/s" if self.rows else "nothing was missing"
        return as_lines(
            [
                ("exported", f"{made['exported_rows']:,} rows, {made['tokens']:,} tokens to {made['format']}"),
                ("norm", f"the final state is that {'before' if made['final_norm'] == 'pre' else 'after'} the norm"),
                ("this run", f"{self.rows:,} rows, {human_bytes(self.bytes)} in {self.seconds:.1f} s: {rate}"),
                ("output", str(self.output)),
            ]
        )


def _run_name() -> str:
    config = flow_run.parameters["config"]
    values = config if isinstance(config, dict) else config.model_dump()
    return f"export-{Path(values['store']).name}-{values['to']}"


@flow(name="export", flow_run_name=_run_name, persist_result=False)
def export(config: ExportConfig) -> Exported:
    """Write the files that a trainer reads from a store.

    Args:
        config: Which store, for which trainer, and where to.
    """
    started = time.monotonic()
    job = open_step(config)
    with WriterLock(config.output / "lock.json"):
        done = _export_shards(job)
        mark = finish_step(job)
    return Exported(
        output=config.output,
        mark=mark,
        rows=sum(rows for rows, _ in done),
        bytes=sum(written for _, written in done),
        seconds=time.monotonic() - started,
    )


@task(name="open", task_run_name="open", **UNCACHED)
def open_step(config: ExportConfig) -> "Job":
    """Check the store, the norm, the folder and the room."""
    values = config.model_dump(exclude={"output"})
    job = open_export(output=config.output, **values)
    get_run_logger().info("%d rows in %d shards to %s", len(job.places), len(job.shards), config.output)
    return Job(job)


class Job:
    """An export job on its way between tasks. Not a dataclass: Prefect looks into every field of one."""

    def __init__(self, job: ExportJob):
        self.job = job


@task(name="export", task_run_name="export-{shard:06d}", **UNCACHED)
def export_step(shard: int, job: Job) -> tuple[int, int]:
    """Write the rows of one shard."""
    return export_shard(job.job, shard)


@task(name="finish", task_run_name="finish", **UNCACHED)
def finish_step(job: Job) -> dict[str, Any]:
    """Write what belongs to all rows, and the mark."""
    return finish_export(job.job)


def _export_shards(job: Job) -> list[tuple[int, int]]:
    bar = Progress(
        TextColumn("  export"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=min(THREADS, 2 * (os.cpu_count() or 1)))
    with runner, bar:
        shards = list(range(len(job.job.shards)))
        futures = runner.map(export_step, {"shard": shards, "job": unmapped(job)})
        work: list[Any] = [future.wrapped_future for future in futures]  # type: ignore[attr-defined]  # of threads
        line = bar.add_task("export", total=len(work))
        try:
            for _ in concurrent.futures.as_completed(work):
                bar.advance(line)
        except BaseException:
            for future in work:
                future.cancel()
            concurrent.futures.wait(work)
            raise
    results: list[Any] = [future.result() for future in futures]  # raises what ended a shard
    return results
