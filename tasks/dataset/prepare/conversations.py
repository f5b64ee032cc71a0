"""What a line of a source may be: OpenAI's `messages`, ShareGPT's `conversations`, or token ids; all as one form."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.dataset.formats import ID, IDS
from tasks.dataset.rows import InvalidRow, Row, parse_row

# ShareGPT's names of who speaks, as they are found in its many descendants.
ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
MESSAGES, CONVERSATIONS = "messages", "conversations"


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them; arguments of tool calls are objects."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None

    def with_text_arguments(self) -> "Conversation":
        """With the arguments of tool calls as JSON text, which some templates want (DeepSeek-V3's)."""
        messages = [
            {**message, "tool_calls": [_with_arguments(call, _as_text) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in self.messages
        ]
        return Conversation(messages, self.tools)


def parse_record(record: Any, number: int, vocab_size: int) -> Row | Conversation:
    """A row of token ids or a conversation. Raises InvalidRow, whose `kind` groups the same fault."""
    if not isinstance(record, dict):
        raise InvalidRow("no conversation", f"no JSON object, but {type(record).__name__}")
    if record.get(IDS) is not None:
        return parse_row({name: _as_list(value) for name, value in record.items()}, number, vocab_size)
    for name in (MESSAGES, CONVERSATIONS):
        if record.get(name) is not None:
            turns = record[name]
            break
    else:
        raise InvalidRow(
            "no conversation",
            f"none of {MESSAGES}, {CONVERSATIONS}, {IDS}; it has {', '.join(map(repr, record)) or 'no keys'}",
        )
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise InvalidRow("no conversation", f"{name} is no list of messages")
    messages = [_message(turn, place) for place, turn in enumerate(turns)]
    if isinstance(system := record.get("system"), str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, _tools(record.get("tools")))


def id_of(record: Any) -> str | None:
    """The record's own id."""
    value = record.get(ID) if isinstance(record, dict) else None
    return None if value is None else str(value)


def without_nulls(value: Any) -> Any:
    """A table's row without the fields that it has only because another row has them, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return list(map(without_nulls, value))
    return value


def _message(turn: dict[str, Any], place: int) -> dict[str, Any]:
    said_by = turn.get("role", turn.get("from"))
    role = ROLES.get(said_by) if isinstance(said_by, str) else None
    if role is None:
        raise InvalidRow("unknown role", f"message {place} is by {said_by!r}; known are {', '.join(ROLES)}")
    content = turn["content"] if "content" in turn else turn.get("value")
    if said_by == "function_call":
        return {"role": role, "content": None, "tool_calls": _calls_of_text(content, place)}
    kept = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    message = {**kept, "role": role, "content": _text(content, place)}
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise InvalidRow("wrong tool call", f"tool_calls of message {place} is no list of objects")
        message["tool_calls"] = [_with_arguments(call, _as_object) for call in calls]
    elif message["content"] is None:
        raise InvalidRow("message without content", f"message {place} has neither content nor tool_calls")
    return message


def _text(content: Any, place: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        raise InvalidRow("content that is no text", f"message {place} holds {', '.join(kinds)}: only text is supported")
    raise InvalidRow("content that is no text", f"the content of message {place} is {type(content).__name__}, not text")


def _calls_of_text(text: Any, place: int) -> list[dict[str, Any]]:
    try:
        value = json.loads(text)
        calls = value if isinstance(value, list) else [value]
        return [
            {
                "id": f"call_{place}_{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": _as_object(call.get("arguments", {}))},
            }
            for number, call in enumerate(calls)
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRow(
            "wrong tool call", f"message {place} is a function_call, but not {{name, arguments}} in JSON: {error!r}"
        ) from error


def _with_arguments(call: dict[str, Any], change: Any) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


def _as_object(arguments: Any) -> Any:
    """OpenAI writes arguments as text; Transformers' templates expect the object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise InvalidRow("wrong tools", f"tools is no JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRow("wrong tools", "tools is no list of JSON schemas")
    return tools


def _as_list(value: Any) -> Any:
    """A table's booleans, in a loss mask, count as 0 and 1."""
    if isinstance(value, list) and value and set(map(type, value)) == {bool}:
        return list(map(int, value))
    return value.tolist() if isinstance(value, np.ndarray) else value
