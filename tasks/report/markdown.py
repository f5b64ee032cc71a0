"""The report in short, as Markdown: Prefect shows it as an artifact."""

from tasks.files import human_bytes
from tasks.report.facts import gather
from tasks.store.layout import Store

SHOWN = 15  # lines of a list
MARKS = {"yes": "yes", "no": "**NO**", "-": "not done"}


def markdown_report(store: Store) -> str | None:
    """None if the store was never verified."""
    facts = gather(store)
    if facts is None:
        return None
    outcome = facts.outcome
    lines = [f"# {_plain(facts.name)}: {facts.verdict.lower()}", "", facts.sentence, ""]
    if outcome.problems:
        lines += ["## Problems", "", *_cut([_plain(problem["text"]) for problem in outcome.problems]), ""]
    lines += ["## What was proved", "", "| | holds | figures |", "|---|---|---|"]
    lines += [f"| {line.name} | {MARKS[line.mark]} | {_plain(line.figures)} |" for line in facts.proved]
    lines += ["", "## Stored", ""]
    lines += [f"{outcome.tokens:,} tokens, {human_bytes(outcome.bytes)}, {outcome.shards:,} shards", ""]
    if facts.throughput:
        rate = facts.throughput.tokens / facts.throughput.seconds
        lines += [f"{rate:,.0f} tokens/s over {facts.throughput.seconds:,.0f} s of work", ""]
    if facts.reasons:
        lines += ["## Rows that are not stored whole", ""]
        reasons = [f"{one.count:,} {one.state}: {_plain(one.text)} (row {one.rows})" for one in facts.reasons]
        lines += [*_cut(reasons), ""]
    if outcome.outliers:
        lines += ["## Outliers", "", *_cut([f"row {one.row}: {one.text()}" for one in outcome.outliers]), ""]
    lines += [f"The whole report: `{facts.root}/logs/report.html`"]
    return "\n".join(lines)


def _cut(lines: list[str]) -> list[str]:
    more = [f"- ... and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    return [*(f"- {line}" for line in lines[:SHOWN]), *more]


def markdown_table(lines: list[tuple[str, str]]) -> str:
    """Name and value a line; long values are shown whole."""
    return "\n".join(["| | |", "|---|---|", *(f"| {_plain(name)} | {_plain(value)} |" for name, value in lines)])


def _plain(text: str) -> str:
    """Text from elsewhere, which must not become a table's column or a link."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
