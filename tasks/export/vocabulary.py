"""A drafter's smaller vocabulary: the tokens that count most often, as SpecForge and speculators both choose them."""

import numpy as np
import torch

from tasks.errors import ConfigError
from tasks.store.reader import HiddenStates


def count_tokens(states: HiddenStates, places: np.ndarray) -> np.ndarray:
    """How often each id counts (loss mask 1) in these rows; int64 [vocabulary]."""
    counts = np.zeros(states.vocab_size, dtype=np.int64)
    for place in places.tolist():
        ids, mask = states.tokens_of(place)
        counts += np.bincount(ids.numpy()[mask.numpy() == 1], minlength=len(counts))
    return counts


def map_vocabulary(counts: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t int64 [size]: draft id i is target id i + d2t[i]; t2d bool [vocabulary]: the targets that there are.

    Of equally frequent tokens the lower id comes first; ids that never count fill up what is left. Raises ConfigError
    if the target has fewer ids than that.
    """
    if size > len(counts):
        raise ConfigError(f"--draft-vocab-size is {size}, but the model's vocabulary has {len(counts)} ids.")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    target_to_draft = torch.zeros(len(counts), dtype=torch.bool)
    target_to_draft[torch.from_numpy(chosen)] = True
    return torch.from_numpy(chosen - np.arange(size)), target_to_draft
