"""The raw figures of `gpu_table` as Markdown, for the README.

python -m tests.benchmarks.gpu_report llama-8b.json deepseek.json
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

LABELS = {
    "bare": "(a) bare SGLang, nothing captured",
    "capture": "the plugin alone, dumps deleted when seen",
    "memory": "**(b) drillcore, whole flow, to shared memory**",
    "all": "**(b) the same, all servers**",
    "disk": "**(b) drillcore, whole flow, to disk**",
    "serial": "(c) one request at a time: wait for its dump, `torch.save`",
    "transformers": "(d) Transformers, `output_hidden_states`, `torch.save`",
}
# Not measured here: what others say of themselves.
PUBLISHED = {
    "llama-8b": [
        (
            "(e) SpecForge's capture server, as published for Qwen3-8B and rows of 550 tokens on one H200 "
            "(its docs/benchmarks/domino-disaggregated-performance.md)",
            27_000,
        )
    ]
}
# What is compared with what, and how many times as fast the first one is to be.
RATIOS = {
    ("memory", "bare"): 0.97,
    ("disk", "bare"): None,
    ("memory", "transformers"): 2.7,
    ("memory", "serial"): 2.5,
    ("all", "memory"): 1.9,
}
# Of reference-case.template.md, which becomes deployments/reference-case.md, where each step is shown.
REFERENCE_TOKENS = 37_312 * 2_353
REFERENCE_BYTES = 57_349  # a token
REFERENCE_FLOP = 66.4e9  # a token


def print_table(results: list[dict[str, Any]]) -> str:
    """Markdown: a section for each result."""
    return "\n\n".join(_section(result) for result in results)


def _section(result: dict[str, Any]) -> str:
    facts = result["facts"]
    rates = rates_of(result)
    rows = result.get("rows", {})
    versions = ", ".join(f"{name} {facts[name]}" for name in ("sglang", "torch", "transformers", "prefect", "python"))
    lines = [
        f"**{result['shape']}**, {result['bytes a token']:,} B a token: {facts['card']}, {versions}, {facts['date']}; "
        f"{rows.get('rows', 0):,} rows of 1 to {rows.get('longest', 0):,} tokens, {rows.get('tokens', 0):,} in all",
        "",
        "| way | tokens/s, each run | median | of (a) | written |",
        "|---|---|---|---|---|",
    ]
    bare = statistics.median(rates["bare"]) if "bare" in rates else None
    for method in sorted(rates, key=lambda method: [*LABELS, method].index(method)):
        label = LABELS.get(method, method)
        lines.append(_line(label, rates[method], bare, result["bytes a token"] if method != "bare" else 0))
    for label, rate in PUBLISHED.get(result["shape"], []):
        lines.append(_line(label, [rate], bare, 0))
    lines += ["", *(f"- {remark}" for remark in _remarks(result, rates)), "", f"`{result['command']}`"]
    return "\n".join(lines)


def rates_of(result: dict[str, Any]) -> dict[str, list[float]]:
    """Tokens a second of each method's runs, in order."""
    rates: dict[str, list[float]] = {}
    for run in result["runs"]:
        rates.setdefault(run["method"], []).append(run["tokens_per_second"])
    return rates


def ratio_of(result: dict[str, Any], one: str, other: str) -> float | None:
    """How many times as fast one method is, median over the rounds in which both ran; None if there is none."""
    runs = {(run["method"], run["round"]): run["tokens_per_second"] for run in result["runs"]}
    rounds = [number for method, number in runs if method == one and (other, number) in runs]
    return statistics.median(runs[one, number] / runs[other, number] for number in rounds) if rounds else None


def _line(label: str, rates: list[float], bare: float | None, token_bytes: int) -> str:
    median = statistics.median(rates)
    share = f"{median / bare:.1%}" if bare else ""
    written = f"{median * token_bytes / 1e9:.2f} GB/s" if token_bytes else ""
    return f"| {label} | {' · '.join(f'{rate:,.0f}' for rate in rates)} | {median:,.0f} | {share} | {written} |"


