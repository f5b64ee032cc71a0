"""Which layers the captured states are: compared with every layer that the checkpoint itself computes.

In a real model the state of a prompt's first token lies nearly all in a few dimensions, hundreds of times as large as
the rest, which many layers leave as they are: of SmolLM2's 30 layers, 14 differ from a neighbour by no more (L2) than
bfloat16 rounds. So each dimension counts by its own size here. And where a captured state is not exactly what the asked
layer gives, it is asked whether the difference points to another layer: the lean is 0 for the asked layer and 1 for the
other one. Rounding points nowhere.
"""

from dataclasses import dataclass

import torch

from tasks.errors import ProbeError

# Largest error of the asked layer, the median over dimensions and tokens. Seen in bfloat16: up to 0.022 (SmolLM2), and
# with activations that Transformers' layers were given in fp8 up to 0.24 (tiny random experts). Of what is not this
# model's state: about 1.
ERROR_LIMIT = {"float32": 1e-3, "bfloat16": 0.35, "float16": 0.1}
LEAN_LIMIT = 0.25  # seen: up to 0.04 in bfloat16, 0.08 with fp8 activations


@dataclass(frozen=True)
class LayerCheck:
    """How far the captured states are from what the checkpoint computes: aux layers in order, then the final state."""

    tokens: int
    """Prompts of one token that were compared."""
    layers: int
    """Layers of the checkpoint that each state was compared with."""
    errors: list[float]
    """Error against the asked layer, relative."""
    other_errors: list[float]
    """Error against the nearest other one."""
    leans: list[float]
    """How far the state leans towards any other layer: 0 not at all, 1 it is that one."""


def check_layers(
    captured: torch.Tensor, outputs: torch.Tensor, layers: list[int], final_norm: str, tokens: list[int], dtype: str
) -> LayerCheck:
    """Raises ProbeError that names which layers the states are, if not the asked ones, or which prompts were mixed.

    captured: float32 [aux layers + 1, tokens, hidden], of prompts of one token each. outputs: what the checkpoint
    computes for them, float32 [1 + model layers + 1, tokens, hidden]: embedding, each layer's output, and the last
    one's after the final norm. layers, final_norm, tokens: what was asked for.
    """
    count = len(outputs) - 2
    asked = [*(layer + 1 for layer in layers), count + 1 if final_norm == "post" else count]
    nearest = torch.stack([_distances(state, outputs).flatten(1).argmin(1) for state in captured])
    found, of = nearest // len(tokens), nearest % len(tokens)  # [states, tokens]: which output, and of which prompt
    _check_prompts(of, tokens, _names(layers))
    actual = found.mode(dim=1).values.tolist()
    if actual != asked:
        raise ProbeError(_name_layers(actual, asked, count))
    errors, others, leans = [], [], []
    for state, layer in zip(captured, asked, strict=True):
        each = (state - outputs).abs().median(-1).values / outputs.abs().median(-1).values
        each = each.median(-1).values
        errors.append(float(each[layer]))
        rest = torch.arange(len(outputs)) != layer
        others.append(float(each[rest].min()))
        leans.append(float(_leans(state, outputs[layer], outputs[rest]).median(-1).values.max()))
    for name, error, other, lean in zip(_names(layers), errors, others, leans, strict=True):
        if not error <= ERROR_LIMIT[dtype] or not lean <= LEAN_LIMIT:
            raise ProbeError(
                f"{name} is not what the checkpoint computes: relative error {error:.3g}, {ERROR_LIMIT[dtype]:.3g} is "
                f"rounding in {dtype}; no other layer is nearer than {other:.3g}, the lean towards one is {lean:.2f}. "
                "The server computes something else than the checkpoint, or the capture takes it from the wrong place."
            )
    return LayerCheck(len(tokens), count, errors, others, leans)


def _distances(state: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """How far each token's state [tokens, hidden] is from each token's output: [tokens, outputs, tokens]."""
    scales = _scales(outputs)
    each = [torch.linalg.vector_norm((one - outputs) / scales, dim=-1) for one in state]
    return torch.stack(each) / torch.linalg.vector_norm(outputs / scales, dim=-1)


def _scales(outputs: torch.Tensor) -> torch.Tensor:
    """What to divide each dimension by, so that all count: its own size, but no less than the usual one's."""
    sizes = outputs.abs()
    return sizes + sizes.median(-1, keepdim=True).values


def _leans(state: torch.Tensor, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The share of the way from `own` to each of `others` that `state` has gone: [others, tokens]."""
    scales = _scales(own)
    gone, way = (state - own) / scales, (others - own) / scales
    return (gone * way).sum(-1) / way.square().sum(-1)


def _check_prompts(of: torch.Tensor, tokens: list[int], names: list[str]) -> None:
    """of: int [states, tokens], whose state each one is."""
    mixed = {
        token: tokens[int(others.mode().values)]
        for number, (token, others) in enumerate(zip(tokens, of.T, strict=True))
        if int(others.mode().values) != number
    }
    # What is mixed is at least two. One alone was seen to be nearer to another by chance: in bfloat16, where rounding
    # chose other experts for it, and with fp8 activations.
    if len(mixed) > 1:
        token, other = next(iter(mixed.items()))
        cause = "Two requests are swapped" if len(mixed) == 2 else "Rows are shifted, or requests are mixed"
        raise ProbeError(
            f"{len(mixed)} of {len(tokens)} requests of one batch hold the states of others: the prompt of token "
            f"{token} those of token {other}. {cause}."
        )
    for name, others in zip(names, of, strict=True):
        if len(wrong := (others != torch.arange(len(tokens))).nonzero()) > 1:
            token = int(wrong[0])
            raise ProbeError(
                f"{name} of the prompt of token {tokens[token]} is that of the prompt of token "
                f"{tokens[int(others[token])]}; other states are its own. The rows of one layer are shifted or mixed."
            )


def _name_layers(actual: list[int], asked: list[int], count: int) -> str:
    """What is captured instead, by its likely cause."""

    def name(output: int) -> str:
        if output == 0:
            return "the embedding"
        if output == count + 1:
            return "the final state after the norm"
        return f"the output of layer {output - 1}" + (" (the final state before the norm)" if output == count else "")

    *aux, last = actual
    *asked_aux, asked_last = asked
    causes = []
    if aux != asked_aux:
        shifts = {found - wanted for found, wanted in zip(aux, asked_aux, strict=True)}
        lines = [
            f"layer {wanted - 1} holds what the checkpoint computes as {name(found)}"
            for found, wanted in zip(aux, asked_aux, strict=True)
            if found != wanted
        ]
        if len(shifts) == 1:
            lines[0] = f"Every layer is shifted by {shifts.pop():+d}: {lines[0]}"
        elif sorted(aux) == sorted(asked_aux):
            lines = [f"The layers are in another order: asked {_ids(asked_aux)}, captured {_ids(aux)}"]
        else:
            lines[0] = f"Captured are other layers than asked for: {lines[0]}"
        causes.append("; ".join(lines) + ".")
    if last != asked_last:
        norms = {count: "before", count + 1: "after"}
        if last in norms:
            causes.append(
                f"The final state is the one {norms[last]} the model's last norm; the config asks for the one "
                f"{norms[asked_last]} it (capture.final_norm)."
            )
        else:
            causes.append(f"The final state holds what the checkpoint computes as {name(last)}.")
    return " ".join(causes)


def _ids(outputs: list[int]) -> list[int]:
    return [output - 1 for output in outputs]


def _names(layers: list[int]) -> list[str]:
    return [*(f"Layer {layer}" for layer in layers), "The final state"]
