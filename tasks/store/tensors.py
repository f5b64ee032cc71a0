"""Opens one shard for random access by tensor: mapped where it is a file, by range reads where it is an object."""

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from safetensors import safe_open

from tasks.errors import StoreError
from tasks.storage import Location, S3Path
from tasks.store.shard import DTYPES

TORCH = {name: getattr(torch, dtype) for dtype, name in DTYPES.items()} | {"I32": torch.int32, "U8": torch.uint8}
HEAD = 256 << 10  # bytes of an object that are read first: most headers fit


class OpenShard(Protocol):
    """What `safetensors.safe_open` gives, as far as it is used here."""

    def keys(self) -> Any: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class RemoteShard:
    """A shard in a bucket; each tensor is one range read. For any number of threads."""

    def __init__(self, path: S3Path):
        self.path = path
        first = path.read_range(0, HEAD)
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or 8 + length > path.stat().st_size:
            raise StoreError(f"{path} is no safetensors file: its header would be {length} bytes long.")
        text = first[8 : 8 + length]
        text += path.read_range(8 + len(text), length - len(text))
        try:
            header = _parse(text)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is no safetensors file: {error!r}.") from error
        self.begin, self.header = 8 + length, header

    def keys(self) -> list[str]:
        return list(self.header)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Raises KeyError for a tensor that it does not have, StoreError if its bytes are not all there."""
        dtype, shape, start, end = self.header[name]
        data = self.path.read_range(self.begin + start, end - start)
        if len(data) != end - start:
            raise StoreError(f"{self.path} ends inside {name}.")
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


@contextlib.contextmanager
def open_shard(path: Location) -> Iterator[OpenShard]:
    """The tensors of one shard, by name. Raises StoreError, FileNotFoundError."""
    if isinstance(path, S3Path):
        yield RemoteShard(path)
    else:
        with safe_open(path, framework="pt") as shard:
            yield shard


def _parse(text: bytes) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    found = {}
    for name, entry in json.loads(text).items():
        if name != "__metadata__":
            dtype, shape, (start, end) = TORCH[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has {end - start} bytes")
            found[name] = (dtype, shape, start, end)
    return found
