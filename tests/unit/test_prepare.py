"""Conversations become token ids with a loss mask on the assistant's words, by any chat template."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tasks.dataset.prepare import prepare_conversations, tokenize_conversation
from tasks.errors import DatasetError
from tests.unit.helpers import write_jsonl

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As some reasoning models do: what an earlier turn thought is left out once another turn follows.
FORGETFUL = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last %}{{ message['content'] }}{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}",
)
STRICT = (
    "{% if messages and messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
)
TEXTS = [
    "Hello there, how are you? I am fine, thank you.",
    "    return value\n    print(value)",
    "Grüße, 東京! 🙂 naïve",
]


def make_tokenizer(template: str = CHATML, trim_offsets: bool = False) -> Any:
    """A byte-level BPE tokenizer whose tokens are bytes and a few longer pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def turns(*pairs: str) -> list[dict[str, str]]:
    """Messages from 'role: content' strings."""
    return [dict(zip(("role", "content"), pair.split(": ", 1), strict=True)) for pair in pairs]


def runs(sample: dict[str, list[int]], tokenizer: Any) -> list[tuple[int, str]]:
    """(mask, text) of each run of tokens with the same mask."""
    pairs = zip(sample["input_ids"], sample["loss_mask"], strict=True)
    return [
        (mask, tokenizer.decode([token for token, _ in group]))
        for mask, group in itertools.groupby(pairs, key=lambda pair: pair[1])
    ]


def test_the_mask_is_on_the_assistants_words_and_the_token_that_ends_them(tokenizer: Any) -> None:
    sample = tokenize_conversation(turns("user: How are you?", "assistant: I am fine."), tokenizer)
    assert runs(sample, tokenizer) == [
        (0, "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"),
        (1, "I am fine.<|im_end|>"),
        (0, "\n"),
    ]


def test_every_assistant_turn_counts(tokenizer: Any) -> None:
    messages = turns("user: Hello", "assistant: Hello there", "user: I am fine", "assistant: thank you", "user: x")
    assert [text for mask, text in runs(tokenize_conversation(messages, tokenizer), tokenizer) if mask] == [
        "Hello there<|im_end|>",
        "thank you<|im_end|>",
    ]


