"""The input proof and the argmax proof (tasks/verification/alignment.py) on a random share of the stored rows.

Measured on SmolLM2-135M over 70 conversations in ten languages: a row's effect is at least 0.79 (input) and 0.72
(argmax) of the run's median; with another row's states at most 0.85 and 0.56, with states one token off at most 0.32
and 0.21 (0.50 of the next neighbour). BELONGS lies between. A row below it in both proofs has the wrong states, or in
one if the states fit another row's ids, or its own ids a few tokens off. In one only it is doubtful: text that nobody
can foretell (hexadecimal, random digits) has no argmax proof. Where there is a server, doubtful rows are extracted
again, which decides.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.checkpoint import Checkpoint
from tasks.config import VerifyConfig
from tasks.dataset.plan import Plan
from tasks.dataset.rows import read_planned
from tasks.errors import ModelError
from tasks.model import read_model
from tasks.store.layout import Store
from tasks.store.record import Record
from tasks.verification.alignment import APPLIES, FEWEST, Strength, choose_places, strength
from tasks.verification.findings import Problem
from tasks.verification.stored import StoredRows, StoredStates

SEED = 2
BELONGS = 0.6  # of the run's median effect
NOTHING = 0.25  # of it: in the input proof alone this is enough, since every text has an input
MOVES = (-2, -1, 1, 2)  # tokens by which states may be off
MOST_CANDIDATES = 64  # rows of the same length whose ids a doubtful row's states are compared with


@dataclass
class Proof:
    """What one of the proofs came to."""

    name: str
    applies: bool = False
    reason: str = ""
    """Why it does not apply, or what it says."""
    rows: int = 0
    judged: int = 0
    """Rows long enough for the run's median effect to show."""
    effect: float = 0.0
    """The median of z / sqrt(places)."""
    weakest: float = 0.0
    """Smallest effect among the judged rows, as a share of the median."""


@dataclass
class Proofs:
    """Both, and the rows that they do not believe."""

    input: Proof = field(default_factory=lambda: Proof("input"))
    argmax: Proof = field(default_factory=lambda: Proof("argmax"))
    problems: list[Problem] = field(default_factory=list)
    doubtful: dict[int, str] = field(default_factory=dict)
    """Why, by row."""


@dataclass(frozen=True)
class _Sampled:
    row: int
    ids: np.ndarray
    input: Strength
    argmax: Strength


class _Weights:
    """Of the extraction's own checkpoint. Raises ModelError if it is not there or is another one."""

    def __init__(self, extraction: dict[str, Any]):
        try:
            path = Path(extraction["config"]["model"]["path"])
        except KeyError as error:
            raise ModelError("the output does not say where the checkpoint is") from error
        if read_model(path).identity != extraction["parts"].get("model_identity"):
            raise ModelError(f"{path} is not the checkpoint of this extraction any more")
        self.pre_norm = extraction["parts"]["final_norm"] == "pre"
        self.checkpoint = Checkpoint(path)
        self.embedding, self.head = self.checkpoint.embedding(), self.checkpoint.lm_head()

    def final(self, states: torch.Tensor) -> torch.Tensor:
        """States as lm_head takes them, float32."""
        return self.checkpoint.apply_final_norm(states.float()) if self.pre_norm else states.float()


