"""Renders a chat template so that each message's own text is known, whatever the template does in between.

A template is a program: it may leave out what an earlier turn thought, put tools into the first message, or write a
turn of tool calls. So its text is not searched for. The template's syntax tree gets a mark at the beginning of each
pass of each loop and after each loop; where a loop goes over the conversation's messages, the marks come out in the
text, and say where each message's text begins and ends. `{% generation %}` blocks are marked, too.

Transformers renders the same template without marks; `mask` compares the two, so that a difference between
this environment and Transformers' cannot go unseen.
"""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TRACE = "drillcore_trace"  # the name of the tracer inside templates
MARK = re.compile("\x00(?:B(\\d+):(\\d+)|E(\\d+)|([GH]))\x00")


@dataclass
class Rendering:
    """A conversation's text, and what of it comes from where; places count characters."""

    text: str
    segments: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By message: what each pass of a loop over the messages wrote, where it wrote anything."""
    generation: list[tuple[int, int]] = field(default_factory=list)
    """What stands in `{% generation %}` blocks."""


class ChatTemplate:
    """A compiled chat template. Not for several threads at once."""

    def __init__(self, source: str):
        """Raises jinja2.TemplateError if it cannot be compiled."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        # What Transformers gives to templates: transformers/utils/chat_template_utils.py.
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": datetime.now().strftime}
        self._trace = _Trace()
        environment.globals[TRACE] = self._trace
        tree = environment.parse(source)
        _mark_loops(tree, itertools.count())
        self._template = environment.from_string(tree)
        self.has_generation = "\x00G\x00" in (data.data for data in tree.find_all(nodes.TemplateData))
        """Whether the template itself says which text is the assistant's."""

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> Rendering:
        """Raises what the template raises."""
        self._trace.begin(messages)
        return _read_marks(self._template.render(messages=messages, **variables))


class _Trace:
    """What the marks in a template call. Messages are known by identity: templates slice and filter their list."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._marked: set[int] = set()

    def begin(self, messages: list[dict[str, Any]]) -> None:
        self._places = {id(message): place for place, message in enumerate(messages)}
        self._marked = set()

    def enter(self, loop: int, item: Any) -> str:
        place = self._places.get(id(item))
        if place is None:
            return ""
        self._marked.add(loop)
        return f"\x00B{loop}:{place}\x00"

    def leave(self, loop: int) -> str:
        return f"\x00E{loop}\x00" if loop in self._marked else ""


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(f"\x00{mark}\x00")]) for mark in "GH")
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _mark_loops(node: nodes.Node, numbers: Iterator[int]) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _mark_loops(value, numbers)
        if not isinstance(value, list):
            continue
        marked = []
        for child in value:
            marked.append(child)
            if not isinstance(child, nodes.Node):
                continue
            _mark_loops(child, numbers)
            if isinstance(child, nodes.For) and isinstance(child.target, nodes.Name):
                loop = next(numbers)
                item = nodes.Name(child.target.name, "load")
                child.body.insert(0, _call("enter", child.lineno, nodes.Const(loop), item))
                marked.append(_call("leave", child.lineno, nodes.Const(loop)))
        setattr(node, name, marked)


def _call(method: str, line: int, *arguments: nodes.Expr) -> nodes.Node:
    function = nodes.Getattr(nodes.Name(TRACE, "load"), method, "load")
    return nodes.Output([nodes.Call(function, list(arguments), [], None, None)]).set_lineno(line)


def _read_marks(marked: str) -> Rendering:
    pieces: list[str] = []
    rendering = Rendering("")
    open_loops: dict[int, tuple[int, int]] = {}
    generation = length = at = 0
    for mark in MARK.finditer(marked):
        pieces.append(marked[at : mark.start()])
        length += len(pieces[-1])
        at = mark.end()
        begun, message, ended, block = mark.groups()
        if block == "G":
            generation = length
        elif block == "H":
            rendering.generation.append((generation, length))
        elif (last := open_loops.pop(int(begun or ended), None)) and last[1] < length:
            rendering.segments[last[0]].append((last[1], length))
        if begun:
            open_loops[int(begun)] = (int(message), length)
    rendering.text = "".join([*pieces, marked[at:]])
    return rendering


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)
