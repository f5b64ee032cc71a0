"""Preparing a dataset: `extract` reads what comes out, every record is accounted for, the seed decides the order."""

import gzip
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config import DatasetConfig
from tasks.dataset.manifest import check_agreement, check_contents, manifest_path
from tasks.dataset.prepare.conversations import Conversation, parse_record
from tasks.dataset.prepare.mask import ConversationTokenizer
from tasks.dataset.prepare.run import prepare_dataset
from tasks.dataset.prepare.settings import PrepareConfig
from tasks.dataset.rows import InvalidRow, Row
from tasks.dataset.scan import scan_dataset
from tasks.errors import DatasetError
from tasks.model import Model
from tests.unit.chat import make_tokenizer, read_template, tokenizer_of, turns
from tests.unit.helpers import write_jsonl

HELLO = turns("user: Hello", "assistant: I am fine")
GREETING = turns("user: Grüße", "assistant: 東京")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("chatml").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vocab_size(tokenizer_folder: Path) -> int:
    return len(tokenizer_of("chatml"))


def settings(tmp_path: Path, tokenizer: Path, *sources: Path, **more: Any) -> PrepareConfig:
    values = {"max_seq_len": 512, "workers": 1, "shuffle": False, "output": tmp_path / "out/dataset.jsonl"}
    return PrepareConfig(sources=list(sources), tokenizer=tokenizer, **(values | more))


def rows_of(config: PrepareConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in config.output.read_text().splitlines()]


