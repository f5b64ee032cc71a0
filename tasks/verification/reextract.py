"""Extracts a random share of the rows again and compares: with limits that come from measured noise, not from a guess.

Each row is extracted twice more, among others and alone, so that the two differ by what batches of another shape do to
rounding. The logarithms of these differences give, for each state, a median, and over all states one robust deviation;
the stored row may differ from the new one by the median and DEVIATIONS deviations more, but never by more than HEADROOM
times the measured noise's upper quartile: where some rows come out bit for bit the same and others do not, the
deviation of logarithms means nothing. Two figures are compared: the relative error over the row, and that of its worst
token, which one wrong token among thousands does not escape. In a mixture of experts rounding decides which of two
nearly tied experts a token takes, and its state may then be any: as in the probe, a few tokens of a row are left out of
both figures. One wrong token does escape there; many do not.

The server also names its own most likely next tokens: `lm_head` of the *stored* final state must pick the same.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tasks.checkpoint import Checkpoint
from tasks.config import VerifyConfig
from tasks.dataset.plan import Plan
from tasks.dataset.rows import Row, read_planned
from tasks.errors import ModelError, StoreError
from tasks.extraction.engine import PrefillEngine
from tasks.files import write_json
from tasks.model import ITEMSIZE
from tasks.probe import NEAR_TIE, NOISE_LIMIT, allowed_strays, states_of
from tasks.server.dumps import Captured
from tasks.store.layout import Store
from tasks.verification.findings import Problem
from tasks.verification.stored import StoredRows, StoredStates

FORMAT = "drillcore.comparison/2"
COMPARISON = "reextraction.json"  # in the store's logs
SAMPLE_SEED = 1
GROUP_BYTES = 512 << 20  # of dumps that are held at once
HEADROOM = 4.0  # above the upper quartile of the noise
DEVIATIONS = 8.0  # robust standard deviations of the noise's logarithm
# Batches of other shapes than the two that were measured may round by more: no limit is below this, a relative error
# over the row and of its worst token. Seen in bfloat16: 0.02, and 0.063 where rounding chose other experts for a token.
FLOOR = {"float32": (1e-4, 1e-2), "bfloat16": (0.06, 0.25), "float16": (0.01, 0.25)}
FEWEST_ROWS = 4  # below, there is no deviation to measure: the probe's limit of rounding counts
TOP_TOKENS, TOP_PLACES = 512, 64  # tokens of a prompt that the server is asked about; those compared
VOCABULARY_AT_ONCE = 8192  # rows of lm_head


@dataclass(frozen=True)
class Comparison:
    """A second extraction of some rows: how far the new states were from the stored ones."""

    format: str
    records_sha256: str
    """Of the commit records that it holds for."""
    rows: list[int]
    states: list[str]
    noise: list[list[float]]
    """[2][states]: the median difference between two new extractions: over the row, of the worst token."""
    limits: list[list[float]]
    """[2][states]: the largest difference that counts as rounding."""
    largest: list[list[float]]
    """[2][states]: the largest between stored and new."""
    top_token_rows: int
    """Rows whose next tokens the server named, too."""
    top_token_positions: int
    top_token_agreement: float
    """Share of positions with the same token first; the rest are near ties."""
    problems: list[Problem]

    @property
    def largest_difference(self) -> float:
        """Over a row, among all states."""
        return max(self.largest[0])


def read_comparison(store: Store, digest: str) -> Comparison | None:
    """The last comparison, if it was of the records with this digest."""
    try:
        value = json.loads((store.logs / COMPARISON).read_bytes())
        if value["records_sha256"] != digest or value.get("format") != FORMAT:
            return None
        value["problems"] = [Problem(**problem) for problem in value["problems"]]
        return Comparison(**value)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{store.logs / COMPARISON} is damaged: {error}. Delete it.") from error


def choose_rows(stored: np.ndarray, config: VerifyConfig, also: list[int]) -> list[int]:
    """A random share of the stored rows (ascending numbers), and those that other checks doubt."""
    count = min(len(stored), max(config.reextract_rows, round(config.reextract_share * len(stored))))
    return sorted({*stored[random.Random(SAMPLE_SEED).sample(range(len(stored)), count)].tolist(), *also})


def compare(
    store: Store,
    plan: Plan,
    dataset: Path,
    records: StoredRows,
    digest: str,
    rows: list[int],
    engine: PrefillEngine,
    vocab_size: int,
    checkpoint: Path | None,
) -> Comparison:
    """Extract `rows` twice more, compare with what is stored, and keep the outcome with the store.

    checkpoint: of the model, for the top tokens; None leaves them out. Raises what the engine's futures raise.
    """
    captured = engine.captured
    stored, experts = StoredStates(store), _has_experts(checkpoint)
    noise, errors = [], []  # [rows][2][states]
    groups = _groups(read_planned(dataset, plan, rows, vocab_size), captured)
    for group in groups:
        among = _extract(engine, group)
        for row in reversed(group):
            (alone,) = _extract(engine, [row])
            first = among.pop()
            noise.append(differences(first, alone, experts))
            errors.append(differences(states_of(*stored.whole(records[row.number][1], row.number)), first, experts))
            del alone, first
        errors[-len(group) :] = errors[-len(group) :][::-1]
    limits = noise_limits(np.array(noise), captured.dtype)
    problems = []
    for number, found in zip(rows, errors):
        name, record = records[number]
        for kind, what in enumerate(("differs", "differs at one token")):
            for state, label in enumerate(_names(captured)):
                if not found[kind][state] <= limits[kind][state]:
                    text = (
                        f"{record.file} row {number}: extracted again, {label} {what} by {found[kind][state]:.3g} "
                        f"(relative); the measured noise allows {limits[kind][state]:.3g}"
                    )
                    problems.append(Problem("second extraction", text, name, number, "row"))
    agreement, positions = 1.0, 0
    if checkpoint is not None:
        asked = read_planned(dataset, plan, rows, vocab_size)
        agreement, positions, wrong = _top_tokens(engine, stored, records, asked, checkpoint, experts)
        problems += wrong
    comparison = Comparison(
        *(FORMAT, digest, rows, _names(captured)),
        noise=np.median(noise, axis=0).tolist(),
        limits=limits.tolist(),
        largest=np.max(errors, axis=0).tolist(),
        top_token_rows=len(rows) if positions else 0,
        top_token_positions=positions,
        top_token_agreement=agreement,
        problems=problems,
    )
    write_json(store.logs / COMPARISON, asdict(comparison))
    return comparison


def differences(one: torch.Tensor, other: torch.Tensor, experts: bool = False) -> list[list[float]]:
    """|one - other| / |one| (L2) of each state, over the row and of its worst token; both [states, tokens, hidden].

    experts: leave out the few tokens of each state that may be anything in a mixture of experts, the worst ones.
    """
    difference = torch.linalg.vector_norm(one - other, dim=-1)
    size = torch.linalg.vector_norm(one, dim=-1)
    errors = difference / size
    if experts and one.shape[1] > 1:
        _, kept = errors.topk(one.shape[1] - min(one.shape[1] - 1, allowed_strays(one.shape[1])), dim=-1, largest=False)
        difference, size, errors = (values.gather(1, kept) for values in (difference, size, errors))
    rows = torch.linalg.vector_norm(difference, dim=-1) / torch.linalg.vector_norm(size, dim=-1)
    return [rows.tolist(), errors.amax(dim=-1).tolist()]


def _has_experts(checkpoint: Path | None) -> bool:
    """Also where it cannot be known: a right store must pass."""
    try:
        return checkpoint is None or Checkpoint(checkpoint).has_experts
    except ModelError:
        return True


def noise_limits(noise: np.ndarray, dtype: str) -> np.ndarray:
    """The largest differences that count as rounding, [2, states]; noise: [rows, 2, states] between new extractions."""
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    rows = len(noise)
    if rows < FEWEST_ROWS:
        # The worst token is further away than the row, by as much as was measured.
        limit = np.full(noise.shape[1:], NOISE_LIMIT[dtype])
        limit[1] = np.maximum(limit[1], 4 * noise[:, 1].max(axis=0))
        return limit
    logs = np.log(np.maximum(noise, epsilon / 8))
    middle = np.median(logs, axis=0)
    # 1.4826: what makes it the standard deviation where the distribution is normal.
    deviation = 1.4826 * np.median(np.abs(logs - middle), axis=(0, 2))
    limits = np.minimum(np.exp(middle + DEVIATIONS * deviation[:, None]), HEADROOM * np.quantile(noise, 0.75, axis=0))
    return np.maximum(limits, np.array(FLOOR[dtype])[:, None])


def _names(captured: Captured) -> list[str]:
    return [*(f"layer {layer}" for layer in captured.layers), "final"]


def _groups(rows: Iterator[Row], captured: Captured) -> Iterator[list[Row]]:
    """Consecutive rows, as many as may be held at once."""
    token_bytes = (len(captured.layers) + 1) * captured.hidden_size * ITEMSIZE[captured.dtype]
    group: list[Row] = []
    size = 0
    for row in rows:
        if len(group) > 1 and size + len(row.input_ids) * token_bytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(row)
        size += len(row.input_ids) * token_bytes
    if group:
        yield group


def _extract(engine: PrefillEngine, rows: list[Row]) -> list[torch.Tensor]:
    """The states of some rows that are prefilled together, float32 [states, tokens, hidden]."""
    futures = [engine.submit(row.number, row.input_ids) for row in rows][::-1]
    states = []
    try:
        while futures:
            dump = futures[-1].result()
            futures.pop()  # with the future goes the dump's mapping
            states.append(states_of(dump.aux, dump.last))
            engine.release(dump)
            del dump
    finally:
        for future in futures:
            engine.discard(future)
    return states


def _top_tokens(
    engine: PrefillEngine,
    stored: StoredStates,
    records: StoredRows,
    rows: Iterator[Row],
    checkpoint: Path,
    experts: bool,
) -> tuple[float, int, list[Problem]]:
    """Agreement, positions, and the rows whose stored final state does not name the server's own next token."""
    try:
        weights = Checkpoint(checkpoint)
        head = weights.lm_head()
    except ModelError:
        return 1.0, 0, []
    same = positions = 0
    problems = []
    for row in rows:
        ids = row.input_ids[:TOP_TOKENS]  # what comes later changes nothing before it
        places = np.unique(np.linspace(0, len(ids) - 1, TOP_PLACES).astype(np.int64))
        theirs = torch.tensor(engine.top_tokens(ids))[places]
        name, record = records[row.number]
        final = stored.at(record, row.number, places.tolist())[-1]
        if engine.captured.final_norm == "pre":
            final = weights.apply_final_norm(final)
        logits = torch.cat([final @ part.float().T for part in head.split(VOCABULARY_AT_ONCE)], dim=1)
        gap = (logits.max(dim=-1).values - logits.gather(1, theirs[:, None])[:, 0]) / logits.std(dim=-1)
        same += int((logits.argmax(dim=-1) == theirs).sum())
        positions += len(places)
        strays = min(allowed_strays(len(places)), len(places) - 1) if experts else 0  # as in `differences`
        worst = int(gap.argsort(descending=True)[strays])
        if not gap[worst] <= NEAR_TIE[engine.captured.dtype]:
            text = (
                f"{record.file} row {row.number}: lm_head(final state) does not pick the server's own next token at "
                f"position {places[worst]}: it is {float(gap[worst]):.2f} standard deviations less likely"
            )
            problems.append(Problem("top tokens", text, name, row.number, "row"))
    return (same / positions if positions else 1.0), positions, problems