def _remarks(result: dict[str, Any], rates: dict[str, list[float]]) -> list[str]:
    remarks = []
    for (one, other), wanted in RATIOS.items():
        if (ratio := ratio_of(result, one, other)) is not None:
            target = f", at least {wanted} wanted" if wanted else ""
            remarks.append(f"{one} / {other}, median of the rounds' ratios: {ratio:.3f}{target}")
    remarks += _limits(result, rates)
    for run in result["runs"]:
        if "usage" in run:
            usage = run["usage"]
            remarks.append(
                f"{run['method']}, run {run['round']}: {run['command_seconds']:.0f} s for the whole command, "
                f"{run['step_seconds'].get('verify', 0):.0f} s of it verification; servers "
                f"{usage['full']:.1%} full, {usage['starved']:.1%} with room for more, {usage['blocked']:.1%} waiting "
                f"for staging, {usage['behind']:.1%} with writers behind; {_verified(run)}"
            )
    if values := result.get("values against Transformers"):
        remarks.append(
            f"values: {values['states']} states of {values['rows']} rows against Transformers in bfloat16 on the same "
            f"card, relative error {values['median relative error']:.2g} in the median, at most "
            f"{values['largest relative error']:.2g}; {values['limit']:.2g} is the limit"
        )
    remarks += [f"not run: {one['method']} {one['round']}, {one['reason'][:200]}" for one in result["not run"]]
    return remarks


def _verified(run: dict[str, Any]) -> str:
    if not run["verified"]:
        return f"NOT VERIFIED: {run['refused'][-300:]}"
    again, largest = run["rows extracted again"], run["largest difference"]
    return f"verified, {again} rows extracted again, largest difference {largest:.2g}"


def _limits(result: dict[str, Any], rates: dict[str, list[float]]) -> list[str]:
    """The machine's own limits, and the share of them that the whole flow reached."""
    limits = result.get("limits", {})
    remarks = ["limits: " + ", ".join(f"{name} {value:,.1f}" for name, value in limits.items())] if limits else []
    if "memory" not in rates or "bf16, TFLOP/s" not in limits:
        return remarks
    rate = statistics.median(rates["memory"])
    done = rate * result["operations"] / result["rows"]["tokens"] / 1e12
    copied = rate * result["bytes a token"] / 1e9
    return [
        *remarks,
        f"reached by (b): {done:,.0f} TFLOP/s, {done / limits['bf16, TFLOP/s']:.0%} of the bf16 rate; {copied:.2f} "
        f"GB/s over the bus, {copied / limits['device to host, GB/s']:.0%} of its rate",
    ]


def reference_figures(result: dict[str, Any]) -> dict[str, str]:
    """What reference-case.template.md says of one card, and its arithmetic for eight of them, by ⟨name⟩."""
    facts, limits, rates = result["facts"], result["limits"], rates_of(result)
    rate = statistics.median(rates["memory"])
    flops = rate * result["operations"] / result["rows"]["tokens"]
    flows = [run for run in result["runs"] if run["method"] == "memory" and run["verified"]]
    verify = statistics.median(run["bytes"] / run["step_seconds"]["verify"] for run in flows)
    copied = rate * result["bytes a token"]
    figures = {
        "card": facts["card"],
        "date": facts["date"],
        "sglang": facts["sglang"],
        "rate": f"{rate:,.0f}",
        "kept": f"{ratio_of(result, 'memory', 'bare'):.1%}",
        "gflop": f"{flops / rate / 1e9:.2f}",
        "tflops": f"{flops / 1e12:,.0f}",
        "share": f"{flops / 1e12 / limits['bf16, TFLOP/s']:.0%}",
        "bf16": f"{limits['bf16, TFLOP/s']:,.0f}",
        "probe": f"{statistics.median(run['step_seconds']['probe'] for run in flows):.1f}",
        "verify": f"{verify / 1e9:.2f}",
        "verify_hours": f"{REFERENCE_TOKENS * REFERENCE_BYTES / verify / 3600:.1f}",
        "copied": f"{copied / 1e9:.2f}",
        "bus": f"{copied / 1e9 / limits['device to host, GB/s']:.0%}",
        "copied8": f"{8 * flops / REFERENCE_FLOP * REFERENCE_BYTES / 1e9:.2f}",
    }
    for cards in (8, 4):
        expected = cards * flops / REFERENCE_FLOP
        hours = REFERENCE_TOKENS / expected / 3600
        figures |= {
            f"rate{cards}": f"{expected:,.0f}",
            f"hours{cards}": f"{hours:.1f}",
            f"disk{cards}": f"{expected * REFERENCE_BYTES / 1e9:.2f}",
            f"gpu{cards}": f"{8 * hours:.0f}",
        }
    return figures


def fill(page: str, figures: dict[str, str]) -> str:
    """The page with each ⟨name⟩ replaced. Raises KeyError for one that is not known."""
    return re.sub("⟨([a-z0-9_]+)⟩", lambda found: figures[found[1]], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="raw JSON of gpu_table")
    parser.add_argument("--page", type=Path, help="print this page, filled in, instead of the table")
    options = parser.parse_args()
    results = [json.loads(path.read_bytes()) for path in options.results]
    if options.page:
        print(fill(options.page.read_text(), reference_figures(results[0])), end="")
    else:
        print(print_table(results))


if __name__ == "__main__":
    main()
