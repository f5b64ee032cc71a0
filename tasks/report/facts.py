"""What the report says, gathered from the store alone: books, records, plan, logs."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tasks.dataset.plan import load_plan
from tasks.errors import StoreError
from tasks.files import human_bytes, human_seconds
from tasks.store.books import FAILED, MISSING, SKIPPED, TRUNCATED, Books, balance
from tasks.store.layout import Store, read_extraction
from tasks.store.record import Record, RowRecords, in_order, read_whole_record, record_paths
from tasks.verification.findings import Check
from tasks.verification.outcome import FAILED as NOT_PASSED
from tasks.verification.outcome import INCOMPLETE, PASSED, Outcome, read_outcome

EXAMPLES = 8  # rows named for a reason
IDLE = 300.0  # seconds without any batch at work that are left out of the throughput's time axis


@dataclass(frozen=True)
class Reason:
    """Why rows are not in the store whole."""

    state: str
    text: str
    """One of its messages; they differ in numbers only."""
    count: int
    rows: str
    """The first of them."""


@dataclass(frozen=True)
class Proved:
    """A line of what was checked: with which numbers, and whether it held."""

    name: str
    figures: str
    mark: str
    """`yes`, `no`, or `-` where it was not or could not be done."""


@dataclass(frozen=True)
class Throughput:
    """Tokens a second over the time in which batches were at work."""

    rates: np.ndarray
    """[bins]"""
    seconds: float
    seams: list[float]
    """Where idle time was left out, as shares of the axis."""
    began: str
    ended: str
    tokens: int


@dataclass(frozen=True)
class Facts:
    """Everything that a report shows."""

    name: str
    root: str
    verdict: str
    sentence: str
    outcome: Outcome
    parts: dict[str, Any]
    lengths: np.ndarray
    """Tokens of each stored row."""
    throughput: Throughput | None
    reasons: list[Reason]
    proved: list[Proved]


def gather(store: Store) -> Facts | None:
    """The facts of a store that was verified, passed or not; None if it never was."""
    outcome, extraction = read_outcome(store), read_extraction(store)
    if outcome is None or extraction is None:
        return None
    plan, records = load_plan(store.plan), _readable(store)
    books = balance(plan, records)
    rows = np.concatenate([np.empty(0, np.int64), *(RowRecords.of(record.rows).tokens for record in records)])
    return Facts(
        name=str(extraction["config"].get("name", store.root.name)),
        root=str(store.root.absolute()),
        verdict={PASSED: "Passed", NOT_PASSED: "Failed", INCOMPLETE: "Incomplete"}.get(outcome.verdict, "Unfinished"),
        sentence=_sentence(outcome),
        outcome=outcome,
        parts=extraction["parts"],
        lengths=rows,
        throughput=throughput_of(records),
        reasons=reasons_of(books),
        proved=_proved(outcome, _probes(store)),
    )


def _readable(store: Store) -> list[Record]:
    records = []
    for path in record_paths(store):
        try:
            if record := read_whole_record(path):
                records.append(record)
        except StoreError:  # it is among the problems
            continue
    return in_order(records)


def _probes(store: Store) -> list[dict[str, Any]]:
    """What the probe saw, by server."""
    try:
        probes: list[dict[str, Any]] = json.loads((store.logs / "probe.json").read_bytes())
        return probes
    except (OSError, ValueError):
        return []


def _sentence(outcome: Outcome) -> str:
    rows = outcome.rows
    stored = rows.get("done", 0) + rows.get(TRUNCATED, 0)
    all_rows = sum(rows.values())
    if outcome.verdict == PASSED:
        left_out = all_rows - stored
        rest = f"; the other {left_out:,} are accounted for, with reasons" if left_out else ""
        return f"{stored:,} of {all_rows:,} rows are stored and every byte of them was read back and checked{rest}."
    if outcome.verdict == INCOMPLETE:
        missing, failed = rows.get(MISSING, 0), rows.get(FAILED, 0)
        return (
            f"What is stored is right, but it is not all: {stored:,} of {all_rows:,} rows are stored, {failed:,} "
            f"failed and {missing:,} were not extracted yet. Run the same extraction again."
        )
    if outcome.verdict == NOT_PASSED:
        advice = (
            "They are back in the plan" if outcome.repaired else "`verify --repair` puts the rows back into the plan"
        )
        return f"{len(outcome.problems):,} problems were found. {advice}; `extract` then extracts just these again."
    return "The verification was interrupted. The same command goes on where it was."


def throughput_of(records: list[Record], bins: int = 60) -> Throughput | None:
    """From the commit records: each batch's tokens, spread evenly over the seconds that it took."""
    spans = []
    for record in records:
        try:
            end = datetime.fromisoformat(record.written["at"]).timestamp()
            seconds = max(float(record.written["seconds"]), 1e-3)
        except (KeyError, ValueError, TypeError):
            continue
        spans.append((end - seconds, end, record.tokens))
    if not spans:
        return None
    spans.sort()
    # The axis: times at which nothing was at work for long are cut out.
    pieces: list[list[float]] = []
    for start, end, _ in spans:
        if pieces and start - pieces[-1][1] <= IDLE:
            pieces[-1][1] = max(pieces[-1][1], end)
        else:
            pieces.append([start, end])
    begins = np.cumsum([0.0] + [end - start for start, end in pieces])
    total = float(begins[-1])
    edges = np.linspace(0, total, bins + 1)
    tokens = np.zeros(bins)
    for start, end, count in spans:
        piece = next(at for at, (first, last) in enumerate(pieces) if first <= start <= last)
        low = begins[piece] + start - pieces[piece][0]
        overlap = np.clip(np.minimum(edges[1:], low + end - start) - np.maximum(edges[:-1], low), 0, None)
        tokens += count * overlap / (end - start)
    return Throughput(
        rates=tokens / (total / bins),
        seconds=total,
        seams=[float(begin / total) for begin in begins[1:-1]],
        began=f"{datetime.fromtimestamp(spans[0][0], UTC):%Y-%m-%d %H:%M:%S UTC}",
        ended=f"{datetime.fromtimestamp(max(end for _, end, _ in spans), UTC):%Y-%m-%d %H:%M:%S UTC}",
        tokens=sum(count for _, _, count in spans),
    )


