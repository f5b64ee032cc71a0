"""A store's batches split into partitions, each of which one flow run of a fleet extracts.

The split lies in the store, made once by whoever starts a fleet, under the store's lock. Its `fleet`, a name made up
for it, is what every run of a partition must show: one that was left over from an earlier split writes nothing.
"""

import json
import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tasks.dataset.plan import MOST_BATCHES
from tasks.errors import OutputError, StoreError
from tasks.files import write_json
from tasks.store.layout import Store

FILE = "fleet.json"  # in the store's logs


@dataclass(frozen=True)
class Partition:
    """Consecutive batches of the plan."""

    number: int
    """From 0."""
    first: int
    end: int
    """One past the last."""

    @property
    def batches(self) -> range:
        return range(self.first, self.end)


@dataclass(frozen=True)
class Split:
    """All batches of a plan with rows to extract, in partitions."""

    fleet: str
    at: str
    """When it was made, ISO 8601."""
    there: dict[str, int]
    """Rows, tokens and bytes that the store had then."""
    partitions: list[Partition]


def split_batches(tokens: np.ndarray, count: int, most: int = MOST_BATCHES) -> list[Partition]:
    """Partitions with about as many tokens each, of at most `most` batches with something to do.

    tokens: int64 [batches], tokens that are to be extracted, 0 where nothing is. Every batch with tokens is in exactly
    one partition; none is without. There are more than `count` where `most` asks for it, fewer where batches are.
    """
    due = np.flatnonzero(tokens)
    if not len(due):
        return []
    ends = np.cumsum(tokens[due], dtype=np.int64)
    # The batch in whose middle a border falls goes to the partition that has the larger part of it.
    borders = ends[-1] * np.arange(1, count) / count
    cuts = np.searchsorted(ends - tokens[due] / 2, borders, side="left").tolist()
    pieces: list[np.ndarray] = []
    for piece in np.split(due, cuts):
        if len(piece):
            pieces += np.array_split(piece, -(-len(piece) // most))
    return [Partition(number, int(piece[0]), int(piece[-1]) + 1) for number, piece in enumerate(pieces)]


def new_split(partitions: list[Partition], there: dict[str, int]) -> Split:
    """A split with a name of its own."""
    return Split(secrets.token_hex(8), datetime.now(UTC).isoformat(timespec="seconds"), there, partitions)


def save_split(store: Store, split: Split) -> None:
    """The store's lock must be held."""
    write_json(store.logs / FILE, asdict(split))


def read_split(store: Store) -> Split | None:
    """The store's split; None if no fleet was started on it. Raises StoreError if it is damaged."""
    try:
        value: dict[str, Any] = json.loads((store.logs / FILE).read_bytes())
        return Split(**(value | {"partitions": [Partition(**one) for one in value["partitions"]]}))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{store.logs / FILE} is damaged: {error!r}. Delete it, and start the fleet again: no row is lost by that."
        ) from error


def find_partition(store: Store, fleet: str, number: int) -> Partition:
    """A partition of the split that counts now. Raises OutputError if `fleet` is that of another one."""
    split = read_split(store)
    if split is None or split.fleet != fleet:
        raise OutputError(
            f"{store.root} was split anew after this run was asked for ({split.fleet if split else 'no fleet'} now, "
            f"{fleet} then). Nothing is to be done: the fleet that runs now has runs of its own."
        )
    if not 0 <= number < len(split.partitions):
        raise OutputError(f"{store.root} has {len(split.partitions)} partitions, from 0 on; there is no {number}.")
    return split.partitions[number]
