"""Reads back what was stored and says whether it is complete and right; only then is the manifest written.

Checked: each row of the plan is in exactly one place of the books; each shard's size, checksum and header against its
record; ids and masks against the input file; every state finite, none zero, its RMS as the plugin measured it on the
device; a random share extracted a second time, where there is a server.
"""

import json
import random
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tasks.config import VerifyConfig
from tasks.dataset.plan import Plan, load_plan
from tasks.dataset.rows import read_planned
from tasks.errors import DatasetError, ExtractionError, StoreError, VerificationError
from tasks.extraction.engine import PrefillEngine
from tasks.files import checksum_of, sha256_of, write_json
from tasks.probe import ProbeReport, relative_errors, states_of
from tasks.store.books import DONE, FAILED, MISSING, TRUNCATED, Books, balance, records_digest, write_ledger
from tasks.store.layout import Store, read_extraction
from tasks.store.record import Record, RowRecord, read_records, record_path
from tasks.store.shard import AUX, DTYPES, IDS, LAST, MASK, tensor_name

SHOWN_PROBLEMS = 20
RMS_TOLERANCE = 0.01  # relative, between the device's sum and ours: both in float32, in another order
# A second extraction may differ this much more than the probe saw one prompt differ from itself.
NOISE_FACTOR = 8.0
SAMPLE_SEED = 1
COMPARISON = "reextraction.json"  # in the store's logs


@dataclass(frozen=True)
class Verified:
    """A store that passed."""

    digest: str
    """SHA-256 of manifest.json, hexadecimal."""
    rows: dict[str, int]
    """Rows by state: done, truncated, skipped, failed."""
    tokens: int
    bytes: int
    shards: int
    reextracted: int
    """Rows extracted a second time and compared."""
    largest_difference: float | None
    """Largest relative error among them."""


@dataclass(frozen=True)
class Comparison:
    """A re-extraction of some rows: how far the second states were from the stored ones."""

    records_sha256: str
    """Of the commit records that it holds for."""
    rows: list[int]
    largest_difference: float
    """Relative (L2) over a row's state."""
    limits: list[float]
    """Largest difference that counts as rounding: aux layers in order, then the final state."""
    problems: list[str]


def verify_store(
    store: Store,
    dataset: Path,
    max_failed_share: float,
    config: VerifyConfig | None = None,
    engine: PrefillEngine | None = None,
    probe: ProbeReport | None = None,
) -> Verified:
    """Check a store and write its ledger and manifest. The lock must be held.

    engine, probe, config: to extract a share again; without them an earlier comparison of the same records counts.
    Raises VerificationError listing what is wrong, ExtractionError if only rows are missing, StoreError if the store's
    own books are damaged, DatasetError if the dataset is gone. The manifest is there only if it passed.
    """
    store.manifest.unlink(missing_ok=True)
    extraction = read_extraction(store)
    if extraction is None:
        raise StoreError(f"{store.root} holds no extraction: there is no {store.extraction.name}.")
    if not dataset.exists():
        raise DatasetError(f"The dataset {dataset} does not exist; its ids and masks are needed to verify.")
    plan, records, parts = load_plan(store.plan), read_records(store), extraction["parts"]
    books = balance(plan, records)
    problems = list(books.problems)
    if (actual := sha256_of(dataset)) != parts["input_sha256"]:
        problems.append(f"{dataset} is another file than was extracted: its sha256 is {actual}")
    elif not problems:
        for record in records:
            problems += _check_record(store, record, plan, dataset, extraction)
    if not problems and engine and probe and config:
        _reextract(store, plan, dataset, records, engine, probe, config, parts["vocab_size"])
    comparison = read_comparison(store, records_digest(store, records))
    problems += comparison.problems if comparison else []
    if problems:
        raise VerificationError(
            f"{store.root} did not pass: {len(problems)} problem(s).\n{_shorten(problems)}\n"
            "`python -m flows extract CONFIG.yaml --deep` extracts the rows of damaged shards again. Otherwise: delete "
            "the commit record (shards/*.json) of a damaged shard and run the extraction again to replace it."
        )
    _check_complete(store, plan, books, max_failed_share)
    write_ledger(store.ledger, plan, books)
    manifest = _manifest(store, extraction, records, books)
    write_json(store.manifest, manifest)
    return Verified(
        digest=sha256_of(store.manifest),
        rows=manifest["rows_by_state"],
        tokens=manifest["tokens"],
        bytes=manifest["bytes"],
        shards=manifest["shards"],
        reextracted=len(comparison.rows) if comparison else 0,
        largest_difference=comparison.largest_difference if comparison else None,
    )