def test_a_system_message_does_not_count(tokenizer: Any) -> None:
    messages = turns("system: You are the assistant\nI am fine", "user: Hello", "assistant: I am fine")
    assert runs(tokenize_conversation(messages, tokenizer), tokenizer) == [
        (
            0,
            "<|im_start|>system\nYou are the assistant\nI am fine<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (1, "I am fine<|im_end|>"),
        (0, "\n"),
    ]


def test_a_turn_that_repeats_another_ones_words_is_told_apart(tokenizer: Any) -> None:
    messages = turns("user: yes", "assistant: yes", "user: yes", "assistant: yes")
    marked = runs(tokenize_conversation(messages, tokenizer), tokenizer)
    assert [mask for mask, _ in marked] == [0, 1, 0, 1, 0]
    assert [text for mask, text in marked if mask] == ["yes<|im_end|>"] * 2


@pytest.mark.parametrize("words", ["Grüße aus 東京", "🙂🙂", "a\u0301 e\u0301", "مرحبا", "\U0001f469\u200d\U0001f680!"])
def test_words_of_any_script_are_marked_byte_by_byte(tokenizer: Any, words: str) -> None:
    messages = turns(f"user: {words}", f"assistant: {words}", "user: ¿qué?", f"assistant: {words}")
    marked = runs(tokenize_conversation(messages, tokenizer), tokenizer)
    assert [text for mask, text in marked if mask] == [f"{words}<|im_end|>"] * 2
    assert [text for mask, text in marked if not mask][
        1
    ] == "\n<|im_start|>user\n¿qué?<|im_end|>\n<|im_start|>assistant\n"


def test_white_space_inside_a_turn_counts(tokenizer: Any) -> None:
    words = "  def f():\n    return value\n\n        print(value)  \n"
    messages = [*turns("user: x"), {"role": "assistant", "content": words}]
    marked = runs(tokenize_conversation(messages, tokenizer), tokenizer)
    assert [text for mask, text in marked if mask] == [f"{words}<|im_end|>"]


def test_an_empty_answer_is_its_end_token(tokenizer: Any) -> None:
    messages = [*turns("user: Hello"), {"role": "assistant", "content": ""}]
    assert [text for mask, text in runs(tokenize_conversation(messages, tokenizer), tokenizer) if mask] == [
        "<|im_end|>"
    ]


def test_without_an_assistant_nothing_counts(tokenizer: Any) -> None:
    sample = tokenize_conversation(turns("user: Hello"), tokenizer)
    assert set(sample["loss_mask"]) == {0}
    assert tokenizer.decode(sample["input_ids"]) == "<|im_start|>user\nHello<|im_end|>\n"


def test_the_ids_are_those_of_the_whole_text(tokenizer: Any) -> None:
    messages = turns("system: fine", "user: Hello there", "assistant: I am fine, thank you.", "user: x")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    sample = tokenize_conversation(messages, tokenizer)
    assert sample["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(sample["loss_mask"]) == len(sample["input_ids"])


def test_a_template_that_renders_an_earlier_turn_differently_is_refused() -> None:
    messages = turns("user: x", "assistant: <think>hm</think>yes", "user: x", "assistant: <think>so</think>no")
    with pytest.raises(ValueError, match="renders message 1 differently inside the conversation"):
        tokenize_conversation(messages, make_tokenizer(FORGETFUL))


def test_conversations_become_a_dataset(tmp_path: Path, tokenizer: Any) -> None:
    conversations = [
        {"id": "a", "messages": turns("user: Hello", "assistant: I am fine")},
        {"messages": turns("user: Grüße", "assistant: 東京")},
    ]
    source = write_jsonl(tmp_path / "conversations.jsonl", conversations)
    rows, tokens = prepare_conversations(source, tmp_path / "new/dataset.jsonl", tokenizer)
    samples = [json.loads(line) for line in (tmp_path / "new/dataset.jsonl").read_text().splitlines()]
    assert [sample["id"] for sample in samples] == ["a", None]
    for sample, conversation in zip(samples, conversations, strict=True):
        wanted = tokenize_conversation(conversation["messages"], tokenizer)  # type: ignore[arg-type]
        assert {name: sample[name] for name in ("input_ids", "loss_mask")} == wanted
    assert (rows, tokens) == (2, sum(len(sample["input_ids"]) for sample in samples))


BAD_LINES = {
    "no JSON": ("{", "line 2 is invalid JSON"),
    "a list": ([1], "line 2 is no conversation"),
    "no messages": ({"text": "x"}, "line 2 is no conversation: KeyError\\('messages'\\)"),
    "messages are text": ({"messages": "Hello"}, "line 2 is no conversation"),
    "no role": ({"messages": [{"content": "x"}]}, "line 2 is no conversation: KeyError\\('role'\\)"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, tokenizer: Any, line: Any, message: str) -> None:
    fine = {"messages": turns("user: Hello", "assistant: fine")}
    source = write_jsonl(tmp_path / "conversations.jsonl", [fine, line, fine])
    with pytest.raises(DatasetError, match=message):
        prepare_conversations(source, tmp_path / "dataset.jsonl", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["conversations.jsonl"]


def test_a_template_that_changes_turns_is_named_with_the_line(tmp_path: Path) -> None:
    messages = turns("user: x", "assistant: <think>hm</think>yes", "user: x")
    source = write_jsonl(tmp_path / "conversations.jsonl", [{"messages": messages}])
    with pytest.raises(DatasetError, match=r"line 1 is no conversation: .*renders message 1 differently"):
        prepare_conversations(source, tmp_path / "dataset.jsonl", make_tokenizer(FORGETFUL))


def test_an_empty_file_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DatasetError, match="holds no conversation"):
        prepare_conversations(write_jsonl(tmp_path / "c.jsonl", []), tmp_path / "dataset.jsonl", tokenizer)


def test_a_missing_file_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DatasetError, match=r"c\.jsonl cannot be read: No such file"):
        prepare_conversations(tmp_path / "c.jsonl", tmp_path / "dataset.jsonl", tokenizer)


def test_white_space_counts_with_a_tokenizer_that_trims_offsets() -> None:
    tokenizer, words = make_tokenizer(trim_offsets=True), "def f():\n    return value"
    messages = [*turns("user: x"), {"role": "assistant", "content": words}]
    marked = runs(tokenize_conversation(messages, tokenizer), tokenizer)
    assert [text for mask, text in marked if mask] == [f"{words}<|im_end|>"]


def test_a_conversation_that_its_template_refuses_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": turns("assistant: Hello", "user: x")}])
    with pytest.raises(DatasetError, match="line 1"):
        prepare_conversations(source, tmp_path / "dataset.jsonl", make_tokenizer(STRICT))


def test_a_conversation_may_begin_with_the_assistant(tokenizer: Any) -> None:
    marked = runs(tokenize_conversation(turns("assistant: Hello", "user: x"), tokenizer), tokenizer)
    assert [text for mask, text in marked if mask] == ["Hello<|im_end|>"]


@pytest.mark.parametrize("answer", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_a_message_without_content_is_refused(tmp_path: Path, tokenizer: Any, answer: Any) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [*turns("user: x"), answer]}])
    with pytest.raises(DatasetError, match="line 1"):
        prepare_conversations(source, tmp_path / "dataset.jsonl", tokenizer)
