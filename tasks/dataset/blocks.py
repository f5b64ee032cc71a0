"""Judging rows many at a time: what a plan needs of a million rows, in a few array operations a block.

`parse_row` says what a valid row is. Here whole blocks are shown to hold nothing but valid rows; where that fails,
`parse_row` judges the block's rows one by one and names what is wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw

from tasks.dataset.formats import ID, IDS, MASK, errors_named, is_parquet, open_lines, open_table
from tasks.dataset.rows import FIELDS, InvalidRow, parse_row, text_of
from tasks.dataset.tables import read_tables, values_of

# Bytes of lines at a time: what is worked out of them stays in the processor's cache.
BLOCK = 1 << 17
NULL = Raw(b"null")
WORD = 8  # digits that are compared at once


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
    try:
        fields = list(map(FIELDS.decode, lines))
        samples = [values[IDS] for values in fields]
        ids = orjson.loads(b"[" + b",".join([values.get(ID, NULL) for values in fields]) + b"]")
    except (KeyError, ValueError):  # msgspec's and orjson's errors are ValueErrors
        return None
    masks = [values.get(MASK, NULL) for values in fields]
    masked = [at for at, mask in enumerate(masks) if len(mask) != len(NULL) or bytes(mask) != bytes(NULL)]
    tokens, masked_tokens = _lengths(samples, vocab_size), _lengths([masks[at] for at in masked], 2)
    if tokens is None or masked_tokens is None or (masked_tokens != tokens[masked]).any():
        return None
    return tokens, list(map(text_of, ids)), {}


def _lengths(values: list[Raw], limit: int) -> np.ndarray | None:
    """How many numbers each JSON value has, int32; None if one may be no list of integers from 0 to below `limit`.

    The digits, nearly all of a dataset's text, are judged as they stand: no number becomes a Python object.
    """
    width = len(str(limit - 1))
    if not values or width > WORD:
        return None if values else np.empty(0, dtype=np.int32)
    text = np.frombuffer(b"".join([*values, b" " * WORD]), dtype=np.uint8)
    first = np.cumsum([0, *map(len, values)])[:-1]
    is_digit, is_comma = text - ord("0") < 10, text == ord(",")
    others = len(text) - sum(map(np.count_nonzero, (is_digit, is_comma, text == ord(" "))))
    # Nothing but digits, commas and spaces between two brackets: what is JSON then is a list of integers.
    if others != 2 * len(values) or not ((text[first] == ord("[")).all() and is_digit[first + 1].all()):
        return None
    longest = is_digit[:-WORD]  # where `width` digits begin; JSON has no leading zeros
    for place in range(1, width):
        longest = longest & is_digit[place : place - WORD]
    if (longest & is_digit[width : width - WORD or None]).any():
        return None
    # Of equally many digits: as text they compare as numbers do.
    words = np.ndarray(len(longest), dtype=f">u{WORD}", buffer=text, strides=(1,))
    largest = words[np.flatnonzero(longest)].max(initial=0).item() >> 8 * (WORD - width)
    if largest > int.from_bytes(str(limit - 1).encode()):
        return None
    return np.add.reduceat(is_comma, first, dtype=np.int32) + 1


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
