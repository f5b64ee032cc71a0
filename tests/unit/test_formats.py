"""The kinds of file: packed lines and Parquet give what the same rows give as JSONL; a damaged file is refused."""

import gzip
import hashlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.dataset import blocks, positions
from tasks.dataset.blocks import Block, read_blocks
from tasks.dataset.plan import Plan
from tasks.dataset.rows import InvalidRow, parse_row, read_planned
from tasks.errors import StoreError
from tests.unit.helpers import VOCAB, refusal, scan, write_jsonl

PACKED = [".jsonl.gz", ".jsonl.zst"]
ENDINGS = [".jsonl", *PACKED, ".parquet"]


def pack(path: Path, data: bytes) -> Path:
    """Write bytes as the kind of file that the name says."""
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(data, 1))
    elif path.name.endswith(".zst"):
        path.write_bytes(pa.compress(data, "zstd", asbytes=True))
    else:
        path.write_bytes(data)
    return path


def write_table(
    path: Path, rows: list[dict[str, Any]], mask_type: pa.DataType | None = None, group: int | None = None
) -> Path:
    """Rows of input_ids, loss_mask and id as Parquet, in row groups of `group` rows."""
    masks = pa.list_(pa.int64()) if mask_type is None else mask_type
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", masks), ("id", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group)
    return path


def write_as(ending: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """The same rows as one of the kinds; Parquet in row groups of three."""
    path = folder / f"d{ending}"
    if ending == ".parquet":
        return write_table(path, rows, group=3)
    return pack(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def many_rows(count: int) -> list[dict[str, Any]]:
    chance = random.Random(4)
    rows = []
    for row in range(count):
        length = chance.randint(1, 12)
        mask = [chance.randint(0, 1) for _ in range(length)] if row % 3 else None
        ids = [chance.randrange(VOCAB) for _ in range(length)]
        rows.append({"input_ids": ids, "loss_mask": mask, "id": f"Größe-{row}" if row % 4 else None})
    return rows


def outcome(plan: Plan) -> dict[str, Any]:
    """Everything in a plan but where the rows lie."""
    arrays = {name: getattr(plan, name).tolist() for name in ("input_tokens", "tokens", "action", "batch")}
    return arrays | {"reason": plan.reason, "id": plan.id.to_pylist()}


def content(path: Path, plan: Plan, numbers: list[int]) -> list[tuple[Any, ...]]:
    rows = read_planned(path, plan, numbers, VOCAB)
    return [(row.number, row.input_ids.tolist(), row.loss_mask.tolist(), row.id) for row in rows]


FAULTY = [
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "id": "good"},
    {"input_ids": [], "loss_mask": [], "id": "empty"},
    {"input_ids": None, "loss_mask": None, "id": "nothing"},
    {"input_ids": [1, None], "loss_mask": None, "id": "a hole"},
    {"input_ids": [1, VOCAB], "loss_mask": None, "id": "outside"},
    {"input_ids": [-1], "loss_mask": None, "id": "below"},
    {"input_ids": [1, 2], "loss_mask": [1], "id": "short mask"},
    {"input_ids": [1, 2], "loss_mask": [1, 2], "id": "mask of 2"},
    {"input_ids": [1, 2], "loss_mask": [1, -1], "id": "mask of -1"},
    {"input_ids": [1, 2], "loss_mask": [1, None], "id": "mask with a hole"},
    {"input_ids": [1] * 9, "loss_mask": None, "id": "long"},
    {"input_ids": [5], "loss_mask": None, "id": None},
]


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_every_kind_gives_the_plan_of_the_same_rows_as_jsonl(tmp_path: Path, ending: str) -> None:
    rows = many_rows(700)
    policies = {"on_too_long": "truncate", "shard_bytes": 300}
    plain_path, path = write_as(".jsonl", tmp_path, rows), write_as(ending, tmp_path, rows)
    plain, other = scan(plain_path, **policies).plan, scan(path, **policies).plan
    assert outcome(other) == outcome(plain)
    if ending in PACKED:
        assert other.offset.tolist() == plain.offset.tolist()
        assert other.size.tolist() == plain.size.tolist()
    for numbers in plain.rows_by_batch():
        assert content(path, other, numbers) == content(plain_path, plain, numbers)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_hash_is_that_of_the_file_as_it_lies_there(tmp_path: Path, ending: str) -> None:
    path = write_as(ending, tmp_path, many_rows(5))
    assert scan(path, max_seq_len=12).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_every_kind_skips_the_same_rows_for_the_same_reasons(tmp_path: Path, ending: str) -> None:
    plain, other = (
        scan(write_as(kind, tmp_path, FAULTY), on_invalid="skip", on_too_long="skip") for kind in (".jsonl", ending)
    )
    assert outcome(other.plan) == outcome(plain.plan)
    assert other.plan.counts() == {"extract": 2, "truncate": 0, "skip": 10}


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_every_kind_refuses_the_same_rows(tmp_path: Path, ending: str) -> None:
    plain = refusal(write_as(".jsonl", tmp_path, FAULTY)).replace("d.jsonl", f"d{ending}")
    if ending == ".parquet":  # its rows are no lines
        for number in range(len(FAULTY)):
            plain = plain.replace(f"line {number + 1} (row {number})", f"row {number}")
    assert "10 of 12 rows" in plain
    assert refusal(write_as(ending, tmp_path, FAULTY)) == plain


@pytest.mark.parametrize(
    "mask_type",
    [pa.list_(pa.bool_()), pa.large_list(pa.bool_()), pa.list_(pa.int8()), pa.large_list(pa.uint64())],
    ids=str,
)
def test_a_mask_in_parquet_may_be_integers_or_booleans(tmp_path: Path, mask_type: pa.DataType) -> None:
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4, 5], "loss_mask": None}]
    plain, other = tmp_path / "d.jsonl", tmp_path / "d.parquet"
    write_jsonl(plain, rows)
    boolean = pa.types.is_boolean(mask_type.value_type)
    kind = bool if boolean else int
    table_rows = [row | {"loss_mask": row["loss_mask"] and list(map(kind, row["loss_mask"]))} for row in rows]
    write_table(other, table_rows, mask_type)
    assert content(other, scan(other).plan, [0, 1]) == content(plain, scan(plain).plan, [0, 1])