def comparison_due(store: Store, config: VerifyConfig) -> bool:
    """Whether a share of this store must still be extracted a second time and pass."""
    if not config.reextract_rows and not config.reextract_share:
        return False
    comparison = read_comparison(store, records_digest(store, read_records(store)))
    return comparison is None or bool(comparison.problems)


def read_comparison(store: Store, digest: str) -> "Comparison | None":
    """The last re-extraction's outcome, if it was of the records with this digest."""
    try:
        value = json.loads((store.logs / COMPARISON).read_bytes())
        return Comparison(**value) if value["records_sha256"] == digest else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{store.logs / COMPARISON} is damaged: {error}. Delete it.") from error


def _check_record(store: Store, record: Record, plan: Plan, dataset: Path, extraction: dict[str, Any]) -> list[str]:
    """What is wrong with one shard."""
    parts = extraction["parts"]
    name = record_path(store, record.batch, record.part).name
    if record.fingerprint != extraction["fingerprint"]:
        return [f"{name} belongs to another extraction ({record.fingerprint[:12]}...)"]
    if record.file is None:
        return []
    path = store.shards / record.file
    if not path.exists():
        return [f"{name}: its shard {record.file} is missing"]
    if path.stat().st_size != record.bytes:
        return [f"{record.file} has {path.stat().st_size} bytes, the record says {record.bytes}"]
    if (actual := checksum_of(path)) != record.checksum:
        return [f"{record.file} is damaged: checksum {actual}, the record says {record.checksum}"]
    try:
        with safe_open(path, framework="pt") as shard:
            wanted = {tensor_name(row.row, tensor) for row in record.rows for tensor in (AUX, LAST, IDS, MASK)}
            if differing := wanted ^ set(shard.keys()):
                return [f"{record.file} and its record differ in {len(differing)} tensors, as {min(differing)}"]
            numbers = [row.row for row in record.rows]
            inputs = read_planned(dataset, plan, numbers, parts["vocab_size"])
            problems = []
            for row, source in zip(record.rows, inputs, strict=True):
                problem = _check_row(shard, row, source.input_ids, source.loss_mask, parts)
                if problem:
                    problems.append(f"{record.file} row {row.row}: {problem}")
            return problems
    except (SafetensorError, OSError) as error:
        return [f"{record.file} cannot be read: {error}"]


def _check_row(shard: Any, row: RowRecord, ids: np.ndarray, mask: np.ndarray, parts: dict[str, Any]) -> str | None:
    aux, last, stored_ids, stored_mask = (
        shard.get_tensor(tensor_name(row.row, tensor)) for tensor in (AUX, LAST, IDS, MASK)
    )
    tokens, hidden, layers = len(ids), parts["hidden_size"], parts["layers"]
    if row.tokens != tokens:
        return f"the record says {row.tokens} tokens, the plan {tokens}"
    if aux.shape != (tokens, hidden * len(layers)) or last.shape != (tokens, hidden):
        return f"states of shape {tuple(aux.shape)} and {tuple(last.shape)} for {tokens} tokens"
    dtype = getattr(torch, parts["dtype"])
    if aux.dtype != dtype or last.dtype != dtype:
        return f"dtype {aux.dtype} and {last.dtype}, not {parts['dtype']} ({DTYPES[parts['dtype']]})"
    if not np.array_equal(stored_ids.numpy(), ids):
        return "the token ids are not the input's"
    if not np.array_equal(stored_mask.numpy(), mask):
        return "the loss mask is not the input's"
    states = [*aux.unflatten(-1, (-1, hidden)).unbind(1), last]
    for name, state, rms in zip([*(f"layer {layer}" for layer in layers), "final"], states, row.rms, strict=True):
        norms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.float32)
        if not torch.isfinite(norms).all():
            return f"{name} is not finite at token {int((~torch.isfinite(norms)).nonzero()[0])}"
        if (norms == 0).any():
            return f"{name} is all zero at token {int((norms == 0).nonzero()[0])}"
        actual = float((norms.double().square().sum() / (tokens * hidden)).sqrt())
        if not abs(actual - rms) <= RMS_TOLERANCE * rms:
            return f"{name} has RMS {actual:.6g}, the server measured {rms:.6g}"
    return None