def reasons_of(books: Books) -> list[Reason]:
    """Reasons that differ in numbers only are one, the most frequent first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    order = [FAILED, MISSING, SKIPPED, TRUNCATED]
    for state in order:
        for row in books.rows(state):
            groups[state, re.sub(r"\d+", "#", books.reason(row))].append(row)
    reasons = []
    for (state, _), rows in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]))):
        more = f" and {len(rows) - EXAMPLES:,} more" if len(rows) > EXAMPLES else ""
        named = ", ".join(map(str, rows[:EXAMPLES])) + more
        reasons.append(Reason(state, books.reason(rows[0]), len(rows), named))
    return reasons


def _proved(outcome: Outcome, probes: list[dict[str, Any]]) -> list[Proved]:
    failed = {problem["check"] for problem in outcome.problems}
    read = outcome.bytes_read + outcome.bytes_kept

    def line(check: Check, name: str, figures: str, done: bool = True) -> Proved:
        return Proved(name, figures, "no" if check in failed else "yes" if done else "-")

    rate = f", {outcome.bytes_read / outcome.seconds / 1e9:.2f} GB/s" if outcome.seconds else ""
    kept = (
        f"; {human_bytes(outcome.bytes_kept)} of it by an earlier run that did not pass" if outcome.bytes_kept else ""
    )
    shards = f"{outcome.shards:,} shards; {human_bytes(read)} read in {human_seconds(outcome.seconds)}{rate}{kept}"
    shared, same = (outcome.duplicates.get(name, 0) for name in ("shared_states", "same_ids"))
    twice = f"{shared:,} rows share a final state; {same:,} rows have ids that another row has, too"
    judged, listed = outcome.outlier_rows_judged, len({one.row for one in outcome.outliers})
    lines = [
        line("books", "The books add up", ", ".join(f"{count:,} {state}" for state, count in outcome.rows.items())),
        line("bytes", "Every byte is what was committed", f"sizes, headers and XXH3-128 of {shards}", bool(read)),
        line("input", "Ids and masks are the input's", f"{outcome.tokens:,} tokens compared", bool(read)),
        line("values", "Every value is sound", "finite, none zero, full precision, RMS as on the device", bool(read)),
        line("duplicates", "No state is there twice", twice, bool(read)),
        line(
            "distribution",
            "No row stands outside the run's distribution",
            f"{judged:,} rows judged, {listed:,} to look at" if judged else "too few rows for a distribution",
            bool(judged),
        ),
    ]
    for key, name in (("input", "States belong to their input tokens"), ("argmax", "lm_head favours the next token")):
        proof = outcome.proofs.get(key)
        figures = proof["reason"] if proof else "not reached"
        if proof and proof["applies"]:
            figures = (
                f"{proof['judged']:,} rows at random: {figures}; the weakest has {proof['weakest']:.2f} of the median"
            )
        lines.append(line("proof", name, figures, bool(proof and proof["applies"])))
    lines += _second_extraction(outcome, line)
    for probe in probes:
        agreement = f"{100 * probe['top_token_agreement']:.1f}% of {probe['positions']} positions"
        noise = ", ".join(f"{value:.2g}" for value in probe["noise"])
        figures = f"{probe['prompts']} prompts; the server's own top token at {agreement}; noise {noise}"
        lines.append(Proved("The probe passed before anything was extracted", figures, "yes"))
    return lines


def _second_extraction(outcome: Outcome, line: Callable[..., Proved]) -> list[Proved]:
    name = "A second extraction gives the same"
    compared = outcome.comparison
    if not compared:
        return [Proved(name, "not done: there was no server", "-")]
    columns = zip(compared["states"], compared["largest"][0], compared["noise"][0], compared["limits"][0])
    by_state = "; ".join(
        f"{state} {found:.2g} (noise {noise:.2g}, limit {limit:.2g})" for state, found, noise, limit in columns
    )
    rows = f"{len(compared['rows']):,} rows; largest relative difference: {by_state}"
    lines = [line("second extraction", name, rows)]
    if compared["top_token_positions"]:
        figures = (
            f"{100 * compared['top_token_agreement']:.1f}% of {compared['top_token_positions']:,} positions in "
            f"{compared['top_token_rows']:,} rows; the rest are near ties"
        )
        lines.append(line("top tokens", "lm_head of stored states picks the server's own token", figures))
    return lines
