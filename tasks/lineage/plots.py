"""Small plots as SVG, for people who look at a run: no plotting library is worth its seconds here."""

from collections.abc import Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 320, 76, 46, 34  # pixels
BINS = 30
COLOUR, LIGHT = "#2b6cb0", "#bee3f8"


def histogram(title: str, values: np.ndarray, unit: str) -> str:
    """How many of the values lie in each of BINS equal steps."""
    counts, edges = np.histogram(values, bins=BINS) if len(values) else (np.zeros(1, int), np.array([0.0, 1.0]))
    axes = Axes(edges[0], edges[-1], 0, counts.max())
    bars = [
        f'<rect x="{axes.x(low):.1f}" y="{axes.y(count):.1f}" width="{axes.x(high) - axes.x(low) - 1:.1f}" '
        f'height="{axes.y(0) - axes.y(count):.1f}" fill="{COLOUR}"/>'
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True)
    ]
    return axes.page(title, unit, "rows", bars)


def line(title: str, x: Sequence[float], y: Sequence[float], x_unit: str, y_unit: str) -> str:
    """One line through the points."""
    axes = Axes(0, max(x, default=1), 0, max(y, default=1))
    points = " ".join(f"{axes.x(at):.1f},{axes.y(value):.1f}" for at, value in zip(x, y, strict=True))
    return axes.page(
        title, x_unit, y_unit, [f'<polyline points="{points}" fill="none" stroke="{COLOUR}" stroke-width="2"/>']
    )


def ranges(title: str, names: list[str], low: list[float], middle: list[float], high: list[float], unit: str) -> str:
    """A bar from lowest to highest for each name, with its middle."""
    axes = Axes(0, len(names), 0, max(high, default=1))
    marks = []
    for number, (name, *values) in enumerate(zip(names, low, middle, high, strict=True)):
        bottom, centre, top = (axes.y(value) for value in values)
        at = axes.x(number + 0.5)
        marks += [
            f'<rect x="{at - 16:.1f}" y="{top:.1f}" width="32" height="{max(bottom - top, 1):.1f}" fill="{LIGHT}"/>',
            f'<rect x="{at - 16:.1f}" y="{centre - 1:.1f}" width="32" height="2" fill="{COLOUR}"/>',
            f'<text x="{at:.1f}" y="{axes.y(0) + 17:.1f}" text-anchor="middle">{escape(name)}</text>',
            f'<text x="{at + 20:.1f}" y="{centre + 4:.1f}">{values[1]:.3g}</text>',
        ]
    return axes.page(title, "", unit, marks, ticks_below=False)


class Axes:
    """Turns values into pixels, and what is drawn into a page."""

    def __init__(self, left: float, right: float, bottom: float, top: float):
        self.left, self.right = float(left), float(right) if right > left else float(left) + 1
        self.bottom, self.top = float(bottom), float(top) if top > bottom else float(bottom) + 1

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - 20)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.bottom) / (self.top - self.bottom) * (HEIGHT - BOTTOM - TOP)

    def page(self, title: str, x_unit: str, y_unit: str, drawn: list[str], ticks_below: bool = True) -> str:
        lines = []
        for tick in np.linspace(self.bottom, self.top, 5):
            lines.append(f'<path d="M{LEFT} {self.y(tick):.1f}H{WIDTH - 20}" stroke="#ddd"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{tick:,.4g}</text>')
        for tick in np.linspace(self.left, self.right, 7) if ticks_below else []:
            lines.append(
                f'<text x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick:,.4g}</text>'
            )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
                f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#333">',
                '<rect width="100%" height="100%" fill="white"/>',
                f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
                *lines,
                *drawn,
                f'<text x="{WIDTH - 20}" y="{HEIGHT - 10}" text-anchor="end">{escape(x_unit)}</text>',
                f'<text x="{WIDTH - 20}" y="20" text-anchor="end">{escape(y_unit)}</text>',
                "</svg>\n",
            ]
        )
