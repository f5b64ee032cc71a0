"""One row of the dataset: what a valid sample is, and reading planned rows again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from msgspec import MsgspecError, Raw
from msgspec.json import Decoder

from tasks.dataset.formats import COLUMNS, ID, IDS, MASK, is_parquet
from tasks.dataset.plan import Plan
from tasks.dataset.positions import PositionReader
from tasks.errors import DatasetError, StoreError

FIELDS = Decoder(dict[str, Raw])


@dataclass(frozen=True)
class Row:
    """A valid sample. `number` is its 0-based place in the file; `input_ids` is int32, `loss_mask` uint8 [tokens]."""

    number: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    id: str | None


class InvalidRow(ValueError):
    """A row that is no valid sample. `kind` groups the same fault; the message has the details."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


def name_row(path: Path, number: int) -> str:
    """What people call a row: lines have numbers in an editor, from 1; rows of a table have theirs from 0."""
    return f"row {number}" if is_parquet(path) else f"line {number + 1} (row {number})"


def parse_row(raw: bytes | dict[str, Any], number: int, vocab_size: int) -> Row:
    """Judge one row: a line of JSON, or a table's values by column. Raises InvalidRow.

    A missing loss_mask means that every token counts.
    """
    value = raw if isinstance(raw, dict) else fields_of(raw)
    if IDS not in value:
        raise InvalidRow("no input_ids", f"no input_ids; the line has {', '.join(map(repr, value)) or 'no keys'}")
    if not isinstance(raw, dict):
        value = {name: _parse(value[name]) for name in COLUMNS if name in value}
    ids = _integers(value[IDS], IDS)
    if len(ids) == 0:
        raise InvalidRow("empty row", "input_ids is empty")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise InvalidRow(
            "id outside the vocabulary",
            f"input_ids[{at}] is {ids[at]}, the model's vocabulary has ids 0 to {vocab_size - 1}",
        )
    if value.get(MASK) is None:
        mask = np.ones(len(ids), dtype=np.uint8)
    else:
        mask = _integers(value[MASK], MASK)
        if len(mask) != len(ids):
            raise InvalidRow("loss_mask length", f"loss_mask has {len(mask)} values, input_ids has {len(ids)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise InvalidRow("loss_mask value", "loss_mask holds values other than 0 and 1")
    return Row(number, ids.astype(np.int32), mask.astype(np.uint8), text_of(value.get(ID)))


def fields_of(line: bytes) -> dict[str, Raw]:
    """The fields of a line as they stand there. Raises InvalidRow if the line is no JSON object.

    Of what no row is made of, numbers too large for a float and text that is no UTF-8 are let pass.
    """
    try:
        return FIELDS.decode(line)
    except MsgspecError as error:
        raise InvalidRow("invalid JSON", f"invalid JSON: {error}") from error


def text_of(row_id: Any) -> str | None:
    """A row's id as it is kept."""
    return None if row_id is None else str(row_id)


def read_planned(path: Path, plan: Plan, numbers: Iterable[int], vocab_size: int) -> Iterator[Row]:
    """Read the given rows again, cut as planned. Raises StoreError if the file is no longer the planned one.

    In ascending order it costs least: a packed file has no way back.
    """
    try:
        with PositionReader(path) as reader:
            for number in map(int, numbers):
                raw = reader.read(int(plan.offset[number]), int(plan.size[number]))
                tokens = int(plan.tokens[number])
                try:
                    row = parse_row(raw, number, vocab_size)
                except InvalidRow as error:
                    raise StoreError(
                        f"{path} changed since it was planned: {name_row(path, number)}: {error}."
                    ) from error
                if len(row.input_ids) != plan.input_tokens[number]:
                    raise StoreError(
                        f"{path} changed since it was planned: {name_row(path, number)} has another length."
                    )
                yield Row(number, row.input_ids[:tokens], row.loss_mask[:tokens], row.id)
    except DatasetError as error:
        raise StoreError(f"{path} is no longer as it was planned. {error}") from error


def _integers(value: Any, field: str) -> np.ndarray:
    if not isinstance(value, list):
        raise InvalidRow(f"wrong {field}", f"{field} must be a list of integers, this is {_kind(value)}")
    if not value:
        return np.empty(0, dtype=np.int64)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InvalidRow(f"wrong {field}", f"{field} is not a flat list of integers") from error
    # True and false among integers would become 1 and 0.
    if array.ndim != 1 or array.dtype.kind != "i" or set(map(type, value)) != {int}:
        raise InvalidRow(f"wrong {field}", f"{field} holds values that are no integers")
    return array.astype(np.int64)


def _parse(raw: Raw) -> Any:
    try:
        return orjson.loads(memoryview(raw))
    except orjson.JSONDecodeError as error:
        raise InvalidRow("invalid JSON", f"invalid JSON: {error}") from error


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
