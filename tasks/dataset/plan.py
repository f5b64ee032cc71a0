"""The plan: what happens to every row, and which rows share a shard. Numbers only; rows stay in the file."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.errors import StoreError
from tasks.files import write_parquet
from tasks.storage import Location

MOST_ROWS = 8192  # of a batch: its rows, its shard's header and its record are in memory
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
    id: pa.ChunkedArray
    """utf8: the rows' own names, null where a row has none."""

    def __len__(self) -> int:
        return len(self.offset)

    def same(self, other: "Plan") -> bool:
        """Whether both say the same of every row."""
        mine, others = vars(self), vars(other)
        arrays = (name for name in mine if name not in ("reason", "id"))
        return (
            all(np.array_equal(mine[name], others[name]) for name in arrays)
            and self.reason == other.reason
            and self.id.equals(other.id)
        )

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

    def rows_by_batch(self) -> list[np.ndarray]:
        """The row numbers of each batch, in order; int64 [rows of the batch]."""
        order = np.flatnonzero(self.batch != NO_BATCH)
        bounds = np.searchsorted(self.batch[order], np.arange(1, self.batches))
        return np.split(order, bounds) if len(order) else []

    def counts(self) -> dict[str, int]:
        """Rows by action."""
        return {name: int((self.action == code).sum()) for code, name in enumerate(ACTIONS)}


def assign_batches(
    tokens: np.ndarray, skipped: np.ndarray, token_bytes: int, shard_bytes: int, most_batches: int = MOST_BATCHES
) -> np.ndarray:
    """Group consecutive rows into batches of at most `shard_bytes` (a longer row is alone) and MOST_ROWS; int32 [rows].

    Both limits grow until there are at most `most_batches`.
    """
    most_rows = MOST_ROWS
    rows = np.flatnonzero(~skipped)
    ends = np.cumsum(tokens[rows], dtype=np.int64) * token_bytes
    while True:
        starts, filled = [0], 0
        while len(starts) <= most_batches:
            fitting = int(np.searchsorted(ends, filled + shard_bytes, side="right"))
            start = min(max(fitting, starts[-1] + 1), starts[-1] + most_rows)
            if start >= len(rows):
                batch = np.full(len(tokens), NO_BATCH, dtype=np.int32)
                batch[rows] = np.repeat(np.arange(len(starts)), np.diff([*starts, len(rows)]))
                return batch
            starts.append(start)
            filled = int(ends[start - 1])
        shard_bytes, most_rows = shard_bytes * 5 // 4 + 1, most_rows * 5 // 4 + 1


def save_plan(plan: Plan, path: Location) -> None:
    """Write the plan as Parquet, atomically."""
    table = pa.table(
        {
            "row": np.arange(len(plan), dtype=np.int64),
            "id": plan.id,
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
        with pq.ParquetFile(pa.BufferReader(path.read_bytes())) as file:

            def column(name: str) -> pa.ChunkedArray:
                return file.read([name])[name]  # one at a time: the others take no memory meanwhile

            # As codes at once: a million strings take 60 MB.
            action = pc.index_in(column("action").cast(pa.string()), pa.array(ACTIONS))
            if action.null_count:
                raise KeyError("an unknown action")
            return Plan(
                **{name: column(name).to_numpy() for name in ("offset", "size", "input_tokens", "tokens", "batch")},
                action=action.to_numpy().astype(np.uint8),
                reason=column("reason").to_pylist(),
                id=column("id"),
            )
    except (OSError, KeyError, pa.ArrowException) as error:
        raise StoreError(f"The plan {path} cannot be read ({error}). Restore it, or start a new output.") from error


def give_back_memory() -> None:
    """What Arrow keeps of a plan that is gone, or of reading one: 80 MB of a million rows."""
    pa.default_memory_pool().release_unused()
