"""Random access to stored rows, for the checks that look at a few of them only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from tasks.store.layout import Store
from tasks.store.record import Record, RowRecords, record_path
from tasks.store.shard import AUX, LAST, tensor_name
from tasks.store.tensors import open_shard

NOWHERE = -1


class StoredRows(Mapping[int, tuple[str, Record]]):
    """By row: the record that has it, with the record's file name. Takes four bytes a row of the plan."""

    def __init__(self, store: Store, records: Sequence[Record], rows: int):
        """rows: of the plan. Where several records list a row, the last one counts."""
        self._records = [(record_path(store, record.batch, record.part).name, record) for record in records]
        self._at = np.full(rows, NOWHERE, dtype=np.int32)
        for at, record in enumerate(records):
            numbers = RowRecords.of(record.rows).numbers
            self._at[numbers[(numbers >= 0) & (numbers < rows)]] = at

    def without(self, rows: Iterable[int], records: Iterable[str]) -> "StoredRows":
        """All rows but these and those of these records, by file name."""
        gone, left = set(records), StoredRows.__new__(StoredRows)
        left._records, left._at = self._records, self._at.copy()
        left._at[list(rows)] = NOWHERE
        left._at[np.isin(left._at, [at for at, (name, _) in enumerate(self._records) if name in gone])] = NOWHERE
        return left

    def numbers(self) -> np.ndarray:
        """int64, ascending."""
        return np.flatnonzero(self._at != NOWHERE)

    def __getitem__(self, row: int) -> tuple[str, Record]:
        if not 0 <= row < len(self._at) or self._at[row] == NOWHERE:
            raise KeyError(row)
        return self._records[self._at[row]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers().tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._at != NOWHERE))


class StoredStates:
    """Reads rows of a store's shards."""

    def __init__(self, store: Store):
        self.store = store

    def at(self, record: Record, row: int, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """float32 [states, tokens, hidden]: aux layers in order, then the final state; only these are read."""
        where = torch.as_tensor(tokens, dtype=torch.long)  # of an empty list it would make float32
        with open_shard(self.store.shards / str(record.file)) as shard:
            aux, last = (shard.get_tensor(tensor_name(row, name)) for name in (AUX, LAST))
            chosen, final = aux[where].float(), last[where].float()
        return torch.stack([*chosen.unflatten(-1, (-1, final.shape[-1])).unbind(1), final])

    def whole(self, record: Record, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """aux [tokens, layers * hidden] and last [tokens, hidden], as they are stored."""
        with open_shard(self.store.shards / str(record.file)) as shard:
            aux, last = (shard.get_tensor(tensor_name(row, name)) for name in (AUX, LAST))
        return aux, last
