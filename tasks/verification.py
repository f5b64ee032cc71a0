"""Reads back what was stored and says whether it is complete and right; only then is the manifest written.

Checked: each row of the plan is in exactly one place of the books; each shard's size, checksum and header against its
record; ids and masks against the input file; every state finite, none zero, its RMS as the plugin measured it on the
device; a random share extracted a second time, where there is a server.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open

from tasks.config import VerifyConfig
from tasks.dataset.plan import ACTIONS, EXTRACT, SKIP, TRUNCATE, Plan, load_plan
from tasks.dataset.rows import read_planned
from tasks.errors import DatasetError, ExtractionError, StoreError, VerificationError
from tasks.extraction.engine import PrefillEngine
from tasks.files import checksum_of, sha256_of, sha256_of_json, write_atomic, write_json
from tasks.probe import ProbeReport, relative_errors, states_of
from tasks.store.layout import Store, read_extraction
from tasks.store.record import Record, RowRecord, read_records, record_path
from tasks.store.shard import AUX, DTYPES, IDS, LAST, MASK, tensor_name

SHOWN_PROBLEMS = 20
RMS_TOLERANCE = 0.01  # relative, between the device's sum and ours: both in float32, in another order
# A second extraction may differ this much more than the probe saw one prompt differ from itself.
NOISE_FACTOR = 4.0
SAMPLE_SEED = 1
DONE, TRUNCATED, SKIPPED, FAILED = "done", "truncated", "skipped", "failed"


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


def verify_store(
    store: Store,
    dataset: Path,
    vocab_size: int,
    max_failed_share: float = 0.0,
    config: VerifyConfig | None = None,
    engine: PrefillEngine | None = None,
    probe: ProbeReport | None = None,
    on_progress: Callable[[int], None] = lambda size: None,
) -> Verified:
    """Check a store and write its ledger and manifest.

    vocab_size: of the model that the rows were judged with; engine and probe: to extract a share again; on_progress:
    called with the bytes of each shard read. Raises VerificationError listing what is wrong (an old manifest is removed
    then), ExtractionError if only rows are missing, StoreError if the store's own books are damaged.
    """
    found = read_extraction(store)
    if found is None:
        raise StoreError(f"{store.root} holds no extraction: there is no {store.extraction.name}.")
    plan, records = load_plan(store.plan), read_records(store)
    parts = found["parts"]
    problems: list[str] = []
    if not dataset.exists():
        raise DatasetError(f"The dataset {dataset} does not exist; its ids and masks are needed to verify.")
    if (actual := sha256_of(dataset)) != parts["input_sha256"]:
        problems.append(f"{dataset} is not the file that was extracted: sha256 {actual[:12]}..., not "
                        f"{parts['input_sha256'][:12]}...")  # fmt: skip
    else:
        for record in records:
            problems += _check_record(store, record, plan, dataset, parts, vocab_size, found["fingerprint"])
            on_progress(record.bytes)
    states, reasons = _balance(plan, records, problems)
    reextracted, largest = 0, None
    if not problems and engine and probe and config:
        reextracted, largest = _reextract(store, plan, dataset, vocab_size, records, engine, probe, config, problems)
    if problems:
        store.manifest.unlink(missing_ok=True)
        raise VerificationError(_list_problems(store, problems))
    counts = {name: states.count(name) for name in (DONE, TRUNCATED, SKIPPED, FAILED)}
    if not counts[DONE] + counts[TRUNCATED] or counts[FAILED] > max_failed_share * len(plan):
        store.manifest.unlink(missing_ok=True)
        failures = [f"row {row}: {reason}" for row, reason in enumerate(reasons) if states[row] == FAILED]
        raise ExtractionError(
            f"{counts[FAILED]} of {len(plan)} rows are missing from {store.root} (extraction.max_failed_share allows "
            f"{max_failed_share:.2%}):\n" + _shorten(failures) + "\nRun the same command again to try them again."
        )
    _write_ledger(store, plan, records, states, reasons)
    manifest = _manifest(store, found, plan, records, counts)
    write_json(store.manifest, manifest)
    return Verified(
        digest=sha256_of(store.manifest),
        rows=counts,
        tokens=manifest["tokens"],
        bytes=manifest["bytes"],
        shards=manifest["shards"],
        reextracted=reextracted,
        largest_difference=largest,
    )


def _check_record(
    store: Store, record: Record, plan: Plan, dataset: Path, parts: dict[str, Any], vocab_size: int, fingerprint: str
) -> list[str]:
    """What is wrong with one shard."""
    name = record_path(store, record.batch, record.part).name
    if record.fingerprint != fingerprint:
        return [f"{name} belongs to another extraction ({record.fingerprint[:12]}...)"]
    outside = [row.row for row in record.rows if not 0 <= row.row < len(plan) or plan.batch[row.row] != record.batch]
    if outside:
        return [f"{name} lists rows that the plan does not have in batch {record.batch}: {outside[:5]}"]
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
            inputs = read_planned(dataset, plan, numbers, vocab_size)
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
        if abs(actual - rms) > RMS_TOLERANCE * rms:
            return f"{name} has RMS {actual:.6g}, the server measured {rms:.6g}"
    return None


def _balance(plan: Plan, records: list[Record], problems: list[str]) -> tuple[list[str], list[str]]:
    """State and reason of each row. Rows that are in the books twice become problems."""
    states, reasons = [FAILED] * len(plan), ["not extracted yet"] * len(plan)
    for record in records:
        for failure in record.failed:
            reasons[failure.row] = failure.reason
    for row in np.flatnonzero(plan.action == ACTIONS.index(SKIP)).tolist():
        states[row], reasons[row] = SKIPPED, plan.reason[row]
    for record in records:
        for stored in record.rows:
            if not 0 <= stored.row < len(plan):
                continue  # named by _check_record
            if states[stored.row] != FAILED:
                problems.append(f"row {stored.row} is in the books twice, again in batch {record.batch}.{record.part}")
            action = ACTIONS[plan.action[stored.row]]
            states[stored.row] = {EXTRACT: DONE, TRUNCATE: TRUNCATED}.get(action, SKIPPED)
            reasons[stored.row] = plan.reason[stored.row]
    return states, reasons


def _reextract(
    store: Store,
    plan: Plan,
    dataset: Path,
    vocab_size: int,
    records: list[Record],
    engine: PrefillEngine,
    probe: ProbeReport,
    config: VerifyConfig,
    problems: list[str],
) -> tuple[int, float]:
    """Extract a random share again and compare; returns (rows, largest relative error)."""
    where = {row.row: record for record in records for row in record.rows}
    count = min(len(where), max(config.reextract_rows, round(config.reextract_share * len(where))))
    chosen = sorted(random.Random(SAMPLE_SEED).sample(sorted(where), count))
    limits = [
        max(NOISE_FACTOR * noise, torch.finfo(getattr(torch, engine.captured.dtype)).eps) for noise in probe.noise
    ]
    futures = {
        row.number: engine.submit(row.number, row.input_ids) for row in read_planned(dataset, plan, chosen, vocab_size)
    }
    largest = 0.0
    for number, future in futures.items():
        dump = future.result()
        again = states_of(dump.aux, dump.last)
        engine.release(dump)
        with safe_open(store.shards / str(where[number].file), framework="pt") as shard:
            stored = states_of(*(shard.get_tensor(tensor_name(number, tensor)) for tensor in (AUX, LAST)))
        for name, error, limit in zip(
            [*(f"layer {layer}" for layer in engine.captured.layers), "final"],
            relative_errors(again, stored),
            limits,
            strict=True,
        ):
            largest = max(largest, error)
            if error > limit:
                problems.append(
                    f"row {number}: extracted again, {name} differs by {error:.3g} (relative); "
                    f"the probe's noise allows {limit:.3g}"
                )
    return count, largest


def _write_ledger(store: Store, plan: Plan, records: list[Record], states: list[str], reasons: list[str]) -> None:
    shard: list[str | None] = [None] * len(plan)
    for record in records:
        for row in record.rows:
            shard[row.row] = record.file
    table = pa.table(
        {
            "row": np.arange(len(plan), dtype=np.int64),
            "id": pa.array(plan.id, pa.string()),
            "state": pa.array(states).dictionary_encode(),
            "reason": pa.array(reasons, pa.string()),
            "tokens": plan.tokens,
            "input_tokens": plan.input_tokens,
            "shard": pa.array(shard, pa.string()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(store.ledger, sink.getvalue().to_pybytes())


def _manifest(
    store: Store, extraction: dict[str, Any], plan: Plan, records: list[Record], counts: dict[str, int]
) -> dict[str, Any]:
    """What the store is. The same store gives the same bytes at any time: no clock, no host in it."""
    files = [record_path(store, record.batch, record.part) for record in records]
    return {
        "format": "drillcore.manifest/1",
        "fingerprint": extraction["fingerprint"],
        "parts": extraction["parts"],
        "rows": len(plan),
        "rows_by_state": counts,
        "tokens": sum(record.tokens for record in records),
        "bytes": sum(record.bytes for record in records),
        "shards": sum(record.file is not None for record in records),
        "records_sha256": sha256_of_json({file.name: sha256_of(file) for file in files}),
        "plan_sha256": sha256_of(store.plan),
        "ledger_sha256": sha256_of(store.ledger),
    }


def read_manifest(store: Store) -> dict[str, Any]:
    """The manifest of a verified store. Raises StoreError if there is none."""
    try:
        return json.loads(store.manifest.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{store.root} has no readable manifest ({error}): it is not verified.") from error


def _list_problems(store: Store, problems: list[str]) -> str:
    return (
        f"{store.root} did not pass: {len(problems)} problem(s).\n{_shorten(problems)}\n"
        "Delete the record (shards/*.json) of a damaged shard and run the extraction again to replace it."
    )


def _shorten(lines: list[str]) -> str:
    more = [f"  ... and {len(lines) - SHOWN_PROBLEMS} more"] if len(lines) > SHOWN_PROBLEMS else []
    return "\n".join([*(f"  {line}" for line in lines[:SHOWN_PROBLEMS]), *more])
