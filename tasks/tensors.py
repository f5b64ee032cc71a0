"""What lies where in a safetensors file, by its own header, and whether that is what the format says.

For dumps and shards, of which every byte is checked. The library takes three times as long to open a small file, and
does not say where a shard's tensors lie.

Format: https://huggingface.co/docs/safetensors, "Format".
"""

import math
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

HEADER_LIMIT = 100 << 20  # bytes: the format's own limit
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U8": 1}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; its bytes are data[start:end]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class LayoutError(ValueError):
    """The header is not one of a safetensors file, or not that of this one."""


def read_header(file: BinaryIO, size: int) -> tuple[bytes, dict[str, Any]]:
    """The file's first bytes, up to the data, and the header in them. Raises LayoutError, which keeps no bytes."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(HEADER_LIMIT, size - 8):
        raise LayoutError(f"its header would be {length} bytes long, the file has {size}")
    text = file.read(length)
    try:
        header = orjson.loads(text)
    except ValueError as error:
        raise LayoutError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise LayoutError("its header is no JSON object")
    return head + text, header


def tensors_in_order(header: dict[str, Any], data_bytes: int) -> list[Tensor]:
    """All tensors by their place in the file, which they fill without a gap. Raises LayoutError."""
    tensors, at = [], 0
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors.append(Tensor(name, entry["dtype"], tuple(entry["shape"]), start, end))
        tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
        for tensor in tensors:
            if tensor.start != at or tensor.nbytes != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
                raise LayoutError(f"{tensor.name} lies at {tensor.start} to {tensor.end}, as {tensor.shape}")
            at = tensor.end
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"its header is damaged: {error}") from error
    if at != data_bytes:
        raise LayoutError(f"its tensors have {at} bytes, the file {data_bytes}")
    return tensors