def _check_complete(store: Store, plan: Plan, books: Books, max_failed_share: float) -> None:
    """Only rows that were tried and failed may be missing, not more than the config allows, and never all."""
    missing, failed, counts = books.rows(MISSING), books.rows(FAILED), books.counts()
    done = counts[DONE] + counts[TRUNCATED]
    if done and not missing and len(failed) <= max_failed_share * len(plan):
        return
    advice = ["Run the same command again: it tries just these."] if books.due() else []
    if books.final:
        advice.append(
            f"{len(books.final)} rows would fail in the same way, so only `python -m flows retry-failed CONFIG.yaml` "
            "tries them again; extraction.max_failed_share lets a run pass without them."
        )
    lines = [f"row {row}: {books.reasons[row]}" for row in [*failed, *missing]]
    raise ExtractionError(
        f"{store.root} is not complete: {done} rows are done, {len(failed)} of {len(plan)} rows failed "
        f"(extraction.max_failed_share allows {max_failed_share:.2%}), {len(missing)} were not extracted yet.\n"
        + "\n".join([_shorten(lines), *advice])
    )


def _reextract(
    store: Store,
    plan: Plan,
    dataset: Path,
    records: list[Record],
    engine: PrefillEngine,
    probe: ProbeReport,
    config: VerifyConfig,
    vocab_size: int,
) -> None:
    """Extract a random share again, compare, and keep the outcome with the store."""
    where = {row.row: record for record in records for row in record.rows}
    count = min(len(where), max(config.reextract_rows, round(config.reextract_share * len(where))))
    chosen = sorted(random.Random(SAMPLE_SEED).sample(sorted(where), count))
    epsilon = torch.finfo(getattr(torch, engine.captured.dtype)).eps
    limits = [NOISE_FACTOR * max(noise, epsilon) for noise in probe.noise]
    names = [*(f"layer {layer}" for layer in engine.captured.layers), "final"]
    futures = deque(
        (row.number, engine.submit(row.number, row.input_ids))
        for row in read_planned(dataset, plan, chosen, vocab_size)
    )
    largest, problems = 0.0, []
    try:
        while futures:
            number, future = futures.popleft()  # with the future goes the dump's mapping
            dump = future.result()
            again = states_of(dump.aux, dump.last)
            engine.release(dump)
            del dump, future
            with safe_open(store.shards / str(where[number].file), framework="pt") as shard:
                stored = states_of(*(shard.get_tensor(tensor_name(number, tensor)) for tensor in (AUX, LAST)))
            for name, error, limit in zip(names, relative_errors(again, stored), limits, strict=True):
                largest = max(largest, error)
                if not error <= limit:
                    problems.append(
                        f"row {number}: extracted again, {name} differs by {error:.3g} (relative); "
                        f"the probe's noise allows {limit:.3g}"
                    )
    finally:
        for _, future in futures:
            engine.discard(future)
    comparison = Comparison(records_digest(store, records), chosen, largest, limits, problems)
    write_json(store.logs / COMPARISON, asdict(comparison))


def _manifest(store: Store, extraction: dict[str, Any], records: list[Record], books: Books) -> dict[str, Any]:
    """What the store is. The same store gives the same bytes at any time: no clock, no host in it."""
    return {
        "format": "drillcore.manifest/1",
        "fingerprint": extraction["fingerprint"],
        "parts": extraction["parts"],
        "rows": len(books.states),
        "rows_by_state": books.counts(),
        "tokens": sum(record.tokens for record in records),
        "bytes": sum(record.bytes for record in records),
        "shards": sum(record.file is not None for record in records),
        "records_sha256": records_digest(store, records),
        "plan_sha256": sha256_of(store.plan),
        "ledger_sha256": sha256_of(store.ledger),
    }


def read_manifest(store: Store) -> dict[str, Any]:
    """The manifest of a verified store. Raises StoreError if there is none, or if the records changed since."""
    try:
        manifest = json.loads(store.manifest.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{store.root} has no readable manifest ({error}): it is not verified.") from error
    if manifest["records_sha256"] != records_digest(store, read_records(store)):
        raise StoreError(f"{store.root} changed since it was verified: verify it again.")
    return manifest


def _shorten(lines: list[str]) -> str:
    more = [f"  ... and {len(lines) - SHOWN_PROBLEMS} more"] if len(lines) > SHOWN_PROBLEMS else []
    return "\n".join([*(f"  {line}" for line in lines[:SHOWN_PROBLEMS]), *more])
