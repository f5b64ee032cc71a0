"""Loss masks by five chat templates, each token compared with a reference that was written out by hand.

The templates in tests/data/chat_templates have the structure of the published ones: what is written where, and what is
left out when. The reference says of every piece of text whether the model generates it; a token counts if any of its
bytes does.
"""

from typing import Any

import numpy as np
import pytest

from tasks.dataset.prepare.mask import ConversationTokenizer, UnmaskableError
from tests.unit.chat import SPECIAL, THOUGHTS, make_tokenizer, read_template, tokenizer_of, turns

Pieces = list[tuple[str, int]]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(content: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"functions.weather:{number}"}


PARIS = call("weather", {"city": "Paris"})
OSLO = call("weather", {"city": "Oslo"}, 1)
LLAMA_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
LLAMA_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"


def llama(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


# family, what it shows -> messages, tools, the pieces of text with whether the model generates them
CASES: dict[tuple[str, str], tuple[list[dict[str, Any]], list[Any] | None, Pieces]] = {
    ("chatml", "several turns"): (
        turns("user: Hi", "assistant: Hello there", "user: Hi", "assistant: Grüße, 東京! 🙂"),
        None,
        [
            ("<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n", 0),
            ("<|im_start|>assistant\n", 0),
            ("Hello there<|im_end|>", 1),
            ("\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Grüße, 東京! 🙂<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    ("chatml", "system prompt and two answers in a row"): (
        turns("system: Be brief", "user: Hi", "assistant: Hello", "assistant: again\n", "user: bye"),
        None,
        [
            ("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Hello<|im_end|>", 1),
            ("\n<|im_start|>assistant\n", 0),
            ("again\n<|im_end|>", 1),
            ("\n<|im_start|>user\nbye<|im_end|>\n", 0),
        ],
    ),
    ("llama-3", "system prompt, trimmed content"): (
        turns("system: Be brief", "user:  Hi ", "assistant:  Hello there\n", "user: x", "assistant: y"),
        None,
        [
            (
                LLAMA_SYSTEM + LLAMA_DATES + "Be brief<|eot_id|>" + llama("user") + "Hi<|eot_id|>" + llama("assistant"),
                0,
            ),
            ("Hello there<|eot_id|>", 1),
            (llama("user") + "x<|eot_id|>" + llama("assistant"), 0),
            ("y<|eot_id|>", 1),
        ],
    ),
    ("llama-3", "a tool call and its result"): (
        [*turns("user: Weather?"), calling(None, PARIS), result("rain"), answer("It rains.")],
        None,
        [
            (LLAMA_SYSTEM + LLAMA_DATES + "<|eot_id|>" + llama("user") + "Weather?<|eot_id|>" + llama("assistant"), 0),
            ('{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>', 1),
            (llama("ipython") + "rain<|eot_id|>" + llama("assistant"), 0),
            ("It rains.<|eot_id|>", 1),
        ],
    ),
    ("deepseek-v3", "several turns"): (
        turns("system: Be brief", "user: Hi", "assistant: Hello", "user: x", "assistant: Hello\n"),
        None,
        [
            ("<｜begin▁of▁sentence｜>Be brief<｜User｜>Hi<｜Assistant｜>", 0),
            ("Hello<｜end▁of▁sentence｜>", 1),
            ("<｜User｜>x<｜Assistant｜>", 0),
            ("Hello\n<｜end▁of▁sentence｜>", 1),
        ],
    ),
    ("deepseek-v3", "two tool calls, whose results are closed by what follows"): (
        [
            *turns("user: Weather?"),
            calling(None, call("weather", '{"city": "Paris"}'), call("weather", '{"city": "Oslo"}')),
            result("rain"),
            result("snow"),
            answer("Rain and snow."),
            *turns("user: Thanks", "assistant: Bye"),
        ],
        None,
        [
            ("<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜>", 0),
            (
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}'
                "\n```<｜tool▁call▁end｜>\n"
                '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}'
                "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
                1,
            ),
            (
                "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>rain<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>snow",
                0,
            ),
            ("<｜tool▁output▁end｜><｜tool▁outputs▁end｜>", 0),
            ("Rain and snow.<｜end▁of▁sentence｜>", 1),
            ("<｜User｜>Thanks<｜Assistant｜>", 0),
            ("Bye<｜end▁of▁sentence｜>", 1),
        ],
    ),
    ("kimi-k2.5", "thoughts of earlier turns are left out"): (
        [
            *turns("system: Be brief", "user: Hi"),
            answer("Hello", reasoning_content="hm"),
            *turns("user: x"),
            answer("y", reasoning_content="so"),
        ],
        None,
        [
            ("<|im_system|>system<|im_middle|>Be brief<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>", 0),
            ("<|im_assistant|>assistant<|im_middle|><think>", 0),
            ("</think>Hello<|im_end|>", 1),
            ("<|im_user|>user<|im_middle|>x<|im_end|><|im_assistant|>assistant<|im_middle|><think>", 0),
            ("</think>y<|im_end|>", 1),
        ],
    ),
    ("kimi-k2.5", "tool calls after the last answer keep their thought"): (
        [
            *turns("user: Weather?"),
            calling("", PARIS, OSLO, reasoning_content="two cities"),
            result("rain"),
            result("snow", 1),
        ],
        [WEATHER],
        [
            (
                '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"weather","parameters":'
                '{"type":"object"}}}]<|im_end|><|im_user|>user<|im_middle|>Weather?<|im_end|>',
                0,
            ),
            ("<|im_assistant|>assistant<|im_middle|><think>", 0),
            (
                "two cities</think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
                '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.weather:1'
                '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
                1,
            ),
            ("<|im_system|>tool<|im_middle|>## Return of functions.weather:0\nrain<|im_end|>", 0),
            ("<|im_system|>tool<|im_middle|>## Return of functions.weather:1\nsnow<|im_end|>", 0),
        ],
    ),
    ("qwen3", "the last thought counts, earlier ones are left out"): (
        [
            *turns("system: Be brief", "user: Hi"),
            answer("<think>\nhm\n</think>\n\nHello"),
            *turns("user: x"),
            answer("y", reasoning_content="so"),
        ],
        None,
        [
            ("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Hello<|im_end|>", 1),
            ("\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", 0),
            ("<think>\nso\n</think>\n\ny<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    ("qwen3", "a thought before a tool call is left out once there is another question"): (
        [
            *turns("user: Weather?"),
            calling("I look.", PARIS, OSLO, reasoning_content="hm"),
            result("rain"),
            result("snow", 1),
            answer("Rain and snow.", reasoning_content="so"),
            *turns("user: Thanks"),
            answer("Bye", reasoning_content="well"),
        ],
        [WEATHER],
        [
            (
                '<|im_start|>system\n# Tools\n\n<tools>\n{"type": "function", "function": {"name": "weather", '
                '"parameters": {"type": "object"}}}\n</tools><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n',
                0,
            ),
            ("<|im_start|>assistant\n", 0),
            (
                'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
                '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
                1,
            ),
            ("\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsnow\n</tool_response>", 0),
            ("<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Rain and snow.<|im_end|>", 1),
            ("\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n", 0),
            ("<think>\nwell\n</think>\n\nBye<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
}


def reference(ids: list[int], tokenizer: Any, pieces: Pieces) -> list[int]:
    """Token by token: does any of its bytes come from a piece that counts?"""
    counts = b"".join(bytes([flag]) * len(text.encode()) for text, flag in pieces)
    to_byte = {character: byte for byte, character in _byte_characters().items()}
    mask, at = [], 0
    for token in tokenizer.convert_ids_to_tokens(ids):
        is_added = token in tokenizer.get_added_vocab() or token in sum(SPECIAL.values(), THOUGHTS)
        length = len(token.encode()) if is_added else len(bytes(to_byte[character] for character in token))
        mask.append(int(any(counts[at : at + length])))
        at += length
    assert at == len(counts)
    return mask


def _byte_characters() -> dict[int, str]:
    """The characters that byte-level tokenizers write bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}


@pytest.mark.parametrize(("family", "what"), CASES, ids=[f"{family}: {what}" for family, what in CASES])
def test_each_token_is_masked_as_the_reference_says(family: str, what: str) -> None:
    messages, tools, pieces = CASES[family, what]
    tokenizer = tokenizer_of(family)
    ids, mask = ConversationTokenizer(tokenizer).tokenize(messages, tools)
    text = "".join(text for text, _ in pieces)
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == text
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (ids.dtype, mask.dtype) == (np.int32, np.uint8)
    assert mask.tolist() == reference(ids.tolist(), tokenizer, pieces)


@pytest.mark.parametrize(("family", "what"), CASES, ids=[f"{family}: {what}" for family, what in CASES])
def test_a_tokenizer_that_says_nothing_of_places_gives_the_same(family: str, what: str) -> None:
    """As Kimi's: the text is cut at the turns, and the pieces' tokens are those of the whole."""

    class Slow:
        is_fast = False

        def __init__(self, tokenizer: Any):
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

    messages, tools, _ = CASES[family, what]
    tokenizer = tokenizer_of(family)
    slow = ConversationTokenizer(Slow(tokenizer)).tokenize(messages, tools)
    for one, other in zip(slow, ConversationTokenizer(tokenizer).tokenize(messages, tools), strict=True):
        assert one.tolist() == other.tolist()


def test_marks_in_the_template_decide_where_there_are_any() -> None:
    marked = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{% set words = message.content %}{{ words }}{% endgeneration %}{% else %}{{ message.content }}"
        "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    tokenizer = make_tokenizer(marked)
    messages = turns("user: Hi", "assistant: Hello there", "user: x", "assistant: y")
    follower = ConversationTokenizer(tokenizer)
    ids, mask = follower.tokenize(messages)
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert follower.follows_marks
    assert ids.tolist() == theirs["input_ids"]
    assert mask.tolist() == theirs["assistant_masks"]
    text, spans = follower.spans(messages)
    assert [text[begin:end] for begin, end in spans] == ["Hello there", "y"]


def spans_of(template: str, messages: list[dict[str, Any]], **variables: Any) -> list[str]:
    text, spans = ConversationTokenizer(make_tokenizer(template), variables=variables).spans(messages)
    return [text[begin:end] for begin, end in spans]


def test_a_variable_of_the_template_moves_the_beginning_of_a_turn() -> None:
    messages = turns("user: Hi", "assistant: Hello")
    assert spans_of(read_template("qwen3"), messages) == ["<think>\n\n</think>\n\nHello<|im_end|>"]
    assert spans_of(read_template("qwen3"), messages, enable_thinking=False) == ["Hello<|im_end|>"]


def test_a_generation_prompt_that_begins_a_thought_the_turn_does_not_have() -> None:
    """As DeepSeek-R1's. The answer's own first character is not taken for the thought's."""
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    assert spans_of(template, turns("user: Hi", "assistant: <thin> ice")) == ["<thin> ice<|im_end|>"]
    assert spans_of(template, turns("user: Hi", "assistant: <think>\nhm")) == ["hm<|im_end|>"]


def test_a_generation_prompt_that_is_written_inside_the_loop() -> None:
    """As Zephyr's."""
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% endfor %}"
    )
    assert spans_of(template, turns("user: Hi", "assistant: Hello", "user: x", "assistant: y")) == [
        "Hello<|im_end|>",
        "y<|im_end|>",
    ]


def test_the_end_token_counts_where_it_is_written_after_the_loop() -> None:
    template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content }}{% if not loop.last %}{{ '\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\nassistant: ' }}{% else %}{{ '<|im_end|>' }}"
        "{% endif %}"
    )
    assert spans_of(template, turns("user: Hi", "assistant: Hello")) == ["Hello<|im_end|>"]


def test_a_template_without_a_generation_prompt_begins_a_turn_at_its_content() -> None:
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
        "{% endfor %}"
    )
    assert spans_of(template, turns("user: Hi", "assistant: Hello")) == ["Hello<|im_end|>"]


CANNOT = {
    "turns in pairs": (
        "{% for at in range(0, messages|length, 2) %}{{ messages[at].content + '|' + messages[at + 1].content }}"
        "{% endfor %}{% if add_generation_prompt %}{% endif %}",
        "writes message 1 in 0 places",
    ),
    "content is changed": (
        "{% for message in messages %}{{ message.content | upper }}{% endfor %}{% if add_generation_prompt %}"
        "{% endif %}",
        "changes the content of message 1",
    ),
    "another generation prompt": (
        "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'bot: ' }}{% endif %}",
        "begins message 1 with 'assis', but the generation prompt is 'bot: '",
    ),
    "messages twice": (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% for message in messages %}"
        "{{ message.content }}{% endfor %}{% if add_generation_prompt %}{% endif %}",
        "writes message 1 in 2 places",
    ),
}


@pytest.mark.parametrize(("template", "message"), CANNOT.values(), ids=CANNOT.keys())
def test_what_cannot_be_told_for_certain_is_refused(template: str, message: str) -> None:
    with pytest.raises(UnmaskableError, match=message):
        ConversationTokenizer(make_tokenizer(template)).tokenize(turns("user: Hi", "assistant: Hello"))


def test_a_tool_call_that_the_template_leaves_out_is_refused() -> None:
    """DeepSeek-V3's writes calls only where there is no content, not even an empty one."""
    messages = [*turns("user: Weather?"), calling("", call("weather", "{}"))]
    with pytest.raises(UnmaskableError, match="leaves out the call of 'weather' in message 1"):
        ConversationTokenizer(tokenizer_of("deepseek-v3")).tokenize(messages)


def test_text_that_looks_like_a_mark_is_refused() -> None:
    messages = turns("user: Hi\x00G\x00", "assistant: Hello")
    with pytest.raises(UnmaskableError, match="followed message by message"):
        ConversationTokenizer(tokenizer_of("chatml")).tokenize(messages)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = None
    with pytest.raises(UnmaskableError, match="chat template cannot be used"):
        ConversationTokenizer(tokenizer)
