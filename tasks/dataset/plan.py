"""The plan: what happens to every row, and which rows share a shard. Numbers only; rows stay in the file."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import StoreError
from tasks.files import write_parquet
from tasks.storage import Location

MOST_BATCHES = 2000  # mapped tasks of one flow run that a self-hosted Prefect server takes without losing records
EXTRACT, TRUNCATE, SKIP = "extract", "truncate", "skip"
ACTIONS = (EXTRACT, TRUNCATE, SKIP)
NO_BATCH = -1


@dataclass(frozen=True)
class Plan:
    """One entry a row of the dataset, in order. All arrays are [rows]."""

    offset: np.ndarray
    """int64: byte at which the line starts, in a packed file counted after unpacking; in Parquet the row's number."""
    size: np.ndarray
    """int64: bytes of the line; 0 in Parquet."""
    input_tokens: np.ndarray
    """int32: tokens in the file (0 where it holds no sample)."""
    tokens: np.ndarray
    """int32: tokens to extract (0 where skipped)."""
    action: np.ndarray
    """uint8: index into ACTIONS."""
    batch: np.ndarray
    """int32: batch number, NO_BATCH where skipped."""
    reason: list[str]
    """Why a row is cut or skipped; empty otherwise."""
    id: list[str | None]

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def batches(self) -> int:
        return int(self.batch.max(initial=NO_BATCH)) + 1

    @property
    def total_tokens(self) -> int:
        return int(self.tokens.sum(dtype=np.int64))

    @property
    def longest(self) -> int:
        """Tokens of the longest row to extract."""
        return int(self.tokens.max(initial=0))

    def rows_by_batch(self) -> list[list[int]]:
        """The row numbers of each batch, in order."""
        order = np.flatnonzero(self.batch != NO_BATCH)
        bounds = np.searchsorted(self.batch[order], np.arange(1, self.batches))
        return [part.tolist() for part in np.split(order, bounds)] if len(order) else []

    def counts(self) -> dict[str, int]:
        """Rows by action."""
        return {name: int((self.action == code).sum()) for code, name in enumerate(ACTIONS)}


def assign_batches(tokens: np.ndarray, skipped: np.ndarray, token_bytes: int, shard_bytes: int) -> np.ndarray:
    """Group consecutive rows into batches of at most `shard_bytes` (a longer row is alone); int32 [rows].

    `shard_bytes` grows until there are at most MOST_BATCHES.
    """
    rows = np.flatnonzero(~skipped)
    ends = np.cumsum(tokens[rows], dtype=np.int64) * token_bytes
    while True:
        starts, filled = [0], 0
        while len(starts) <= MOST_BATCHES:
            start = max(int(np.searchsorted(ends, filled + shard_bytes, side="right")), starts[-1] + 1)
            if start >= len(rows):
                batch = np.full(len(tokens), NO_BATCH, dtype=np.int32)
                batch[rows] = np.repeat(np.arange(len(starts)), np.diff([*starts, len(rows)]))
                return batch
            starts.append(start)
            filled = int(ends[start - 1])
        shard_bytes = shard_bytes * 5 // 4 + 1


def save_plan(plan: Plan, path: Location) -> None:
    """Write the plan as Parquet, atomically."""
    table = pa.table(
        {
            "row": np.arange(len(plan), dtype=np.int64),
            "id": pa.array(plan.id, pa.string()),
            "offset": plan.offset,
            "size": plan.size,
            "input_tokens": plan.input_tokens,
            "tokens": plan.tokens,
            "action": pa.DictionaryArray.from_arrays(plan.action.astype(np.int32), list(ACTIONS)),
            "batch": plan.batch,
            "reason": pa.array(plan.reason, pa.string()),
        }
    )
    write_parquet(path, table)


def load_plan(path: Location) -> Plan:
    """Read a plan that `save_plan` wrote. Raises StoreError if it cannot be read."""
    try:
        table = pq.read_table(pa.BufferReader(path.read_bytes()))
        codes = {name: code for code, name in enumerate(ACTIONS)}
        return Plan(
            **{name: table[name].to_numpy() for name in ("offset", "size", "input_tokens", "tokens", "batch")},
            action=np.array([codes[name] for name in table["action"].to_pylist()], dtype=np.uint8),
            reason=table["reason"].to_pylist(),
            id=table["id"].to_pylist(),
        )
    except (OSError, KeyError, pa.ArrowException) as error:
        raise StoreError(f"The plan {path} cannot be read ({error}). Restore it, or start a new output.") from error
