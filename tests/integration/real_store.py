"""Stores of a real model's states, computed by Transformers: what a right extraction of these rows holds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.config import DatasetConfig
from tasks.dataset.plan import Plan, save_plan
from tasks.dataset.scan import scan_dataset
from tasks.model import Model
from tasks.store.layout import Store, create_store, fingerprint_of
from tasks.store.record import Record, RowRecord, record_path, write_record
from tasks.store.shard import ShardWriter, row_bytes
from tests.unit.helpers import raw, rms_of, write_jsonl


@dataclass(frozen=True)
class Sample:
    """A row and its states: aux [tokens, layers * hidden], last [tokens, hidden]."""

    row: int
    ids: np.ndarray
    mask: np.ndarray
    aux: torch.Tensor
    last: torch.Tensor
    rms: list[float] | None = None
    """As the server would say; None: that of the states."""


Spoil = Callable[[list[Sample]], list[Sample]]


@dataclass(frozen=True)
class RealRun:
    """What a model's extraction should come to; `write` makes a store of it."""

    model: Model
    layers: list[int]
    dtype: str
    samples: list[Sample]

    def write(self, folder: Path, spoil: Spoil = lambda samples: samples, rows_a_shard: int = 5) -> "RealStore":
        """A store of all rows; `spoil` changes what is stored, not the dataset."""
        folder.mkdir(exist_ok=True)
        lines = [{"input_ids": one.ids.tolist(), "loss_mask": one.mask.tolist()} for one in self.samples]
        dataset = write_jsonl(folder / "dataset.jsonl", lines)
        longest = max(len(one.ids) for one in self.samples)
        itemsize = getattr(torch, self.dtype).itemsize
        token_bytes = row_bytes(1, len(self.layers) + 1, self.model.hidden_size, itemsize)
        scan = scan_dataset(
            DatasetConfig(path=dataset, max_seq_len=longest),
            self.model.vocab_size,
            token_bytes,
            rows_a_shard * longest * token_bytes,
        )
        parts: dict[str, Any] = {
            "input_sha256": scan.sha256,
            "model_identity": self.model.identity,
            "layers": self.layers,
            "final_norm": "post",
            "dtype": self.dtype,
            "hidden_size": self.model.hidden_size,
            "vocab_size": self.model.vocab_size,
        }
        config = {
            "name": "real",
            "dataset": {"path": str(dataset)},
            "model": {"path": str(self.model.path)},
            "extraction": {"max_failed_share": 0.0},
        }
        store = Store(folder / "store")
        create_store(store, parts, config)
        store.shards.mkdir()
        save_plan(scan.plan, store.plan)
        real = RealStore(store, dataset, scan.plan, fingerprint_of(parts), self.dtype)
        by_row = {one.row: one for one in spoil(list(self.samples))}
        for batch, numbers in enumerate(scan.plan.rows_by_batch()):
            real.write_part(batch, 0, [by_row[row] for row in numbers if row in by_row])
        return real


@dataclass(frozen=True)
class RealStore:
    store: Store
    dataset: Path
    plan: Plan
    fingerprint: str
    dtype: str

    def record_path(self, row: int) -> Path:
        return record_path(self.store, int(self.plan.batch[row]), 0)

    def write_part(self, batch: int, part: int, samples: list[Sample]) -> Record:
        """Commit a shard."""
        path = self.store.shard(batch, part)
        with ShardWriter(path, len(samples), self.dtype, {"fingerprint": self.fingerprint}) as writer:
            for one in samples:
                writer.add(one.row, raw(one.aux), raw(one.last), one.ids, one.mask)
            written = writer.finish()
        rows = [
            RowRecord(
                one.row, len(one.ids), rms := rms_of(one.aux, one.last) if one.rms is None else one.rms, [0] * len(rms)
            )
            for one in samples
        ]
        record = Record(self.fingerprint, batch, part, path.name, written.bytes, written.checksum, "raw", rows, [], {})
        write_record(self.store, record)
        return record


def only(row: int, change: Callable[[Sample], Sample]) -> Spoil:
    """Spoil one row."""
    return lambda samples: [change(one) if one.row == row else one for one in samples]


def with_states_of(row: int, other: int) -> Spoil:
    """Rows `row` and `other` get each other's states, cut to the shorter, as if requests had been mixed up."""

    def swap(samples: list[Sample]) -> list[Sample]:
        one, two = samples[row], samples[other]
        assert len(one.ids) == len(two.ids)
        samples[row] = replace(one, aux=two.aux, last=two.last)
        samples[other] = replace(two, aux=one.aux, last=one.last)
        return samples

    return swap
