"""The probe raises no false alarm: real servers of every family, with other prompts and batch orders each time.

Each figure that the probe checks is printed with its limit: the limits in tasks/probe.py and tasks/layer_check.py were
set by these.
"""

import statistics
from pathlib import Path

import pytest

from tasks.layer_check import ERROR_LIMIT, LEAN_LIMIT
from tasks.probe import DIFFERENT, NEAR_TIE, NOISE_LIMIT, UNLIKE, ProbeReport, probe
from tests.integration.serving import cpu_config, serving
from tests.integration.tiny_models import make_checkpoint
from tests.unit.helpers import write_jsonl

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

IN_FLIGHT = (128, 3)  # requests at once: batches of other sizes


@pytest.mark.parametrize(
    ("family", "dtype", "chunk", "layers", "final_norm", "probes"),
    [
        ("llama", "bfloat16", 48, [0, 2, 4], "post", 4),
        ("qwen3", "bfloat16", 64, [1, 3], "pre", 4),
        ("deepseek-v3", "bfloat16", 64, [0, 2, 4], "post", 4),
        ("kimi-k2.5", "float32", 96, [1, 3], "pre", 4),
        ("smollm2", "bfloat16", 256, "eagle3", "post", 4),
        ("smollm2", "float32", 512, [2, 13, 25], "pre", 4),
    ],
)
def test_clean_probes_pass(
    request: pytest.FixtureRequest,
    staging: Path,
    tmp_path: Path,
    family: str,
    dtype: str,
    chunk: int,
    layers: list[int] | str,
    final_norm: str,
    probes: int,
) -> None:
    model = tmp_path / "model"
    if family == "smollm2":
        model = request.getfixturevalue("demo_model")
    else:
        make_checkpoint(family, model)
    config = cpu_config(
        model,
        write_jsonl(tmp_path / "dataset.jsonl", [{"input_ids": [1, 2, 3]}]),
        tmp_path / "unused",
        staging,
        server={"dtype": dtype, "chunked_prefill_size": chunk},
        capture={"layers": layers, "final_norm": final_norm},
    )
    reports = []
    with serving(config, tmp_path / "server.log") as running:
        for seed in range(probes):
            with running.engine(requests_in_flight=IN_FLIGHT[seed % 2], attempts=1) as engine:
                reports.append(probe(engine, running.preflight.model, running.facts, 2048, seed))
        left = [file.name for file in running.server.staging.iterdir()]
    assert [name for name in left if not name.startswith(("ready.", "owner."))] == []
    print(f"\n{family} {dtype}, {chunk} tokens a pass, {reports[0].chunks} passes")
    for name, values, limit in figures(reports, dtype):
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"  {name}: {low:.2g} / {middle:.2g} / {high:.2g} (least / median / most), limit {limit:.2g}")


def figures(reports: list[ProbeReport], dtype: str) -> list[tuple[str, list[float], float]]:
    """Each checked figure's name, its values (of all states and probes), its limit."""
    checks = [report.layers for report in reports if report.layers]
    assert len(checks) == len(reports)
    return [
        ("error of the asked layer", [error for check in checks for error in check.errors], ERROR_LIMIT[dtype]),
        ("error of the nearest other", [error for check in checks for error in check.other_errors], float("nan")),
        ("lean", [lean for check in checks for lean in check.leans], LEAN_LIMIT),
        ("first token", [error for report in reports for error in report.first_tokens], NOISE_LIMIT[dtype]),
        ("noise", [error for report in reports for error in report.noise], float("nan")),
        ("noise of a prompt's median token", [report.median_noise for report in reports], NOISE_LIMIT[dtype]),
        ("noise of any token", [report.token_noise for report in reports], UNLIKE[dtype]),
        ("near tie", [report.near_tie for report in reports], NEAR_TIE[dtype]),
        ("difference (at least)", [report.difference for report in reports], DIFFERENT),
        ("seconds", [report.seconds for report in reports], float("nan")),
    ]
