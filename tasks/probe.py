"""The health check with test dumps: before anything is extracted, a handful of prompts must come back right.

Fixed prompts of random token ids go through the engine that the extraction uses. Every dump is checked for ids, shapes,
dtype and health when it is opened (tasks/server/dumps.py). Here, in this order:
- every value is finite, no state is zero, constant, or rounded to fewer bits than its dtype has;
- prompts of one token, together, hold what the checkpoint itself computes for them at the asked layers, and at no other
  (tasks/reference.py, tasks/layer_check.py); the first token's state does not depend on what follows;
- `lm_head(final state)`, after the last norm where the state was taken before it, puts first the token that the server
  itself puts first at each position;
- the same prompt alone, among others, split over several forward passes and repeated agrees;
- different prompts differ.
The dumps are deleted. The report is kept with the run.
"""

import itertools
import logging
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from tasks.checkpoint import Checkpoint
from tasks.errors import ModelError, NoReferenceError, ProbeError, RowError, TransientPrefillError
from tasks.extraction.engine import PrefillEngine
from tasks.layer_check import LayerCheck, check_layers
from tasks.model import Model
from tasks.precision import lost_precision
from tasks.reference import layer_outputs
from tasks.server.dumps import Captured
from tasks.server.facts import ServerFacts

SEED = 20_26
SHORT_PROMPTS = (1, 2, 7, 33, 64)  # tokens
PROOF_TOKENS = 64
# Prompts of one token that are computed from the checkpoint; fewer of one that has more bytes than LARGE, since each
# chooses experts of its own.
REFERENCE_TOKENS, REFERENCE_TOKENS_OF_LARGE, LARGE = 6, 2, 64 << 30
# Largest relative error between two prefills of one prompt: of its median token, and of any token. Batches of another
# shape sum in another order; the rest is rounding.
NOISE_LIMIT = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
UNLIKE = {"float32": 1e-2, "bfloat16": 0.5, "float16": 0.5}
# Share of a prompt's tokens, and always one, that may be unlike in a mixture of experts: where two experts are nearly
# tied, rounding decides which one a token takes. Seen of 250 tokens in bfloat16 against float32, tiny random experts: 3
# above UNLIKE, up to 0.95.
STRAYS = 0.05
FEWEST_FOR_A_MEDIAN = 5  # tokens
# Smallest relative difference between two prompts' states. Seen: 0.38 to 0.63 of SmolLM2, 1.3 of random weights.
DIFFERENT = 0.1
# Where lm_head(final) and the server name different tokens, theirs may be this much less likely (logit difference as a
# share of the logits' standard deviation): a near tie, decided by rounding.
NEAR_TIE = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.05}
EXPLAINS = 0.9  # share of positions at which another reading of the states picks the server's tokens


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeReport:
    """What the probe saw; kept with the run."""

    prompts: int
    tokens: int
    seconds: float
    chunks: int
    """Most forward passes that one prompt was split over."""
    noise: list[float]
    """Largest of the `relative_errors` between two prefills of a prompt: aux layers in order, then the final state."""
    top_token_agreement: float
    """Share of positions at which lm_head(final) and the server put the same token first; the rest are near ties."""
    positions: int
    near_tie: float = 0.0
    """Largest difference of such a tie's logits, in standard deviations of the logits."""
    first_tokens: list[float] = field(default_factory=list)
    """Relative error between a prompt's first state and that of a prompt of this token only, as `noise`."""
    median_noise: float = 0.0
    """As `noise`, of the median token and any state."""
    token_noise: float = 0.0
    """As `noise`, of any token and state."""
    difference: float = 0.0
    """Smallest relative difference between the states of two prompts."""
    layers: LayerCheck | None = None
    """The comparison with what the checkpoint computes; None if it was not made."""
    layers_not_checked: str | None = None
    """Why it was not made."""

    def text(self) -> str:
        """The figures in a line for people."""
        noise = ", ".join(f"{value:.2g}" for value in self.noise)
        if self.layers is None:
            layers = f"the layers were NOT compared with the checkpoint's: {self.layers_not_checked}"
        else:
            errors = ", ".join(f"{value:.2g}" for value in self.layers.errors)
            layers = (
                f"of {self.layers.layers} layers they are the asked ones, by the checkpoint itself (errors {errors})"
            )
        return (
            f"{self.prompts} prompts in {self.seconds:.1f} s; {layers}; noise {noise}; lm_head picks the server's "
            f"token at {self.top_token_agreement:.1%} of {self.positions} positions"
        )


@dataclass(frozen=True)
class Sent:
    """A prompt that came back."""

    ids: np.ndarray
    states: torch.Tensor
    """float32 [aux layers + 1, tokens, hidden]."""


