"""The store: shards as safetensors files, commit records, and whose directory it is."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from tasks.errors import OutputError, StoreError
from tasks.files import checksum_of
from tasks.server.dumps import Captured
from tasks.store.inspection import NOTHING, inspect_store, remove_remains
from tasks.store.layout import Store, check_owner, create_store, fingerprint_of, read_extraction
from tasks.store.record import FailedRow, Record, RowRecord, RowRecords, read_records, record_path, write_record
from tasks.store.shard import ShardWriter, row_bytes, tensor_name
from tests.unit.helpers import CAPTURED, HIDDEN, SmallStore, make_store, new_store, random_states, raw

FLOAT32 = Captured(layers=[1, 4], final_norm="post", dtype="float32", hidden_size=HIDDEN)
PARTS = {"input_sha256": "a" * 64, "layers": [1, 4], "dtype": "bfloat16"}


@pytest.fixture
def small(tmp_path: Path) -> SmallStore:
    return make_store(tmp_path)


def write_shard(path: Path, rows: dict[int, int], captured: Captured = CAPTURED) -> dict[str, torch.Tensor]:
    """Write a shard of rows with so many tokens each, in this order; returns what it should hold."""
    wanted: dict[str, torch.Tensor] = {}
    with ShardWriter(path, len(rows), captured.dtype, {"batch": "7"}) as writer:
        for row, tokens in rows.items():
            aux, last = random_states(row, tokens, captured)
            ids, mask = np.arange(tokens, dtype=np.int32) + row % 1000, np.arange(tokens, dtype=np.uint8) % 2
            writer.add(row, raw(aux), raw(last), ids, mask)
            wanted |= {
                tensor_name(row, "aux_hidden_states"): aux,
                tensor_name(row, "last_hidden_state"): last,
                tensor_name(row, "input_ids"): torch.from_numpy(ids),
                tensor_name(row, "loss_mask"): torch.from_numpy(mask),
            }
        written = writer.finish()
    assert written.bytes == path.stat().st_size
    assert written.checksum == xxhash.xxh3_128(path.read_bytes()).hexdigest() == checksum_of(path)
    return wanted


def assert_holds(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """safetensors opens the file and finds the same tensors, bit for bit."""
    found = load_file(path)
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("captured", [CAPTURED, FLOAT32], ids=lambda captured: captured.dtype)
def test_a_shard_opens_as_safetensors_with_every_bit_as_given(tmp_path: Path, captured: Captured) -> None:
    path = tmp_path / "000007.safetensors"
    assert_holds(path, write_shard(path, {3: 5, 4: 1, 9: 12}, captured))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([[0x7FC1, 0x7F80, -0x8000, 0x0001]], dtype=torch.int16)  # a NaN, infinity, -0, a subnormal
    state = bits.view(torch.bfloat16)
    path = tmp_path / "s.safetensors"
    with ShardWriter(path, 1, "bfloat16", {}) as writer:
        writer.add(0, raw(state), raw(state), np.zeros(1, np.int32), np.zeros(1, np.uint8))
        writer.finish()
    assert load_file(path)["r000000.last_hidden_state"].view(torch.int16).tolist() == bits.tolist()


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    assert_holds(path, write_shard(path, {12: 2, 3: 9, 700: 1, 4: 4}))


def test_masks_of_odd_length_leave_every_tensor_loadable(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    assert_holds(path, write_shard(path, {row: 2 * row + 1 for row in range(20)}))


def test_the_header_has_room_for_many_rows_with_large_numbers(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    assert_holds(path, write_shard(path, {10**12 - row: 1 for row in range(3000)}))


def test_a_shard_with_room_for_more_rows_than_it_got_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    aux, last = random_states(1, 3)
    with ShardWriter(path, 50, "bfloat16", {}) as writer:
        writer.add(1, raw(aux), raw(last), np.arange(3, dtype=np.int32), np.ones(3, np.uint8))
        writer.finish()
    assert torch.equal(load_file(path)["r000001.aux_hidden_states"], aux)


def test_nothing_is_left_of_a_shard_that_was_not_finished(tmp_path: Path) -> None:
    aux, last = random_states(1, 3)

    def write_half() -> None:
        with ShardWriter(tmp_path / "s.safetensors", 2, "bfloat16", {}) as writer:
            writer.add(1, raw(aux), raw(last), np.arange(3, dtype=np.int32), np.ones(3, np.uint8))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_shard_has_no_final_name(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with ShardWriter(path, 1, "bfloat16", {}):
        assert not path.exists()
        assert [file.name[0] for file in tmp_path.iterdir()] == ["."]


def test_row_bytes_are_those_that_a_shard_takes(tmp_path: Path) -> None:
    wanted = write_shard(tmp_path / "s.safetensors", {1: 7})
    assert row_bytes(7, 3, HIDDEN, 2) == sum(tensor.nbytes for tensor in wanted.values())


def test_parts_of_a_batch_have_names_of_their_own() -> None:
    store = Store(Path("out"))
    assert store.shard(42, 0) == Path("out/shards/000042.safetensors")
    assert store.shard(42, 3) == Path("out/shards/000042.3.safetensors")
    assert record_path(store, 42, 3) == Path("out/shards/000042.3.json")


def record(batch: int = 3, part: int = 0) -> Record:
    rows = [RowRecord(5, 2, [0.5, 1.25, 2.0], [0, 0, 0]), RowRecord(6, 9, [0.1, 1 / 3, 7e-5], [0, 0, 1])]
    failed = [FailedRow(7, 'refused: "Länge"', may_heal=False), FailedRow(8, "HTTP 503")]
    return Record(
        "f" * 64,
        batch,
        part,
        Store(Path()).shard(batch, part).name,
        77,
        "ab" * 16,
        "raw",
        rows,
        failed,
        {"by": "host:1"},
    )


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    store = new_store(Store(tmp_path), PARTS)
    records = [record(0), record(3), record(3, 1)]
    for one in reversed(records):
        write_record(store, one)
    assert read_records(store) == records
    assert records[0].tokens == 11


def test_rows_that_were_read_are_columns_and_look_like_rows(tmp_path: Path) -> None:
    store = new_store(Store(tmp_path), PARTS)
    write_record(store, record())
    (found,) = read_records(store)
    rows = found.rows
    assert isinstance(rows, RowRecords)
    assert (len(rows), rows[-1], rows[:1], list(rows)) == (2, record().rows[1], record().rows[:1], record().rows)
    assert (rows.numbers.tolist(), rows.tokens.tolist()) == ([5, 6], [2, 9])
    assert rows.rms.tolist() == [[0.5, 1.25, 2.0], [0.1, 1 / 3, 7e-5]]
    assert rows != RowRecords([replace(row, tokens=row.tokens + 1) for row in rows])
    assert rows != RowRecords([*rows, *rows])
    assert found.tokens == 11
    write_record(store, found)
    assert read_records(store) == [found]


def test_a_record_whose_rows_have_different_states_is_damaged(tmp_path: Path) -> None:
    store = new_store(Store(tmp_path), PARTS)
    write_record(store, replace(record(), rows=[RowRecord(5, 2, [0.5], [0]), RowRecord(6, 2, [0.5, 1.0], [0, 0])]))
    with pytest.raises(StoreError, match="is damaged"):
        read_records(store)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"format": "drillcore.shard/2"}',
        '{"format": "drillcore.shard/1", "rows": [], "failed": []}',
        '{"format": "drillcore.shard/1", "rows": [{"row": 1}], "failed": []}',
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    store = new_store(Store(tmp_path), PARTS)
    (store.shards / "000003.json").write_text(text)
    with pytest.raises(StoreError, match=r"000003\.json is damaged.*Delete it to extract its rows again"):
        read_records(store)


def batches_of(small: SmallStore, deep: bool = False) -> list[int]:
    """The batches of the records that count."""
    return [one.batch for one in inspect_store(small.store, small.fingerprint, deep).records]


def files_of(store: Store) -> list[str]:
    return sorted(path.name for path in store.shards.iterdir())


ALL_FILES = [f"00000{batch}.{ending}" for batch in range(3) for ending in ("json", "safetensors")]


@pytest.mark.parametrize("deep", [False, True])
def test_in_a_store_without_faults_every_record_counts(small: SmallStore, deep: bool) -> None:
    found = inspect_store(small.store, small.fingerprint, deep)
    assert [[row.row for row in one.rows] for one in found.records] == [[0, 1], [2, 3], [5, 6]]
    assert (found.damaged, found.unfinished, found.problems(small.store)) == ([], [], [])
    remove_remains(small.store, found)
    assert files_of(small.store) == ALL_FILES


def test_a_record_whose_shard_is_missing_does_not_count_and_is_removed(small: SmallStore) -> None:
    small.store.shard(1, 0).unlink()
    found = inspect_store(small.store, small.fingerprint)
    assert [one.batch for one in found.records] == [0, 2]
    assert found.problems(small.store) == ["000001.safetensors is not what its commit record says"]
    remove_remains(small.store, found)
    assert files_of(small.store) == [name for name in ALL_FILES if "000001" not in name]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_record_whose_shard_has_another_size_does_not_count(small: SmallStore, change: int) -> None:
    path = small.store.shard(1, 0)
    path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    assert batches_of(small) == [0, 2]


def test_a_flipped_byte_is_found_by_a_deep_look_only(small: SmallStore, capfd: pytest.CaptureFixture[str]) -> None:
    path = small.store.shard(1, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert batches_of(small) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    found = inspect_store(small.store, small.fingerprint, deep=True)
    assert ([one.batch for one in found.records], [one.batch for one in found.damaged]) == ([0, 2], [1])
    total = sum(path.stat().st_size for path in small.store.shards.glob("*.safetensors"))
    assert (
        f"checksums  {total / 1024:.1f} KiB of {total / 1024:.1f} KiB read, 1 shards damaged" in capfd.readouterr().err
    )
    remove_remains(small.store, found)
    assert files_of(small.store) == [name for name in ALL_FILES if "000001" not in name]


@pytest.mark.parametrize("size", [0, 1, 300, -2])
def test_a_half_written_record_does_not_count_and_is_removed_with_its_shard(small: SmallStore, size: int) -> None:
    path = small.record_path(2)
    path.write_bytes(path.read_bytes()[:size])
    found = inspect_store(small.store, small.fingerprint)
    assert [one.batch for one in found.records] == [0, 2]
    assert found.problems(small.store) == ["000001.json, a commit record, is half written"]
    with pytest.raises(StoreError, match=r"000001\.json is damaged: it is no JSON"):
        read_records(small.store)
    remove_remains(small.store, found)
    assert files_of(small.store) == [name for name in ALL_FILES if "000001" not in name]


def test_a_record_that_was_preallocated_and_never_filled_does_not_count(small: SmallStore) -> None:
    small.record_path(2).write_bytes(b"\x00" * 200)
    assert batches_of(small) == [0, 2]


def test_a_shard_without_a_record_does_not_count_and_is_removed(small: SmallStore) -> None:
    small.record_path(2).unlink()
    write_shard(small.store.shard(2, 1), {5: 2})
    (small.store.shards / ".000009.safetensors.17.tmp").write_text("x")
    (small.store.root / ".manifest.json.17.tmp").write_text("x")
    found = inspect_store(small.store, small.fingerprint)
    assert [one.batch for one in found.records] == [0, 2]
    remove_remains(small.store, found)
    assert files_of(small.store) == [name for name in ALL_FILES if "000001" not in name]
    assert not (small.store.root / ".manifest.json.17.tmp").exists()


def test_a_record_of_failed_rows_only_counts_without_a_shard(small: SmallStore) -> None:
    write_record(small.store, replace(record(7), file=None, rows=[], fingerprint=small.fingerprint))
    assert batches_of(small) == batches_of(small, deep=True) == [0, 1, 2, 7]


def test_a_record_of_another_extraction_is_an_error(small: SmallStore) -> None:
    with pytest.raises(StoreError, match=r"000000\.json belongs to another extraction .*Move it out of the store"):
        inspect_store(small.store, "0" * 64)


def test_a_record_under_the_name_of_another_batch_is_an_error(small: SmallStore) -> None:
    copy = record_path(small.store, 5, 0)
    copy.write_bytes(small.record_path(0).read_bytes())
    with pytest.raises(
        StoreError, match=r"000005\.json is damaged: it is that of batch 0, part 0, in 000000\.safetensors"
    ):
        inspect_store(small.store, small.fingerprint)


def test_a_record_never_names_a_file_elsewhere(small: SmallStore) -> None:
    write_record(small.store, replace(read_records(small.store)[0], file="../../dataset.jsonl"))
    with pytest.raises(StoreError, match=r"000000\.json is damaged"):
        inspect_store(small.store, small.fingerprint)


def test_two_looks_see_the_same_files_unless_somebody_wrote(small: SmallStore) -> None:
    path = small.store.shard(1, 0)
    path.write_bytes(bytes(path.stat().st_size))
    first, deep = (inspect_store(small.store, small.fingerprint, deep) for deep in (False, True))
    assert first.contents == deep.contents == first.without_rows().contents
    assert first.contents != NOTHING.contents
    write_record(small.store, replace(first.records[0], written={"by": "another run"}))
    assert first.contents != inspect_store(small.store, small.fingerprint).contents


def test_a_new_directory_belongs_to_nobody(tmp_path: Path) -> None:
    assert check_owner(Store(tmp_path / "new"), PARTS) is False
    for name in ("lock.json", "lock.json.0123.new", "lock.json.0123", ".extraction.json.17.tmp"):
        (tmp_path / name).write_text("{}")  # the writer locks before it looks, and may have died in the middle
    assert check_owner(Store(tmp_path), PARTS) is False


def test_the_same_extraction_is_recognised(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    create_store(store, PARTS, {"name": "kept for people"})
    assert check_owner(store, dict(reversed(PARTS.items()))) is True
    found = read_extraction(store)
    assert found is not None
    assert found["fingerprint"] == fingerprint_of(PARTS)
    assert found["config"] == {"name": "kept for people"}


def test_another_extraction_is_refused_naming_each_field_that_differs(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    create_store(store, PARTS, {})
    with pytest.raises(OutputError) as refused:
        check_owner(store, PARTS | {"layers": [2, 4], "max_seq_len": 8})
    message = str(refused.value)
    assert "layers: the output has [1, 4], this run has [2, 4]" in message
    assert "max_seq_len: the output has None, this run has 8" in message
    assert "dtype" not in message
    assert "input_sha256" not in message


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(OutputError, match="is not empty and holds no extraction"):
        check_owner(Store(tmp_path), PARTS)


def test_an_extraction_json_changed_by_hand_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    create_store(store, PARTS, {})
    value = json.loads(store.extraction.read_text())
    value["parts"]["dtype"] = "float32"
    store.extraction.write_text(json.dumps(value))
    with pytest.raises(StoreError, match="was changed by hand"):
        check_owner(store, PARTS | {"dtype": "float32"})


def test_an_extraction_json_that_is_no_json_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    create_store(store, PARTS, {})
    store.extraction.write_text(store.extraction.read_text()[:40])
    with pytest.raises(StoreError, match="is damaged"):
        check_owner(store, PARTS)


def test_a_record_that_is_null_is_named(tmp_path: Path) -> None:
    store = new_store(Store(tmp_path), PARTS)
    (store.shards / "000003.json").write_text("null")
    with pytest.raises(StoreError, match="is damaged"):
        read_records(store)


@pytest.mark.parametrize("text", ["{}", "[]", '{"parts": {}}'])
def test_an_extraction_json_without_its_fields_is_refused(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    store.extraction.write_text(text)
    with pytest.raises(StoreError):
        check_owner(store, PARTS)
