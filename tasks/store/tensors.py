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
from tasks.store.shard import DTYPES, IDS, MASK

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
        self.begin, text = read_header(path)
        try:
            self.header = _parse(text)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is no safetensors file: {error!r}.") from error

    def keys(self) -> list[str]:
        return list(self.header)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Raises KeyError for a tensor that it does not have, StoreError if its bytes are not all there."""
        dtype, shape, start, end = self.header[name]
        data = self.path.read_range(self.begin + start, end - start)
        if len(data) != end - start:
            raise StoreError(f"{self.path} ends inside {name}.")
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


class RemoteData:
    """What follows an object's header, in ranges. For any number of threads.

    Ids and masks of all rows lie together at the end of a shard: they are read once, and kept.
    """

    def __init__(self, path: S3Path):
        """Raises StoreError for what is no safetensors file."""
        self.path = path
        self.begin, text = read_header(path)
        self.header: dict[str, Any] = json.loads(text)
        """Entries by tensor, as safetensors has them."""
        self._size = path.stat().st_size - self.begin
        ends = {True: [self._size], False: [0]}  # where small tensors begin, and where states end
        for name, entry in self.header.items():
            if name != "__metadata__":
                small = name.endswith((f".{IDS}", f".{MASK}"))
                ends[small].append(entry["data_offsets"][0 if small else 1])
        self._small_from = max(min(ends[True]), *ends[False])
        self._small: bytes | None = None

    def __len__(self) -> int:
        return self._size

    def read(self, spans: list[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each span [start, end), writable; spans that follow one another come in one request."""
        found: dict[tuple[int, int], memoryview] = {}
        joined: list[list[tuple[int, int]]] = []
        for span in sorted(spans):
            if span[0] >= self._small_from:
                found[span] = memoryview(
                    bytearray(self._ends()[span[0] - self._small_from : span[1] - self._small_from])
                )
            elif joined and joined[-1][-1][1] == span[0]:
                joined[-1].append(span)
            else:
                joined.append([span])
        for group in joined:
            first = group[0][0]
            data = memoryview(bytearray(self._range(first, group[-1][1])))
            found |= {(start, end): data[start - first : end - first] for start, end in group}
        return [found[span] for span in spans]

    def _ends(self) -> bytes:
        if self._small is None:
            self._small = self._range(self._small_from, self._size)
        return self._small

    def _range(self, start: int, end: int) -> bytes:
        data = self.path.read_range(self.begin + start, end - start)
        if len(data) != end - start:
            raise StoreError(f"{self.path} ends before byte {self.begin + end}.")
        return data


def read_header(path: S3Path) -> tuple[int, bytes]:
    """Where an object's tensors begin, and its header's JSON. Raises StoreError for what is no safetensors file."""
    first = path.read_range(0, HEAD)
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or 8 + length > path.stat().st_size:
        raise StoreError(f"{path} is no safetensors file: its header would be {length} bytes long.")
    text = first[8 : 8 + length]
    return 8 + length, text + path.read_range(8 + len(text), length - len(text))


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
