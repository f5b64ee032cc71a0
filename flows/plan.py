"""The flow `plan`: everything that can be known before a server starts. It starts none and writes nothing."""

from typing import Annotated

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from pydantic import BaseModel, Field

from flows.places import credentials_of
from tasks.config import ExtractConfig
from tasks.preflight import check_space, describe, run_preflight
from tasks.report import markdown_table

Rate = Annotated[float | None, Field(gt=0, examples=[5000])]


class Planned(BaseModel):
    """What an extraction with this config would do."""

    lines: list[tuple[str, str]]
    rows: int
    """Still to extract."""
    tokens: int


def _run_name() -> str:
    config = flow_run.parameters["config"]
    return f"plan-{config['name'] if isinstance(config, dict) else config.name}"


@flow(name="plan", flow_run_name=_run_name, persist_result=False)
def plan(config: ExtractConfig, rate: Rate = None) -> Planned:
    """Check everything that needs no server; show rows, bytes, room and what is there already.

    Args:
        config: The extraction, as for `extract`.
        rate: Tokens a second that the servers are expected to do: shows how long it would take.
    """
    preflight = run_preflight(config, space=False, credentials=credentials_of(config.s3))
    lines = describe(preflight, rate)
    for name, value in lines:
        get_run_logger().info("%s: %s", name, value)
    create_markdown_artifact(
        markdown_table(lines), key="plan", description=f"What the extraction {config.name} would do"
    )
    check_space(preflight)
    get_run_logger().info("There is room for it. Nothing was started.")
    return Planned(lines=lines, rows=preflight.missing_rows, tokens=preflight.missing_tokens)
