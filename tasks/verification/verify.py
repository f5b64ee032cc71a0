"""The verification, in order: books, shards, distribution, proofs, second extraction; then ledger and manifest."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config import VerifyConfig
from tasks.dataset.plan import Plan, give_back_memory, load_plan
from tasks.errors import DatasetError, ExtractionError, StoreError, VerificationError
from tasks.extraction.engine import PrefillEngine
from tasks.files import sha256_of
from tasks.storage import is_remote
from tasks.store.books import (
    DONE,
    FAILED,
    MISSING,
    TRUNCATED,
    Books,
    Contradiction,
    balance,
    records_digest,
    write_ledger,
)
from tasks.store.index import keep_index
from tasks.store.layout import Store, read_extraction
from tasks.store.lock import WriterLock
from tasks.store.record import Record, in_order, read_records, read_whole_record, record_path, record_paths
from tasks.verification import outcome as outcomes
from tasks.verification.distribution import describe, find_outliers
from tasks.verification.duplicates import differing_twins, find_duplicates, shared_states
from tasks.verification.findings import Mend, Problem, shorten
from tasks.verification.kept import KeptChecks, forget
from tasks.verification.manifest import write_manifest
from tasks.verification.outcome import Outcome, Verified, write_outcome
from tasks.verification.proof import prove
from tasks.verification.reading import ReadingProgress, Show, read_shards
from tasks.verification.reextract import Comparison, choose_rows, compare, read_comparison
from tasks.verification.repair import withdraw
from tasks.verification.shards import Checked, Figures, ShardReader, join
from tasks.verification.stored import StoredRows


def verify_store(
    store: Store,
    dataset: Path,
    max_failed_share: float,
    config: VerifyConfig | None = None,
    engine: PrefillEngine | None = None,
    *,
    plan: Plan | None = None,
    fresh: bool = False,
    repair: WriterLock | None = None,
    show: Show = lambda progress: None,
) -> Verified:
    """Check a store and write its ledger and manifest. The lock must be held.

    engine: to extract a share again; without one an earlier comparison of the same records counts. plan: what
    the store's should be, so that two of them need not stay in memory. fresh: read again what an unfinished
    verification has read. repair: the held lock; what is wrong is put back into the plan. show: told how far the
    reading is.
    Raises VerificationError listing what is wrong, ExtractionError if only rows are missing, StoreError if the store's
    own books are damaged, DatasetError if the dataset is gone. The manifest is there only if it passed; the outcome is
    kept in any case.
    """
    store.manifest.unlink(missing_ok=True)
    (store.logs / outcomes.OUTCOME).unlink(missing_ok=True)
    extraction = read_extraction(store)
    if extraction is None:
        raise StoreError(f"{store.root} holds no extraction: there is no {store.extraction.name}.")
    if not dataset.exists():
        raise DatasetError(f"The dataset {dataset} does not exist; its ids and masks are needed to verify.")
    verification = _Verification(store, dataset, extraction, _plan_of(store, plan), config or VerifyConfig())
    outcome = verification.outcome
    try:
        verification.read(fresh, show)
        if not verification.problems and engine:
            verification.extract_again(engine)
        verification.add_comparison()
        outcome.problems = [asdict(problem) for problem in verification.problems]
        if verification.problems:
            outcome.verdict = outcomes.FAILED
            advice = _REPAIR
            if repair is not None:
                repaired = withdraw(store, verification.problems, repair)
                outcome.repaired = asdict(repaired)
                advice = _describe_repair(repaired.rows, repaired.shards, repaired.left)
            raise VerificationError(
                f"{store.root} did not pass: {len(verification.problems)} problem(s).\n"
                f"{shorten([problem.text for problem in verification.problems])}\n{advice}"
            )
        return verification.finish(max_failed_share)
    except ExtractionError as error:
        outcome.verdict, outcome.incomplete = outcomes.INCOMPLETE, str(error)
        raise
    finally:
        outcome.at = datetime.now(UTC).isoformat(timespec="seconds")
        write_outcome(store, outcome)


_REPAIR = (
    "`python -m flows verify OUTPUT --repair` puts the rows concerned back into the plan, and `python -m flows extract "
    "CONFIG.yaml` then extracts just these again."
)


def _plan_of(store: Store, known: Plan | None) -> Plan:
    """The store's plan, read from its file; `known`, if that is the same."""
    read = load_plan(store.plan)
    if known is None or not known.same(read):
        return read
    del read
    give_back_memory()
    return known