def check_books(manifest: dict[str, Any], config: PrepareConfig) -> None:
    """Read = written + dropped, in all and for each source; sizes and hashes are the files'."""
    assert manifest["read"] == manifest["rows"] + sum(manifest["dropped"].values())
    for source in manifest["sources"]:
        assert source["read"] == source["written"] + sum(source["dropped"].values())
        data = Path(source["path"]).read_bytes()
        assert (source["bytes"], source["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    for name in ("read", "written"):
        assert sum(source[name] for source in manifest["sources"]) == manifest["read" if name == "read" else "rows"]
    data = config.output.read_bytes()
    assert (manifest["bytes"], manifest["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    rows = rows_of(config)
    assert manifest["rows"] == len(rows)
    assert manifest["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert manifest["loss_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert manifest["longest"] == max(len(row["input_ids"]) for row in rows)
    assert manifest["largest_id"] == max(max(row["input_ids"]) for row in rows)
    assert json.loads(manifest_path(config.output).read_text()) == manifest


def test_conversations_become_the_dataset_that_extract_reads(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "talks.jsonl", [{"id": "a", "messages": HELLO}, {"messages": GREETING}])
    config = settings(tmp_path, tokenizer_folder, source)
    manifest = prepare_dataset(config)
    check_books(manifest, config)
    follower = ConversationTokenizer(tokenizer_of("chatml"))
    for row, messages in zip(rows_of(config), (HELLO, GREETING), strict=True):
        ids, mask = follower.tokenize(messages)
        assert (row["input_ids"], row["loss_mask"]) == (ids.tolist(), mask.tolist())
    assert [row["id"] for row in rows_of(config)] == ["a", "talks:1"]
    scan = scan_dataset(DatasetConfig(path=config.output, max_seq_len=512), 400, 10, 1 << 20)
    assert scan.sha256 == manifest["sha256"]
    assert scan.plan.total_tokens == manifest["tokens"]
    assert sorted(os.listdir(config.output.parent)) == ["dataset.jsonl", "dataset.jsonl.manifest.json"]


def test_every_form_of_a_source_gives_the_same_rows(tmp_path: Path, tokenizer_folder: Path) -> None:
    records = [{"id": str(at), "messages": turns(f"user: {at}", f"assistant: {at + 1}")} for at in range(300)]
    plain = write_jsonl(tmp_path / "plain.jsonl", records)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    zstd = tmp_path / "zstd.jsonl.zst"
    zstd.write_bytes(pa.compress(plain.read_bytes(), codec="zstd", asbytes=True))
    table = tmp_path / "table.parquet"
    pq.write_table(pa.Table.from_pylist(records), table, row_group_size=70)
    shared = [
        {
            "id": str(at),
            "conversations": [{"from": "human", "value": str(at)}, {"from": "gpt", "value": str(at + 1)}],
        }
        for at in range(300)
    ]
    sharegpt = write_jsonl(tmp_path / "sharegpt.jsonl", shared)
    ids = tmp_path / "ids.jsonl"
    found = []
    for number, source in enumerate((plain, packed, zstd, table, sharegpt, ids)):
        config = settings(tmp_path, tokenizer_folder, source, output=tmp_path / f"{number}.jsonl")
        check_books(prepare_dataset(config), config)
        found.append(config.output.read_bytes())
        if source == sharegpt:
            ids.write_bytes(found[0])  # its own output, as token ids
    assert len(set(found)) == 1


def test_sources_are_merged_and_duplicates_dropped_where_they_are_found_last(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [{"id": "a", "messages": HELLO}, {"id": "b", "messages": GREETING}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"id": "c", "messages": HELLO}, {"id": "d", "messages": HELLO}])
    config = settings(tmp_path, tokenizer_folder, one, two)
    manifest = prepare_dataset(config)
    check_books(manifest, config)
    assert [row["id"] for row in rows_of(config)] == ["a", "b"]
    assert [source["dropped"] for source in manifest["sources"]] == [{}, {"duplicate": 2}]
    kept = settings(tmp_path, tokenizer_folder, one, two, deduplicate=False, output=tmp_path / "all.jsonl")
    check_books(prepare_dataset(kept), kept)
    assert [row["id"] for row in rows_of(kept)] == ["a", "b", "c", "d"]


def test_the_seed_decides_the_order_however_many_work(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.dataset.prepare.run.SMALL", 0)
    monkeypatch.setattr("tasks.dataset.prepare.sources.BLOCK_BYTES", 500)
    records = [{"id": str(at), "messages": turns(f"user: {at}", f"assistant: {at}")} for at in range(100)]
    source = write_jsonl(tmp_path / "s.jsonl", records)

    def order(name: str, **more: Any) -> list[int]:
        config = settings(tmp_path, tokenizer_folder, source, output=tmp_path / name, **more)
        check_books(prepare_dataset(config), config)
        return [int(row["id"]) for row in rows_of(config)]

    one = order("one.jsonl", shuffle=True, seed=1)
    assert order("two.jsonl", shuffle=True, seed=1, workers=2) == one
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert order("three.jsonl", shuffle=True, seed=2) != one
    assert sorted(one) == order("four.jsonl") == list(range(100))
    moved = sum(abs(at - place) for place, at in enumerate(one)) / 100
    assert 20 < moved < 47  # a third of the way on average: over the whole file, not within a block


def test_long_rows_are_cut_with_a_count_or_left_out_or_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    long = turns("user: Hello", f"assistant: {'word ' * 40}")
    late = turns(f"user: {'word ' * 40}", "assistant: Hello")
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": HELLO}, {"messages": long}, {"messages": late}])
    whole = len(tokenizer_of("chatml").apply_chat_template(HELLO)["input_ids"])
    config = settings(tmp_path, tokenizer_folder, source, max_seq_len=whole)
    manifest = prepare_dataset(config)
    check_books(manifest, config)
    assert [len(row["input_ids"]) for row in rows_of(config)] == [whole, whole]
    assert manifest["truncated"] == 1  # of the rows that were written: the other one's answer was cut off
    assert manifest["dropped"] == {"no token counts": 1}
    assert manifest["examples"]["no token counts"] == ["s.jsonl record 2: its loss mask is 0 throughout"]
    config = settings(
        tmp_path, tokenizer_folder, source, max_seq_len=whole, on_too_long="skip", output=tmp_path / "b.jsonl"
    )
    manifest = prepare_dataset(config)
    check_books(manifest, config)
    assert (manifest["truncated"], manifest["dropped"]) == (0, {"longer than max_seq_len": 2})
    config = settings(
        tmp_path, tokenizer_folder, source, max_seq_len=whole, on_too_long="fail", output=tmp_path / "c.jsonl"
    )
    with pytest.raises(
        DatasetError, match=r"s.jsonl line 2: \d+ tokens, max_seq_len is \d+.*--on-too-long skip or trunc"
    ):
        prepare_dataset(config)


BAD: dict[str, tuple[Any, str, str]] = {
    "no JSON": ("{", "invalid JSON", "invalid JSON"),
    "a list": ([1], "no conversation", "no JSON object, but list"),
    "no messages": ({"text": "x"}, "no conversation", "none of messages, conversations, input_ids; it has 'text'"),
    "messages are text": ({"messages": "Hello"}, "no conversation", "messages is no list of messages"),
    "no messages in it": ({"messages": []}, "no conversation", "messages is no list of messages"),
    "no role": ({"messages": [{"content": "x"}]}, "unknown role", "message 0 is by None"),
    "a stranger": ({"conversations": [{"from": "x", "value": "y"}]}, "unknown role", "message 0 is by 'x'"),
    "no content": ({"messages": [{"role": "user"}]}, "message without content", "message 0 has neither"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "content that is no text",
        "message 0 holds image_url: only text",
    ),
    "id too large": ({"input_ids": [100000]}, "id outside the vocabulary", r"input_ids\[0\] is 100000"),
    "mask too short": ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask length", "loss_mask has 1 values"),
}


@pytest.mark.parametrize(("line", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_a_record_that_is_none_is_named_or_counted(
    tmp_path: Path, tokenizer_folder: Path, line: Any, kind: str, message: str
) -> None:
    fine = {"messages": HELLO}
    source = write_jsonl(tmp_path / "s.jsonl", [fine, line, {"messages": GREETING}])
    with pytest.raises(DatasetError, match=rf"s.jsonl line 2: .*{message}.*--on-invalid skip"):
        prepare_dataset(settings(tmp_path, tokenizer_folder, source))
    assert os.listdir(tmp_path / "out") == []
    config = settings(tmp_path, tokenizer_folder, source, on_invalid="skip")
    manifest = prepare_dataset(config)
    check_books(manifest, config)
    assert manifest["dropped"] == {kind: 1}
    assert manifest["examples"][kind][0].startswith("s.jsonl record 1: ")


def test_what_a_template_refuses_is_counted_by_reason(tmp_path: Path) -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    doubled = "{% for message in messages %}{{ message.content * 2 }}{% endfor %}"
    messages = turns("assistant: Hello", "user: x")
    for number, (template, kind) in enumerate(
        [
            (strict + read_template("chatml"), "refused by the chat template"),
            (doubled + read_template("chatml"), "turns cannot be told for certain"),
        ]
    ):
        folder = tmp_path / str(number)
        make_tokenizer(template).save_pretrained(folder)
        source = write_jsonl(tmp_path / "s.jsonl", [{"messages": messages}, {"input_ids": [1, 2]}])
        config = settings(folder, folder, source, on_invalid="skip")
        manifest = prepare_dataset(config)
        check_books(manifest, config)
        assert manifest["dropped"] == {kind: 1}


def test_a_template_that_wants_arguments_as_text_gets_them_so(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer_of("deepseek-v3").save_pretrained(folder)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "東京"}}}
    messages = [*turns("user: x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    config = settings(tmp_path, folder, write_jsonl(tmp_path / "s.jsonl", [{"messages": messages}]))
    prepare_dataset(config)
    text = tokenizer_of("deepseek-v3").decode(rows_of(config)[0]["input_ids"])
    assert '```json\n{"city": "東京"}\n```' in text


def test_a_tables_empty_fields_do_not_become_arguments(tmp_path: Path) -> None:
    """A table has a column for each argument that any row's call has."""
    folder = tmp_path / "tokenizer"
    tokenizer_of("qwen3").save_pretrained(folder)
    records = []
    for arguments in ({"city": "Paris", "day": None}, {"city": None, "day": "Monday"}):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        asked, said = {"role": "user", "content": "x", "tool_calls": []}, {"role": "assistant", "tool_calls": [call]}
        records.append({"messages": [asked, said]})
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "t.parquet")
    config = settings(tmp_path, folder, tmp_path / "t.parquet")
    prepare_dataset(config)
    texts = [tokenizer_of("qwen3").decode(row["input_ids"]) for row in rows_of(config)]
    assert ['"arguments": {"city": "Paris"}}' in texts[0], '"arguments": {"day": "Monday"}}' in texts[1]] == [
        True,
        True,
    ]


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": turns("user: Hello")}])
    with pytest.raises(DatasetError, match=r"No row is left of 1 records \(no token counts: 1\)"):
        prepare_dataset(settings(tmp_path, tokenizer_folder, source))
    with pytest.raises(DatasetError, match="No row is left of 0 records"):
        prepare_dataset(settings(tmp_path, tokenizer_folder, write_jsonl(tmp_path / "e.jsonl", [])))


def test_what_is_there_is_never_written_over(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": HELLO}])
    config = settings(tmp_path, tokenizer_folder, source)
    prepare_dataset(config)
    before = config.output.read_bytes()
    with pytest.raises(DatasetError, match="exists already"):
        prepare_dataset(config)
    assert config.output.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("s.jsonl", None, "does not exist"),
        ("s.json", b"[]", "of no known kind.*jq -c"),
        ("s.jsonl.gz", gzip.compress(b"x" * 100_000)[:60], "damaged or cut short"),
        ("s.parquet", b"PAR1", "damaged or cut short"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(
    tmp_path: Path, tokenizer_folder: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DatasetError, match=rf"{name}.*{message}"):
        prepare_dataset(settings(tmp_path, tokenizer_folder, tmp_path / name))


def test_a_source_that_grows_meanwhile_is_noticed(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": HELLO}])
    config = settings(tmp_path, tokenizer_folder, source)

    def grow(progress: Any) -> None:
        if progress.written:  # all of it was read
            with source.open("a") as file:
                file.write(json.dumps({"messages": GREETING}) + "\n")

    with pytest.raises(DatasetError, match="was written to while it was read"):
        prepare_dataset(config, grow)
    assert os.listdir(config.output.parent) == []


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": HELLO}])
    with pytest.raises(DatasetError, match="is no folder"):
        prepare_dataset(settings(tmp_path, tmp_path / "nowhere", source))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="cannot be loaded"):
        prepare_dataset(settings(tmp_path, tmp_path / "empty", source))


# What a record may be


def test_sharegpt_with_tools_and_calls(vocab_size: int) -> None:
    record = {
        "system": "Be brief",
        "tools": '[{"name": "weather"}]',
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "It rains."},
        ],
    }
    parsed = parse_record(record, 0, vocab_size)
    assert isinstance(parsed, Conversation)
    assert [message["role"] for message in parsed.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert parsed.messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert parsed.tools == [{"name": "weather"}]


def test_openai_messages_with_parts_and_calls(vocab_size: int) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    record = {
        "messages": [
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
    }
    parsed = parse_record(record, 0, vocab_size)
    assert isinstance(parsed, Conversation)
    assert parsed.messages[0] == {"role": "system", "content": "Be brief"}
    assert parsed.messages[1]["content"] == "Weather?"
    assert parsed.messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert "name" not in parsed.messages[2]
    assert parsed.messages[3]["tool_call_id"] == "1"
    assert parsed.with_text_arguments().messages[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


def test_token_ids_stay_as_they_are(vocab_size: int) -> None:
    parsed = parse_record({"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}, 7, vocab_size)
    assert isinstance(parsed, Row)
    assert (parsed.input_ids.tolist(), parsed.loss_mask.tolist()) == ([1, 2, 3], [0, 1, 1])
    with pytest.raises(InvalidRow, match="input_ids is empty"):
        parse_record({"input_ids": []}, 0, vocab_size)


# The manifest, as `extract` checks it


@pytest.fixture
def prepared(tmp_path: Path, tokenizer_folder: Path) -> PrepareConfig:
    long = turns("user: Hello", f"assistant: {'word ' * 40}")
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": HELLO}, {"messages": long}])
    config = settings(tmp_path, tokenizer_folder, source, max_seq_len=60)
    assert prepare_dataset(config)["truncated"] == 1
    return config


def model_in(folder: Path, vocab_size: int = 400) -> Model:
    return Model(folder, "Llama", 8, 16, vocab_size, 8192, "identity")


def agree(config: PrepareConfig, model: Model, **policies: Any) -> dict[str, Any] | None:
    return check_agreement(DatasetConfig(path=config.output, **({"max_seq_len": 60} | policies)), model)


def test_a_prepared_dataset_agrees_with_its_own_settings(prepared: PrepareConfig) -> None:
    manifest = agree(prepared, model_in(prepared.tokenizer))
    assert manifest is not None
    check_contents(prepared.output, manifest, manifest["sha256"])
    assert manifest["settings"]["max_seq_len"] == 60
    assert manifest["template"]["mask"] == "the template followed message by message"


def test_a_dataset_without_a_manifest_is_left_to_the_scan(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"input_ids": [1]}])
    assert check_agreement(DatasetConfig(path=path, max_seq_len=8), model_in(tmp_path)) is None
    check_contents(path, None, "anything")


def test_a_changed_dataset_is_found(prepared: PrepareConfig) -> None:
    manifest = agree(prepared, model_in(prepared.tokenizer))
    with pytest.raises(DatasetError, match="changed since it was prepared: its sha256 is 000000000000"):
        check_contents(prepared.output, manifest, "0" * 64)
    with prepared.output.open("a") as file:
        file.write("\n")
    with pytest.raises(DatasetError, match=r"changed since it was prepared: it has \d+ bytes"):
        agree(prepared, model_in(prepared.tokenizer))


def test_another_tokenizer_is_found(prepared: PrepareConfig, tmp_path: Path) -> None:
    tokenizer_of("llama-3").save_pretrained(tmp_path / "other")
    with pytest.raises(DatasetError, match="prepared with another tokenizer"):
        agree(prepared, model_in(tmp_path / "other"))
    (tmp_path / "bare").mkdir()  # a checkpoint without one says nothing
    assert agree(prepared, model_in(tmp_path / "bare")) is not None


def test_a_smaller_vocabulary_is_found(prepared: PrepareConfig) -> None:
    with pytest.raises(DatasetError, match=r"has the id \d+; the vocabulary of the model .* has ids 0 to 99"):
        agree(prepared, model_in(prepared.tokenizer, vocab_size=100))


def test_rows_that_were_cut_shorter_than_is_asked_for_are_found(prepared: PrepareConfig) -> None:
    with pytest.raises(DatasetError, match=r"1 rows of .* were cut to 60 tokens .*asks for up to 8192"):
        agree(prepared, model_in(prepared.tokenizer), max_seq_len=8192)


def test_rows_longer_than_is_asked_for_are_found(prepared: PrepareConfig) -> None:
    with pytest.raises(DatasetError, match=r"longest row of .* has 60 tokens .*dataset.max_seq_len is 59"):
        agree(prepared, model_in(prepared.tokenizer), max_seq_len=59)
    assert agree(prepared, model_in(prepared.tokenizer), max_seq_len=59, on_too_long="skip") is not None


def test_a_manifest_of_another_kind_is_refused(prepared: PrepareConfig) -> None:
    manifest_path(prepared.output).write_text('{"format": "x"}')
    with pytest.raises(DatasetError, match="its format is 'x'"):
        agree(prepared, model_in(prepared.tokenizer))


def test_reasons_are_counted_over_all_sources(tmp_path: Path, tokenizer_folder: Path) -> None:
    lines = [{"messages": HELLO}, "{", {"text": 1}, "{"]
    sources = [write_jsonl(tmp_path / f"{number}.jsonl", lines) for number in range(3)]
    config = settings(tmp_path, tokenizer_folder, *sources, on_invalid="skip")
    manifest = prepare_dataset(config)
    check_books(manifest, config)
    assert Counter(manifest["dropped"]) == {"invalid JSON": 6, "no conversation": 3, "duplicate": 2}
