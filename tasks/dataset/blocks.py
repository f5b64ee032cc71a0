"""Judging rows many at a time: what a plan needs of a million rows, in a few array operations a block.

`parse_row` says what a valid row is. Here whole blocks are shown to hold nothing but valid rows; where that fails,
`parse_row` judges the block's rows one by one and names what is wrong.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tasks.dataset.formats import ID, IDS, MASK, errors_named, is_parquet, open_lines, open_table
from tasks.dataset.rows import InvalidRow, parse_row, text_of
from tasks.dataset.tables import read_tables, values_of

# Bytes of lines at a time. The parsed numbers, 4 to 8 bytes for each byte of text, stay in the processor's cache.
BLOCK = 1 << 16


@dataclass(frozen=True)
class Block:
    """Consecutive rows, judged. All arrays are [rows]."""

    offset: np.ndarray
    """int64: as in `Plan`."""
    size: np.ndarray
    """int64: as in `Plan`."""
    tokens: np.ndarray
    """int32: 0 where the row is invalid."""
    ids: list[str | None]
    invalid: dict[int, InvalidRow]
    """What is wrong, by place in the block."""

    def __len__(self) -> int:
        return len(self.ids)


def read_blocks(path: Path, vocab_size: int) -> Iterator[Block]:
    """Read and judge the whole file, streaming. Raises DatasetError if it cannot be read or is damaged."""
    return _table_blocks(path, vocab_size) if is_parquet(path) else _line_blocks(path, vocab_size)


def _line_blocks(path: Path, vocab_size: int) -> Iterator[Block]:
    start = 0
    with errors_named(path), open_lines(path) as file:
        while lines := file.readlines(BLOCK):
            size = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
            end = start + np.cumsum(size)
            judged = _valid_lines(lines, vocab_size) or _one_by_one(lines.__getitem__, len(lines), vocab_size)
            yield Block(end - size, size, *judged)
            start = int(end[-1])


def _table_blocks(path: Path, vocab_size: int) -> Iterator[Block]:
    start = 0
    with errors_named(path), open_table(path) as table:
        for batch in read_tables(table):
            rows = len(batch)
            judged = _valid_table(batch, vocab_size) or _one_by_one(partial(values_of, batch), rows, vocab_size)
            yield Block(np.arange(start, start + rows), np.zeros(rows, dtype=np.int64), *judged)
            start += rows


Judged = tuple[np.ndarray, list[str | None], dict[int, InvalidRow]]  # the last three fields of a block


def _valid_lines(lines: list[bytes], vocab_size: int) -> Judged | None:
    """None if a line may be invalid."""
    if _may_hold_booleans(lines):
        return None
    try:
        values = list(map(orjson.loads, lines))
        samples = [value[IDS] for value in values]
        masks = [value.get(MASK) for value in values]
        lengths = list(map(len, samples))
        # struct takes integers only (and booleans), bytearray integers from 0 to 255, numpy would take anything.
        packed = b"".join([struct.pack(f"{length}i", *ids) for length, ids in zip(lengths, samples)])
        present = [(mask, length) for mask, length in zip(masks, lengths) if mask is not None]
        mask_bytes = b"".join([bytearray(mask) for mask, _ in present])
        fitting = all(len(mask) == length for mask, length in present)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, struct.error):
        return None
    tokens = np.array(lengths, dtype=np.int32)
    flat, flat_mask = np.frombuffer(packed, dtype=np.int32), np.frombuffer(mask_bytes, dtype=np.uint8)
    if not (fitting and _in_range(tokens, flat, flat_mask, vocab_size)):
        return None
    return tokens, [text_of(value.get(ID)) for value in values], {}


def _valid_table(batch: pa.RecordBatch, vocab_size: int) -> Judged | None:
    """None if a row may be invalid."""
    samples = batch.column(IDS)
    lengths, flat = pc.list_value_length(samples), pc.list_flatten(samples)
    if samples.null_count or flat.null_count:
        return None
    tokens, flat_mask = lengths.to_numpy(), np.empty(0, dtype=np.uint8)
    if MASK in batch.schema.names:
        masks = batch.column(MASK)
        values = pc.list_flatten(masks)
        fitting = pc.all(pc.equal(pc.list_value_length(masks), lengths)).as_py()  # over the rows that have a mask
        if values.null_count or fitting is False:
            return None
        flat_mask = values.to_numpy()
    if not _in_range(tokens, flat.to_numpy(), flat_mask, vocab_size):
        return None
    ids = batch.column(ID).to_pylist() if ID in batch.schema.names else [None] * len(batch)
    return tokens.astype(np.int32), list(map(text_of, ids)), {}


def _one_by_one(raw: Callable[[int], Any], rows: int, vocab_size: int) -> Judged:
    """As `parse_row` judges the row raw(at), for each place in the block."""
    tokens = np.zeros(rows, dtype=np.int32)
    ids: list[str | None] = [None] * rows
    invalid = {}
    for at in range(rows):
        try:
            row = parse_row(raw(at), at, vocab_size)
        except InvalidRow as error:
            invalid[at] = error
        else:
            tokens[at], ids[at] = len(row.input_ids), row.id
    return tokens, ids, invalid


def _in_range(tokens: np.ndarray, ids: np.ndarray, mask: np.ndarray, vocab_size: int) -> bool:
    """Whether no row is empty, all ids are in the vocabulary and all masks 0 or 1."""
    return bool(
        tokens.all()
        and ids.min() >= 0
        and ids.max() < vocab_size
        and mask.max(initial=0) <= 1
        and mask.min(initial=0) >= 0
    )


def _may_hold_booleans(lines: list[bytes]) -> bool:
    """Whether true or false stands anywhere in the lines, which orjson's lists hide among ones and zeros."""
    # One letter is found many times faster than a word, and an id, which may have it, mostly stands before the lists.
    if all(line.find(b"e", line.find(b"[")) < 0 for line in lines):
        return False
    text = b"".join(lines)
    return b"true" in text or b"false" in text
