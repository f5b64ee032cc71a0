"""One row of the dataset: what a valid line is, and reading planned rows again by their offset."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tasks.dataset.plan import Plan
from tasks.errors import StoreError


@dataclass(frozen=True)
class Row:
    """A valid sample. `number` is its 0-based line; `input_ids` int32 [tokens], `loss_mask` uint8 [tokens]."""

    number: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    id: str | None


class InvalidRow(ValueError):
    """A line that is no valid sample. `kind` groups the same fault; the message has the details."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


def parse_row(line: bytes, number: int, vocab_size: int) -> Row:
    """Parse and judge one line. A missing loss_mask means that every token counts. Raises InvalidRow."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRow("invalid JSON", f"invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRow("invalid JSON", f"a JSON object was expected, this is {_kind(value)}")
    if "input_ids" not in value:
        raise InvalidRow("no input_ids", f"no input_ids; the line has {', '.join(map(repr, value)) or 'no keys'}")
    ids = _integers(value["input_ids"], "input_ids")
    if len(ids) == 0:
        raise InvalidRow("empty row", "input_ids is empty")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise InvalidRow(
            "id outside the vocabulary",
            f"input_ids[{at}] is {ids[at]}, the model's vocabulary has ids 0 to {vocab_size - 1}",
        )
    if value.get("loss_mask") is None:
        mask = np.ones(len(ids), dtype=np.uint8)
    else:
        mask = _integers(value["loss_mask"], "loss_mask")
        if len(mask) != len(ids):
            raise InvalidRow("loss_mask length", f"loss_mask has {len(mask)} values, input_ids has {len(ids)}")
        if not np.isin(mask, (0, 1)).all():
            raise InvalidRow("loss_mask value", "loss_mask holds values other than 0 and 1")
    row_id = value.get("id")
    return Row(number, ids.astype(np.int32), mask.astype(np.uint8), None if row_id is None else str(row_id))


def read_planned(path: Path, plan: Plan, numbers: list[int], vocab_size: int) -> Iterator[Row]:
    """Read the given rows again, cut as planned. Raises StoreError if the file is no longer the planned one."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise StoreError(f"{path} cannot be read any more: {error.strerror}.") from error
    with file:
        for number in numbers:
            file.seek(int(plan.offset[number]))
            line = file.read(int(plan.size[number]))
            tokens = int(plan.tokens[number])
            try:
                row = parse_row(line, number, vocab_size)
            except InvalidRow as error:
                raise StoreError(f"{path} changed since it was planned: line {number + 1}: {error}.") from error
            if len(row.input_ids) != plan.input_tokens[number]:
                raise StoreError(f"{path} changed since it was planned: line {number + 1} has another length.")
            yield Row(number, row.input_ids[:tokens], row.loss_mask[:tokens], row.id)


def _integers(value: Any, field: str) -> np.ndarray:
    if not isinstance(value, list):
        raise InvalidRow(f"wrong {field}", f"{field} must be a list of integers, this is {_kind(value)}")
    if not value:
        return np.empty(0, dtype=np.int64)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InvalidRow(f"wrong {field}", f"{field} is not a flat list of integers") from error
    # A list of true and false becomes "b"; one true among integers would become 1.
    if array.ndim != 1 or array.dtype.kind != "i" or any(item is True or item is False for item in value):
        raise InvalidRow(f"wrong {field}", f"{field} holds values that are no integers")
    return array.astype(np.int64)


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
