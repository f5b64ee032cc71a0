"""Measures pieces of stored states while they are in the processor's cache: norms, largest values, precision.

Each figure costs one pass over a few megabytes that have just been read; nothing is converted or copied as a whole.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class Format:
    """A floating-point format, as its bits show it."""

    torch_dtype: torch.dtype
    signed: type
    unsigned: type
    mantissa: int
    """Bits of the mantissa that are stored."""
    enough: int
    """Mantissa bits that a value of full precision has; fewer in all values come from a narrower format."""

    @cached_property
    def magnitude(self) -> int:
        """Mask of all bits but the sign."""
        return int(np.iinfo(self.signed).max)


FORMATS = {
    "bfloat16": Format(torch.bfloat16, np.int16, np.uint16, 7, enough=4),  # fp8 (e4m3) has 3
    "float16": Format(torch.float16, np.int16, np.uint16, 10, enough=8),  # bfloat16 has 7
    "float32": Format(torch.float32, np.int32, np.uint32, 23, enough=11),  # float16 has 10
}
# Values converted at a time. With 128 Ki, 16 threads on 16 cores waited for each other in the interpreter: they read
# 1.7 GB/s, and 7.4 with these (1,024 Ki: 6.0). Two cores read as fast with either.
BLOCK = 2048 << 10
JUDGED = 64  # values that must lack bits before it is no chance: 2 to the power of -64
DISTINCT, DISTINCT_OF = 126, 1024  # fp8 has 126 magnitudes at any scale; of so many real bfloat16 values 300 differ


@dataclass
class Measured:
    """One tensor of a row, [tokens, states]; filled piece by piece."""

    norms: list[np.ndarray]
    """float32: L2 norm of each token's state. Not finite where a value is not, or is too large to square (1e19)."""
    largest: np.ndarray
    """[states]: bits of the largest magnitude in the tokens looked at closely."""
    used: np.ndarray
    """[states]: mantissa bits that are set in any of their values."""
    looked_at: int = 0
    """Values a state in those tokens: of each piece, the one with the largest norm."""


def start(states: int, form: Format) -> Measured:
    return Measured([], np.zeros(states, dtype=form.unsigned), np.zeros(states, dtype=form.unsigned))


def scratch() -> torch.Tensor:
    """Memory that `measure` converts in; for one thread."""
    return torch.empty(BLOCK, dtype=torch.float32)


def measure(piece: np.ndarray, states: int, form: Format, into: Measured, memory: torch.Tensor) -> None:
    """piece: raw bytes of whole tokens, uint8 [tokens, bytes a token]; memory: from `scratch`."""
    tokens = len(piece)
    values = torch.from_numpy(piece.reshape(-1)).view(form.torch_dtype).view(tokens, states, -1)
    # PyTorch's norm of bfloat16 takes twice as long as a conversion and a norm that both stay in the cache.
    norms = np.empty((tokens, states), dtype=np.float32)
    at = 0
    for block in values.split(max(1, BLOCK // (states * values.shape[-1]))):
        converted = memory[: block.numel()].view(block.shape) if block.numel() <= BLOCK else torch.empty(block.shape)
        norms[at : at + len(block)] = torch.linalg.vector_norm(converted.copy_(block), dim=-1).numpy()
        at += len(block)
    into.norms.append(norms)
    raw: np.ndarray = piece.reshape(-1).view(form.unsigned).reshape(tokens, states, -1)
    close = raw[norms.argmax(axis=0), np.arange(states)]
    into.used |= np.bitwise_or.reduce(close, axis=1)
    into.largest = np.maximum(into.largest, (close & form.magnitude).max(axis=1))
    into.looked_at += close.shape[1]


def as_values(bits: np.ndarray, form: Format) -> np.ndarray:
    """Magnitudes as float32."""
    return torch.from_numpy(bits.astype(form.signed)).view(form.torch_dtype).float().numpy()


def lost_bits(measured: Measured, form: Format) -> list[int]:
    """For each state: the low mantissa bits that no value uses, if that is more than the format leaves; else 0."""
    lost = []
    for used in measured.used.tolist():
        mantissa = used & ((1 << form.mantissa) - 1)
        unused = form.mantissa if mantissa == 0 else (mantissa & -mantissa).bit_length() - 1
        lost.append(unused if measured.looked_at >= JUDGED and form.mantissa - unused < form.enough else 0)
    return lost


def few_magnitudes(token: np.ndarray, states: int, form: Format) -> list[int]:
    """For each state of one token (raw bytes): how many magnitudes it has, if as few as fp8 at some scale; else 0."""
    bits = token.view(form.unsigned).reshape(states, -1) & form.magnitude
    if bits.shape[1] < DISTINCT_OF:
        return [0] * states
    counts = [len(np.unique(state)) for state in bits]
    return [count if count <= DISTINCT else 0 for count in counts]
