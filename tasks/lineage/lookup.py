"""Answers both questions: which extractions fed this drafter, and which drafters did this extraction feed.

The datasets of MLflow's runs join the two: a training run and the extraction before it have the same digest. Everything
is read from MLflow; a file or a store is only looked at to learn its digest.
"""

import difflib
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tasks.errors import LineageError
from tasks.files import sha256_of
from tasks.lineage.client import (
    DRAFTER_MODEL,
    DRAFTER_NAME,
    DRAFTER_URI,
    EXTRACTION,
    GONE,
    INPUT_DIGEST,
    INPUT_URI,
    KIND,
    OUTPUT_CONTEXT,
    STATES_DIGEST,
    STATES_URI,
    TRAINING_CONTEXT,
    connected,
    get_run,
    mlflow_digest,
    pages,
    search,
    tracking_uri,
)
from tasks.lineage.sources import context_of
from tasks.storage import is_remote
from tasks.store.layout import Store

ADVICE = "Is the tracking URI right (--tracking-uri, MLFLOW_TRACKING_URI)?"
HEX = re.compile(r"[0-9a-f]{6,64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]*")
NEAREST = 5  # names in an error


@dataclass(frozen=True)
class Extraction:
    """An extraction's run."""

    name: str
    run_id: str
    experiment_id: str
    status: str
    verified: str
    digest: str
    """SHA-256 of the manifest that was recorded last."""
    digests: list[str]
    """As MLflow has them (36 characters): of each manifest that the store had when it was recorded."""
    uri: str
    input_uri: str
    input_sha256: str
    model: str
    model_identity: str
    layers: str
    final_norm: str
    dtype: str
    rows: int
    tokens: int
    bytes: int
    sglang: str
    prefect: str
    """Address of the flow run's page, if it had one."""


@dataclass(frozen=True)
class Drafter:
    """A version of a drafter; version None: its training run has not registered one."""

    name: str
    version: str | None
    aliases: list[str]
    run_id: str
    experiment_id: str
    model_id: str
    uri: str
    status: str
    """Of the training run."""
    created: str
    digests: list[str]
    """As MLflow has them (36 characters): of the hidden states that it was trained on."""
    metrics: dict[str, float]

    @property
    def title(self) -> str:
        """NAME/VERSION and the aliases."""
        version = f"/{self.version}" if self.version else " (not registered)"
        return f"{self.name}{version}{''.join(f' @{alias}' for alias in self.aliases)}"


@dataclass(frozen=True)
class Lineage:
    """Extractions and drafters that have to do with what was asked for."""

    extractions: list[Extraction]
    drafters: list[Drafter]
    others: frozenset[str] = frozenset()
    """Run ids of extractions that nobody asked for: they fed the same drafters."""

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """(index of the extraction, index of the drafter) for each that fed one."""
        return [
            (number, other)
            for number, extraction in enumerate(self.extractions)
            for other, drafter in enumerate(self.drafters)
            if set(extraction.digests) & set(drafter.digests)
        ]

    @property
    def unknown(self) -> list[str]:
        """Digests that a drafter was trained on and no extraction here has."""
        known = {digest for extraction in self.extractions for digest in extraction.digests}
        return sorted({digest for drafter in self.drafters for digest in drafter.digests} - known)

    def as_json(self) -> dict[str, Any]:
        """Plain values: `extractions`, `drafters`, `edges` of [run_id, run_id], `others`, `unknown` digests."""
        pairs = [[self.extractions[one].run_id, self.drafters[other].run_id] for one, other in self.edges]
        return {
            "extractions": [asdict(extraction) for extraction in self.extractions],
            "drafters": [asdict(drafter) for drafter in self.drafters],
            "edges": pairs,
            "others": sorted(self.others),
            "unknown": self.unknown,
        }


def lineage_of_drafter(reference: str, uri: str | None = None) -> Lineage:
    """What a drafter was trained on. reference: NAME (all versions), NAME/VERSION or NAME@ALIAS.

    uri: tracking URI; default: MLFLOW_TRACKING_URI or the state folder. Raises LineageError that names what there is.
    """
    with connected(tracking_uri(uri), ADVICE) as client:
        drafters = _drafters_called(client, reference)
        return Lineage(extractions_of(client, [digest for drafter in drafters for digest in drafter.digests]), drafters)


