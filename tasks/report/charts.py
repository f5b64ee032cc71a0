"""Plain SVG charts for the page: colours come from its style sheet, so that they follow light and dark."""

import numpy as np
from markupsafe import Markup, escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 180, 56, 26, 10


def bars(heights: np.ndarray, ticks: list[tuple[float, str]], unit: str, seams: list[float] | None = None) -> Markup:
    """A bar chart. heights: [bins]; ticks: place on the x axis (0 to 1) and text; seams: dashed lines, 0 to 1."""
    top = _round_up(float(heights.max(initial=0)))
    width, height = WIDTH - LEFT - 8, HEIGHT - BOTTOM - TOP
    step = width / max(1, len(heights))
    parts = []
    for share in (0, 0.5, 1):
        y = TOP + height * (1 - share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{_short(top * share)}</text>')
    for at, value in enumerate(heights.tolist()):
        tall = height * value / top if top else 0
        title = f"<title>{_short(value)} {escape(unit)}</title>"
        parts.append(
            f'<rect class="bar" x="{LEFT + at * step + 0.5:.2f}" y="{TOP + height - tall:.2f}" '
            f'width="{max(step - 1, 0.5):.2f}" height="{tall:.2f}" rx="1">{title}</rect>'
        )
    for seam in seams or []:
        x = LEFT + seam * width
        parts.append(f'<line class="seam" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + height}"/>')
    for place, text in ticks:
        anchor = "start" if place == 0 else "end" if place == 1 else "middle"
        parts.append(
            f'<text style="text-anchor:{anchor}" x="{LEFT + place * width:.1f}" y="{HEIGHT - 8}">{escape(text)}</text>'
        )
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)}">{"".join(parts)}</svg>')


def spark(bins: list[int]) -> Markup:
    """A small histogram for a table's cell."""
    width, height, most = 220, 34, max([*bins, 1])
    step = width / len(bins)
    parts = [
        f'<rect class="bar" x="{at * step:.2f}" y="{height - height * count / most:.2f}" '
        f'width="{max(step - 0.6, 0.5):.2f}" height="{height * count / most:.2f}"/>'
        for at, count in enumerate(bins)
        if count
    ]
    return Markup(f'<svg class="spark" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>')


def length_histogram(lengths: np.ndarray, bins: int = 48) -> Markup:
    """Rows by their length in tokens."""
    low, high = int(lengths.min()), int(lengths.max())
    counts = np.histogram(lengths, min(bins, max(1, high - low + 1)), (low, high + 1))[0]
    middle = f"{(low + high) // 2:,}"
    return bars(counts.astype(float), [(0, f"{low:,}"), (0.5, middle), (1, f"{high:,} tokens")], "rows")


def _round_up(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value))


def _short(value: float) -> str:
    """12345 -> '12.3k'."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"
