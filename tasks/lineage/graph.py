"""The graph of a lineage as a picture: input files, extractions, drafters, from left to right. Mermaid or SVG."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from tasks.errors import LineageError
from tasks.lineage.lookup import Drafter, Extraction, Lineage

COLUMN, BOX, HEIGHT, GAP, MARGIN = 330, 270, 64, 22, 16  # pixels
COLOURS = {"input": "#fefcbf", "extraction": "#bee3f8", "drafter": "#c6f6d5", "unknown": "#fed7d7"}
SHOWN = 40  # characters of a line


@dataclass(frozen=True)
class Node:
    """A box: its kind, its place in the column of that kind, and its lines."""

    kind: str
    column: int
    place: int
    lines: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.kind}{self.place}"


def nodes_and_edges(lineage: Lineage) -> tuple[list[Node], list[tuple[Node, Node]]]:
    """The boxes and the arrows between them."""
    inputs: dict[str, Node] = {}
    for one in lineage.extractions:
        lines = (Path(one.input_uri).name, f"sha256 {one.input_sha256[:12]}...")
        inputs.setdefault(one.input_sha256, Node("input", 0, len(inputs), lines))
    extractions = [Node("extraction", 1, at, _extraction(one)) for at, one in enumerate(lineage.extractions)]
    unknown = {
        digest: Node("unknown", 1, len(extractions) + at, ("not recorded here", f"digest {digest[:12]}..."))
        for at, digest in enumerate(lineage.unknown)
    }
    drafters = [Node("drafter", 2, at, _drafter(one)) for at, one in enumerate(lineage.drafters)]
    edges = [(inputs[one.input_sha256], node) for one, node in zip(lineage.extractions, extractions, strict=True)]
    edges += [(extractions[one], drafters[other]) for one, other in lineage.edges]
    edges += [
        (node, drafters[at])
        for digest, node in unknown.items()
        for at, drafter in enumerate(lineage.drafters)
        if digest in drafter.digests
    ]
    return [*inputs.values(), *extractions, *unknown.values(), *drafters], edges


def as_mermaid(lineage: Lineage) -> str:
    """A flowchart."""
    nodes, edges = nodes_and_edges(lineage)
    boxes = [f'    {node.id}["{"<br/>".join(map(_quoted, node.lines))}"]' for node in nodes]
    arrows = [f"    {one.id} --> {other.id}" for one, other in edges]
    return "\n".join(["flowchart LR", *boxes, *arrows, ""])


def as_svg(lineage: Lineage) -> str:
    """The same, drawn."""
    nodes, edges = nodes_and_edges(lineage)
    height = 2 * MARGIN + max((node.place + 1 for node in nodes), default=1) * (HEIGHT + GAP) - GAP
    width = 2 * MARGIN + 2 * COLUMN + BOX
    drawn = []
    for one, other in edges:
        (x1, y1), (x2, y2) = _corner(one), _corner(other)
        x1, y1, y2, middle = x1 + BOX, y1 + HEIGHT / 2, y2 + HEIGHT / 2, (x1 + BOX + x2) / 2
        path = f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2 - 7} {y2}"
        drawn.append(f'<path d="{path}" fill="none" stroke="#718096" stroke-width="1.5" marker-end="url(#head)"/>')
    for node in nodes:
        x, y = _corner(node)
        drawn.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6" fill="{COLOURS[node.kind]}"/>')
        for number, line in enumerate(node.lines):
            text = line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."
            weight = ' font-weight="bold"' if number == 0 else ""
            drawn.append(f'<text x="{x + 10}" y="{y + 20 + 17 * number}"{weight}>{escape(text)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="12" fill="#1a202c">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#718096"/></marker></defs>',
            '<rect width="100%" height="100%" fill="white"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def write_picture(lineage: Lineage, path: Path) -> None:
    """By the path's ending: .svg, or .mmd for Mermaid. Raises LineageError for another one."""
    drawings = {".svg": as_svg, ".mmd": as_mermaid}
    if path.suffix not in drawings:
        raise LineageError(f"{path} ends with neither .svg nor .mmd, so what to draw is not known.")
    path.write_text(drawings[path.suffix](lineage))


def _corner(node: Node) -> tuple[float, float]:
    return MARGIN + node.column * COLUMN, MARGIN + node.place * (HEIGHT + GAP)


def _extraction(one: Extraction) -> tuple[str, ...]:
    model = Path(one.model).name
    return one.name, f"{model}, layers {one.layers}", f"{one.rows:,} rows, {one.tokens:,} tokens, {one.digest[:12]}..."


def _drafter(one: Drafter) -> tuple[str, ...]:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in one.metrics.items())
    return one.title, metrics or one.status.lower(), f"run {one.run_id[:12]}..."


def _quoted(text: str) -> str:
    return escape(text).replace("&quot;", "#quot;")
