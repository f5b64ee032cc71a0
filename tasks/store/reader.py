"""Hidden states for a trainer: random access by row, nothing copied from a local shard, a PyTorch `Dataset`.

    from tasks.store.reader import HiddenStates

    states = HiddenStates.open("/data/hidden-states/my")
    sample = states[0]                      # rows in order; states.row(123) is row 123 of the dataset
    sample.layer(29), sample.last_hidden_state, sample.loss_mask

Beside this package it needs torch, numpy and safetensors, and nothing else; for a store in a bucket, whose rows are
read one by one where they are asked for, also boto3, tenacity and pydantic.
"""

import json
import mmap
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from tasks.errors import StoreError
from tasks.storage import S3Path, as_location, read_all
from tasks.store.index import Index, load_index, make_index
from tasks.store.layout import Store, read_extraction
from tasks.store.record import Record, read_whole_record, record_paths
from tasks.store.shard import AUX, IDS, LAST, MASK, tensor_name
from tasks.store.tensors import TORCH, RemoteData

if TYPE_CHECKING:  # a trainer that reads a local store has no pydantic
    from tasks.config import S3Config

MOST_OPEN = 256  # shards at a time, of each process
TOKENS: tuple[tuple[str, torch.dtype, list[int]], ...] = ((IDS, torch.int32, []), (MASK, torch.uint8, []))


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
    def open(
        cls, path: str | Path | S3Path, incomplete: bool = False, endpoint_url: str | None = None
    ) -> "HiddenStates":
        """Open a verified store: a directory, or `s3://BUCKET/PREFIX`. incomplete: one that is not, too; what of it
        cannot be read is in `left_out`. endpoint_url: of a bucket that is not AWS's; default: AWS_ENDPOINT_URL_S3.

        Raises StoreError if there is no store, it is not verified, changed since, or a shard is not as it was written
        (by its size; `python -m flows verify` reads every byte), RemoteError if the bucket cannot be read.
        """
        store = Store(as_location(path, _s3_config(endpoint_url)))
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
        sizes = _sizes(store)
        for file, size in zip(index.files, index.bytes, strict=True):
            if problem := _problem(sizes, file, size):
                raise StoreError(f"{store.root} is damaged: {problem}. `python -m flows verify --repair` mends it.")
        return cls(store, parts, index, [])

    def __len__(self) -> int:
        return len(self._index.rows)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index}: there are {len(self)} rows")
        place = int(index) % len(self)
        width = self.hidden_size
        states = (AUX, self.dtype, [len(self.layers) * width]), (LAST, self.dtype, [width])
        ids, mask, aux, last = self._tensors(place, *TOKENS, *states)
        return Sample(int(self._index.rows[place]), ids, mask, aux, last, self.layers)

    def tokens_of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`input_ids` and `loss_mask` alone, without touching the states."""
        ids, mask = self._tensors(index, *TOKENS)
        return ids, mask

    def _tensors(self, place: int, *wanted: tuple[str, torch.dtype, list[int]]) -> list[torch.Tensor]:
        file = self._index.files[self._index.shard[place]]
        row, tokens = int(self._index.rows[place]), int(self._index.tokens[place])
        return self._shards.tensors(file, row, [(name, dtype, [tokens, *width]) for name, dtype, width in wanted])

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
    """Open shards. Mapped files and what was read of objects stay behind when this goes to another process."""

    def __init__(self, store: Store):
        self._store = store
        self._open: OrderedDict[str, tuple[memoryview | RemoteData, dict[str, Any]]] = OrderedDict()

    def __getstate__(self) -> Store:
        return self._store

    def __setstate__(self, store: Store) -> None:
        self.__init__(store)  # type: ignore[misc]

    def tensors(self, file: str, row: int, wanted: list[tuple[str, torch.dtype, list[int]]]) -> list[torch.Tensor]:
        """A row's tensors, each of a dtype and shape. Raises StoreError if the shard does not have just these."""
        data, header = self._open.get(file) or self._add(file)
        spans = [
            self._span(file, header, tensor_name(row, name), dtype, shape, len(data)) for name, dtype, shape in wanted
        ]
        if isinstance(data, RemoteData):
            try:
                parts = data.read(spans)
            except OSError as error:
                raise StoreError(f"Row {row} of the shard {data.path} cannot be read: {error}.") from error
        else:
            parts = [data[start:end] for start, end in spans]
        return [
            torch.frombuffer(part, dtype=dtype).view(shape)
            for part, (_, dtype, shape) in zip(parts, wanted, strict=True)
        ]

    def _span(
        self, file: str, header: dict[str, Any], name: str, dtype: torch.dtype, shape: list[int], size: int
    ) -> tuple[int, int]:
        try:
            entry = header[name]
            start, end = entry["data_offsets"]
            found = TORCH[entry["dtype"]], entry["shape"]
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self._store.shards / file} has no sound {name}.") from error
        if found != (dtype, shape) or end - start != dtype.itemsize * int(np.prod(shape)) or end > size:
            raise StoreError(f"{self._store.shards / file}: {name} is {found}, {(dtype, shape)} is expected.")
        return start, end

    def _add(self, file: str) -> tuple[memoryview | RemoteData, dict[str, Any]]:
        path = self._store.shards / file
        opened: tuple[memoryview | RemoteData, dict[str, Any]]
        try:
            if isinstance(path, S3Path):
                remote = RemoteData(path)
                opened = remote, remote.header
            else:
                data = map_file(path)
                begin = 8 + int.from_bytes(data[:8], "little")
                opened = data[begin:], json.loads(bytes(data[8:begin]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"The shard {path} cannot be read: {error}.") from error
        self._open[file] = opened
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)  # a file stays mapped for as long as a tensor of it lives
        return opened


def _s3_config(endpoint_url: str | None) -> "S3Config | None":
    if endpoint_url is None:
        return None
    from tasks.config import S3Config

    return S3Config(endpoint_url=endpoint_url)


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
    paths, sizes = record_paths(store), _sizes(store)
    if isinstance(store.root, S3Path):
        deque(read_all(paths), maxlen=0)  # many at a time; what a listing named is kept once it was read
    for path in paths:
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
            problem = _problem(sizes, record.file, record.bytes) if record.file else None
        if problem:
            left_out.append(problem)
        elif record:
            records.append(record)
    return make_index(records), left_out


def _sizes(store: Store) -> dict[str, int]:
    """Bytes of each file among the shards, by its name."""
    return {path.name: path.stat().st_size for path in store.shards.glob("[0-9]*.safetensors")}


def _problem(sizes: dict[str, int], file: str, size: int) -> str | None:
    if file not in sizes:
        return f"{file} is gone"
    return None if sizes[file] == size else f"{file} has {sizes[file]} bytes, not {size}"
