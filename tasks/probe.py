"""The health check with test dumps: before anything is extracted, a handful of prompts must come back right.

Fixed prompts of random token ids go through the engine that the extraction uses. Every dump is checked for ids, shapes,
dtype and health when it is opened (tasks/server/dumps.py). Here: the same prompt alone, among others, split over
several forward passes and repeated agrees; different prompts differ; `lm_head(final state)`, after the last norm where
the state was taken before it, puts first the token that the server itself puts first. The dumps are deleted.
"""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tasks.checkpoint import apply_final_norm, read_lm_head
from tasks.errors import ProbeError, RowError, TransientPrefillError
from tasks.extraction.engine import PrefillEngine
from tasks.model import Model
from tasks.server.facts import ServerFacts

SEED = 20_26
SHORT_PROMPTS = (1, 2, 7, 33, 64)  # tokens
PROOF_TOKENS = 64
# Largest relative error (L2, over a prompt's state) between two prefills of one prompt. Batches of another shape sum in
# another order; the rest is rounding.
NOISE_LIMIT = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
DIFFERENT = 0.3
# Where lm_head(final) and the server name different tokens, theirs may be this much less likely (logit difference as a
# share of the logits' standard deviation): a near tie, decided by rounding.
NEAR_TIE = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.05}


@dataclass(frozen=True)
class ProbeReport:
    """What the probe saw; kept with the run."""

    prompts: int
    tokens: int
    seconds: float
    chunks: int
    """Most forward passes that one prompt was split over."""
    noise: list[float]
    """Largest relative error between two prefills of one prompt: aux layers in order, then the final state."""
    top_token_agreement: float
    """Share of positions at which lm_head(final) and the server put the same token first; the rest are near ties."""
    positions: int


def probe(engine: PrefillEngine, model: Model, facts: ServerFacts, max_seq_len: int) -> ProbeReport:
    """Prove the server's capture. Raises ProbeError that says what is wrong; nothing should be extracted then."""
    started = time.monotonic()
    longest = min(max_seq_len, facts.longest_prompt)
    long = min(facts.chunked_prefill_size + 17, longest)
    random = np.random.default_rng(SEED)
    # Together they do not fit one forward pass, so at least one prompt is split over two.
    several = [long] * (facts.chunked_prefill_size // long + 1)
    lengths = [*(length for length in SHORT_PROMPTS if length <= longest), *several]
    prompts = [random.integers(0, model.vocab_size, length, dtype=np.int32) for length in lengths]
    try:
        alone = [_states(engine, [prompt])[0][0] for prompt in prompts]
        together, chunks = _states(engine, [*prompts, prompts[-1]])
    except (RowError, TransientPrefillError) as error:
        raise ProbeError(f"The server did not give the probe its dumps: {error}") from error
    noise = _check_agreement(engine, alone, together)
    _check_difference(alone)
    agreement, positions = _check_top_tokens(engine, model.path, prompts, alone)
    return ProbeReport(
        prompts=2 * len(prompts) + 1,
        tokens=2 * sum(lengths) + lengths[-1],
        seconds=round(time.monotonic() - started, 2),
        chunks=chunks,
        noise=noise,
        top_token_agreement=agreement,
        positions=positions,
    )


def relative_errors(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """|one - other| / |one| (L2) of each state; both float32 [states, tokens, hidden]."""
    difference = torch.linalg.vector_norm(one - other, dim=(1, 2))
    return (difference / torch.linalg.vector_norm(one, dim=(1, 2))).tolist()


def states_of(aux: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """aux [tokens, layers * hidden] and last [tokens, hidden] as one float32 copy [layers + 1, tokens, hidden]."""
    return torch.stack([*aux.unflatten(-1, (-1, last.shape[-1])).unbind(1), last]).float()


def _states(engine: PrefillEngine, prompts: list[np.ndarray]) -> tuple[list[torch.Tensor], int]:
    """The prompts' states, and the most forward passes that one of them was split over."""
    futures = [engine.submit(row, prompt) for row, prompt in enumerate(prompts)]
    states, chunks = [], 0
    for future in futures:
        dump = future.result()
        chunks = max(chunks, dump.chunks)
        states.append(states_of(dump.aux, dump.last))
        engine.release(dump)
    return states, chunks


def _check_agreement(engine: PrefillEngine, alone: list[torch.Tensor], together: list[torch.Tensor]) -> list[float]:
    """`together` has the prompts of `alone` in one go, the last one twice."""
    captured = engine.captured
    limit = NOISE_LIMIT[captured.dtype]
    errors = [relative_errors(one, other) for one, other in zip([*alone, alone[-1]], together, strict=True)]
    noise = [max(values) for values in zip(*errors, strict=True)]
    for name, value in zip(captured.state_names(), noise, strict=True):
        if not value <= limit:
            raise ProbeError(
                f"The same prompt alone and among others gives different states at {name}: relative error {value:.3g}, "
                f"{limit:.3g} is rounding in {captured.dtype}. The server mixes requests or loses chunks."
            )
    return noise


def _check_difference(alone: list[torch.Tensor]) -> None:
    """Prompts of different ids must have different states; not the first token's, where many models sink attention."""
    for one, other in itertools.pairwise(alone):
        tokens = min(one.shape[1], other.shape[1])
        if tokens < 2:
            continue
        difference = min(relative_errors(one[:, 1:tokens], other[:, 1:tokens]))
        if difference < DIFFERENT:
            raise ProbeError(
                f"Two prompts of different ids have nearly the same states (relative difference {difference:.3g}): the "
                "capture does not follow the input."
            )


def _check_top_tokens(
    engine: PrefillEngine, checkpoint: Path, prompts: list[np.ndarray], alone: list[torch.Tensor]
) -> tuple[float, int]:
    head = read_lm_head(checkpoint).float()
    same = positions = 0
    for ids, states in zip(prompts, alone, strict=True):
        if not 1 < len(ids) <= PROOF_TOKENS:
            continue
        final = states[-1] if engine.captured.final_norm == "post" else apply_final_norm(checkpoint, states[-1])
        logits = final @ head.T
        theirs = torch.tensor(engine.top_tokens(ids))
        gap = (logits.max(dim=-1).values - logits.gather(1, theirs[:, None])[:, 0]) / logits.std(dim=-1)
        worst = int(gap.argmax())
        if gap[worst] > NEAR_TIE[engine.captured.dtype]:
            raise ProbeError(
                f"lm_head(final state) does not pick the server's own next token: prompt of {len(ids)} tokens, "
                f"position {worst}, server's token {int(theirs[worst])}, ours {int(logits[worst].argmax())} is "
                f"{float(gap[worst]):.2f} standard deviations more likely. The final state is not the one that the "
                "model ends with, or rows are shifted."
            )
        same += int((logits.argmax(dim=-1) == theirs).sum())
        positions += len(ids)
    return same / positions, positions
