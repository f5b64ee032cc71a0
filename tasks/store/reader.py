"""Hidden states for a trainer: random access by row, nothing copied from a local shard, a PyTorch `Dataset`.

    from tasks.store.reader import HiddenStates

    states = HiddenStates.open("/data/hidden-states/my")
    sample = states[0]                      # rows in order; states.row(123) is row 123 of the dataset
    sample.layer(29), sample.last_hidden_state, sample.loss_mask

Beside this package it needs torch, numpy and safetensors, and nothing else.
"""

import json
import mmap
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from tasks.errors import StoreError
from tasks.storage import is_remote
from tasks.store.index import Index, load_index, make_index
from tasks.store.layout import Store, read_extraction
from tasks.store.record import Record, read_whole_record, record_paths
from tasks.store.shard import AUX, IDS, LAST, MASK, tensor_name
from tasks.store.tensors import TORCH

MOST_OPEN = 256  # shards at a time, of each process


class Sample(NamedTuple):
    """A row. Tensors of a local store lie in the page cache: writing to one changes a copy, never the store."""

    row: int
    """Its 0-based number in the dataset."""
    input_ids: torch.Tensor
    """int32 [tokens]."""
    loss_mask: torch.Tensor
    """uint8 [tokens], not shifted: 1 where the token itself counts."""
    aux_hidden_states: torch.Tensor
    """[tokens, layers * hidden], the layers in ascending order."""
    last_hidden_state: torch.Tensor
    """[tokens, hidden], after or before the final norm: `HiddenStates.final_norm`."""
    layers: tuple[int, ...]
    """The decoder layers, 0-based, whose outputs these are."""

    def layer(self, number: int) -> torch.Tensor:
        """The output of one decoder layer [tokens, hidden], a view. Raises KeyError for one that is not stored."""
        if number not in self.layers:
            raise KeyError(f"layer {number} is not stored; {', '.join(map(str, self.layers))} are")
        width = self.last_hidden_state.shape[-1]
        at = self.layers.index(number) * width
        return self.aux_hidden_states[:, at : at + width]


class HiddenStates(Dataset[Sample]):
    """A store's rows, in order. For any number of threads and DataLoader workers, however they are started."""

    def __init__(self, store: Store, parts: dict[str, Any], index: Index, left_out: list[str]):
        """Use `open`."""
        self.store = store
        self.layers: tuple[int, ...] = tuple(parts["layers"])
        """Decoder layers, 0-based, whose outputs are stored."""
        self.final_norm: str = parts["final_norm"]
        """Whether the last state is that after ('post') or before ('pre') the model's final norm."""
        self.dtype: torch.dtype = getattr(torch, parts["dtype"])
        self.hidden_size: int = parts["hidden_size"]
        self.vocab_size: int = parts["vocab_size"]
        self.left_out = left_out
        """Of a store opened as incomplete: what of it cannot be read, and why."""
        self.digest = index.digest
        self._index = index
        self._shards = _Shards(store)

    @classmethod
    def open(cls, path: str | Path, incomplete: bool = False) -> "HiddenStates":
        """Open a verified store. incomplete: one that is not, too; what of it cannot be read is in `left_out`.

        Raises StoreError if there is no store, it is not verified, changed since, or a shard is not as it was written
        (by its size; `python -m flows verify` reads every byte).
        """
        if is_remote(str(path)):
            raise StoreError(f"{path} lies in a bucket. Copy all of it to a disk and open that: it is a store, too.")
        store = Store(Path(path))
        extraction = read_extraction(store)
        if extraction is None:
            raise StoreError(f"{store.root} holds no hidden states: there is no {store.extraction.name}.")
        parts, fingerprint = extraction["parts"], extraction["fingerprint"]
        if incomplete:
            index, left_out = _what_is_there(store, fingerprint)
            return cls(store, parts, index, left_out)
        expected = _records_digest(store)
        index = load_index(store)
        if index.digest != expected:
            raise StoreError(f"{store.root} changed since it was verified: verify it again, or open it as incomplete.")
        if index.fingerprints != [fingerprint]:
            raise StoreError(f"{store.root} has shards of another extraction.")
        for file, size in zip(index.files, index.bytes, strict=True):
            if problem := _problem(store, file, size):
                raise StoreError(f"{store.root} is damaged: {problem}. `python -m flows verify --repair` mends it.")
        return cls(store, parts, index, [])

    def __len__(self) -> int:
        return len(self._index.rows)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index}: there are {len(self)} rows")
        place = int(index) % len(self)
        width, row = self.hidden_size, int(self._index.rows[place])
        aux = self._tensor(place, AUX, self.dtype, len(self.layers) * width)
        return Sample(row, *self.tokens_of(place), aux, self._tensor(place, LAST, self.dtype, width), self.layers)

    def tokens_of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`input_ids` and `loss_mask` alone, without touching the states."""
        return self._tensor(index, IDS, torch.int32), self._tensor(index, MASK, torch.uint8)

    def _tensor(self, place: int, name: str, dtype: torch.dtype, *width: int) -> torch.Tensor:
        file = self._index.files[self._index.shard[place]]
        row, tokens = int(self._index.rows[place]), int(self._index.tokens[place])
        return self._shards.tensor(file, row, name, dtype, [tokens, *width])

    def __iter__(self) -> Iterator[Sample]:
        return (self[place] for place in range(len(self)))

    def row(self, number: int) -> Sample:
        """By the row's number in the dataset. Raises KeyError if it is not stored."""
        place = int(np.searchsorted(self._index.rows, number))
        if place == len(self) or self._index.rows[place] != number:
            raise KeyError(f"row {number} is not in {self.store.root}")
        return self[place]

    @property
    def rows(self) -> np.ndarray:
        """int64 [len]: the stored rows' numbers in the dataset, ascending."""
        return self._index.rows

    @property
    def tokens(self) -> np.ndarray:
        """int32 [len]: tokens of each row, for batches by length."""
        return self._index.tokens

    @property
    def shards(self) -> list[np.ndarray]:
        """The indices of the rows in each shard: reading these together is fastest."""
        order = np.argsort(self._index.shard, kind="stable")
        bounds = np.searchsorted(self._index.shard[order], np.arange(1, len(self._index.files)))
        return np.split(order, bounds) if len(order) else []


