"""Tokenizers for tests: byte-level, with the special tokens of a model family, and its chat template."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).resolve().parents[1] / "data/chat_templates"
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama-3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "deepseek-v3": [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ],
    "kimi-k2.5": [
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
}
THOUGHTS = ["<think>", "</think>"]  # tokens of their own, but not special ones, as in Qwen3
BOS = {"llama-3": "<|begin_of_text|>", "deepseek-v3": "<｜begin▁of▁sentence｜>"}
EOS = {"llama-3": "<|eot_id|>", "deepseek-v3": "<｜end▁of▁sentence｜>"}
TEXTS = [
    "Hello there, how are you? I am fine, thank you.",
    "    return value\n    print(value)",
    "Grüße, 東京! 🙂 naïve",
]


def read_template(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text().removesuffix("\n")


def make_tokenizer(template: str, family: str = "chatml", trim_offsets: bool = False) -> Any:
    """A byte-level BPE tokenizer whose tokens are bytes and a few longer pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL[family],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THOUGHTS])
    names = {"eos_token": EOS.get(family, "<|im_end|>")}
    if family in BOS:
        names["bos_token"] = BOS[family]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    return fast


def tokenizer_of(family: str) -> Any:
    return make_tokenizer(read_template(family), family)


def turns(*pairs: str) -> list[dict[str, Any]]:
    """Messages from 'role: content' strings."""
    return [dict(zip(("role", "content"), pair.split(": ", 1), strict=True)) for pair in pairs]
