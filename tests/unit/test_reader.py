"""The reader that trainers use: every value as it was stored, at any row, in any process; nothing unsound is opened."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tasks.errors import StoreError
from tasks.store.reader import HiddenStates, Sample
from tests.unit.helpers import CAPTURED, HIDDEN, ROOT, SmallStore, StoredRow, random_states, seed_of, write_part
from tests.unit.verified import make_verified, mark_verified

ROWS = [0, 1, 2, 3, 5, 6]  # row 4 is no JSON and skipped
TOKENS = [3, 5, 6, 4, 2, 6]


@pytest.fixture
def small(tmp_path: Path) -> SmallStore:
    return make_verified(tmp_path)


def check(sample: Sample, tokens: int) -> None:
    """Each value is the one that make_store wrote."""
    ids = np.array([sample.row * 10 + at for at in range(tokens)], dtype=np.int32)
    aux, last = random_states(seed_of(ids), tokens)
    assert sample.input_ids.tolist() == ids.tolist()
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (torch.int32, torch.uint8)
    assert torch.equal(sample.aux_hidden_states, aux)
    assert torch.equal(sample.last_hidden_state, last)
    for place, layer in enumerate(CAPTURED.layers):
        assert torch.equal(sample.layer(layer), aux[:, place * HIDDEN : (place + 1) * HIDDEN])


def test_rows_come_in_order_with_every_value_as_stored(small: SmallStore) -> None:
    states = HiddenStates.open(small.store.root)
    assert (len(states), states.rows.tolist(), states.tokens.tolist()) == (6, ROWS, TOKENS)
    assert (states.layers, states.final_norm, states.dtype) == ((1, 4), "post", torch.bfloat16)
    for sample, tokens in zip(states, TOKENS, strict=True):
        check(sample, tokens)
    assert states[2].loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert states[-1].row == 6


def test_any_row_is_found_by_its_number(small: SmallStore) -> None:
    states = HiddenStates.open(small.store.root)
    for row, tokens in reversed([*zip(ROWS, TOKENS, strict=True)]):
        check(states.row(row), tokens)
    for row in (4, 7, -1):
        with pytest.raises(KeyError, match=f"row {row} is not in"):
            states.row(row)
    with pytest.raises(IndexError):
        states[6]
    with pytest.raises(KeyError, match="layer 2 is not stored; 1, 4 are"):
        states[0].layer(2)


def test_nothing_is_copied_and_nothing_can_be_changed(small: SmallStore) -> None:
    states = HiddenStates.open(small.store.root)
    before = small.shard_path(0).read_bytes()
    one, other = states[0], states[0]
    assert one.last_hidden_state.data_ptr() == other.last_hidden_state.data_ptr()
    one.last_hidden_state.zero_()
    assert small.shard_path(0).read_bytes() == before
    check(HiddenStates.open(small.store.root)[0], 3)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_the_same_in_any_order(small: SmallStore, context: str) -> None:
    states = HiddenStates.open(small.store.root)
    check(states[0], 3)  # a shard is mapped already when the workers begin
    loader = DataLoader(states, batch_size=None, shuffle=True, num_workers=2, multiprocessing_context=context)
    samples = {sample.row: sample for sample in loader}
    assert sorted(samples) == ROWS
    for row, tokens in zip(ROWS, TOKENS, strict=True):
        check(samples[row], tokens)


def test_it_goes_to_another_process_without_its_files(small: SmallStore) -> None:
    states = HiddenStates.open(small.store.root)
    size = len(pickle.dumps(states))
    check(states[0], 3)
    assert len(pickle.dumps(states)) == size
    check(pickle.loads(pickle.dumps(states))[1], 5)  # noqa: S301


def test_shards_tell_which_rows_lie_together(small: SmallStore) -> None:
    assert [shard.tolist() for shard in HiddenStates.open(small.store.root).shards] == [[0, 1], [2, 3], [4, 5]]


def test_the_index_is_kept_and_made_anew_when_records_change(small: SmallStore) -> None:
    HiddenStates.open(small.store.root)
    kept = small.store.index.read_bytes()
    HiddenStates.open(small.store.root)
    assert small.store.index.read_bytes() == kept
    ids = np.array([50, 51], dtype=np.int32)
    aux, last = random_states(9, 2)
    small.record_path(6).unlink()
    write_part(small.store, small.fingerprint, 2, 0, [StoredRow(5, aux, last, ids, np.ones(2, np.uint8), [1.0] * 3)])
    with pytest.raises(StoreError, match="changed since it was verified"):
        HiddenStates.open(small.store.root)
    states = HiddenStates.open(mark_verified(small).store.root)
    assert states.rows.tolist() == ROWS[:-1]
    assert torch.equal(states.row(5).last_hidden_state, last)


def test_a_damaged_index_is_made_anew(small: SmallStore) -> None:
    HiddenStates.open(small.store.root)
    small.store.index.write_bytes(small.store.index.read_bytes()[:40])
    check(HiddenStates.open(small.store.root)[0], 3)


def test_a_store_that_cannot_be_written_to_is_read(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr("tasks.store.index.write_atomic", refuse)
    check(HiddenStates.open(small.store.root)[0], 3)
    assert not small.store.index.exists()


def test_a_store_that_is_not_verified_is_refused_unless_asked(small: SmallStore) -> None:
    small.store.manifest.unlink()
    with pytest.raises(StoreError, match="not complete, or not verified"):
        HiddenStates.open(small.store.root)
    states = HiddenStates.open(small.store.root, incomplete=True)
    assert (states.rows.tolist(), states.left_out) == (ROWS, [])


def test_a_damaged_store_is_refused_unless_asked(small: SmallStore) -> None:
    with small.shard_path(2).open("ab") as file:
        file.write(b"x")
    small.shard_path(6).unlink()
    with pytest.raises(StoreError, match=r"is damaged: 000001.safetensors has \d+ bytes, not \d+"):
        HiddenStates.open(small.store.root)
    states = HiddenStates.open(small.store.root, incomplete=True)
    assert states.rows.tolist() == [0, 1]
    assert [line.split(" ", 1)[0] for line in states.left_out] == ["000001.safetensors", "000002.safetensors"]


def test_a_half_written_record_counts_only_as_left_out(small: SmallStore) -> None:
    small.record_path(0).write_text('{"format": "dril')
    with pytest.raises(StoreError, match="half written"):
        HiddenStates.open(small.store.root)
    states = HiddenStates.open(small.store.root, incomplete=True)
    assert states.rows.tolist() == ROWS[2:]
    assert states.left_out == ["000000.json is half written"]


def test_a_shard_with_other_tensors_is_named(small: SmallStore) -> None:
    data = small.shard_path(0).read_bytes()
    small.shard_path(0).write_bytes(data.replace(b"r000000.aux_hidden_states", b"r000009.aux_hidden_states"))
    with pytest.raises(StoreError, match=r"has no sound r000000\.aux_hidden_states"):
        HiddenStates.open(small.store.root)[0]


def test_no_store_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no hidden states"):
        HiddenStates.open(tmp_path)


def test_another_extractions_record_is_refused(small: SmallStore) -> None:
    path = small.record_path(0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "0" * 64}))
    mark_verified(small)
    with pytest.raises(StoreError, match="shards of another extraction"):
        HiddenStates.open(small.store.root)


def test_a_copy_elsewhere_is_read(small: SmallStore, tmp_path: Path) -> None:
    HiddenStates.open(small.store.root)
    copy = shutil.copytree(small.store.root, tmp_path / "copy", copy_function=shutil.copyfile)
    check(HiddenStates.open(copy)[0], 3)


def test_a_trainer_needs_torch_numpy_and_safetensors_only(small: SmallStore) -> None:
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tasks.store.reader import HiddenStates\n"
        f"HiddenStates.open({str(small.store.root)!r})[0]\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = {"pydantic", "yaml", "pyarrow", "xxhash", "prefect", "mlflow", "orjson", "msgspec", "psutil", "httpx"}
    assert not (ours | {"boto3", "botocore", "tenacity", "urllib3"}) & set(done.stdout.split())