class _Shards:
    """Open shards. The mapped files stay behind when this goes to another process."""

    def __init__(self, store: Store):
        self._store = store
        self._open: OrderedDict[str, tuple[memoryview, dict[str, Any]]] = OrderedDict()

    def __getstate__(self) -> Store:
        return self._store

    def __setstate__(self, store: Store) -> None:
        self.__init__(store)  # type: ignore[misc]

    def tensor(self, file: str, row: int, name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """Raises StoreError if the shard has not just that tensor."""
        data, header = self._open.get(file) or self._add(file)
        try:
            entry = header[tensor_name(row, name)]
            start, end = entry["data_offsets"]
            found = TORCH[entry["dtype"]], entry["shape"]
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self._store.shards / file} has no sound {tensor_name(row, name)}.") from error
        if found != (dtype, shape) or end - start != dtype.itemsize * int(np.prod(shape)) or end > len(data):
            raise StoreError(
                f"{self._store.shards / file}: {tensor_name(row, name)} is {found}, {(dtype, shape)} is expected."
            )
        return torch.frombuffer(data[start:end], dtype=dtype).view(shape)

    def _add(self, file: str) -> tuple[memoryview, dict[str, Any]]:
        path = self._store.shards / file
        try:
            assert isinstance(path, Path)  # `open` refuses a bucket
            data = map_file(path)
            begin = 8 + int.from_bytes(data[:8], "little")
            opened = data[begin:], json.loads(bytes(data[8:begin]))
        except (OSError, ValueError) as error:
            raise StoreError(f"The shard {path} cannot be read: {error}.") from error
        self._open[file] = opened
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)  # a file stays mapped for as long as a tensor of it lives
        return opened


def map_file(path: Path) -> memoryview:
    """A file's bytes, not copied. Private: what is written to them does not reach the file."""
    with path.open("rb") as file:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return memoryview(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def _records_digest(store: Store) -> str:
    try:
        return str(json.loads(store.manifest.read_bytes())["records_sha256"])
    except FileNotFoundError as error:
        raise StoreError(
            f"{store.root} is not complete, or not verified: it has no {store.manifest.name}. Finish it with `python "
            "-m flows extract`, or verify it; incomplete=True opens what is there."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{store.manifest} cannot be read: {error!r}. Verify the store again.") from error


def _what_is_there(store: Store, fingerprint: str) -> tuple[Index, list[str]]:
    """The rows whose record and shard are sound, by the shard's size, and what is not."""
    records: list[Record] = []
    left_out: list[str] = []
    for path in record_paths(store):
        try:
            record = read_whole_record(path)
        except StoreError as error:
            left_out.append(str(error))
            continue
        if record is None:
            problem: str | None = f"{path.name} is half written"
        elif record.fingerprint != fingerprint:
            problem = f"{path.name} belongs to another extraction"
        else:
            problem = _problem(store, record.file, record.bytes) if record.file else None
        if problem:
            left_out.append(problem)
        elif record:
            records.append(record)
    return make_index(records), left_out


def _problem(store: Store, file: str, size: int) -> str | None:
    try:
        found = (store.shards / file).stat().st_size
    except OSError:
        return f"{file} is gone"
    return None if found == size else f"{file} has {found} bytes, not {size}"