def probe(engine: PrefillEngine, model: Model, facts: ServerFacts, max_seq_len: int, seed: int = SEED) -> ProbeReport:
    """Prove the server's capture. Raises ProbeError that says what is wrong; nothing should be extracted then.

    seed: decides the prompts and their order.
    """
    started = time.monotonic()
    captured, checkpoint = engine.captured, Checkpoint(model.path)
    prompts = make_prompts(model.vocab_size, facts, max_seq_len, seed)
    alone = [_prefill(engine, [prompt])[0][0] for prompt in prompts]
    ones, _ = _prefill(engine, [prompt[:1] for prompt in prompts])
    check, reason = _check_layers(captured, model, ones)
    experts = checkpoint.has_experts
    first_tokens = _check_first_tokens(captured, ones, alone, experts)
    agreement, positions, near_tie = _check_top_tokens(engine, checkpoint, alone)
    order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
    together, chunks = _prefill(engine, [*(prompts[number] for number in order), prompts[-1]])
    noise, median_noise, token_noise = _check_agreement(captured, alone, together, [*order, len(prompts) - 1], experts)
    difference = _check_difference(alone)
    tokens = sum(len(prompt) for prompt in prompts)
    return ProbeReport(
        prompts=3 * len(prompts) + 1,
        tokens=2 * tokens + len(prompts) + len(prompts[-1]),
        seconds=round(time.monotonic() - started, 2),
        chunks=chunks,
        noise=noise,
        top_token_agreement=agreement,
        positions=positions,
        near_tie=near_tie,
        first_tokens=first_tokens,
        median_noise=median_noise,
        token_noise=token_noise,
        difference=difference,
        layers=check,
        layers_not_checked=reason,
    )


