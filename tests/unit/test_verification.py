"""Verification: a whole and right store gets its manifest, and every way to spoil one is caught by name."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tasks.config import ExtractionConfig, VerifyConfig
from tasks.errors import DatasetError, DrillcoreError, ExtractionError, StoreError, VerificationError
from tasks.extraction.engine import PrefillEngine
from tasks.files import sha256_of
from tasks.server.launch import AttachedServer
from tasks.store.layout import Store
from tasks.store.record import FailedRow, read_record, record_path, write_record
from tasks.verification import Verified, comparison_due, read_manifest, verify_store
from tests.unit.helpers import (
    CAPTURED,
    HIDDEN,
    FakeSGLang,
    Request,
    SmallStore,
    StoredRow,
    make_store,
    random_states,
    rms_of,
    status,
    wait_for,
    write_part,
)


def verify(small: SmallStore, max_failed_share: float = 0.0) -> Verified:
    return verify_store(small.store, small.dataset, max_failed_share)


def refusal(small: SmallStore, error: type[DrillcoreError] = VerificationError) -> str:
    """The message with which verification refuses the store; the manifest of an earlier one must go."""
    small.store.manifest.write_text("{}")
    with pytest.raises(error) as refused:
        verify(small)
    assert not small.store.manifest.exists()
    return str(refused.value)


def only(row: int, **changes: Callable[[StoredRow], object]) -> Callable[[StoredRow], StoredRow]:
    """Spoil one row: each field named is replaced by what the function makes of the row."""
    return lambda stored: (
        replace(stored, **{name: change(stored) for name, change in changes.items()}) if stored.row == row else stored
    )


def test_a_right_store_passes_and_gets_ledger_and_manifest(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    verified = verify(small)
    assert verified.rows == {"done": 5, "truncated": 1, "skipped": 1, "failed": 0}
    assert verified.tokens == 3 + 5 + 6 + 4 + 2 + 6
    assert verified.shards == 3
    assert verified.bytes == sum(path.stat().st_size for path in small.store.shards.glob("*.safetensors"))
    assert verified.digest == sha256_of(small.store.manifest)
    manifest = read_manifest(small.store)
    assert manifest["fingerprint"] == small.fingerprint
    assert manifest["rows"] == 7
    assert manifest["rows_by_state"] == verified.rows
    assert manifest["tokens"] == verified.tokens
    assert manifest["ledger_sha256"] == sha256_of(small.store.ledger)
    assert manifest["plan_sha256"] == sha256_of(small.store.plan)


def test_the_ledger_has_a_line_for_every_row(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    verify(small)
    ledger = pq.read_table(small.store.ledger).to_pydict()
    assert ledger["row"] == list(range(7))
    assert ledger["state"] == ["done", "done", "truncated", "done", "skipped", "done", "done"]
    assert ledger["tokens"] == [3, 5, 6, 4, 0, 2, 6]
    assert ledger["input_tokens"] == [3, 5, 9, 4, 0, 2, 6]
    first, second, third = (f"{batch:06d}.safetensors" for batch in range(3))
    assert ledger["shard"] == [first, first, second, second, None, third, third]
    assert ledger["id"] == ["sample-0", "sample-1", "sample-2", "sample-3", None, "sample-5", "sample-6"]
    assert ledger["reason"][2] == "9 tokens, max_seq_len is 6"
    assert "invalid JSON" in ledger["reason"][4]
    assert [ledger["reason"][row] for row in (0, 1, 3, 5, 6)] == [""] * 5


def test_the_same_store_always_has_the_same_digest(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    digest = verify(small).digest
    manifest, ledger = small.store.manifest.read_bytes(), small.store.ledger.read_bytes()
    assert verify(small).digest == digest
    assert small.store.manifest.read_bytes() == manifest
    assert small.store.ledger.read_bytes() == ledger


def test_another_state_gives_another_digest(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    changed = only(0, last=lambda stored: -stored.last)
    assert verify(make_store(one)).digest != verify(make_store(other, changed)).digest


@pytest.mark.parametrize("at", [20, -1, 0.5], ids=["header", "last byte", "middle"])
def test_a_flipped_byte_is_caught(tmp_path: Path, at: float) -> None:
    small = make_store(tmp_path)
    path = small.shard_path(2)
    data = bytearray(path.read_bytes())
    data[int(at * len(data)) if isinstance(at, float) else at] ^= 1
    path.write_bytes(data)
    assert "000001.safetensors is damaged: checksum" in refusal(small)


def test_a_truncated_shard_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    size = small.shard_path(2).stat().st_size
    os.truncate(small.shard_path(2), size - 1)
    assert f"000001.safetensors has {size - 1} bytes, the record says {size}" in refusal(small)


def test_a_missing_shard_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    small.shard_path(2).unlink()
    assert "000001.json: its shard 000001.safetensors is missing" in refusal(small)


def test_a_shard_without_a_record_does_not_exist(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    small.record_path(2).unlink()
    message = refusal(small, ExtractionError)
    assert "0 of 7 rows failed" in message
    assert "2 were not extracted yet" in message
    assert "row 2: not extracted yet" in message
    assert "row 3: not extracted yet" in message


def test_a_row_in_two_shards_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    ids = np.arange(3, dtype=np.int32)
    aux, last = random_states(5, 3)
    again = StoredRow(0, aux, last, ids, np.array([0, 1, 1], dtype=np.uint8), rms_of(aux, last))
    write_part(small.store, small.fingerprint, 0, 1, [again])
    assert "row 0 is in the books twice, again in record 000000.1" in refusal(small)


def test_a_missing_row_is_named_with_its_reason(tmp_path: Path) -> None:
    small = make_store(tmp_path, leave_out=(5,))
    record = read_record(small.record_path(6))
    write_record(small.store, replace(record, failed=[FailedRow(5, "the server refused the row")]))
    message = refusal(small, ExtractionError)
    assert "1 of 7 rows failed (extraction.max_failed_share allows 0.00%), 0 were not extracted yet" in message
    assert "row 5: the server refused the row" in message
    assert not small.store.ledger.exists()


def test_a_failed_row_passes_where_so_many_may_fail(tmp_path: Path) -> None:
    small = make_store(tmp_path, leave_out=(5,))
    record = read_record(small.record_path(6))
    write_record(small.store, replace(record, failed=[FailedRow(5, "the server refused the row")]))
    assert verify(small, max_failed_share=1 / 7).rows == {"done": 4, "truncated": 1, "skipped": 1, "failed": 1}
    ledger = pq.read_table(small.store.ledger).to_pydict()
    assert (ledger["state"][5], ledger["reason"][5]) == ("failed", "the server refused the row")


def test_a_row_that_was_never_tried_is_not_one_that_may_fail(tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match="1 were not extracted yet"):
        verify(make_store(tmp_path, leave_out=(5,)), max_failed_share=0.9)


def test_a_store_of_which_every_row_failed_never_passes(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    for batch, rows in enumerate(small.plan.rows_by_batch()):
        record = read_record(record_path(small.store, batch, 0))
        failed = [FailedRow(row, "HTTP 503") for row in rows.tolist()]
        write_record(small.store, replace(record, file=None, bytes=0, rows=[], failed=failed))
    with pytest.raises(ExtractionError, match="6 of 7 rows failed"):
        verify(small, max_failed_share=0.99)


def test_a_store_without_any_row_never_passes(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    for path in small.store.shards.iterdir():
        path.unlink()
    with pytest.raises(ExtractionError, match="6 were not extracted yet"):
        verify(small, max_failed_share=0.99)


def test_a_row_that_an_earlier_part_failed_and_a_later_one_has_counts_as_done(tmp_path: Path) -> None:
    small = make_store(tmp_path, leave_out=(0,))
    record = read_record(small.record_path(1))
    write_record(small.store, replace(record, failed=[FailedRow(0, "HTTP 503")]))
    ids = np.arange(3, dtype=np.int32)
    aux, last = random_states(5, 3)
    stored = StoredRow(0, aux, last, ids, np.array([0, 1, 1], dtype=np.uint8), rms_of(aux, last))
    write_part(small.store, small.fingerprint, 0, 1, [stored])
    assert verify(small).rows["failed"] == 0
    ledger = pq.read_table(small.store.ledger).to_pydict()
    assert ledger["shard"][0] == "000000.1.safetensors"
    assert ledger["reason"][0] == ""


def test_a_row_that_one_part_has_and_a_later_one_failed_counts_as_done(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    record = read_record(small.record_path(0))
    again = replace(record, part=1, file=None, bytes=0, rows=[], failed=[FailedRow(0, "HTTP 503")])
    write_record(small.store, again)
    assert verify(small).rows == {"done": 5, "truncated": 1, "skipped": 1, "failed": 0}


def test_the_ids_of_a_neighbour_are_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path, only(6, ids=lambda stored: stored.ids + 1))
    assert "000002.safetensors row 6: the token ids are not the input's" in refusal(small)


def test_a_loss_mask_off_by_one_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path, only(1, mask=lambda stored: np.roll(stored.mask, 1)))
    assert "000000.safetensors row 1: the loss mask is not the input's" in refusal(small)


def test_states_that_are_not_finite_are_caught(tmp_path: Path) -> None:
    def spoil(stored: StoredRow) -> torch.Tensor:
        aux = stored.aux.clone()
        aux[2, HIDDEN + 1] = float("nan")
        return aux

    small = make_store(tmp_path, only(3, aux=spoil))
    assert "000001.safetensors row 3: layer 4 is not finite at token 2" in refusal(small)


def test_a_state_that_is_all_zero_is_caught(tmp_path: Path) -> None:
    def spoil(stored: StoredRow) -> torch.Tensor:
        last = stored.last.clone()
        last[1] = 0
        return last

    small = make_store(tmp_path, only(3, last=spoil))
    assert "000001.safetensors row 3: final is all zero at token 1" in refusal(small)


def test_states_that_are_not_those_the_server_measured_are_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path, only(0, rms=lambda stored: [stored.rms[0], 1.02 * stored.rms[1], stored.rms[2]]))
    assert "000000.safetensors row 0: layer 4 has RMS" in refusal(small)


def test_layers_in_another_order_are_caught_by_their_rms(tmp_path: Path) -> None:
    scaled = only(0, aux=lambda stored: torch.cat([stored.aux[:, HIDDEN:] * 8, stored.aux[:, :HIDDEN]], dim=-1))
    assert "000000.safetensors row 0: layer 1 has RMS" in refusal(make_store(tmp_path, scaled))


def test_fewer_states_than_tokens_are_caught(tmp_path: Path) -> None:
    shorter = only(6, aux=lambda stored: stored.aux[:-1], last=lambda stored: stored.last[:-1])
    assert "row 6: states of shape (5, 8) and (5, 4) for 6 tokens" in refusal(make_store(tmp_path, shorter))


def test_a_row_that_was_cut_further_than_planned_is_caught(tmp_path: Path) -> None:
    shorter = only(2, **{name: lambda stored, name=name: getattr(stored, name)[:5] for name in ("aux", "ids", "mask")})
    assert "row 2: the record says 5 tokens, the plan 6" in refusal(make_store(tmp_path, shorter))


def test_a_record_that_names_other_rows_than_its_shard_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    record = read_record(small.record_path(0))
    write_record(small.store, replace(record, rows=record.rows[:1]))
    assert "its record says: it and its record differ in 4 tensors, as r000001.aux_hidden_states" in refusal(small)


@pytest.mark.parametrize("row", [5, 7, -1], ids=["another batch's", "beyond the plan", "negative"])
def test_rows_that_the_plan_does_not_have_there_are_caught(tmp_path: Path, row: int) -> None:
    small = make_store(tmp_path, leave_out=(5,))
    record = read_record(small.record_path(0))
    write_record(small.store, replace(record, rows=[replace(record.rows[0], row=row), record.rows[1]]))
    assert f"record 000000.0 lists rows that the plan does not have in that batch: [{row}]" in refusal(small)


def test_a_record_of_another_extraction_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    write_record(small.store, replace(read_record(small.record_path(0)), fingerprint="0" * 64))
    assert "000000.json belongs to another extraction (000000000000...)" in refusal(small)


def test_a_changed_dataset_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    small.dataset.write_text(small.dataset.read_text().replace("sample-0", "sample-9"))
    assert "dataset.jsonl is another file than was extracted: its sha256 is" in refusal(small)


def test_a_missing_dataset_is_named(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    small.dataset.unlink()
    with pytest.raises(DatasetError, match=r"dataset\.jsonl does not exist; its ids and masks are needed"):
        verify(small)


def test_a_directory_that_holds_no_extraction_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no extraction"):
        verify_store(Store(tmp_path), tmp_path / "dataset.jsonl", 0.0)


def test_every_problem_is_listed_and_what_to_do(tmp_path: Path) -> None:
    small = make_store(tmp_path, lambda stored: replace(stored, ids=stored.ids + 1))
    message = refusal(small)
    assert "6 problem(s)" in message
    assert [row for row in range(7) if f"row {row}: the token ids" in message] == [0, 1, 2, 3, 5, 6]
    assert "`python -m flows verify OUTPUT --repair` puts the rows concerned back into the plan" in message


def test_reading_no_manifest_says_that_the_store_is_not_verified(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="it is not verified"):
        read_manifest(Store(tmp_path))


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSGLang]:
    with FakeSGLang(tmp_path / "staging") as fake:
        yield fake


def verify_again(small: SmallStore, fake: FakeSGLang, config: VerifyConfig) -> Verified:
    """Verify with a second extraction, for a server whose prompts gave the same states each time."""
    server = AttachedServer(fake.url, fake.staging)
    with PrefillEngine([server], CAPTURED, ExtractionConfig(attempts=1), 1 << 20) as engine:
        return verify_store(small.store, small.dataset, 0.0, config, engine)


def test_rows_that_come_out_the_same_again_pass(tmp_path: Path, fake: FakeSGLang) -> None:
    verified = verify_again(make_store(tmp_path), fake, VerifyConfig(reextract_rows=4, reextract_share=0))
    assert (verified.reextracted, verified.largest_difference) == (4, 0.0)
    assert len(fake.rids) == 8  # among others, and alone
    assert list(fake.staging.iterdir()) == []


def test_a_comparison_counts_for_as_long_as_the_records_are_the_same(tmp_path: Path, fake: FakeSGLang) -> None:
    small, config = make_store(tmp_path), VerifyConfig(reextract_rows=4, reextract_share=0)
    assert comparison_due(small.store, config)
    verify_again(small, fake, config)
    assert not comparison_due(small.store, config)
    assert (verify(small).reextracted, len(fake.rids)) == (4, 8)
    write_record(small.store, replace(read_record(small.record_path(0)), written={"by": "another run"}))
    assert comparison_due(small.store, config)
    assert verify(small).reextracted == 0


def test_no_comparison_is_due_where_none_is_asked_for(tmp_path: Path) -> None:
    assert not comparison_due(make_store(tmp_path).store, VerifyConfig(reextract_rows=0, reextract_share=0))


def test_a_manifest_does_not_count_after_its_records_changed(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    verify(small)
    assert read_manifest(small.store)["shards"] == 3
    write_record(small.store, replace(read_record(small.record_path(0)), written={"by": "another run"}))
    with pytest.raises(StoreError, match="changed since it was verified"):
        read_manifest(small.store)


def test_all_rows_are_extracted_again_where_the_share_is_one(tmp_path: Path, fake: FakeSGLang) -> None:
    verified = verify_again(make_store(tmp_path), fake, VerifyConfig(reextract_rows=0, reextract_share=1))
    assert verified.reextracted == 6
    assert sorted(int(rid.split("-")[2]) for rid in fake.rids) == sorted([0, 1, 2, 3, 5, 6] * 2)


def test_states_that_differ_when_extracted_again_are_caught(tmp_path: Path, fake: FakeSGLang) -> None:
    def other_states(request: Request) -> tuple[int, object]:
        def change(metadata: dict, tensors: dict) -> None:
            tensors["last_hidden_state"] = -tensors["last_hidden_state"]

        request.write_dump(change)
        return 200, {}

    fake.answers[3] = [other_states]
    small = make_store(tmp_path)
    small.store.manifest.write_text("{}")
    with pytest.raises(VerificationError, match=r"row 3: extracted again, final differs by 2 "):
        verify_again(small, fake, VerifyConfig(reextract_share=1))
    assert not small.store.manifest.exists()
    assert comparison_due(small.store, VerifyConfig())
    with pytest.raises(VerificationError, match="row 3: extracted again"):  # also without a server
        verify(small)


def test_the_manifest_is_valid_json_with_the_parts_of_the_extraction(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    verify(small)
    extraction = json.loads(small.store.extraction.read_bytes())
    assert json.loads(small.store.manifest.read_bytes())["parts"] == extraction["parts"]


def test_a_damaged_record_removes_the_old_manifest(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    small.record_path(0).write_text("{")
    assert "000000.json, a commit record, is damaged: half written" in refusal(small)


def test_a_failed_row_that_the_plan_does_not_have_is_caught(tmp_path: Path) -> None:
    small = make_store(tmp_path)
    record = read_record(small.record_path(0))
    write_record(small.store, replace(record, failed=[FailedRow(7, "HTTP 503")]))
    assert "record 000000.0 lists rows that the plan does not have in that batch: [7]" in refusal(small)


def test_a_row_that_cannot_be_extracted_again_is_an_error_that_leaves_nothing(tmp_path: Path, fake: FakeSGLang) -> None:
    small = make_store(tmp_path)
    small.store.manifest.write_text("{}")

    def refused_after_all_others(request: Request) -> tuple[int, object] | None:
        wait_for(lambda: len(list(fake.staging.iterdir())) == 5)
        time.sleep(0.2)  # and they are fetched
        return status(400, "too long")(request)

    fake.answers[0] = [refused_after_all_others]
    with pytest.raises(DrillcoreError):
        verify_again(small, fake, VerifyConfig(reextract_share=1))
    assert not small.store.manifest.exists()
    assert list(fake.staging.iterdir()) == []
