"""Token ids and loss mask of a conversation: 1 on what the assistant generates, the token that ends a turn included."""

import re
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from jinja2 import TemplateError

from tasks.dataset.prepare.chat_template import ChatTemplate, Rendering

ASSISTANT = "assistant"
THOUGHT_END = "</think>"
STAND_IN: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
Spans = list[tuple[int, int]]
Messages = list[dict[str, Any]]


class UnmaskableError(ValueError):
    """What is the assistant's in a conversation's text cannot be told for certain."""


class ConversationTokenizer:
    """A tokenizer with its chat template.

    Where the template has `{% generation %}` blocks, they say what counts. Elsewhere a turn's text is what the template
    writes while its loop is at that message (see `chat_template`), less the head that it shows before the model
    generates: the generation prompt, which is rendered from the messages before.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, variables: dict[str, Any] | None = None):
        """tokenizer: Transformers'. template: instead of the tokenizer's own; variables: for the template.

        Raises UnmaskableError if there is no usable template.
        """
        try:
            self.source: str = template or tokenizer.get_chat_template()
            self._template = ChatTemplate(self.source)
        except (ValueError, TemplateError) as error:
            raise UnmaskableError(f"The chat template cannot be used: {error}") from error
        self.tokenizer = tokenizer
        self._arguments = dict(variables or {})
        self._variables = {**tokenizer.special_tokens_map, **self._arguments}
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, is_special in added.items() if is_special} | set(tokenizer.all_special_tokens)
        self._added, self._special = (_any_of(texts) for texts in (added.keys() | special, special))

    @property
    def follows_marks(self) -> bool:
        """Whether the template's own `{% generation %}` blocks decide."""
        return self._template.has_generation

    def tokenize(self, messages: Messages, tools: list[Any] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """input_ids int32 and loss_mask uint8, both [tokens].

        Raises UnmaskableError, or what the template or the tokenizer raises on what they do not take.
        """
        text, spans = self.spans(messages, tools)
        return self._ids_and_mask(text, spans)

    def spans(self, messages: Messages, tools: list[Any] | None = None) -> tuple[str, Spans]:
        """The conversation's text and where in it the assistant's is, in characters, ascending."""
        rendering = self._render(messages, tools)
        expected = self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self.source, tokenize=False, **self._arguments
        )
        if rendering.text != expected:
            raise UnmaskableError("the chat template's text is another one when it is followed message by message")
        if self.follows_marks:
            return rendering.text, rendering.generation
        spans = [
            self._turn(messages, tools, place, rendering)
            for place, message in enumerate(messages)
            if message.get("role") == ASSISTANT
        ]
        found = [span for span in spans if span]
        if any(one[1] > other[0] for one, other in pairwise(found)):
            raise UnmaskableError("the chat template changes the order of the messages")
        return rendering.text, found

    def _render(self, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> Rendering:
        variables = {"tools": tools, "documents": None, "add_generation_prompt": prompt, **self._variables}
        return self._template.render(messages, **variables)

    def _turn(
        self, messages: Messages, tools: list[Any] | None, place: int, rendering: Rendering
    ) -> tuple[int, int] | None:
        message, text = messages[place], rendering.text
        segments = rendering.segments.get(place, [])
        says = message.get("content") or message.get("tool_calls")
        if not segments and not says:
            return None
        if len(segments) != 1:
            raise UnmaskableError(f"the chat template writes message {place} in {len(segments)} places, not in one")
        begin, end = segments[0]
        content = message.get("content")
        if isinstance(content, str) and content.rpartition(THOUGHT_END)[2].strip() not in text[begin:end]:
            raise UnmaskableError(f"the chat template changes the content of message {place}")
        for call in message.get("tool_calls") or ():
            name = call.get("function", call).get("name")
            if not isinstance(name, str) or name not in text[begin:end]:
                raise UnmaskableError(f"the chat template leaves out the call of {name!r} in message {place}")
        begin += self._head(messages, tools, place, rendering, begin, end)
        end = self._end(text, begin, end)
        return (begin, end) if begin < end else None

    def _head(
        self, messages: Messages, tools: list[Any] | None, place: int, rendering: Rendering, begin: int, end: int
    ) -> int:
        """Characters at the beginning of a turn's text that are shown to the model, not generated by it."""
        turn = rendering.text[begin:end]
        if "add_generation_prompt" not in self.source:
            content = messages[place].get("content")
            if not isinstance(content, str) or messages[place].get("tool_calls") or content.strip() not in turn:
                raise UnmaskableError(f"the chat template has no generation prompt, and message {place} no beginning")
            return turn.index(content.strip())
        head = self._generation_prompt(messages, tools, place, rendering, begin)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(head, turn)))
        if shared == len(head):
            return shared
        # The prompt may go on with a token that the turn does not have, as one that begins a thought. What turn and
        # token then begin with by chance is generated.
        for token in self._added.finditer(head) if self._added else ():
            if 0 < token.start() <= shared < token.end():
                return token.start()
        raise UnmaskableError(
            f"the chat template begins message {place} with {turn[: len(head)]!r}, but the generation prompt is "
            f"{head!r}"
        )

    def _generation_prompt(
        self, messages: Messages, tools: list[Any] | None, place: int, rendering: Rendering, begin: int
    ) -> str:
        """What the model is shown between the message before and what it generates."""
        try:
            before = self._render(messages[:place], tools, prompt=True)
        except TemplateError:
            if place:
                raise
            # Many templates take no empty conversation.
            shown, hidden = (self._render(STAND_IN, tools, prompt).text for prompt in (True, False))
            return shown.removeprefix(hidden)
        history = rendering.text[:begin]
        if before.text.startswith(history):
            return before.text[len(history) :]
        # Earlier turns look different with more after them: compare from the message just before this one.
        here, there = rendering.segments.get(place - 1, []), before.segments.get(place - 1, [])
        if len(here) == len(there) == 1:
            last = rendering.text[here[0][0] : begin]
            rest = before.text[there[0][0] :]
            if rest.startswith(last):
                return rest[len(last) :]
        raise UnmaskableError(f"the chat template writes the messages before message {place} differently after it")

    def _end(self, text: str, begin: int, end: int) -> int:
        """Without the white space after the token that ends the turn, or the line's end where there is none."""
        tokens = list(self._special.finditer(text, begin, end)) if self._special else []
        if tokens and not text[tokens[-1].end() : end].strip():
            return tokens[-1].end()
        eos = self.tokenizer.eos_token
        if eos and text.startswith(eos, end):  # written after the loop
            return end + len(eos)
        return begin + len(text[begin:end].rstrip("\n"))

    def _ids_and_mask(self, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        if not self.tokenizer.is_fast:
            return self._piece_by_piece(text, spans)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        begins, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.uint8)
        for begin, end in spans:
            # Some tokenizers give white space an empty place, at its end.
            mask |= np.where(begins == ends, (begin < ends) & (ends <= end), (begins < end) & (ends > begin))
        return ids, mask

    def _piece_by_piece(self, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """For tokenizers that do not say where their tokens are: the pieces' tokens must be the text's."""
        ids: list[int] = []
        mask: list[int] = []
        for piece, counts in _pieces(text, spans):
            tokens = self.tokenizer.encode(piece, add_special_tokens=False)
            ids += tokens
            mask += [counts] * len(tokens)
        if ids != self.tokenizer.encode(text, add_special_tokens=False):
            raise UnmaskableError(
                "a token reaches over the beginning or end of a turn, and this tokenizer does not say where its tokens "
                "are (it is no fast tokenizer)"
            )
        return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)


def _pieces(text: str, spans: Spans) -> Iterator[tuple[str, int]]:
    at = 0
    for begin, end in spans:
        if at < begin:
            yield text[at:begin], 0
        yield text[begin:end], 1
        at = end
    if at < len(text):
        yield text[at:], 0


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
