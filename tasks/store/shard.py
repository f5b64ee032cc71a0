"""Writes one shard: a safetensors file filled row by row as dumps arrive, with no row held in memory.

The format puts the header first, but its length can be chosen: room is kept for it, the states follow in the order in
which they arrive, ids and masks close the file (so that every tensor is aligned), and the header is written last.
Format: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.files import checksum_of, sync_directory, temporary_for
from tasks.model import ITEMSIZE

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ENTRY_BYTES = 160  # longest header entry of one tensor, with room to spare
WRITE_BACK = 32 << 20  # bytes after which the kernel is told to begin writing them to the disk
AUX, LAST, IDS, MASK = "aux_hidden_states", "last_hidden_state", "input_ids", "loss_mask"


@dataclass(frozen=True)
class WrittenShard:
    """A file under its final name: its size in bytes and its XXH3-128."""

    bytes: int
    checksum: str


def tensor_name(row: int, tensor: str) -> str:
    """Name of a row's tensor inside its shard, as `r000123.input_ids`."""
    return f"r{row:06d}.{tensor}"


def file_bytes(tokens: list[int], states: int, hidden_size: int, itemsize: int) -> int:
    """Bytes of a shard with rows of so many tokens each."""
    return 8 + header_room(len(tokens)) + sum(row_bytes(each, states, hidden_size, itemsize) for each in tokens)


def header_room(rows: int) -> int:
    """Bytes that are kept for the header of so many rows."""
    return (1024 + rows * 4 * ENTRY_BYTES + 7) // 8 * 8


def row_bytes(tokens: int, states: int, hidden_size: int, itemsize: int) -> int:
    """Bytes of a row's tensors: `states` hidden states, ids (int32) and mask (uint8)."""
    return tokens * (states * hidden_size * itemsize + 4 + 1)


class ShardWriter:
    """One shard on its way. Use as a context manager: what is not finished is removed."""

    def __init__(
        self,
        path: Path,
        rows: int,
        dtype: str,
        metadata: dict[str, str],
        workspace: Path | None = None,
        durable: bool = True,
    ):
        """path: the final name; rows: how many may be added at most; dtype: of the states; workspace: the writer's.

        durable: have it on the disk before it gets its name; no, where it is sent elsewhere at once.
        """
        self.path = path
        self.temporary = temporary_for(path, workspace)
        self.dtype = DTYPES[dtype]
        self.itemsize = ITEMSIZE[dtype]
        self.room = header_room(rows)
        self.durable = durable
        self.header = [f'"__metadata__":{json.dumps(metadata)}']  # entries as text: objects take five times as much
        self.end = 0  # of the data written so far, counted from the end of the header
        self.begun = 0  # up to here the writing to the disk has begun
        self.small: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.file = self.temporary.open("wb", buffering=0)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.file.closed:
            self.file.close()
            self.temporary.unlink(missing_ok=True)

    def add(self, row: int, aux: np.ndarray, last: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> None:
        """aux and last: the raw bytes of the states, uint8 [tokens, bytes a token]; ids int32, mask uint8 [tokens]."""
        for name, state in ((AUX, aux), (LAST, last)):
            first = self.end
            self._enter(tensor_name(row, name), self.dtype, [len(state), state.shape[1] // self.itemsize], state.nbytes)
            self._write(state, first)
        self.small.append((row, ids, mask))

    def finish(self) -> WrittenShard:
        """Write ids, masks and header, make the file durable, give it its name."""
        self._append_small(IDS, "I32", [ids.astype("<i4", copy=False) for _, ids, _ in self.small])
        self._append_small(MASK, "U8", [mask for _, _, mask in self.small])
        text = f"{{{','.join(self.header)}}}".encode()
        if len(text) > self.room:
            raise AssertionError(f"the header needs {len(text)} bytes, {self.room} were kept")
        head = self.room.to_bytes(8, "little") + text.ljust(self.room)
        _write_at(self.file.fileno(), memoryview(head), 0)
        if not self.durable:
            checksum = checksum_of(self.temporary)
        elif self.end <= WRITE_BACK:  # too little to be worth a thread
            os.fsync(self.file.fileno())
            checksum = checksum_of(self.temporary)
        else:
            with ThreadPoolExecutor(1) as beside:  # one waits for the disk, the other reads memory
                durable = beside.submit(os.fsync, self.file.fileno())
                checksum = checksum_of(self.temporary)
                durable.result()
        written = WrittenShard(8 + self.room + self.end, checksum)
        self.file.close()
        os.replace(self.temporary, self.path)
        if self.durable:
            sync_directory(self.path.parent)
        return written

    def _append_small(self, tensor: str, dtype: str, rows: list[np.ndarray]) -> None:
        """One tensor of every row, in a single write."""
        first = self.end
        for (row, _, _), data in zip(self.small, rows):
            self._enter(tensor_name(row, tensor), dtype, [len(data)], data.nbytes)
        if rows:
            self._write(np.concatenate(rows), first)

    def _enter(self, name: str, dtype: str, shape: list[int], size: int) -> None:
        """Take `size` bytes at the end for a tensor."""
        start, self.end = self.end, self.end + size
        self.header.append(f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{self.end}]}}')

    def _write(self, data: np.ndarray, start: int) -> None:
        _write_at(self.file.fileno(), data.data.cast("B"), 8 + self.room + start)
        if self.durable and self.end - self.begun >= WRITE_BACK:
            # Of pages that nobody has written to the disk yet, this begins the writing, and does not wait for it.
            os.posix_fadvise(
                self.file.fileno(), 8 + self.room + self.begun, self.end - self.begun, os.POSIX_FADV_DONTNEED
            )
            self.begun = self.end


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
