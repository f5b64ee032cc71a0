"""What to prepare, and how."""

import os
from typing import Any, Literal

from pydantic import Field

from tasks.config import AbsolutePath, Section


class PrepareConfig(Section):
    """Sources in, one dataset out."""

    sources: list[AbsolutePath] = Field(
        min_length=1,
        description="Files of conversations (OpenAI's messages, ShareGPT's conversations) or token ids: .jsonl, "
        ".jsonl.gz, .jsonl.zst or .parquet.",
        examples=[["/data/conversations/talks.jsonl"]],
    )
    tokenizer: AbsolutePath = Field(
        description="Folder of the model, or of its tokenizer alone.", examples=["/data/models/Kimi-K2.5"]
    )
    output: AbsolutePath = Field(
        description="The dataset, a .jsonl file that does not exist yet.",
        examples=["/data/datasets/kimi-k2.5-tokenized.jsonl"],
    )
    max_seq_len: int = Field(gt=0, description="Longest row in tokens. Longer ones meet on_too_long.", examples=[8192])
    on_too_long: Literal["fail", "truncate", "skip"] = Field(
        default="truncate", description="A row longer than max_seq_len: stop, cut it, or leave it out. All are counted."
    )
    on_invalid: Literal["fail", "skip"] = Field(
        default="fail",
        description="A record that is no conversation, or whose assistant turns cannot be told for certain: stop, or "
        "leave it out, counted by reason.",
    )
    deduplicate: bool = Field(default=True, description="Keep the first of several rows with the same token ids.")
    shuffle: bool = Field(default=True, description="Write the rows in a random order, the same for the same seed.")
    seed: int = Field(default=0, ge=0, description="Of the order.")
    template: AbsolutePath | None = Field(
        default=None, description="A Jinja file instead of the tokenizer's own chat template."
    )
    template_variables: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the chat template, as enable_thinking."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run the tokenizer's own Python code from its folder (Kimi's needs that)."
    )
    workers: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)), ge=1, description="Processes that tokenize."
    )
