"""Recognizes states that were rounded to fewer bits than their dtype has, as when they passed through an fp8 buffer.

A state that a model computes uses every bit of its mantissa. One that was rounded uses only a few combinations of them,
whatever it was scaled by: 8 for fp8 e4m3, 4 for e5m2, 2 for fp4 (the scale of a block multiplies all its values).
"""

import torch

MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
HALF_PRECISION = {"float16": 10, "bfloat16": 7}  # mantissa bits; the finer one last: what fits both is bfloat16
GROUP = 128  # values that share a scale, in every block format in use, or are a part of those that do
FEWEST = 32  # values from which the count means anything
# Different mantissas among a group's values. Seen in bfloat16: 23 to 31 among 32 random values, 43 to 56 among 64,
# 68 to 92 among 128; in fp8 at most 8, and one more for zeros.
COARSE = 12
ROWS = 64  # looked at, evenly spread: a rounding that spares most rows is no rounding of the state


def lost_precision(state: torch.Tensor) -> str | None:
    """What coarser format a state's values all fit into, in words; None if it uses its own dtype's precision.

    state: bfloat16, float16 or float32 [tokens, hidden], finite and not all zero. Looks at up to 64 tokens.
    """
    hidden = state.shape[-1]
    rows = state[:: max(1, len(state) // ROWS)]
    bits = MANTISSA_BITS[state.dtype]
    mantissas = rows.contiguous().view(INTEGERS[state.dtype]) & ((1 << bits) - 1)
    if hidden >= FEWEST:
        width = min(GROUP, hidden)
        groups = mantissas[:, : hidden // width * width].unflatten(-1, (-1, width)).sort(dim=-1).values
        different = 1 + (groups.diff(dim=-1) != 0).sum(-1)
        if (typical := float(different.float().median())) <= COARSE:
            return f"{width} values in a row have {typical:.0f} different mantissas, as fp8 has and not {_name(state)}"
    for name, fewer in reversed(HALF_PRECISION.items()):
        if fewer < bits and not (mantissas & ((1 << (bits - fewer)) - 1)).any():
            return f"every value is a {name} number, although the state is {_name(state)}"
    return None


def _name(state: torch.Tensor) -> str:
    return str(state.dtype).removeprefix("torch.")