def comparison_due(store: Store, config: VerifyConfig) -> bool:
    """Whether a share of this store must still be extracted a second time and pass."""
    if not config.reextract_rows and not config.reextract_share:
        return False
    comparison = read_comparison(store, records_digest(store, read_records(store)))
    return comparison is None or bool(comparison.problems)


@dataclass
class _Verification:
    """One verification in progress."""

    store: Store
    dataset: Path
    extraction: dict[str, Any]
    plan: Plan
    config: VerifyConfig

    def __post_init__(self) -> None:
        self.outcome = Outcome()
        self.records, self.problems = _read_records(self.store)
        self.books: Books = balance(self.plan, self.records)
        self.problems += [
            Problem("books", found.text, found.record, found.row, _mend(found)) for found in self.books.contradictions
        ]
        self.digest = records_digest(self.store, self.records)
        self.stored = StoredRows(self.store, self.records, len(self.plan))
        self.names = [*(f"layer {layer}" for layer in self.extraction["parts"]["layers"]), "final"]
        self.comparison: Comparison | None = None
        outcome = self.outcome
        outcome.rows = self.books.counts() | {MISSING: len(self.books.rows(MISSING))}
        outcome.tokens = sum(record.tokens for record in self.records)
        outcome.bytes = sum(record.bytes for record in self.records)
        outcome.shards = sum(record.file is not None for record in self.records)

    def _name(self, record: Record) -> str:
        return record_path(self.store, record.batch, record.part).name

    def read(self, fresh: bool, show: Show) -> None:
        """Read every shard; look at the figures of all rows together."""
        if (actual := sha256_of(self.dataset)) != self.extraction["parts"]["input_sha256"]:
            text = f"{self.dataset} is another file than was extracted: its sha256 is {actual}"
            self.problems.append(Problem("input", text))
            return
        progress = ReadingProgress(self.outcome.bytes, len(self.records), time.monotonic())
        context = {"fingerprint": self.extraction["fingerprint"], "plan": sha256_of(self.store.plan)}
        # A record that the plan does not know has no rows to compare with.
        strange = {problem.record for problem in self.problems if problem.row is None}
        readable = [record for record in self.records if self._name(record) not in strange]
        found: list[Problem] = []

        def figures_of(shards: Iterable[Checked]) -> Iterator[Figures]:
            for checked in shards:
                found.extend(checked.problems)
                yield checked.figures

        with KeptChecks(self.store, context, fresh) as kept:
            shards = read_shards(readable, self._reader, kept, show, progress)
            figures = join(figures_of(shards), sum(len(record.rows) for record in readable), len(self.names))
        self.problems += sorted(found, key=lambda problem: (problem.record or "", problem.row or 0))
        outcome = self.outcome
        outcome.seconds = round(time.monotonic() - progress.started, 3)
        outcome.bytes_read, outcome.bytes_kept = progress.bytes_done, progress.bytes_kept
        self._look_at(figures)
        self._prove()

    def _reader(self, count: Any) -> ShardReader:
        return ShardReader(self.store, self.plan, self.dataset, self.extraction, count)

    def _look_at(self, figures: Figures) -> None:
        """The figures of all rows that have no problem yet, against each other."""
        bad = [problem.row for problem in self.problems if problem.row is not None]
        good: Any = ~np.isin(figures.row, bad) if bad else slice(None)  # a slice copies nothing
        rows = figures.row[good]
        tokens, median = self.plan.tokens[rows], figures.median[good]
        outcome = self.outcome
        outcome.distributions = [asdict(one) for one in describe(self.names, median, figures.largest[good])]
        outcome.outliers, outcome.outlier_rows_judged = find_outliers(self.names, rows, tokens, median)
        for outlier in outcome.outliers:
            if outlier.far:
                self._suspect(outlier.row, outlier.text())
        several = tokens > 1  # the state of a first token depends on little but its place
        last, ids = figures.last[good][several], figures.ids[good][several]
        del figures, median  # a million rows' memory
        shared, twins = find_duplicates(rows[several], last, ids)
        outcome.duplicates = {"same_ids": sum(map(len, twins)), "shared_states": sum(map(len, shared))}
        self.problems += shared_states(shared, self.stored)
        self.problems += differing_twins(self.store, twins, self.stored)

    def _suspect(self, row: int, text: str) -> None:
        name, record = self.stored[row]
        self.problems.append(Problem("distribution", f"{record.file} row {row}: {text}", name, row, "row"))

    def _prove(self) -> None:
        bad = {problem.row for problem in self.problems if problem.row is not None}
        lost = {problem.record for problem in self.problems if problem.row is None and problem.record is not None}
        sound = self.stored.without(bad, lost)
        proofs = prove(self.store, self.plan, self.dataset, self.extraction, sound, self.config)
        self.problems += proofs.problems
        self.outcome.proofs = {"input": asdict(proofs.input), "argmax": asdict(proofs.argmax)}
        self.outcome.doubtful = {str(row): text for row, text in proofs.doubtful.items()}

    def extract_again(self, engine: PrefillEngine) -> None:
        """A random share, and what is doubtful."""
        doubtful = [*map(int, self.outcome.doubtful), *(outlier.row for outlier in self.outcome.outliers)]
        rows = choose_rows(self.stored.numbers(), self.config, doubtful)
        if not rows:
            return
        checkpoint = self.extraction["config"].get("model", {}).get("path")
        compare(
            *(self.store, self.plan, self.dataset, self.stored, self.digest, rows, engine),
            self.extraction["parts"]["vocab_size"],
            Path(checkpoint) if checkpoint else None,
        )

    def add_comparison(self) -> None:
        """The outcome of the second extraction of just these records, by this run or an earlier one."""
        self.comparison = read_comparison(self.store, self.digest)
        if self.comparison:
            self.outcome.comparison = asdict(self.comparison)
            self.problems += self.comparison.problems

    def finish(self, max_failed_share: float) -> Verified:
        """Nothing is wrong: is it complete, too?"""
        _check_complete(self.store, self.plan, self.books, max_failed_share)
        write_ledger(self.store.ledger, self.plan, self.books)
        manifest = write_manifest(self.store, self.extraction, self.records, self.digest, self.books)
        if not is_remote(self.store.root):
            keep_index(self.store, self.records, self.digest)  # so that the first reader need not make it
        forget(self.store)
        self.outcome.verdict, self.outcome.digest = outcomes.PASSED, sha256_of(self.store.manifest)
        return Verified(
            digest=self.outcome.digest,
            rows=manifest["rows_by_state"],
            tokens=manifest["tokens"],
            bytes=manifest["bytes"],
            shards=manifest["shards"],
            reextracted=len(self.comparison.rows) if self.comparison else 0,
            largest_difference=self.comparison.largest_difference if self.comparison else None,
            outliers=len({outlier.row for outlier in self.outcome.outliers}),
        )


