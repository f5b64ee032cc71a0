"""The command `lineage`: which extraction fed which drafter, and a drafter's entry after its training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from flows.summary import as_lines
from tasks.errors import ConfigError
from tasks.files import human_bytes

if TYPE_CHECKING:  # MLflow takes seconds to import, and no other command needs it
    from tasks.lineage.lookup import Drafter, Extraction, Lineage

TEXTS = {
    "drafter": "What a drafter was trained on: its extractions, their input files, models, layers and tokens.",
    "extraction": "Which drafters an extraction, or a dataset file, fed, with their metrics.",
    "register": "Register a drafter that was trained elsewhere, with the hidden states that it was trained on.",
}


def add_actions(parser: argparse.ArgumentParser, epilog: str) -> None:
    """The command's own sub-commands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in TEXTS.items():
        child = actions.add_parser(name, help=text, description=text, epilog=epilog)
        child.add_argument(
            "--tracking-uri", help="MLflow tracking URI (default: MLFLOW_TRACKING_URI or the state folder)"
        )
        if name == "register":
            _add_register(child)
            continue
        child.add_argument(
            "reference",
            metavar="NAME[/VERSION|@ALIAS]" if name == "drafter" else "PATH|DIGEST|NAME",
            help="the registered drafter"
            if name == "drafter"
            else "the output directory or its s3:// name, the input file, the first six or more characters of a "
            "SHA-256 (of the input or of the manifest), a run's id, or the extraction's name",
        )
        child.add_argument("--json", action="store_true", help="print JSON")
        child.add_argument("--picture", type=Path, metavar="FILE", help="draw the graph: .svg, or .mmd for Mermaid")


def _add_register(child: argparse.ArgumentParser) -> None:
    child.add_argument(
        "--store",
        action="append",
        required=True,
        metavar="DIR|S3_URI",
        help="the store; may be given several times. In a bucket it is read with boto3's standard settings",
    )
    child.add_argument("--name", required=True, help="the registered model's name; it gets a new version")
    child.add_argument("--model-uri", help="where the drafter lies")
    child.add_argument("--alias", action="append", default=[], help="an alias that the version takes over")
    child.add_argument("--metric", action="append", default=[], metavar="NAME=VALUE", help="a metric of the drafter")
    child.add_argument("--experiment", default="drillcore", help="MLflow experiment (default: %(default)s)")
    child.add_argument("--run", dest="run_id", metavar="RUN_ID", help="the training run, if MLflow has it already")
    child.add_argument("--deep", action="store_true", help="compare every shard's checksum, not only its size")


def run_lineage(options: argparse.Namespace) -> int:
    if options.action == "register":
        return _register(options)
    from tasks.lineage.graph import write_picture
    from tasks.lineage.lookup import lineage_of_drafter, lineage_of_extraction

    look_up = lineage_of_drafter if options.action == "drafter" else lineage_of_extraction
    lineage = look_up(options.reference, options.tracking_uri)
    if options.picture:
        write_picture(lineage, options.picture)
    if options.json:
        print(json.dumps(lineage.as_json(), indent=1, ensure_ascii=False))
    else:
        print(as_text(lineage, drafters_first=options.action == "drafter"))
    return 0


def _register(options: argparse.Namespace) -> int:
    metrics = dict(_metric(text) for text in options.metric)
    from tasks.lineage.drafter import drafter_run

    with drafter_run(
        options.store,
        options.name,
        options.model_uri,
        aliases=options.alias,
        experiment=options.experiment,
        uri=options.tracking_uri,
        run_id=options.run_id,
        deep=options.deep,
    ) as run:
        run.log_metrics(metrics)
    print(as_lines([("drafter", f"{run.name}/{run.version}"), ("MLflow", f"run {run.run_id}")]))
    return 0


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise ConfigError(f"--metric {text!r} is not of the form NAME=VALUE, with a number.") from error


def as_text(lineage: Lineage, drafters_first: bool) -> str:
    """Lines for people: each on the left with what it is joined to under it."""
    if drafters_first:
        blocks = [
            [*_drafter_lines(drafter), *_sources(lineage, at), *_unknown(lineage, drafter)]
            for at, drafter in enumerate(lineage.drafters)
        ]
    else:
        blocks = [
            [*_extraction_lines(extraction), *_fed(lineage, at)]
            for at, extraction in enumerate(lineage.extractions)
            if extraction.run_id not in lineage.others
        ]
    return "\n\n".join(as_lines(block) for block in blocks)


def _sources(lineage: Lineage, at: int) -> list[tuple[str, str]]:
    found = [lineage.extractions[one] for one, other in lineage.edges if other == at]
    return [line for extraction in found for line in _extraction_lines(extraction)]


def _unknown(lineage: Lineage, drafter: Drafter) -> list[tuple[str, str]]:
    return [
        ("trained on", f"digest {each}: no extraction here has it")
        for each in lineage.unknown
        if each in drafter.digests
    ]


def _fed(lineage: Lineage, at: int) -> list[tuple[str, str]]:
    found = [lineage.drafters[other] for one, other in lineage.edges if one == at]
    return [line for drafter in found for line in _drafter_lines(drafter)] or [("drafter", "none so far")]


def _drafter_lines(drafter: Drafter) -> list[tuple[str, str]]:
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in drafter.metrics.items())
    where = [("  files", drafter.uri)] if drafter.uri else []
    measured = [("  metrics", metrics)] if metrics else []
    run = f"run {drafter.run_id or 'gone'} {drafter.status.lower()}, {drafter.created}"
    return [("drafter", drafter.title), ("  MLflow", run), *where, *measured]


def _extraction_lines(one: Extraction) -> list[tuple[str, str]]:
    return [
        ("extraction", f"{one.name}, run {one.run_id} {one.status.lower()}, {one.verified}"),
        ("  output", f"{one.uri} (digest {one.digest})"),
        ("  stored", f"{one.rows:,} rows, {one.tokens:,} tokens, {human_bytes(one.bytes)}"),
        ("  input", f"{one.input_uri} (SHA-256 {one.input_sha256})"),
        ("  model", f"{one.model}, layers {one.layers} and the final state ({one.final_norm}), {one.dtype}"),
    ]
