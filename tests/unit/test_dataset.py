"""The dataset: every bad line is refused or counted by its policy, and the plan holds what is left."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.dataset import plan as plan_module
from tasks.dataset.plan import ACTIONS, MOST_BATCHES, NO_BATCH, SKIP, Plan, assign_batches, load_plan, save_plan
from tasks.dataset.rows import read_planned
from tasks.errors import StoreError
from tests.unit.helpers import VOCAB, refusal, scan, write_jsonl

GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


BAD_LINES = [
    ("{no json", "invalid JSON: ", "invalid JSON"),
    ('{"input_ids": [1, 2', "invalid JSON: ", "invalid JSON"),
    ("", "invalid JSON: ", "invalid JSON"),
    ('{"input_ids": [NaN]}', "invalid JSON: ", "invalid JSON"),
    ([1, 2, 3], "invalid JSON: Expected `object`, got `array`", "invalid JSON"),
    ("null", "invalid JSON: Expected `object`, got `null`", "invalid JSON"),
    ({"tokens": [1], "text": "x"}, "no input_ids; the line has 'tokens', 'text'", "no input_ids"),
    ({}, "no input_ids; the line has no keys", "no input_ids"),
    ({"input_ids": "1 2 3"}, "input_ids must be a list of integers, this is a str", "wrong input_ids"),
    ({"input_ids": 7}, "input_ids must be a list of integers, this is a int", "wrong input_ids"),
    ({"input_ids": None}, "input_ids must be a list of integers, this is null", "wrong input_ids"),
    ({"input_ids": [1.0, 2.0]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [1, 2.5]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [[1, 2], [3, 4]]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [[1, 2], [3]]}, "input_ids is not a flat list of integers", "wrong input_ids"),
    ({"input_ids": [True, "2"]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [True, False]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [5, True]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [1, None]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [1, 2**64]}, "input_ids holds values that are no integers", "wrong input_ids"),
    ({"input_ids": [1, -1]}, "input_ids[1] is -1, the model's vocabulary has ids 0 to 99", "id outside the vocabulary"),
    ({"input_ids": [5, 7, VOCAB]}, "input_ids[2] is 100, the model's vocabulary", "id outside the vocabulary"),
    ({"input_ids": [2**40]}, "input_ids[0] is 1099511627776, the model's", "id outside the vocabulary"),
    ({"input_ids": []}, "input_ids is empty", "empty row"),
    (GOOD | {"loss_mask": [1, 1]}, "loss_mask has 2 values, input_ids has 3", "loss_mask length"),
    (GOOD | {"loss_mask": []}, "loss_mask has 0 values, input_ids has 3", "loss_mask length"),
    (GOOD | {"loss_mask": [0, 1, 2]}, "loss_mask holds values other than 0 and 1", "loss_mask value"),
    (GOOD | {"loss_mask": [0, 1, -1]}, "loss_mask holds values other than 0 and 1", "loss_mask value"),
    (GOOD | {"loss_mask": [0, 1, 0.5]}, "loss_mask holds values that are no integers", "wrong loss_mask"),
    (GOOD | {"loss_mask": [False, True, True]}, "loss_mask holds values that are no integers", "wrong loss_mask"),
    (GOOD | {"loss_mask": "011"}, "loss_mask must be a list of integers, this is a str", "wrong loss_mask"),
]


@pytest.mark.parametrize(("line", "detail", "kind"), BAD_LINES, ids=[str(line)[:40] for line, *_ in BAD_LINES])
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: Any, detail: str, kind: str) -> None:
    message = refusal(write_jsonl(tmp_path / "d.jsonl", [GOOD, line, GOOD]))
    assert f"1 of 3 rows of {tmp_path / 'd.jsonl'} cannot be extracted ({kind}: 1):" in message
    assert f"  line 2 (row 1): {detail}" in message
    assert "mend the file, or set dataset.on_invalid to 'skip'" in message


@pytest.mark.parametrize(("line", "detail", "kind"), BAD_LINES, ids=[str(line)[:40] for line, *_ in BAD_LINES])
def test_a_bad_line_can_be_skipped_with_its_reason(tmp_path: Path, line: Any, detail: str, kind: str) -> None:
    plan = scan(write_jsonl(tmp_path / "d.jsonl", [GOOD, line, GOOD]), on_invalid="skip").plan
    assert plan.counts() == {"extract": 2, "truncate": 0, "skip": 1}
    assert plan.reason[1].startswith(detail)
    assert plan.tokens.tolist() == [3, 0, 3]
    assert plan.batch.tolist() == [0, NO_BATCH, 0]


def test_a_line_that_is_no_utf8_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"input_ids": [1], "id": "\xff"}\n')
    assert "line 2 (row 1): invalid JSON" in refusal(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "d.jsonl") == f"The dataset {tmp_path / 'd.jsonl'} does not exist (dataset.path)."


def test_a_folder_instead_of_a_file_is_named(tmp_path: Path) -> None:
    assert f"The dataset {tmp_path} cannot be read: Is a directory" in refusal(tmp_path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    assert "d.jsonl is empty (dataset.path)" in refusal(write_jsonl(tmp_path / "d.jsonl", []))


def test_a_file_in_which_every_line_is_skipped_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["x", "y"])
    assert "has no row to extract: 2 rows, all skipped" in refusal(path, on_invalid="skip")


def test_an_over_long_row_fails_by_default(tmp_path: Path) -> None:
    message = refusal(write_jsonl(tmp_path / "d.jsonl", [GOOD, {"input_ids": [1] * 9}, {"input_ids": [1] * 8}]))
    assert "1 of 3 rows" in message
    assert "line 2 (row 1): 9 tokens, max_seq_len is 8" in message
    assert "raise dataset.max_seq_len, or set dataset.on_too_long to 'truncate' or 'skip'" in message
    assert "on_invalid" not in message


def test_an_over_long_row_can_be_cut(tmp_path: Path) -> None:
    lines = [GOOD, {"input_ids": list(range(9)), "loss_mask": [1, 0, 0, 0, 0, 0, 0, 1, 1]}]
    path = write_jsonl(tmp_path / "d.jsonl", lines)
    plan = scan(path, on_too_long="truncate").plan
    assert plan.counts() == {"extract": 1, "truncate": 1, "skip": 0}
    assert plan.tokens.tolist() == [3, 8]
    assert plan.input_tokens.tolist() == [3, 9]
    assert plan.reason == ["", "9 tokens, max_seq_len is 8"]
    (row,) = read_planned(path, plan, [1], VOCAB)
    assert row.input_ids.tolist() == list(range(8))
    assert row.loss_mask.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


def test_an_over_long_row_can_be_skipped(tmp_path: Path) -> None:
    plan = scan(write_jsonl(tmp_path / "d.jsonl", [{"input_ids": [1] * 9}, GOOD]), on_too_long="skip").plan
    assert plan.counts() == {"extract": 1, "truncate": 0, "skip": 1}
    assert plan.reason == ["9 tokens, max_seq_len is 8", ""]
    assert plan.batch.tolist() == [NO_BATCH, 0]


def test_a_bad_over_long_row_is_judged_bad_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [GOOD, {"input_ids": [VOCAB] * 9}])
    assert "id outside the vocabulary: 1" in refusal(path, on_too_long="truncate")


def test_problems_are_listed_together_with_counts_of_each_kind(tmp_path: Path) -> None:
    lines = [GOOD, "x", {"input_ids": []}, GOOD, {"input_ids": [1] * 9}, "y"]
    message = refusal(write_jsonl(tmp_path / "d.jsonl", lines))
    assert "4 of 6 rows" in message
    assert "(invalid JSON: 2, empty row: 1, longer than max_seq_len: 1)" in message
    assert [number for number in range(1, 7) if f"  line {number} (row {number - 1}): " in message] == [2, 3, 5, 6]
    assert "max_seq_len, or set dataset.on_too_long" in message
    assert "set dataset.on_invalid to 'skip'" in message


def test_the_list_ends_after_ten(tmp_path: Path) -> None:
    message = refusal(write_jsonl(tmp_path / "d.jsonl", [GOOD] + 13 * ["x"]))
    assert "13 of 14 rows" in message
    assert message.count("  line ") == 10
    assert "line 11 (row 10)" in message
    assert "line 12 (row 11)" not in message
    assert "\n  ... and 3 more\n" in message


def test_ten_problems_are_all_shown(tmp_path: Path) -> None:
    message = refusal(write_jsonl(tmp_path / "d.jsonl", [GOOD] + 10 * ["x"]))
    assert message.count("  line ") == 10
    assert "more\n" not in message


def test_only_what_a_policy_forbids_is_listed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["x", {"input_ids": [1] * 9}])
    message = refusal(path, on_invalid="skip")
    assert "1 of 2 rows" in message
    assert "row 0" not in message


@pytest.mark.parametrize("line", [{"input_ids": [4, 5]}, {"input_ids": [4, 5], "loss_mask": None}])
def test_without_a_loss_mask_every_token_counts(tmp_path: Path, line: Any) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [line])
    (row,) = read_planned(path, scan(path).plan, [0], VOCAB)
    assert row.loss_mask.tolist() == [1, 1]
    assert row.loss_mask.dtype == np.uint8
    assert row.input_ids.dtype == np.int32


def test_the_smallest_and_the_largest_id_are_allowed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"input_ids": [0, VOCAB - 1]}])
    assert scan(path).plan.counts()["extract"] == 1


def test_the_id_of_a_row_is_kept_as_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [GOOD | {"id": "Größe"}, GOOD | {"id": 17}, GOOD])
    plan = scan(path).plan
    assert plan.id.to_pylist() == ["Größe", "17", None]
    assert [row.id for row in read_planned(path, plan, [0, 1, 2], VOCAB)] == plan.id.to_pylist()


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [GOOD, "x", GOOD | {"id": "Größe"}])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # and without a line end at the end
    assert scan(path, on_invalid="skip").sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_lines_are_found_again_by_their_bytes(tmp_path: Path, ending: bytes) -> None:
    path = tmp_path / "d.jsonl"
    lines = [json.dumps({"id": f"ü{row}", "input_ids": [row] * (row + 1)}, ensure_ascii=False) for row in range(5)]
    path.write_bytes(ending.join(line.encode() for line in lines))  # the last one without an ending
    plan = scan(path).plan
    rows = list(read_planned(path, plan, [4, 0, 2], VOCAB))
    assert [row.number for row in rows] == [4, 0, 2]
    assert [row.input_ids.tolist() for row in rows] == [[4] * 5, [0], [2] * 3]
    assert [row.id for row in rows] == ["ü4", "ü0", "ü2"]


def batches_of(plan: Plan) -> list[list[int]]:
    return [rows.tolist() for rows in plan.rows_by_batch()]


def lengths(plan: Plan) -> list[list[int]]:
    return [plan.tokens[rows].tolist() for rows in plan.rows_by_batch()]


def plan_of(tmp_path: Path, tokens: list[int], shard_bytes: int) -> Plan:
    """A plan of rows with so many tokens (0: no sample), 10 bytes a token."""
    lines: list[Any] = [{"input_ids": [1] * length} if length else "x" for length in tokens]
    path = write_jsonl(tmp_path / "d.jsonl", lines)
    return scan(path, shard_bytes, on_invalid="skip", max_seq_len=1000).plan


def test_batches_are_consecutive_and_within_the_shard_size(tmp_path: Path) -> None:
    assert lengths(plan_of(tmp_path, [4, 4, 2, 1, 9, 3, 3, 3, 3], 100)) == [[4, 4, 2], [1, 9], [3, 3, 3], [3]]


def test_batches_have_no_more_rows_than_memory_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MOST_ROWS", 3)
    none = np.zeros(8, dtype=bool)
    assert assign_batches(np.full(8, 2), none, 10, 1000).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    two = assign_batches(np.full(8, 2), none, 10, 1000, most_batches=2)
    assert two.tolist() == [0] * 4 + [1] * 4  # no more than are needed


def test_a_row_larger_than_a_shard_is_alone(tmp_path: Path) -> None:
    assert lengths(plan_of(tmp_path, [50, 2, 50, 2, 2, 50], 100)) == [[50], [2], [50], [2, 2], [50]]


def test_skipped_rows_are_in_no_batch(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, [0, 4, 0, 4, 0, 0, 4, 4, 0], 100)
    assert batches_of(plan) == [[1, 3], [6, 7]]
    assert plan.batches == 2
    assert plan.batch.tolist() == [-1, 0, -1, 0, -1, -1, 1, 1, -1]


def test_one_batch_is_one_list(tmp_path: Path) -> None:
    assert batches_of(plan_of(tmp_path, [1, 0, 1], 100)) == [[0, 2]]


def test_totals_are_those_of_what_is_extracted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, [5, 0, 70], 100)
    assert (len(plan), plan.total_tokens, plan.longest, plan.batches) == (3, 75, 70, 2)


@pytest.mark.parametrize("rows", [MOST_BATCHES, MOST_BATCHES + 1, 3 * MOST_BATCHES])
def test_there_are_never_more_batches_than_a_flow_run_takes(rows: int) -> None:
    batch = assign_batches(np.full(rows, 7), np.zeros(rows, dtype=bool), token_bytes=10, shard_bytes=70)
    assert batch[0] == 0
    assert set(np.diff(batch).tolist()) <= {0, 1}
    assert batch[-1] < MOST_BATCHES
    if rows == MOST_BATCHES:
        assert batch.tolist() == list(range(rows))


@pytest.mark.parametrize("shard_bytes", [1, 2, 3])
def test_a_shard_size_of_almost_nothing_grows_too(shard_bytes: int) -> None:
    rows = MOST_BATCHES + 1
    batch = assign_batches(np.full(rows, 7), np.zeros(rows, dtype=bool), token_bytes=10, shard_bytes=shard_bytes)
    assert batch[-1] < MOST_BATCHES


def test_random_rows_keep_every_promise_of_the_batches() -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        tokens, skipped = random.integers(1, 300, 400), random.random(400) < 0.2
        batch = assign_batches(tokens, skipped, token_bytes=10, shard_bytes=2000)
        assert ((batch == NO_BATCH) == skipped).all()
        kept = batch[~skipped]
        assert set(np.diff(kept).tolist()) <= {0, 1}
        sizes = np.bincount(kept, weights=tokens[~skipped] * 10)
        assert ((sizes <= 2000) | (np.bincount(kept) == 1)).all()


def test_a_plan_reads_back_as_it_was_saved(tmp_path: Path) -> None:
    lines = [GOOD | {"id": "a"}, "x", {"input_ids": [1] * 12}, GOOD]
    path = write_jsonl(tmp_path / "d.jsonl", lines)
    plan = scan(path, on_invalid="skip", on_too_long="truncate", shard_bytes=60).plan
    save_plan(plan, tmp_path / "plan.parquet")
    loaded = load_plan(tmp_path / "plan.parquet")
    for name in ("offset", "size", "input_tokens", "tokens", "action", "batch"):
        before, after = getattr(plan, name), getattr(loaded, name)
        assert before.dtype == after.dtype, name
        assert before.tolist() == after.tolist(), name
    assert (loaded.reason, loaded.id.to_pylist()) == (plan.reason, plan.id.to_pylist())
    assert batches_of(loaded) == batches_of(plan) == [[0], [2], [3]]
    assert loaded.action[1] == ACTIONS.index(SKIP)


def test_a_plan_with_an_action_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    save_plan(scan(write_jsonl(tmp_path / "d.jsonl", [GOOD, GOOD])).plan, path)
    table = pq.read_table(path)
    at = table.schema.get_field_index("action")
    pq.write_table(table.set_column(at, "action", pa.array(["extract", "wait"])), path)
    with pytest.raises(StoreError, match="cannot be read"):
        load_plan(path)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"PAR1"), lambda path: path.unlink()])
def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "plan.parquet"
    save_plan(plan_of(tmp_path, [3, 3], 100), path)
    damage(path)
    with pytest.raises(StoreError, match=r"plan\.parquet cannot be read"):
        load_plan(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("[1, 2, 3]", "[1, 2, 3, 3]"),
        lambda text: text.replace("[1, 2, 3]", "[1, 2   ]"),
        lambda text: "  " + text,
        lambda text: text[:20],
        lambda text: "",
    ],
    ids=["longer", "shorter", "shifted", "cut", "emptied"],
)
def test_a_file_that_changed_after_the_plan_is_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    plan = scan(path).plan
    path.write_text(change(path.read_text()))
    with pytest.raises(StoreError, match=r"d\.jsonl changed since it was planned: line [12]"):
        list(read_planned(path, plan, [0, 1], VOCAB))