def make_prompts(vocab_size: int, facts: ServerFacts, max_seq_len: int, seed: int) -> list[np.ndarray]:
    """int32 prompts that begin differently: short ones, and so many long ones that together they need two passes."""
    random = np.random.default_rng(seed)
    longest = min(max_seq_len, facts.longest_prompt)
    long = min(facts.chunked_prefill_size + 17, longest)
    lengths = [length for length in SHORT_PROMPTS if length <= longest]
    lengths += [long] * (facts.chunked_prefill_size // long + 1)
    firsts = np.resize(random.permutation(vocab_size), len(lengths))
    return [
        np.concatenate([[first], random.integers(0, vocab_size, length - 1)]).astype(np.int32)
        for first, length in zip(firsts, lengths, strict=True)
    ]


def relative_errors(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """|one - other| / |one| (L2) of each state; both float32 [states, tokens, hidden].

    The root of the tokens' mean square: each counts by its own size, as the first is often a hundred times as large.
    """
    return token_errors(one, other).square().mean(-1).sqrt().tolist()


def token_errors(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """|one - other| / |one| (L2) of each token's state, [states, tokens]; both float32 [states, tokens, hidden]."""
    return torch.linalg.vector_norm(one - other, dim=-1) / torch.linalg.vector_norm(one, dim=-1)


def states_of(aux: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """aux [tokens, layers * hidden] and last [tokens, hidden] as one float32 copy [layers + 1, tokens, hidden]."""
    return torch.stack([*aux.unflatten(-1, (-1, last.shape[-1])).unbind(1), last]).float()


def _prefill(engine: PrefillEngine, prompts: list[np.ndarray]) -> tuple[list[Sent], int]:
    """The prompts as they came back, and the most forward passes that one of them was split over."""
    futures = [engine.submit(row, prompt) for row, prompt in enumerate(prompts)]
    sent, chunks = [], 0
    try:
        for ids in prompts:
            dump = futures.pop(0).result()
            try:
                chunks = max(chunks, dump.chunks)
                states = [*dump.aux.unflatten(-1, (-1, dump.last.shape[-1])).unbind(1), dump.last]
                for name, state in zip(engine.captured.state_names(), states, strict=True):
                    if problem := find_damage(state):
                        raise ProbeError(f"A prompt of {len(ids)} tokens came back damaged: {name} {problem}.")
                sent.append(Sent(ids, states_of(dump.aux, dump.last)))
            finally:
                engine.release(dump)
    except (RowError, TransientPrefillError) as error:
        raise ProbeError(f"The server did not give the probe its dumps: {error}") from error
    finally:
        for future in futures:
            engine.discard(future)
    return sent, chunks


def find_damage(state: torch.Tensor) -> str | None:
    """What no model computes about a state [tokens, hidden], in words; None if it is sound."""
    tokens = len(state)
    if (wrong := (~state.isfinite()).any(-1).nonzero()).numel():
        return f"is not finite at {len(wrong)} of {tokens} tokens, first at {int(wrong[0])}"
    if (zero := (state == 0).all(-1).nonzero()).numel():
        first = int(zero[0])
        if 0 < first == tokens - len(zero):
            return f"is all zero from token {first} of {tokens} on: the last chunk is missing"
        return f"is all zero at {len(zero)} of {tokens} tokens, first at {first}"
    if (constant := (state == state[:, :1]).all(-1).nonzero()).numel():
        return f"is one and the same number in every dimension at token {int(constant[0])}"
    if tokens > 2 and (state == state[0]).all():
        return f"is the same at each of {tokens} tokens: the capture does not follow the input"
    if problem := lost_precision(state):
        return f"lost precision: {problem}"
    return None


def _check_layers(captured: Captured, model: Model, ones: list[Sent]) -> tuple[LayerCheck | None, str | None]:
    """ones: prompts of one token each, which were in one batch."""
    large = sum(file.stat().st_size for file in model.path.glob("*.safetensors")) > LARGE
    ones = ones[: REFERENCE_TOKENS_OF_LARGE if large else REFERENCE_TOKENS]
    tokens = [int(one.ids[0]) for one in ones]
    try:
        outputs = list(layer_outputs(model.path, tokens))
    except (NoReferenceError, ModelError, KeyError) as error:  # what it holds has other names: another kind of model
        reason = f"its config.json has no {error}" if isinstance(error, KeyError) else str(error)
        logger.warning("the captured layers are not compared with the checkpoint's: %s", reason)
        return None, reason
    outputs.append(Checkpoint(model.path).apply_final_norm(outputs[-1]))
    states = torch.cat([one.states for one in ones], dim=1)
    check = check_layers(states, torch.stack(outputs), captured.layers, captured.final_norm, tokens, captured.dtype)
    return check, None


def _check_first_tokens(captured: Captured, ones: list[Sent], alone: list[Sent], experts: bool) -> list[float]:
    """A token attends to none after it: the first state of a prompt is that of a prompt of its first token only."""
    firsts = torch.cat([sent.states[:, :1] for sent in alone], dim=1)
    expected = torch.cat([one.states for one in ones], dim=1)
    for state, errors in enumerate(token_errors(expected, firsts)):
        if excess := _excess(errors, captured.dtype, experts):
            sent = max(alone[: len(SHORT_PROMPTS)], key=lambda sent: len(sent.ids))
            one = expected[state, [id(sent) == id(other) for other in alone]]
            row = int((sent.states[state] - one).norm(dim=-1).argmin())
            raise ProbeError(
                f"The first token of a prompt has another state at {captured.state_names()[state]} than a prompt of "
                f"that token only: {excess}. In a prompt of {len(sent.ids)} tokens, row {row} comes nearest to it. "
                "Rows are shifted, or later tokens change the states of earlier ones."
            )
    return relative_errors(expected, firsts)


def allowed_strays(tokens: int) -> int:
    """How many of a prompt's tokens may be unlike in a mixture of experts."""
    return max(1, int(STRAYS * tokens))


def _excess(errors: torch.Tensor, dtype: str, experts: bool) -> str | None:
    """What is too much about the errors [tokens] of one state between two prefills, in words."""
    strays = allowed_strays(len(errors)) if experts else 0
    if len(errors) <= strays:
        return None
    largest, median = float(errors.sort().values[-1 - strays]), float(errors.median())
    if len(errors) >= FEWEST_FOR_A_MEDIAN and not median <= NOISE_LIMIT[dtype]:
        return f"relative error {median:.3g} at the median token, {NOISE_LIMIT[dtype]:.3g} is rounding in {dtype}"
    if not largest <= UNLIKE[dtype]:
        return (
            f"relative error {largest:.3g} at {strays + 1} token(s), {UNLIKE[dtype]:.3g} is the most that rounding "
            f"makes in {dtype}"
        )
    return None


def _check_top_tokens(engine: PrefillEngine, checkpoint: Checkpoint, alone: list[Sent]) -> tuple[float, int, float]:
    """(share of positions with the same top token, positions, largest gap of a near tie)."""
    post, head = engine.captured.final_norm == "post", checkpoint.lm_head().float()
    same = positions = 0
    largest = 0.0
    for sent in alone:
        if not 1 < len(sent.ids) <= PROOF_TOKENS:
            continue
        last = sent.states[-1]
        theirs = torch.tensor(engine.top_tokens(sent.ids))
        logits = (last if post else checkpoint.apply_final_norm(last)) @ head.T
        gap = (logits.max(dim=-1).values - logits.gather(1, theirs[:, None])[:, 0]) / logits.std(dim=-1)
        worst = int(gap.argmax())
        if not gap[worst] <= NEAR_TIE[engine.captured.dtype]:
            other = (checkpoint.apply_final_norm(last) if post else last) @ head.T
            raise ProbeError(
                f"lm_head(final state) does not pick the server's own next token: prompt of {len(sent.ids)} tokens, "
                f"position {worst}, server's token {int(theirs[worst])}, ours {int(logits[worst].argmax())} is "
                f"{float(gap[worst]):.2f} standard deviations more likely. "
                + _explain_tokens(theirs, logits, other, post)
            )
        same += int((logits.argmax(dim=-1) == theirs).sum())
        positions += len(sent.ids)
        largest = max(largest, float(gap.max()))
    return same / positions, positions, largest


def _explain_tokens(theirs: torch.Tensor, logits: torch.Tensor, other_norm: torch.Tensor, post: bool) -> str:
    """What the final state seems to be: read so, it picks the server's tokens."""
    ours = logits.argmax(-1)
    readings = {
        "Rows are shifted by +1: a token's state is in the row after its own.": (ours[1:], theirs[:-1]),
        "Rows are shifted by -1: a token's state is in the row before its own.": (ours[:-1], theirs[1:]),
        f"It is the state {'before' if post else 'after'} the model's last norm, not the one "
        f"{'after' if post else 'before'} it.": (other_norm.argmax(-1), theirs),
    }
    for text, (picked, wanted) in readings.items():
        if float((picked == wanted).float().mean()) >= EXPLAINS:
            return text
    return "The final state is not the one that the model ends with, or rows are mixed."


def _check_agreement(
    captured: Captured, alone: list[Sent], together: list[Sent], order: list[int], experts: bool
) -> tuple[list[float], float, float]:
    """together: the prompts of `alone` in the order `order`, one of them twice.

    Returns the largest errors by state, of the median token of a prompt, and of any token.
    """
    noise, median_noise, token_noise = [0.0] * len(captured.state_names()), 0.0, 0.0
    for number, sent in zip(order, together, strict=True):
        for state, errors in enumerate(token_errors(alone[number].states, sent.states)):
            if excess := _excess(errors, captured.dtype, experts):
                raise ProbeError(
                    f"The same prompt of {len(sent.ids)} tokens alone and among others gives different states at "
                    f"{captured.state_names()[state]}: {excess}. "
                    + _explain_rows(alone, number, sent, state, NOISE_LIMIT[captured.dtype])
                )
            noise[state] = max(noise[state], float(errors.square().mean().sqrt()))
            token_noise = max(token_noise, float(errors.max()))
            if len(errors) >= FEWEST_FOR_A_MEDIAN:
                median_noise = max(median_noise, float(errors.median()))
    return noise, median_noise, token_noise


def _explain_rows(alone: list[Sent], number: int, sent: Sent, state: int, limit: float) -> str:
    """Where the rows that differ have come from, judged by what every prompt gave alone."""
    expected, rows = alone[number].states[state], sent.states[state]
    wrong = ((rows - expected).norm(dim=-1) > limit * expected.norm(dim=-1)).nonzero()[:, 0]
    sources = torch.cat([one.states[state] for one in alone])
    owners = torch.cat([torch.full((len(one.ids),), place) for place, one in enumerate(alone)])
    places = torch.cat([torch.arange(len(one.ids)) for one in alone])
    some = wrong[:PROOF_TOKENS]
    nearest = torch.cdist(rows[some], sources).argmin(1)
    own, shift = owners[nearest] == number, some - places[nearest]
    usual = int(shift[own].mode().values) if own.any() else 0
    text = f"{len(wrong)} of {len(rows)} rows differ"
    if usual and float((own & (shift == usual)).float().mean()) >= EXPLAINS:
        return f"{text}: the rows of the prompt are shifted by {usual:+d}."
    if float((~own).float().mean()) >= EXPLAINS:
        return f"{text}, and are those of other prompts: requests of one batch are swapped, or rows are shifted."
    return f"{text}. The server mixes requests or loses chunks."


def _check_difference(alone: list[Sent]) -> float:
    """Prompts of different ids must have different states; not the first token's, where many models sink attention.

    Returns the smallest relative difference.
    """
    smallest = float("inf")
    for one, other in itertools.pairwise(alone):
        tokens = min(len(one.ids), len(other.ids))
        if tokens < 2:
            continue
        difference = min(relative_errors(one.states[:, 1:tokens], other.states[:, 1:tokens]))
        if difference < DIFFERENT:
            raise ProbeError(
                f"Two prompts of different ids have nearly the same states (relative difference {difference:.3g}): the "
                "capture does not follow the input."
            )
        smallest = min(smallest, difference)
    return smallest
