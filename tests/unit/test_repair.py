"""Repair: what is wrong goes back into the plan, row by row, and nothing else does."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.dataset.plan import load_plan
from tasks.dataset.rows import read_planned
from tasks.errors import LostLockError, VerificationError
from tasks.store.books import balance
from tasks.store.inspection import inspect_store, remove_remains
from tasks.store.lock import WriterLock
from tasks.store.record import FailedRow, read_record, read_records, write_record
from tasks.verification import read_outcome, verify_store
from tests.unit.helpers import VOCAB, SmallStore, StoredRow, make_store, random_states, rms_of, seed_of, write_part


def repair(small: SmallStore) -> str:
    """Verify and repair a store that does not pass; returns the message."""
    with WriterLock(small.store.lock) as lock, pytest.raises(VerificationError) as refused:
        verify_store(small.store, small.dataset, 0.0, repair=lock)
    return str(refused.value)


def due(small: SmallStore) -> set[int]:
    """The rows that the next `extract` takes."""
    return set(balance(load_plan(small.store.plan), read_records(small.store)).due().tolist())


def extract(small: SmallStore, rows: list[int]) -> None:
    """What a resumed run does: remove what does not count, commit the rows that are due as a further part."""
    remove_remains(small.store, inspect_store(small.store, small.fingerprint))
    for batch in sorted({int(small.plan.batch[row]) for row in rows}):
        numbers = [row for row in rows if small.plan.batch[row] == batch]
        stored = []
        for row in read_planned(small.dataset, small.plan, numbers, VOCAB):
            aux, last = random_states(seed_of(row.input_ids), len(row.input_ids))
            stored.append(StoredRow(row.number, aux, last, row.input_ids, row.loss_mask, rms_of(aux, last)))
        part = next(part for part in range(9) if not small.store.shard(batch, part).with_suffix(".json").exists())
        write_part(small.store, small.fingerprint, batch, part, stored)


def spoil_mask(row: int) -> Callable[[StoredRow], StoredRow]:
    return lambda stored: replace(stored, mask=1 - stored.mask) if stored.row == row else stored


def test_one_bad_row_is_extracted_again_and_its_neighbours_stay(tmp_path: Path) -> None:
    small = make_store(tmp_path, spoil_mask(0))
    shard = small.shard_path(0).read_bytes()
    message = repair(small)
    assert "Repaired: 1 rows are back in the plan, 0 shards were withdrawn as a whole" in message
    assert due(small) == {0}
    books = balance(load_plan(small.store.plan), read_records(small.store))
    assert books.reason(0) == "withdrawn: 000000.safetensors row 0: the loss mask is not the input's"
    assert small.shard_path(0).read_bytes() == shard
    extract(small, [0])
    assert verify_store(small.store, small.dataset, 0.0).rows["done"] == 5
    assert [row.row for record in read_records(small.store) for row in record.rows] == [1, 0, 2, 3, 5, 6]


def test_a_row_that_is_bad_again_is_withdrawn_again(tmp_path: Path) -> None:
    small = make_store(tmp_path, spoil_mask(0))
    repair(small)
    extract(small, [0])
    with small.store.shard(0, 1).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x09")
    assert "1 rows are back in the plan, 1 shards" in repair(small)
    assert due(small) == {0}
    extract(small, [0])
    assert verify_store(small.store, small.dataset, 0.0).rows["done"] == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "half a record"])
def test_a_damaged_shard_goes_as_a_whole(tmp_path: Path, damage: str) -> None:
    small = make_store(tmp_path)
    path = small.shard_path(2)
    if damage == "flip":
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    elif damage == "cut":
        os.truncate(path, 100)
    elif damage == "lose":
        path.unlink()
    else:
        small.record_path(2).write_text(small.record_path(2).read_text()[:100])
    assert "1 shards were withdrawn as a whole" in repair(small)
    assert due(small) == {2, 3}
    extract(small, [2, 3])
    assert verify_store(small.store, small.dataset, 0.0).rows["done"] == 5


def test_what_a_damaged_shards_record_says_of_failed_rows_stays(tmp_path: Path) -> None:
    small = make_store(tmp_path, leave_out=(5,))
    record = read_record(small.record_path(6))
    write_record(small.store, replace(record, failed=[FailedRow(5, "HTTP 400", may_heal=False)]))
    small.shard_path(6).write_bytes(b"")
    repair(small)
    assert due(small) == {6}
    (failed,) = read_record(small.record_path(6)).failed
    assert failed.reason == "HTTP 400"
    assert read_record(small.record_path(6)).file is None
    extract(small, [6])
    assert verify_store(small.store, small.dataset, 0.5).rows["failed"] == 1


def test_a_row_that_is_there_twice_is_withdrawn_once(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    (row,) = read_planned(small.dataset, small.plan, [0], VOCAB)
    aux, last = random_states(5, 3)
    again = StoredRow(0, aux, last, row.input_ids, row.loss_mask, rms_of(aux, last))
    write_part(small.store, small.fingerprint, 0, 1, [again])
    repair(small)
    assert due(small) == set()
    assert verify_store(small.store, small.dataset, 0.0).rows["done"] == 5


def test_what_another_extraction_cannot_mend_is_left_to_a_person(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    write_record(small.store, replace(read_record(small.record_path(0)), fingerprint="0" * 64))
    before = small.record_path(0).read_bytes()
    assert "1 problem(s) need a person" in repair(small)
    assert small.record_path(0).read_bytes() == before
    outcome = read_outcome(small.store)
    assert outcome is not None
    assert outcome.repaired is not None
    assert len(outcome.repaired["left"]) == 1


def test_a_writer_that_lost_its_lock_repairs_nothing(tmp_path: Path) -> None:
    small = make_store(tmp_path, spoil_mask(0))
    before = small.record_path(0).read_bytes()
    with WriterLock(small.store.lock) as lock:
        small.store.lock.unlink()
        with pytest.raises(LostLockError):
            verify_store(small.store, small.dataset, 0.0, repair=lock)
    assert small.record_path(0).read_bytes() == before


def test_withdrawn_rows_are_part_of_what_a_shard_must_hold(tmp_path: Path) -> None:
    small = make_store(tmp_path, spoil_mask(0))
    repair(small)
    record = read_record(small.record_path(0))
    write_record(small.store, replace(record, withdrawn=[]))
    with pytest.raises(VerificationError, match="it and its record differ in 4 tensors"):
        verify_store(small.store, small.dataset, 0.0)


def test_without_repair_nothing_is_changed(tmp_path: Path) -> None:
    small = make_store(tmp_path, spoil_mask(0))
    before = {path.name: path.read_bytes() for path in small.store.shards.iterdir()}
    with pytest.raises(VerificationError, match="`python -m flows verify OUTPUT --repair` puts the rows"):
        verify_store(small.store, small.dataset, 0.0)
    assert {path.name: path.read_bytes() for path in small.store.shards.iterdir()} == before
    assert np.array_equal(load_plan(small.store.plan).tokens, small.plan.tokens)
