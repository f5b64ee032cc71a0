"""What one worker does: a block of records becomes lines of the dataset, or reasons why not."""

import functools
import hashlib
import multiprocessing
import os
import threading
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import numpy as np
import orjson
from jinja2 import TemplateError

from tasks.dataset.formats import ID, IDS, MASK
from tasks.dataset.prepare.conversations import Conversation, id_of, parse_record, without_nulls
from tasks.dataset.prepare.mask import ConversationTokenizer, UnmaskableError
from tasks.dataset.prepare.settings import PrepareConfig
from tasks.dataset.prepare.sources import Block, kind_of
from tasks.dataset.rows import InvalidRow
from tasks.errors import DatasetError

DIGEST = 16  # bytes
TOO_LONG, NOTHING_COUNTS = "longer than max_seq_len", "no token counts"
UNMASKABLE, REFUSED = "turns cannot be told for certain", "refused by the chat template"


@dataclass(frozen=True)
class Dropped:
    """A record that became no row. `kind` groups the same reason."""

    place: int
    """In the source, 0-based."""
    kind: str
    detail: str


@dataclass
class Tokenized:
    """A block's rows, one after the other."""

    source: int
    records: int
    lines: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each row's line."""
    tokens: list[int] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)
    """DIGEST bytes a row, of its token ids."""
    truncated: list[bool] = field(default_factory=list)
    largest_id: int = 0
    dropped: list[Dropped] = field(default_factory=list)


class BlockTokenizer:
    """Tokenizes blocks by one config."""

    def __init__(self, config: PrepareConfig):
        """Loads the tokenizer. Raises DatasetError if it cannot be used."""
        self._config = config
        self.tokenizer = load_tokenizer(config)
        self.vocab_size = vocab_size_of(config, self.tokenizer)
        self._names = [path.name.removesuffix(kind_of(path)) for path in config.sources]

    @functools.cached_property
    def conversations(self) -> ConversationTokenizer:
        """Raises DatasetError if the chat template cannot be used; token ids alone need none."""
        config = self._config
        try:
            template = config.template.read_text() if config.template else None
            return ConversationTokenizer(self.tokenizer, template, config.template_variables)
        except (UnmaskableError, OSError) as error:
            raise DatasetError(f"{error} (tokenizer {config.tokenizer}). --template names another one.") from error

    def describe_template(self) -> dict[str, Any] | None:
        """The chat template's SHA-256 and what decides the mask; None where there is no usable one."""
        try:
            follower = self.conversations
        except DatasetError:
            return None
        basis = "generation marks" if follower.follows_marks else "the template followed message by message"
        return {"sha256": hashlib.sha256(follower.source.encode()).hexdigest(), "mask": basis}

    def tokenize(self, block: Block) -> Tokenized:
        """Raises DatasetError for the first record that a policy `fail` does not let pass."""
        done = Tokenized(block.source, len(block.records))
        for place, record in enumerate(block.records, start=block.first):
            try:
                self._add(done, record, place)
            except InvalidRow as reason:
                self._drop(done, Dropped(place, reason.kind, str(reason)))
        return done

    def _add(self, done: Tokenized, record: bytes | dict[str, Any], place: int) -> None:
        value = _parse(record)
        ids, mask = self._ids_and_mask(parse_record(value, place, self.vocab_size), place)
        length = len(ids)
        if length > (limit := self._config.max_seq_len):
            if self._config.on_too_long != "truncate":
                raise InvalidRow(TOO_LONG, f"{length} tokens, max_seq_len is {limit}")
            ids, mask = ids[:limit], mask[:limit]
        if not mask.any():
            done.dropped.append(Dropped(place, NOTHING_COUNTS, "its loss mask is 0 throughout"))
            return
        row_id = id_of(value) or f"{self._names[done.source]}:{place}"
        row = {ID: row_id, IDS: ids.tolist(), MASK: mask.tolist()}
        line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        done.lines += line
        done.sizes.append(len(line))
        done.tokens.append(len(ids))
        done.loss_tokens.append(int(mask.sum()))
        done.truncated.append(length > limit)
        done.digests += hashlib.blake2b(ids.tobytes(), digest_size=DIGEST).digest()
        done.largest_id = max(done.largest_id, int(ids.max()))

    def _ids_and_mask(self, parsed: Any, place: int) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(parsed, Conversation):
            return parsed.input_ids, parsed.loss_mask
        follower = self.conversations
        try:
            try:
                ids, mask = follower.tokenize(parsed.messages, parsed.tools)
            except TypeError:
                # A template that joins the arguments of a tool call to text takes them as text only.
                text = parsed.with_text_arguments()
                ids, mask = follower.tokenize(text.messages, text.tools)
        except UnmaskableError as error:
            raise InvalidRow(UNMASKABLE, str(error)) from error
        except (TemplateError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRow(REFUSED, f"the chat template does not take it: {error!r}") from error
        if len(ids) == 0:
            raise InvalidRow("empty row", "it has no text")
        return ids, mask

    def _drop(self, done: Tokenized, dropped: Dropped) -> None:
        policy = "on_too_long" if dropped.kind == TOO_LONG else "on_invalid"
        if getattr(self._config, policy) == "fail":
            path = self._config.sources[done.source]
            what = f"line {dropped.place + 1}" if kind_of(path).startswith(".jsonl") else f"row {dropped.place}"
            choice = " or truncate" if policy == "on_too_long" else ""
            raise DatasetError(
                f"{path} {what}: {dropped.detail}. Mend it, or leave such records out, counted: "
                f"--{policy.replace('_', '-')} skip{choice}."
            )
        done.dropped.append(dropped)


def load_tokenizer(config: PrepareConfig) -> Any:
    """Transformers' tokenizer, from its folder only. Raises DatasetError."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DatasetError("Transformers is not installed: pip install 'drillcore[prepare]'.") from error
    if not config.tokenizer.is_dir():  # else it would be looked up on a hub
        raise DatasetError(f"The tokenizer {config.tokenizer} is no folder.")
    try:
        return AutoTokenizer.from_pretrained(
            config.tokenizer, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # what a tokenizer's files can do wrong has no common class
        hint = "" if config.trust_remote_code else " If it needs its own code: --trust-remote-code."
        raise DatasetError(f"The tokenizer in {config.tokenizer} cannot be loaded: {error}.{hint}") from error


def vocab_size_of(config: PrepareConfig, tokenizer: Any) -> int:
    """Ids that the model knows: its config says it, or else the tokenizer."""
    try:
        values = orjson.loads((config.tokenizer / "config.json").read_bytes())
        return int((values.get("text_config") or values)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return len(tokenizer)


def _parse(record: bytes | dict[str, Any]) -> Any:
    if not isinstance(record, bytes):
        return without_nulls(record)
    try:
        return orjson.loads(record)
    except orjson.JSONDecodeError as error:
        raise InvalidRow("invalid JSON", f"invalid JSON: {error}") from error


# A worker's own, made once.
_own: BlockTokenizer


def begin_worker(config: PrepareConfig) -> None:
    """Run in each worker process first."""
    global _own
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallel work
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)  # killed: nobody is left to tell

    threading.Thread(target=end_with_parent, daemon=True).start()
    _own = BlockTokenizer(config)


def tokenize_block(block: Block) -> Tokenized:
    """In a worker process."""
    return _own.tokenize(block)
