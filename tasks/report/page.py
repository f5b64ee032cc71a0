"""Writes the page: one HTML file that needs nothing else, no script, no network."""

from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from tasks.files import human_bytes, human_seconds, write_atomic
from tasks.report.charts import bars, length_histogram, spark
from tasks.report.facts import Facts, gather
from tasks.storage import Location
from tasks.store.layout import Store

REPORT = "report.html"  # in the store's logs
SHOWN = 40  # lines of a table
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # reasons and ids come from the dataset and the server
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"bytes": human_bytes, "seconds": human_seconds, "number": lambda value: f"{value:,}"}


def report_path(store: Store) -> Location:
    return store.logs / REPORT


def write_report(store: Store) -> Location | None:
    """Write the report of a store that was verified; returns its path, or None if it never was."""
    facts = gather(store)
    if facts is None:
        return None
    write_atomic(report_path(store), render(facts).encode())
    return report_path(store)


def render(facts: Facts) -> str:
    """The page as text."""
    template = TEMPLATES.get_template("page.html.j2")
    return template.render(
        facts=facts,
        outcome=facts.outcome,
        shown=SHOWN,
        lengths=_lengths(facts.lengths),
        throughput=_throughput(facts),
        states=[one | {"chart": spark(one["bins"])} for one in facts.outcome.distributions],
        origin=[(name.replace("_", " "), _text(value)) for name, value in facts.parts.items()],
    )


def _lengths(lengths: np.ndarray) -> dict[str, Any] | None:
    if not len(lengths):
        return None
    low, median, high, top = np.quantile(lengths, [0, 0.5, 0.95, 1]).astype(int).tolist()
    return {
        "chart": length_histogram(lengths),
        "figures": f"shortest {low:,}, median {median:,}, 95% up to {high:,}, longest {top:,}",
    }


def _throughput(facts: Facts) -> dict[str, Any] | None:
    found = facts.throughput
    if found is None:
        return None
    ticks = [(0.0, found.began), (1.0, found.ended)]
    gaps = f"; {len(found.seams)} pauses left out, at the dashed lines" if found.seams else ""
    return {
        "chart": bars(found.rates, ticks, "tokens/s", found.seams),
        "figures": f"{found.tokens:,} tokens in {human_seconds(found.seconds)}: "
        f"{found.tokens / found.seconds:,.0f} tokens/s{gaps}",
    }


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