def prove(
    store: Store,
    plan: Plan,
    dataset: Path,
    extraction: dict[str, Any],
    records: StoredRows,
    config: VerifyConfig,
) -> Proofs:
    """Both proofs on config.argmax_rows rows of `records`, or config.argmax_share of them."""
    proofs = Proofs()
    try:
        weights = _Weights(extraction)
    except (ModelError, OSError) as error:
        proofs.input.reason = proofs.argmax.reason = f"not applicable: {error}"
        return proofs
    count = min(len(records), max(config.argmax_rows, round(config.argmax_share * len(records))))
    numbers = records.numbers()
    chosen = sorted(numbers[random.Random(SEED).sample(range(len(numbers)), count)].tolist())
    vocab = extraction["parts"]["vocab_size"]
    stored = StoredStates(store)
    sampled = []
    for row in read_planned(dataset, plan, chosen, vocab):
        places, next_places = choose_places(row.input_ids, row.number), choose_places(row.input_ids, row.number + 1)
        states = stored.at(records[row.number][1], row.number, np.concatenate([places, next_places - 1]).tolist())
        here, before = states[:, : len(places)], states[:, len(places) :]
        sampled.append(
            _Sampled(
                row.number,
                row.input_ids,
                strength(here[0], weights.embedding[_index(row.input_ids, places)]),
                strength(weights.final(before[-1]), weights.head[_index(row.input_ids, next_places)]),
            )
        )
    _judge(proofs.input, [one.input for one in sampled], "its own input tokens in the first captured layer")
    _judge(proofs.argmax, [one.argmax for one in sampled], "the row's own next tokens by lm_head(final state)")
    for one in sampled:
        by_input, by_argmax = (
            one_proof.effect and found.effect / one_proof.effect if _judged(one_proof, found) else None
            for one_proof, found in ((proofs.input, one.input), (proofs.argmax, one.argmax))
        )
        shares = [share for share in (by_input, by_argmax) if share is not None]
        if not shares or min(shares) >= BELONGS:
            continue
        text = ", ".join(
            f"{name} proof {share:.2f} of the run's median"
            for name, share in (("input", by_input), ("argmax", by_argmax))
            if share is not None
        )
        name, record = records[one.row]
        fits = _what_fits(one, stored, record, weights, proofs, _candidates(plan, dataset, one, records, vocab))
        sure = (by_input is not None and by_input < NOTHING) or (len(shares) == 2 and max(shares) < BELONGS)
        if fits or sure:
            why = f"its states are not those of its token ids ({text}{fits})"
            proofs.problems.append(Problem("proof", f"{record.file} row {one.row}: {why}", name, one.row, "row"))
        else:
            proofs.doubtful[one.row] = text
    return proofs


def _index(ids: np.ndarray, places: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids[places].astype(np.int64))


def _judge(proof: Proof, found: list[Strength], what: str) -> None:
    """Decide whether the proof applies to this run, and what it says of it."""
    enough = [one for one in found if one.places >= FEWEST]
    proof.rows = len(found)
    if not enough:
        proof.reason = f"not applicable: no row of the sample has {FEWEST} different tokens"
        return
    proof.effect = float(np.median([one.effect for one in enough]))
    judged = [one for one in enough if proof.effect * one.places**0.5 >= APPLIES]
    expected = proof.effect * float(np.median([one.places for one in enough])) ** 0.5
    if not judged or expected < APPLIES:
        proof.reason = (
            f"not applicable: the states do not favour {what} (median z {expected:.1f}, {APPLIES:.0f} would show it), "
            "as with random ids or random weights"
        )
        return
    proof.applies, proof.judged = True, len(judged)
    proof.weakest = min(one.effect for one in judged) / proof.effect
    proof.reason = f"the states favour {what}, median z {expected:.1f}"


def _judged(proof: Proof, found: Strength) -> bool:
    return proof.applies and found.places >= FEWEST and proof.effect * found.places**0.5 >= APPLIES


def _candidates(
    plan: Plan, dataset: Path, one: _Sampled, records: StoredRows, vocab: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Ids that a row's states may belong to instead, and what to say then."""
    for move in MOVES:
        yield f"; they fit its ids moved by {move:+d}", np.roll(one.ids, move)
    same = [row for row in np.flatnonzero(plan.tokens == len(one.ids)).tolist() if row != one.row and row in records]
    nearest = sorted(sorted(same, key=lambda row: abs(row - one.row))[:MOST_CANDIDATES])
    for row in read_planned(dataset, plan, nearest, vocab):
        yield f"; they fit the ids of row {row.number}", row.input_ids


def _what_fits(
    one: _Sampled,
    stored: StoredStates,
    record: Record,
    weights: _Weights,
    proofs: Proofs,
    candidates: Iterator[tuple[str, np.ndarray]],
) -> str:
    """The first candidate that the states fit where its ids differ from the row's, as well as rows fit in this run."""
    for text, ids in candidates:
        places = choose_places(np.where(ids == one.ids, -1, ids), one.row)
        places = places[ids[places] != one.ids[places]]
        if len(places) < FEWEST:
            continue
        states = stored.at(record, one.row, np.concatenate([places, places - 1]).tolist())
        here, before = states[0, : len(places)], weights.final(states[-1, len(places) :])
        for proof, at, matrix in ((proofs.input, here, weights.embedding), (proofs.argmax, before, weights.head)):
            theirs = strength(at, matrix[_index(ids, places)])
            if _judged(proof, theirs) and theirs.effect >= BELONGS * proof.effect:
                return text
    return ""