@pytest.mark.parametrize("integers", [pa.int8(), pa.uint16(), pa.int64(), pa.uint64()], ids=str)
def test_a_parquet_file_needs_ids_only_and_of_any_integers(tmp_path: Path, integers: pa.DataType) -> None:
    path = tmp_path / "d.parquet"
    lists = pa.array([[1, 2], [3], [4, 5]], pa.list_(integers))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "input_ids": lists}), path)
    plan = scan(path).plan
    assert content(path, plan, [0, 2]) == [(0, [1, 2], [1, 1], None), (2, [4, 5], [1, 1], None)]


def test_lists_of_one_size_and_ids_that_are_numbers_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    lists = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    masks = pa.array([[True, False], [False, True]], pa.list_(pa.bool_(), 2))
    pq.write_table(pa.table({"input_ids": lists, "loss_mask": masks, "id": [7, 8]}), path)
    assert content(path, scan(path).plan, [1]) == [(1, [3, 4], [0, 1], "8")]


def test_rows_are_found_on_both_sides_of_a_row_group(tmp_path: Path) -> None:
    rows = [{"input_ids": [row % VOCAB], "id": str(row)} for row in range(1000)]
    path = write_table(tmp_path / "d.parquet", rows, group=300)
    assert pq.ParquetFile(path).num_row_groups == 4
    plan = scan(path).plan
    for numbers in ([299, 300], [0, 255, 256, 299, 300, 599, 600, 999], [999, 600, 599, 0], [555, 555, 554]):
        assert [row[3] for row in content(path, plan, numbers)] == [str(number) for number in numbers]