def lineage_of_extraction(reference: str, uri: str | None = None) -> Lineage:
    """Which drafters an extraction fed. reference: the output directory, the input file, a SHA-256 of its input or its
    manifest (or the first six characters, at least), a run's id, or the extraction's name.

    uri: tracking URI; default: MLFLOW_TRACKING_URI or the state folder. Raises LineageError that names what there is.
    """
    with connected(tracking_uri(uri), ADVICE) as client:
        runs = _extractions_called(client, reference)
        return lineage_around(client, sorted((as_extraction(run) for run in runs), key=_age))


def lineage_around(client: MlflowClient, extractions: list[Extraction]) -> Lineage:
    """With the drafters that these extractions fed, and what else fed those."""
    drafters = drafters_of(client, [digest for one in extractions for digest in one.digests])
    asked = {one.run_id for one in extractions}
    all_of_them = extractions_of(client, [digest for drafter in drafters for digest in drafter.digests])
    others = [one for one in all_of_them if one.run_id not in asked]
    return Lineage([*extractions, *others], drafters, frozenset(one.run_id for one in others))


def extractions_of(client: MlflowClient, digests: list[str]) -> list[Extraction]:
    """The extractions whose output had one of these digests, the oldest first."""
    runs = _runs_with(client, digests, OUTPUT_CONTEXT)
    return sorted((as_extraction(run) for run in runs), key=_age)


def drafters_of(client: MlflowClient, digests: list[str]) -> list[Drafter]:
    """The drafters that were trained on one of these digests, the oldest first."""
    drafters = [drafter for run in _runs_with(client, digests, TRAINING_CONTEXT) for drafter in _of_run(client, run)]
    return sorted(drafters, key=lambda one: (one.created, one.name, int(one.version or 0)))


def as_extraction(run: Run) -> Extraction:
    """What MLflow knows of an extraction."""
    tags, params, metrics = run.data.tags, run.data.params, run.data.metrics
    return Extraction(
        name=run.info.run_name,
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        status=run.info.status,
        verified=_moment(run.info.end_time or run.info.start_time),
        digest=tags.get(STATES_DIGEST, ""),
        digests=_digests(run, OUTPUT_CONTEXT),
        uri=tags.get(STATES_URI, ""),
        input_uri=tags.get(INPUT_URI, ""),
        input_sha256=tags.get(INPUT_DIGEST, ""),
        model=params.get("model.path", ""),
        model_identity=tags.get("model.identity", ""),
        layers=params.get("parts.layers", ""),
        final_norm=params.get("parts.final_norm", ""),
        dtype=params.get("parts.dtype", ""),
        rows=int(metrics.get("rows_done", 0) + metrics.get("rows_truncated", 0)),
        tokens=int(metrics.get("tokens", 0)),
        bytes=int(metrics.get("bytes", 0)),
        sglang=params.get("parts.sglang", ""),
        prefect=tags.get("prefect.flow_run", ""),
    )


def _age(one: Extraction) -> tuple[str, str]:
    return one.verified, one.name


def _digests(run: Run, context: str) -> list[str]:
    return sorted({each.dataset.digest for each in run.inputs.dataset_inputs if context_of(each) == context})


def _runs_with(client: MlflowClient, digests: list[str], context: str) -> list[Run]:
    if not digests:
        return []
    listed = ", ".join(f"'{digest}'" for digest in sorted(set(digests)))
    found = search(client, f"dataset.digest IN ({listed}) AND dataset.context = '{context}'")
    # MLflow is content with the digest of one dataset and the context of another.
    return [run for run in found if set(_digests(run, context)) & set(digests)]


def _of_run(client: MlflowClient, run: Run) -> list[Drafter]:
    """The versions that a training run registered, or the run alone."""
    query = f"run_id = '{run.info.run_id}'"
    versions = pages(lambda token: client.search_model_versions(query, page_token=token))
    return [_drafter(client, version, run) for version in versions] or [_drafter(client, None, run)]


def _drafter(client: MlflowClient, version: Any | None, run: Run | None) -> Drafter:
    """run: None where its training run is gone, or there never was one."""
    tags = (run.data.tags if run else {}) | (version.tags if version else {})
    aliases = client.get_registered_model(version.name).aliases if version else {}
    digests = _digests(run, TRAINING_CONTEXT) if run else []
    return Drafter(
        name=version.name if version else tags.get(DRAFTER_NAME, run.info.run_name if run else ""),
        version=str(version.version) if version else None,
        aliases=sorted(alias for alias, number in aliases.items() if version and str(number) == str(version.version)),
        run_id=run.info.run_id if run else "",
        experiment_id=run.info.experiment_id if run else "",
        model_id=tags.get(DRAFTER_MODEL, ""),
        uri=tags.get(DRAFTER_URI, "" if DRAFTER_MODEL in tags or not version else version.source),
        status=run.info.status if run else "",
        created=_moment(version.creation_timestamp if version else run.info.start_time if run else 0),
        digests=digests or sorted(mlflow_digest(digest) for digest in tags.get(STATES_DIGEST, "").split(",") if digest),
        metrics=dict(sorted(run.data.metrics.items())) if run else {},
    )


