"""Reads a dump of the capture plugin and refuses one that is not exactly what was asked for."""

import functools
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from tasks.errors import TransientPrefillError
from tasks.processes import start_of
from tasks.tensors import read_header, tensors_in_order

BUSY = "busy."  # and the process id: the plugin's mark, which holds when that process started
METADATA = ("request", "rms", "zero_rows", "nonfinite_rows", "chunks", "layers", "final_norm")
LOOKED_AT = 4  # elements of each token and state, evenly spread; only where all of them are zero, all others too
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
BITS = {2: torch.int16, 4: torch.int32}  # by bytes an element: NumPy knows no bfloat16


@dataclass(frozen=True)
class Captured:
    """What every dump of this run must be."""

    layers: list[int]
    final_norm: str
    dtype: str
    hidden_size: int

    def state_names(self) -> list[str]:
        """What to call each state to a person: aux layers in order, then the final state."""
        return [*(f"layer {layer}" for layer in self.layers), "the final state"]


@dataclass(frozen=True)
class Dump:
    """The states of one prompt, mapped from staging memory: no copy is made until somebody reads them."""

    path: Path
    aux: torch.Tensor
    """[tokens, layers * hidden], in the model's dtype."""
    last: torch.Tensor
    """[tokens, hidden]."""
    rms: list[float]
    zero_rows: list[int]
    chunks: int
    """Forward passes that the prompt was split over."""

    def raw(self) -> tuple[np.ndarray, np.ndarray]:
        """aux and last as raw bytes, uint8 [tokens, bytes a token], still mapped."""
        return self.aux.view(torch.uint8).numpy(), self.last.view(torch.uint8).numpy()

    def delete(self) -> None:
        """Give the staging memory back, as soon as nobody maps it any more."""
        self.path.unlink(missing_ok=True)


def is_behind(staging: Path) -> bool:
    """Whether a living server process asks to be sent nothing new: the writers of its plugin have fallen behind."""
    for name in os.listdir(staging):  # of hundreds of dumps, twenty times a second: a glob costs ten times as much
        if not (name.startswith(BUSY) and name[-1].isdigit()):
            continue
        try:
            if (staging / name).read_text() == start_of(int(name.removeprefix(BUSY))):
                return True
        except FileNotFoundError:  # at this moment
            continue
    return False


def open_dump(path: Path, ids: np.ndarray, expected: Captured) -> Dump:
    """Map a dump and check ids, shapes, dtype, layers, norm, the plugin's own health figures, and that no state is a
    hole: what those figures are about left the device, and never arrived here.

    Raises TransientPrefillError: whatever spoiled this dump, another prefill of the row may give a good one.
    """
    try:
        text, tensors = _map(path)
        metadata = orjson.loads(text["drillcore"])  # a figure that is no number is an error
        request, rms, zero_rows, nonfinite_rows, chunks, layers, final_norm = (metadata[name] for name in METADATA)
        aux, last, dump_ids = (tensors[name] for name in ("aux_hidden_states", "last_hidden_state", "input_ids"))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TransientPrefillError(f"the dump {path.name} cannot be read: {error}") from error
    dtype = getattr(torch, expected.dtype)
    facts = {
        "request": (request, path.stem),  # another one: left over from an earlier run
        "layers": (layers, expected.layers),
        "final norm": (final_norm, expected.final_norm),
        "shape of aux_hidden_states": (tuple(aux.shape), (len(ids), len(expected.layers) * expected.hidden_size)),
        "shape of last_hidden_state": (tuple(last.shape), (len(ids), expected.hidden_size)),
        "dtype": ((aux.dtype, last.dtype), (dtype, dtype)),
    }
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise TransientPrefillError(f"the dump {path.name} has the wrong {name}: {found}, expected {wanted}")
    if not np.array_equal(dump_ids.numpy(), ids):
        raise TransientPrefillError(f"the dump {path.name} holds other token ids than were sent")
    for state, bad, zero in zip(expected.state_names(), nonfinite_rows, zero_rows, strict=True):
        if bad or zero:
            raise TransientPrefillError(
                f"the dump {path.name} is damaged at {state}: {bad} tokens not finite, {zero} all zero"
            )
    if hole := find_hole(aux, last):
        token, number = hole
        rest = torch.cat([aux, last], dim=1)[token:].unflatten(1, (-1, expected.hidden_size))[:, number]
        lost_end = 0 < token < len(ids) - 1 and not rest.any()
        raise TransientPrefillError(
            f"the dump {path.name} has holes: nothing was written at {expected.state_names()[number]}, token {token}"
            + (f" of {len(ids)} and all after it: the last chunk is missing" if lost_end else "")
        )
    return Dump(path, aux, last, rms, zero_rows, chunks)


def _map(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A safetensors file's metadata and its tensors, which read from the file when somebody reads them.

    Raises ValueError or KeyError if it is none, or not whole.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head, header = read_header(file, size)
        # A private mapping: PyTorch takes none that may not be written. Nobody writes, so no page is copied.
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    tensors = {
        tensor.name: torch.frombuffer(
            mapped, dtype=DTYPES[tensor.dtype], count=math.prod(tensor.shape), offset=len(head) + tensor.start
        ).view(tensor.shape)
        for tensor in tensors_in_order(header, size - len(head))
    }
    return header["__metadata__"], tensors


def find_hole(aux: torch.Tensor, last: torch.Tensor) -> tuple[int, int] | None:
    """The first (token, state) of which no bit is set, as in memory that nobody wrote; None if there is none.

    State: aux layers in order, then the final state. A state of -0.0 was written by somebody: it is no hole.
    8,192 tokens of 4 states of 7,168 bfloat16 take 2 ms on one core, and 15 more to map the pages, which the copy into
    the shard then need not do.
    """
    hidden, states = last.shape[1], 0
    for tensor in (aux, last):
        bits = tensor.view(BITS[tensor.itemsize]).numpy().reshape(len(tensor), -1, hidden)
        looked_at = [bits[:, :, at] for at in range(0, hidden, -(-hidden // LOOKED_AT))]
        for token, state in np.argwhere(functools.reduce(np.bitwise_or, looked_at) == 0):
            if not bits[token, state].any():
                return int(token), states + int(state)
        states += bits.shape[1]
    return None
