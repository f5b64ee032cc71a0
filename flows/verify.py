"""The flow `verify`: check any output, finished or not, without a server."""

from pathlib import PurePath

from prefect import flow, task
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from pydantic import BaseModel, Field

from flows.places import credentials_of
from tasks.config import AbsolutePath, OutputPlace, S3Config, Section
from tasks.files import human_bytes
from tasks.recheck import verify_output
from tasks.steps import UNCACHED, show_report
from tasks.storage import as_location
from tasks.store.layout import Store


class RecheckConfig(Section):
    """Which output to check, and how."""

    output: OutputPlace = Field(
        description="Directory of the store, or s3://BUCKET/PREFIX (see the section s3).",
        examples=["/data/hidden-states/kimi-k2.5"],
    )
    dataset: AbsolutePath | None = Field(default=None, description="The dataset, if it moved since the extraction.")
    fresh: bool = Field(
        default=False,
        description="Read everything, also what an unfinished verification of the last three days has read already.",
    )
    repair: bool = Field(
        default=False,
        description="Put what is damaged or suspicious back into the plan: damaged shards and single rows are "
        "withdrawn, and the next extraction extracts just these.",
    )
    s3: S3Config = S3Config()


class Rechecked(BaseModel):
    """An output that passed."""

    rows: dict[str, int]
    """By state: done, truncated, skipped, failed."""
    tokens: int
    shards: int
    bytes: int
    digest: str


def _run_name() -> str:
    config = flow_run.parameters["config"]
    output = config["output"] if isinstance(config, dict) else config.output
    return f"verify-{PurePath(str(output)).name}"


@flow(name="verify", flow_run_name=_run_name, persist_result=False)
def verify(config: RecheckConfig) -> Rechecked:
    """Read everything back, check every value, balance the books, write the report.

    Args:
        config: Which output, and how.
    """
    return verify_step(config)


@task(name="verify", task_run_name="verify", **UNCACHED)
def verify_step(config: RecheckConfig) -> Rechecked:
    """All of it; what an unfinished verification has read already counts for three days."""
    logger = get_run_logger()
    store = Store(as_location(config.output, config.s3, credentials_of(config.s3)))
    verified = verify_output(
        *(store, config.dataset, config.fresh, config.repair),
        show=lambda progress: logger.info("%s", progress.text()),
        report=show_report,
    )
    logger.info(
        "passed: %d tokens, %d shards, %s; digest %s",
        *(verified.tokens, verified.shards, human_bytes(verified.bytes), verified.digest),
    )
    return Rechecked(
        rows=verified.rows,
        tokens=verified.tokens,
        shards=verified.shards,
        bytes=verified.bytes,
        digest=verified.digest,
    )
