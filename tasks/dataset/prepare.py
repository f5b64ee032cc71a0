"""Conversations in, tokenized samples out: the model's chat template and a loss mask on the assistant's words."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from tasks.errors import DatasetError
from tasks.files import write_atomic


def prepare_conversations(source: Path, target: Path, tokenizer: Any) -> tuple[int, int]:
    """Tokenize a JSONL file of {"id", "messages"} into one of {"id", "input_ids", "loss_mask"}.

    tokenizer: a fast Transformers tokenizer with a chat template. Returns (rows, tokens). Raises DatasetError naming
    the line.
    """
    lines, tokens = [], 0
    for number, conversation in _conversations(source):
        try:
            sample = tokenize_conversation(conversation["messages"], tokenizer)
        except (KeyError, TypeError, ValueError, TemplateError) as error:
            raise DatasetError(f"{source} line {number + 1} is no conversation: {error!r}") from error
        tokens += len(sample["input_ids"])
        lines.append(json.dumps({"id": conversation.get("id"), **sample}))
    if not lines:
        raise DatasetError(f"{source} holds no conversation.")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, ("\n".join(lines) + "\n").encode())
    return len(lines), tokens


def tokenize_conversation(messages: list[dict[str, str]], tokenizer: Any) -> dict[str, list[int]]:
    """input_ids and loss_mask of one conversation; the mask is 1 on each assistant turn and the token that ends it.

    The text is rendered once and tokenized once. Where a turn begins and ends in it is read from the rendering of the
    messages before it and up to it, so that no template needs generation marks.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if not isinstance(message["content"], str):
            raise TypeError(f"the content of message {index} is {message['content']!r}, not text")
        if message["role"] != "assistant":
            continue
        through = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if index:
            before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        else:  # templates do not render an empty conversation
            before = through[: through.rindex(message["content"])]
        if not (text.startswith(before) and text.startswith(through)):
            raise ValueError(f"the chat template renders message {index} differently inside the conversation")
        spans.append((len(before), len(through.rstrip("\n"))))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(_inside(token, span) for span in spans)) for token in encoded["offset_mapping"]]
    return {"input_ids": encoded["input_ids"], "loss_mask": mask}


def _inside(token: tuple[int, int], span: tuple[int, int]) -> bool:
    """Whether a token's characters are in a span. Some tokenizers give white space an empty place, at its end."""
    (start, end), (span_start, span_end) = token, span
    return span_start < end <= span_end if start == end else start < span_end and end > span_start


def _conversations(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = source.read_bytes().splitlines()
    except OSError as error:
        raise DatasetError(f"{source} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines):
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{source} line {number + 1} is invalid JSON: {error}") from error
