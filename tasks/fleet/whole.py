"""What a fleet does once, before and after its partitions: plan and split; add up, and keep the figures."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tasks.config import ExtractConfig
from tasks.dataset.plan import Plan
from tasks.errors import FleetError, WriterAliveError
from tasks.files import write_json
from tasks.preflight import Preflight, check_output_space, open_output, run_preflight
from tasks.storage import Location
from tasks.storage.bucket import CredentialsSource
from tasks.store.books import CODES, DONE, FAILED, MISSING, NOWHERE, TRUNCATED, balance
from tasks.store.bucket_lock import writer_lock
from tasks.store.inspection import inspect_store
from tasks.store.layout import Store, batch_of
from tasks.store.partitions import Partition, Split, new_split, read_split, save_split, split_batches
from tasks.store.record import record_paths
from tasks.store.runs import add_run, read_runs

PARTITIONS = "partitions"  # in the store's logs: figures of each run of a partition


@dataclass(frozen=True)
class Plans:
    """A store that is ready for a fleet."""

    preflight: Preflight
    split: Split
    adopted: bool
    """Whether the split is that of a fleet whose runs are still there."""

    @property
    def store(self) -> Store:
        return self.preflight.store


def open_fleet(config: ExtractConfig, partitions: int, credentials: CredentialsSource | None = None) -> Plans:
    """Plan, or resume a plan; split what is missing.

    Where runs of an earlier fleet are writing, its partitions' or the one that verifies, the split is kept: they are
    found again, and go on. Raises what `run_preflight` does, and WriterAliveError if another writer is there.
    """
    preflight = run_preflight(config, space=False, credentials=credentials, flow_runs=partitions)
    store, plan = preflight.store, preflight.plan
    if not preflight.spool:
        check_output_space(preflight)
    tokens = np.zeros(plan.batches, dtype=np.int64)
    for batch, rows in preflight.missing.items():
        tokens[batch] = plan.tokens[rows].sum()
    split = new_split(split_batches(tokens, partitions), _there(preflight))
    try:
        with writer_lock(store):
            if preflight.missing:
                open_output(preflight)
            save_split(store, split)
    except WriterAliveError as error:
        found = read_split(store)
        verifying = found is not None and not preflight.missing and _kept_run(store, found) is not None
        if found is None or (error.lock == store.lock.name and not verifying):
            raise
        return Plans(preflight, found, adopted=True)
    return Plans(preflight, split, adopted=False)


def _there(preflight: Preflight) -> dict[str, int]:
    there = preflight.books.at != NOWHERE
    return {
        "rows": int(there.sum()),
        "tokens": int(preflight.plan.tokens[there].sum(dtype=np.int64)),
        "bytes": sum(record.bytes for record in preflight.inspection.records),
    }


@dataclass(frozen=True)
class Account:
    """The rows of some batches, by what became of them."""

    rows: int
    stored: int
    failed: int
    missing: int


def account(store: Store, plan: Plan, fingerprint: str, partition: Partition | None = None) -> Account:
    """What the commit records say of a partition's rows, or of all.

    Only records whose shard is there count. Raises StoreError for one that a person must judge, FleetError if plan and
    records contradict each other.
    """
    batches = partition.batches if partition else range(plan.batches)
    inspection = inspect_store(store, fingerprint, batches=batches)
    books = balance(plan, inspection.records)
    if books.problems:
        raise FleetError(f"{store.root} contradicts itself: {'; '.join(books.problems[:5])}.")
    ours = (plan.batch >= batches.start) & (plan.batch < batches.stop)
    codes = books.codes[ours]
    counts = {state: int(np.count_nonzero(codes == CODES[state])) for state in (DONE, TRUNCATED, FAILED, MISSING)}
    return Account(int(ours.sum()), counts[DONE] + counts[TRUNCATED], counts[FAILED], counts[MISSING])


def check_sum(store: Store, plan: Plan, fingerprint: str, partitions: list[Partition]) -> Account:
    """The account of the whole, which must be that of its parts. Raises FleetError if a row is missing."""
    whole = account(store, plan, fingerprint)
    if whole.missing:
        lacking = [
            f"partition {one.number}: {part.missing} of {part.rows} rows"
            for one in partitions
            if (part := account(store, plan, fingerprint, one)).missing
        ]
        raise FleetError(
            f"{store.root} is not complete: {whole.missing} of {whole.rows} rows are not in its records "
            f"({'; '.join(lacking) or 'in no partition'}). It was not verified. Start the fleet again: it extracts "
            "these."
        )
    return whole


class Commits:
    """Commit records by partition; one listing for all, however many ask within a look."""

    def __init__(self, store: Store, partitions: list[Partition]):
        self.store, self.partitions = store, partitions
        self.batches = np.empty(0, dtype=np.int64)
        """Batches with a record, in order."""
        self._counts = [0] * len(partitions)

    def refresh(self) -> None:
        batches = np.array([batch_of(path) for path in record_paths(self.store)], dtype=np.int64)
        self.batches = np.unique(batches)
        self._counts = [int(((batches >= one.first) & (batches < one.end)).sum()) for one in self.partitions]

    def count(self, number: int) -> int:
        """Of a partition, by the last `refresh`."""
        return self._counts[number]


def keep_partition_run(store: Store, fleet: str, number: int, figures: dict[str, Any]) -> None:
    """Keep the figures of one run of a partition, in a file of its own: others are being written at this moment."""
    folder = store.logs / PARTITIONS
    folder.mkdir(parents=True, exist_ok=True)
    moment = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    write_json(folder / f"{fleet}-{number:04d}-{moment}.json", {"partition": number, **figures})


def keep_fleet_run(plans: Plans, retries: int) -> dict[str, Any]:
    """Add one line for all runs of the fleet to the store's runs, once, under its lock; returns it.

    Rows, tokens and bytes: by the commit records, those of lost runs too. Seconds: from the first run's begin to the
    last one's end, as all extracted at the same time.
    """
    store, split = plans.store, plans.split
    if (kept := _kept_run(store, split)) is not None:
        return kept
    with writer_lock(store):
        inspection = inspect_store(store, plans.preflight.fingerprint)
        paths: list[Location] = sorted((store.logs / PARTITIONS).glob(f"{split.fleet}-*.json"))
        parts = [json.loads(path.read_bytes()) for path in paths]
        begins = [datetime.fromisoformat(one["began"]).timestamp() for one in parts]
        ends = [begin + one["seconds"] for begin, one in zip(begins, parts, strict=True)]
        records = inspection.records
        figures = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(max(ends) - min(begins), 3) if parts else 0.0,
            "rows": sum(len(record.rows) for record in records) - split.there["rows"],
            "tokens": sum(record.tokens for record in records) - split.there["tokens"],
            "bytes": sum(record.bytes for record in records) - split.there["bytes"],
            **{name: sum(one[name] for one in parts) for name in ("failed", "retries", "restarts")},
            "usage": {},
            "fleet": {"name": split.fleet, "partitions": len(split.partitions), "lost": retries, "runs": parts},
        }
        if parts or figures["rows"]:
            add_run(store, figures)
    return figures


def _kept_run(store: Store, split: Split) -> dict[str, Any] | None:
    """The line of a fleet in the store's runs."""
    return next((run for run in read_runs(store) if run.get("fleet", {}).get("name") == split.fleet), None)