def _drafters_called(client: MlflowClient, reference: str) -> list[Drafter]:
    match = re.fullmatch(r"([^/@]+)(?:/(\d+)|@([^/@]+))?", reference)
    if match is None:
        raise LineageError(f"{reference!r} names no drafter: NAME, NAME/VERSION or NAME@ALIAS is expected.")
    name, number, alias = match.groups()
    try:
        model = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != GONE:
            raise
        known = [each.name for each in pages(lambda token: client.search_registered_models(page_token=token))]
        raise LineageError(f"No drafter is called {name!r}. {_nearest(name, known)}") from None
    versions = pages(lambda token: client.search_model_versions(f"name = '{name}'", page_token=token))
    numbers = sorted(int(version.version) for version in versions)
    if alias is not None:
        if alias not in model.aliases:
            there = ", ".join(f"{name}@{each} (version {at})" for each, at in model.aliases.items()) or "none"
            raise LineageError(f"The drafter {name!r} has no alias {alias!r}. Its aliases: {there}.")
        number = model.aliases[alias]
    chosen = [version for version in versions if number is None or int(version.version) == int(number)]
    if not chosen:
        raise LineageError(f"The drafter {name!r} has no version {number}. Its versions: {_listed(numbers)}.")
    runs = [get_run(client, version.run_id) if version.run_id else None for version in chosen]
    drafters = [_drafter(client, version, run) for version, run in zip(chosen, runs, strict=True)]
    return sorted(drafters, key=lambda one: int(one.version or 0))


def _extractions_called(client: MlflowClient, reference: str) -> list[Run]:
    path: Path | str = reference.rstrip("/") if is_remote(reference) else Path(reference).absolute()
    told = ""
    if isinstance(path, Path) and path.exists():
        file = Store(path).manifest if path.is_dir() else path
        digest = sha256_of(file) if file.exists() else None
        if found := digest and _with_digest(client, f"= '{mlflow_digest(digest)}'"):
            return found
        told = f" Its {'manifest' if path.is_dir() else 'content'} has the SHA-256 {digest}." if digest else ""
        told += f" To record it: python -m flows record {reference}" if digest and path.is_dir() else ""
    elif HEX.fullmatch(reference):
        run = get_run(client, reference) if len(reference) == 32 else None
        if run and run.data.tags.get(KIND) == EXTRACTION:
            return [run]
        if found := _with_digest(client, f"LIKE '{mlflow_digest(reference)}%'"):
            return found
    queries = [f"tags.`{tag}` = '{path}'" for tag in (STATES_URI, INPUT_URI) if "'" not in str(path)]
    if NAME.fullmatch(reference):
        queries.append(f"attributes.run_name = '{reference}'")
    for query in queries:
        if found := search(client, f"{query} AND tags.`{KIND}` = '{EXTRACTION}'"):
            return found
    there = [as_extraction(run) for run in search(client, f"tags.`{KIND}` = '{EXTRACTION}'")]
    known = [known for one in there for known in (one.name, one.uri, one.input_uri)]
    raise LineageError(f"No recorded extraction is, read or wrote {reference!r}.{told} {_nearest(reference, known)}")


def _with_digest(client: MlflowClient, condition: str) -> list[Run]:
    """Extractions with such a dataset, whichever side it is on."""
    return search(client, f"dataset.digest {condition} AND tags.`{KIND}` = '{EXTRACTION}'")


def _nearest(wanted: str, known: list[str]) -> str:
    if not known:
        return "Nothing is recorded here. " + ADVICE
    near = difflib.get_close_matches(wanted, set(known), n=NEAREST, cutoff=0.4)
    return f"Nearest: {_listed(near)}." if near else f"There are: {_listed(sorted(set(known))[:NEAREST])}, ..."


def _listed(values: list[Any]) -> str:
    return ", ".join(map(str, values)) or "none"


def _moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
