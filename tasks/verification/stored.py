"""Random access to stored states, for the checks that look at a few rows only."""

from collections.abc import Sequence

import torch

from tasks.store.layout import Store
from tasks.store.record import Record
from tasks.store.shard import AUX, LAST, tensor_name
from tasks.store.tensors import open_shard


class StoredStates:
    """Reads rows of a store's shards."""

    def __init__(self, store: Store):
        self.store = store

    def at(self, record: Record, row: int, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """float32 [states, tokens, hidden]: aux layers in order, then the final state; only these are read."""
        where = torch.as_tensor(tokens)
        with open_shard(self.store.shards / str(record.file)) as shard:
            aux, last = (shard.get_tensor(tensor_name(row, name)) for name in (AUX, LAST))
            chosen, final = aux[where].float(), last[where].float()
        return torch.stack([*chosen.unflatten(-1, (-1, final.shape[-1])).unbind(1), final])

    def whole(self, record: Record, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """aux [tokens, layers * hidden] and last [tokens, hidden], as they are stored."""
        with open_shard(self.store.shards / str(record.file)) as shard:
            aux, last = (shard.get_tensor(tensor_name(row, name)) for name in (AUX, LAST))
        return aux, last