@pytest.mark.parametrize("ending", [*PACKED, ".parquet"])
def test_a_run_in_order_opens_the_file_once(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = many_rows(900)
    path = write_as(ending, tmp_path, rows)
    plan = scan(path, shard_bytes=500, on_too_long="truncate").plan
    opened = []
    opening = positions._open

    def counted(path: Path, offset: int) -> positions.Cursor:
        opened.append(offset)
        return opening(path, offset)

    monkeypatch.setattr(positions, "_open", counted)
    batches = plan.rows_by_batch()
    assert len(batches) > 50
    for numbers in batches:
        content(path, plan, numbers)
    assert opened == [0]
    content(path, plan, batches[3])  # a batch that is tried again
    assert opened == [0, plan.offset[batches[3][0]]]


@pytest.mark.parametrize("ending", [*PACKED, ".parquet"])
def test_batches_that_are_read_at_once_do_not_disturb_each_other(tmp_path: Path, ending: str) -> None:
    rows = many_rows(600)
    path = write_as(ending, tmp_path, rows)
    plan = scan(path, max_seq_len=12, shard_bytes=500).plan
    readers = [(numbers, read_planned(path, plan, numbers, VOCAB)) for numbers in plan.rows_by_batch()]
    seen: dict[int, list[int]] = {}
    for step in itertools.zip_longest(*(reader for _, reader in readers)):
        seen |= {row.number: row.input_ids.tolist() for row in step if row is not None}
    assert [seen[number] for number in range(len(rows))] == [row["input_ids"] for row in rows]


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_more_files_stay_open_than_batches_are_in_flight(tmp_path: Path, ending: str) -> None:
    path = write_as(ending, tmp_path, many_rows(50))
    plan = scan(path, max_seq_len=12).plan
    readers = [read_planned(path, plan, [number], VOCAB) for number in range(50)]
    assert all(next(reader) is not None for reader in readers)
    for reader in readers:
        reader.close()
    assert len(positions._idle) <= positions.MOST_IDLE


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_was_replaced_is_opened_anew(tmp_path: Path, ending: str) -> None:
    path = write_as(ending, tmp_path, [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    plan = scan(path).plan
    assert content(path, plan, [0]) == [(0, [1, 2], [1, 1], None)]
    path.unlink()
    write_as(ending, tmp_path, [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
    with pytest.raises(StoreError, match=r"changed since it was planned: (line 2 \()?row 1\)?"):
        content(path, plan, [1])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_gone_or_cut_after_the_plan_is_refused(tmp_path: Path, ending: str) -> None:
    path = write_as(ending, tmp_path, many_rows(300))
    plan = scan(path, max_seq_len=12).plan
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StoreError, match=r"d\.[a-z.]* (is no longer as it was|changed since it was) planned"):
        content(path, plan, [299])
    path.unlink()
    with pytest.raises(StoreError, match=r"is no longer as it was planned. The dataset .* does not exist"):
        content(path, plan, [0])


def test_rows_that_a_smaller_table_lacks_are_named(tmp_path: Path) -> None:
    path = write_as(".parquet", tmp_path, many_rows(10))
    plan = scan(path, max_seq_len=12).plan
    write_as(".parquet", tmp_path, many_rows(6))
    with pytest.raises(StoreError, match="has no row 8"):
        content(path, plan, [8])


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("kept", [1, 3, 10, -1, -5, None])
def test_a_packed_file_that_is_cut_short_is_refused(tmp_path: Path, ending: str, kept: int | None) -> None:
    path = write_as(ending, tmp_path, many_rows(3000))
    whole = path.read_bytes()
    path.write_bytes(whole[: kept or len(whole) // 2])
    message = refusal(path, max_seq_len=12, on_invalid="skip")
    assert f"The dataset {path} is damaged, cut short, or no {ending} file: " in message
    assert "Copy or write it anew (dataset.path)." in message


@pytest.mark.parametrize("ending", PACKED)
def test_a_packed_file_in_several_pieces_is_read_to_its_end(tmp_path: Path, ending: str) -> None:
    pieces = [pack(tmp_path / f"{part}{ending}", b'{"input_ids": [%d]}\n' % part).read_bytes() for part in range(3)]
    path = tmp_path / f"d{ending}"
    path.write_bytes(b"".join(pieces))
    assert content(path, scan(path).plan, [0, 1, 2]) == [(row, [row], [1], None) for row in range(3)]


@pytest.mark.parametrize("ending", [".jsonl.gz", ".parquet"])  # a zstd frame or a page without a checksum hides it
def test_flipped_bits_are_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"d{ending}"
    if ending == ".parquet":
        lists = pa.array([row["input_ids"] for row in many_rows(3000)])
        pq.write_table(pa.table({"input_ids": lists}), path, write_page_checksum=True)
    else:
        write_as(ending, tmp_path, many_rows(3000))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    path.write_bytes(damaged)
    assert f"The dataset {path} is damaged" in refusal(path, max_seq_len=12, on_invalid="skip")


@pytest.mark.parametrize("ending", ENDINGS[1:])
@pytest.mark.parametrize("data", [b'{"input_ids": [1]}\n' * 100, b"PAR1", b"\x1f\x8b\x08\x00", b"\n"])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, ending: str, data: bytes) -> None:
    path = tmp_path / f"d{ending}"
    path.write_bytes(data)
    assert f"is damaged, cut short, or no {ending} file: " in refusal(path)


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_another_kind_under_the_name_of_jsonl_is_refused(tmp_path: Path, ending: str) -> None:
    path = write_as(ending, tmp_path, many_rows(3)).rename(tmp_path / "d.jsonl")
    assert f"holds no JSON lines, but what belongs into a {ending} file: rename it" in refusal(path)


@pytest.mark.parametrize("name", ["d.json", "d.jsonl.bz2", "d", "d.gz", "parquet", "d.jsonl.old"])
def test_an_unknown_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"input_ids": [1]}\n')
    message = refusal(tmp_path / name)
    assert "is of no known kind: its name must end in .jsonl, .jsonl.gz, .jsonl.zst or .parquet" in message


def test_the_ending_may_be_in_capitals(tmp_path: Path) -> None:
    assert len(scan(pack(tmp_path / "D.JSONL", b'{"input_ids": [1]}\n')).plan) == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_empty_or_missing_file_of_each_kind_is_named(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"d{ending}"
    assert refusal(path) == f"The dataset {path} does not exist (dataset.path)."
    write_as(ending, tmp_path, [])
    assert refusal(path) == f"The dataset {path} is empty (dataset.path)."


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": [[1]], "text": ["x"]}, "has no column input_ids; it has 'tokens', 'text'"),
        ({"input_ids": ["1 2"]}, "has a column input_ids of type string; lists of integers are expected"),
        ({"input_ids": [1]}, "has a column input_ids of type int64; lists of integers"),
        ({"input_ids": [[1.0]]}, "has a column input_ids of type list<element: double>; lists of integers"),
        ({"input_ids": [[True]]}, "has a column input_ids of type list<element: bool>; lists of integers"),
        ({"input_ids": [[[1]]]}, "has a column input_ids of type list<element: list<element: int64>>; lists of int"),
        ({"input_ids": [[1]], "loss_mask": [1]}, "a column loss_mask of type int64; lists of integers or booleans"),
        ({"input_ids": [[1]], "loss_mask": [[0.5]]}, "a column loss_mask of type list<element: double>; lists of"),
    ],
)
def test_a_table_without_the_right_columns_is_refused(tmp_path: Path, columns: Any, message: str) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table(columns), path)
    assert message in refusal(path, on_invalid="skip")


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_as(".jsonl", tmp_path, many_rows(10))

    def grow(path: Path, vocab_size: int) -> Any:
        yield from read_blocks(path, vocab_size)
        with path.open("a") as file:
            file.write('{"input_ids": [1]}\n')

    monkeypatch.setattr("tasks.dataset.scan.read_blocks", grow)
    assert "was written to while it was read. Start again when it is complete" in refusal(path, max_seq_len=12)


MUTATIONS: list[Callable[[random.Random, dict[str, Any]], Any]] = [
    lambda chance, row: (
        row | {"input_ids": row["input_ids"] + [chance.choice([True, 1.0, "1", None, -1, VOCAB, 2**70])]}
    ),
    lambda chance, row: row | {"input_ids": chance.choice([None, {}, {"1": 1}, "", "12", 3, True, [], [[1]], [[]]])},
    lambda chance, row: (
        row | {"loss_mask": chance.choice([{}, "01", 1, True, 0, [], [[1]], [True], [0.0], [2], [None]])}
    ),
    lambda chance, row: (
        row | {"loss_mask": [chance.choice([0, 1, True, False, 2, -1, 256, 1.0])] * len(row["input_ids"])}
    ),
    lambda chance, row: {"id": row["id"]},
    lambda chance, row: chance.choice([[], [row], "text", 5, None, True]),
    lambda chance, row: row | {"id": chance.choice([1, 1.5, True, ["a"], {"b": 1}, "true", "because"])},
    lambda chance, row: row | {"text": chance.choice(["true", "false", "the true use", True, False, [True]])},
]


def judged_by_block(block: Block) -> list[tuple[Any, ...]]:
    faults = [block.invalid.get(at) for at in range(len(block))]
    return [
        (fault.kind, str(fault)) if fault else (int(tokens), row_id)
        for fault, tokens, row_id in zip(faults, block.tokens, block.ids, strict=True)
    ]


def judged_alone(line: bytes, vocab_size: int) -> tuple[Any, ...]:
    try:
        row = parse_row(line, 0, vocab_size)
    except InvalidRow as error:
        return error.kind, str(error)
    return len(row.input_ids), row.id


def assert_judged_alike(path: Path, lines: list[bytes], vocab_size: int = VOCAB) -> None:
    (block,) = read_blocks(pack(path, b"\n".join(lines)), vocab_size)
    with path.open("rb") as file:
        assert judged_by_block(block) == [judged_alone(line, vocab_size) for line in file]


ODD_LINES = [b"", b"{", b'{"input_ids": [1]} {}', b"\xff", b'{"input_ids":[0', b'{"input_ids": [1], "id": "\xff"}']


def test_blocks_judge_every_row_as_one_row_is_judged(tmp_path: Path) -> None:
    chance = random.Random(5)
    for _ in range(400):
        rows: list[Any] = many_rows(3)
        for at in range(3):
            if chance.random() < 0.4:
                rows[at] = chance.choice(MUTATIONS)(chance, rows[at])
        lines = [json.dumps(row, separators=chance.choice([(",", ":"), (", ", ": ")])).encode() for row in rows]
        if chance.random() < 0.1:
            lines[chance.randrange(3)] = chance.choice(ODD_LINES)
        assert_judged_alike(tmp_path / "d.jsonl", [b'{"input_ids": [1]}', *lines])


@pytest.mark.parametrize("seed", range(4))
def test_blocks_judge_text_that_was_tampered_with_as_one_row_is_judged(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    pieces = [
        '"',
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        " ",
        "0",
        "1",
        "9",
        "-",
        ".",
        "e5",
        "\\",
        "\t",
        "\r",
        "é",
        "true",
        "null",
        '"id":',
    ]
    fragments = [piece.encode() for piece in pieces]
    for _ in range(500):
        line = bytearray(b'{"id": "a", "input_ids": [1, 20, 3], "loss_mask": [0, 1, 1], "text": "b", "more": [[5]]}')
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(line))
            line[at : at + chance.randrange(3)] = chance.choice([b"", *fragments])
        assert_judged_alike(tmp_path / "d.jsonl", [bytes(line), b'{"input_ids": [1]}'])


@pytest.mark.parametrize("vocab_size", [1, 2, 9, 10, 11, 100, 128_000, 163_840, 99_999_999, 100_000_000, 2**31 - 1])
def test_blocks_know_the_largest_id_of_every_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    chance = random.Random(vocab_size)
    near = [max(0, vocab_size + step) for step in (-2, -1, 0, 1)]
    for _ in range(60):
        ids = [chance.choice([0, chance.randrange(vocab_size), vocab_size - 1]) for _ in range(chance.randrange(1, 6))]
        if chance.random() < 0.5:
            ids[chance.randrange(len(ids))] = chance.choice([*near, 10 * vocab_size, -1])
        line = json.dumps({"input_ids": ids}, separators=chance.choice([(",", ":"), (", ", ": "), (",  ", ":")]))
        assert_judged_alike(tmp_path / "d.jsonl", [line.encode()] * 2, vocab_size)


def test_nearly_all_lines_are_judged_many_at_a_time() -> None:
    rows = [*many_rows(3), {"input_ids": [1], "loss_mask": None, "messages": [{"text": "[2, \\"}], "id": 5, "é": True}]
    for separators in ((",", ":"), (", ", ": ")):
        lines = [json.dumps(row, separators=separators).encode() + b"\n" for row in rows]
        judged = blocks._valid_lines(lines, VOCAB)
        assert judged is not None
        assert judged[0].tolist() == [len(row["input_ids"]) for row in rows]


PEAK_OF_SCANS = """
import sys
from pathlib import Path
from tasks.config import DatasetConfig
from tasks.dataset.rows import read_planned
from tasks.dataset.scan import scan_dataset
for path in map(Path, sys.argv[1:]):
    plan = scan_dataset(DatasetConfig(path=path, max_seq_len=100), 200_000, 100, 1 << 20).plan
    assert sum(1 for row in read_planned(path, plan, list(range(0, len(plan), 500)), 200_000)) == len(plan) / 500
    # Not ru_maxrss: that one begins with the parent's.
    print(len(plan), Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
FEW, MANY, TOKENS = 1000, 200_000, 60


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_memory_stays_flat_on_200_000_rows(tmp_path: Path, ending: str) -> None:
    """The plan of a row takes about 100 bytes, its text 400, its numbers 480."""
    ids = np.random.default_rng(0).integers(0, 200_000, (FEW, TOKENS))
    lines = [orjson.dumps({"id": str(row), "input_ids": one}) + b"\n" for row, one in enumerate(ids.tolist())]
    paths = []
    for rows in (FEW, MANY):
        path = tmp_path / f"{rows}{ending}"
        if ending == ".parquet":
            every = np.tile(ids.ravel(), rows // FEW)
            lists = pa.LargeListArray.from_arrays(np.arange(0, len(every) + 1, TOKENS), every)
            table = pa.table({"input_ids": lists})
            pq.write_table(table, path, row_group_size=rows, use_dictionary=False)  # one row group
        else:
            pack(path, b"".join(lines) * (rows // FEW))
        paths.append(path)
    command = [sys.executable, "-c", PEAK_OF_SCANS, *paths]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert (int(printed[0]), int(printed[2])) == (FEW, MANY)
    grown = int(printed[3]) - int(printed[1])
    assert grown < 64 << 10, f"{grown} KiB"
