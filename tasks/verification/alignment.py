"""Whether states belong to their tokens, asked of the numbers alone: no server, no forward pass.

Two proofs share one statistic. The *input proof*: the first captured layer's state still holds the embedding of the
token that went in. The *argmax proof*: `lm_head(final state)` favours the token that comes next in the row.

Of a row's tokens, k different ones are taken at random, and M[t, j] is the product of state t with the weight of the
token at place j. If states and tokens belong together, the diagonal stands out. By how much, compared with every
permutation of the tokens, has an exact mean and variance (Hoeffding's combinatorial central limit theorem): with M
centred by row and column, z = sum of the diagonal / sqrt(sum of M^2 / (k - 1)). For states that have nothing to do with
the tokens z is about normal, whatever the model and whatever the text: the tokens' own frequencies cancel out.

z grows with sqrt(k), so rows are compared by z / sqrt(k). Where the run's median says that the expected z is below
APPLIES, the proof says nothing: random weights or random ids have no next token to favour.
"""

from dataclasses import dataclass

import numpy as np
import torch

PLACES = 128  # tokens of a row that are looked at, at most
FEWEST = 16  # different tokens; a row with fewer is not judged
APPLIES = 8.0  # expected z, from which on a proof is one: 8 standard deviations


@dataclass(frozen=True)
class Strength:
    """How much a row's states favour its tokens over permutations of them."""

    z: float
    places: int

    @property
    def effect(self) -> float:
        """z / sqrt(places): comparable between rows."""
        return self.z / self.places**0.5


def choose_places(tokens: np.ndarray, seed: int) -> np.ndarray:
    """Places of different tokens, in order; never the first, whose state in many models is a sink and nothing else."""
    order = np.random.default_rng(seed).permutation(len(tokens) - 1) + 1 if len(tokens) > 1 else np.empty(0, np.int64)
    _, first = np.unique(tokens[order], return_index=True)
    chosen = order[np.sort(first)][:PLACES]
    return np.sort(chosen)


def strength(states: torch.Tensor, weights: torch.Tensor) -> Strength:
    """states, weights: [places, hidden], any dtype; row t of the weights is that of state t's token."""
    places = len(states)
    if places < 2:
        return Strength(0.0, max(1, places))
    product = _standard(states.float()) @ weights.float().T
    centred = product - product.mean(0) - product.mean(1, keepdim=True) + product.mean()
    scale = (centred.double().square().sum() / (places - 1)).sqrt()
    total = centred.double().diagonal().sum()
    return Strength(float(total / scale) if scale > 0 else 0.0, places)


def _standard(states: torch.Tensor) -> torch.Tensor:
    """Without what all places share, every dimension of one size: a few dimensions are larger than all others."""
    centred = states - states.mean(0)
    return centred / centred.square().mean(0).sqrt().clamp_min(1e-9)