def _read_records(store: Store) -> tuple[list[Record], list[Problem]]:
    """All records that can be read, and a problem for each that cannot."""
    records, problems = [], []
    for path in record_paths(store):
        try:
            record = read_whole_record(path)
        except StoreError as error:
            problems.append(Problem("books", str(error), path.name))
            continue
        if record is None:
            text = f"{path.name}, a commit record, is damaged: half written"
            problems.append(Problem("books", text, path.name, mend="shard"))
        else:
            records.append(record)
    return in_order(records), problems


def _mend(found: Contradiction) -> Mend:
    if found.record is None:
        return "nothing"
    return "shard" if found.row is None else "row"


def _check_complete(store: Store, plan: Plan, books: Books, max_failed_share: float) -> None:
    """Only rows that were tried and failed may be missing, not more than the config allows, and never all."""
    missing, failed, counts = books.rows(MISSING), books.rows(FAILED), books.counts()
    done = counts[DONE] + counts[TRUNCATED]
    if done and not missing and len(failed) <= max_failed_share * len(plan):
        return
    advice = ["Run the same command again: it tries just these."] if len(books.due()) else []
    if books.final:
        advice.append(
            f"{len(books.final)} rows would fail in the same way, so only `python -m flows retry-failed CONFIG.yaml` "
            "tries them again; extraction.max_failed_share lets a run pass without them."
        )
    lines = [f"row {row}: {books.reason(row)}" for row in [*failed, *missing]]
    raise ExtractionError(
        f"{store.root} is not complete: {done} rows are done, {len(failed)} of {len(plan)} rows failed "
        f"(extraction.max_failed_share allows {max_failed_share:.2%}), {len(missing)} were not extracted yet.\n"
        + "\n".join([shorten(lines), *advice])
    )


def _describe_repair(rows: list[int], shards: list[str], left: list[str]) -> str:
    text = (
        f"Repaired: {len(rows)} rows are back in the plan, {len(shards)} shards were withdrawn as a whole. `python -m "
        "flows extract CONFIG.yaml` extracts just these rows."
    )
    if left:
        text += f" {len(left)} problem(s) need a person:\n{shorten(left)}"
    return text
