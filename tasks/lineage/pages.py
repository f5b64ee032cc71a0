"""What a person reads on MLflow's pages of an extraction and of a drafter: a text with links, and the graph.

Written anew whenever one of them gets a relation, so that the older page knows of the younger one.
"""

from dataclasses import replace
from pathlib import Path

from mlflow.tracking import MlflowClient

from tasks.files import human_bytes
from tasks.lineage.client import NOTE, run_link, version_link
from tasks.lineage.graph import as_mermaid, as_svg
from tasks.lineage.lookup import (
    Drafter,
    Extraction,
    Lineage,
    as_extraction,
    drafters_of,
    extractions_of,
    lineage_around,
)

BEGIN, END = "[//]: # (drillcore begins)", "[//]: # (drillcore ends)"  # Markdown that shows nothing


def refresh_extraction(client: MlflowClient, run_id: str) -> None:
    """The page of an extraction's run."""
    extraction = as_extraction(client.get_run(run_id))
    lineage = without_aliases(lineage_around(client, [extraction]))
    _write(client, run_id, describe_extraction(extraction, lineage.drafters), lineage)


def refresh_training(client: MlflowClient, run_id: str, digests: list[str]) -> str:
    """The pages of a training run and of the extractions that fed it; returns the text of its own."""
    drafters = [drafter for drafter in drafters_of(client, digests) if drafter.run_id == run_id]
    lineage = without_aliases(Lineage(extractions_of(client, digests), drafters))
    text = "\n\n".join(describe_drafter(drafter, lineage) for drafter in lineage.drafters)
    _write(client, run_id, text, lineage)
    for extraction in lineage.extractions:
        refresh_extraction(client, extraction.run_id)
    return text


def without_aliases(lineage: Lineage) -> Lineage:
    """An alias moves to another version, and no page would be told."""
    return replace(lineage, drafters=[replace(drafter, aliases=[]) for drafter in lineage.drafters])


def describe_extraction(one: Extraction, drafters: list[Drafter]) -> str:
    """Markdown."""
    shown = [
        ("output", f"`{one.uri}` ({one.rows:,} rows, {one.tokens:,} tokens, {human_bytes(one.bytes)})"),
        ("digest", f"`{one.digest}`"),
        ("input", f"`{one.input_uri}` (SHA-256 `{one.input_sha256}`)"),
        ("model", f"`{one.model}`, layers {one.layers} and the final state ({one.final_norm}), {one.dtype}"),
        ("SGLang", one.sglang),
    ]
    if one.prefect:
        shown.append(("Prefect", f"[flow run]({one.prefect})" if one.prefect.startswith("http") else one.prefect))
    lines = [f"- {name}: {value}" for name, value in shown]
    fed = [f"- {_drafter_links(drafter)}" for drafter in drafters] or ["- none so far"]
    return "\n".join(["**Hidden states**", "", *lines, "", "**Drafters trained on them**", "", *fed])


def describe_drafter(one: Drafter, lineage: Lineage) -> str:
    """Markdown."""
    sources = [
        f"- [{source.name}]({run_link(source.experiment_id, source.run_id)}): `{source.uri}`, {source.tokens:,} tokens "
        f"of `{Path(source.input_uri).name}` through `{Path(source.model).name}`, layers {source.layers}"
        for source in lineage.extractions
    ]
    sources += [f"- digest `{digest}`: not recorded on this server" for digest in lineage.unknown]
    where = [f"- files: `{one.uri}`"] if one.uri else []
    return "\n".join(
        [f"**Drafter** {_drafter_links(one)}", "", *where, "", "**Trained on the hidden states of**", "", *sources]
    )


def _drafter_links(one: Drafter) -> str:
    run = f"[training run]({run_link(one.experiment_id, one.run_id)})"
    if one.version is None:
        return f"{one.title}: {run}"
    return f"[{one.title}]({version_link(one.name, one.version)}): {run}"


def _write(client: MlflowClient, run_id: str, text: str, lineage: Lineage) -> None:
    note = client.get_run(run_id).data.tags.get(NOTE, "")
    client.set_tag(run_id, NOTE, with_block(note, text))
    client.log_text(run_id, as_svg(lineage), "lineage.svg")
    client.log_text(run_id, as_mermaid(lineage), "lineage.mmd")


def with_block(note: str, text: str) -> str:
    """The note with our part of it written anew; what people wrote above and below it stays."""
    before, begin, rest = note.partition(BEGIN)
    after = rest.partition(END)[2] if begin else ""
    parts = [before.strip(), f"{BEGIN}\n\n{text}\n\n{END}", after.strip()]
    return "\n\n".join(part for part in parts if part)
