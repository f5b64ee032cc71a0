"""The course of a run: sampled while it goes on, kept when it is killed, turned into figures over time."""

import json
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import machine
from tasks.extraction.engine import Progress
from tasks.lineage import plots
from tasks.lineage.course import POINTS, course_of, thin_out
from tasks.machine import machine_figures, parse_gpu_figures
from tasks.origin import ROOT, describe_origin, git_state
from tasks.store import attempts
from tasks.store.attempts import Sampler, read_attempts
from tasks.store.layout import Store
from tests.unit.helpers import new_store, wait_for


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(Store(tmp_path / "store"), {})


def test_a_run_is_sampled_to_its_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "SHORTEST", 0.01)
    progress = Progress()
    with Sampler(store, progress, {"python": "3"}, there=4) as sampler:
        wait_for(lambda: sampler.path.exists() and len(sampler.path.read_text().splitlines()) > 2)
        progress.rows, progress.tokens = 2, 30
    (attempt,) = read_attempts(store)
    samples = list(attempt.samples())
    assert attempt.header["origin"] == {"python": "3"}
    assert attempt.header["there"] == 4
    assert (samples[0]["rows"], samples[-1]["rows"], samples[-1]["tokens"]) == (0, 2, 30)
    assert samples[-1]["machine"]["system_memory_usage_percentage"] > 0
    assert "sampler" not in [thread.name for thread in threading.enumerate()]


def test_a_full_disk_or_a_lost_folder_stops_no_run(store: Store) -> None:
    (store.logs / attempts.ATTEMPTS).write_text("a file where the folder should be")
    with Sampler(store, Progress(), {}, there=0):
        pass


def test_what_a_killed_run_left_half_written_does_not_count(store: Store) -> None:
    folder = store.logs / attempts.ATTEMPTS
    folder.mkdir()
    (folder / "1.jsonl").write_text('{"there": 0, "at": "t"}\n{"rows": 1}\n{"ro')
    (folder / "2.jsonl").write_text('{"the')
    (attempt,) = read_attempts(store)
    assert list(attempt.samples()) == [{"rows": 1}]


def test_two_runs_become_one_line_of_figures(store: Store) -> None:
    folder = store.logs / attempts.ATTEMPTS
    folder.mkdir()
    for number, there in ((1, 0), (2, 3)):
        lines: list[dict[str, Any]] = [{"there": there}]
        for seconds, tokens in ((2, 20), (5, 80)):
            counts = {"rows": seconds, "tokens": tokens, "bytes": tokens * 10**9, "failed": 1, "retries": seconds}
            counts |= {"restarts": 0, "in_flight": 7}
            lines.append({"at": 100 * number + seconds, "seconds": seconds, **counts, "machine": {"x": 1.5}})
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures: dict[str, list[tuple[int, int, float]]] = {}
    for metric in course_of(read_attempts(store)):
        figures.setdefault(metric.key, []).append((metric.step, metric.timestamp, metric.value))
    assert figures["progress/tokens_per_second"] == [
        (2, 102_000, 10.0), (5, 105_000, 20.0), (7, 202_000, 10.0), (10, 205_000, 20.0)]  # fmt: skip
    assert [value for _, _, value in figures["progress/gigabytes_per_second"]] == [10.0, 20.0, 10.0, 20.0]
    assert [value for _, _, value in figures["progress/rows_done"]] == [2, 5, 5, 8]
    assert [value for _, _, value in figures["progress/retries"]] == [2, 5, 7, 10]
    assert [value for _, _, value in figures["progress/failed"]] == [1, 1, 2, 2]
    assert [value for _, _, value in figures["system/x"]] == [1.5] * 4


def test_the_nodes_of_a_fleet_become_one_line_of_figures(store: Store) -> None:
    """Partition 0 is lost at 10 s and begun again at 20 s; partition 1 takes until 30 s; 5 rows were there before."""
    folder = store.logs / attempts.ATTEMPTS
    folder.mkdir()
    runs = [(0, 2, 1000.0, range(1, 11)), (1, 0, 1000.5, range(1, 31)), (0, 12, 1020.0, range(1, 11))]
    for name, (partition, there, began, seconds) in enumerate(runs):
        origin = {"partition": {"fleet": "f", "number": partition, "there": 5}}
        lines: list[dict[str, Any]] = [{"there": there, "origin": origin}]
        for second in seconds:
            counts = {"rows": second, "tokens": 10 * second, "bytes": 10**9 * second, "failed": 0, "retries": 1}
            counts |= {"restarts": 0, "in_flight": 3 if second < seconds[-1] or name == 0 else 0}
            lines.append({"at": began + second, "seconds": second, **counts, "machine": {"x": partition}})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures: dict[str, list[float]] = {}
    for metric in course_of(read_attempts(store)):
        figures.setdefault(metric.key, []).append(metric.value)
    assert figures["progress/rows_done"] == [
        5 + 4 + 3,
        5 + 8 + 7,
        5 + 10 + 11,
        5 + 10 + 15,
        5 + 10 + 19,
        5 + 14 + 23,
        5 + 50,
    ]
    rates = figures["progress/tokens_per_second"]
    assert rates[1] == 20.0
    assert rates[3] == 10.0  # one node only
    assert rates[5] == 20.0
    assert figures["progress/retries"][-1] == 3
    assert figures["progress/requests_in_flight"][-1] == 3  # what the lost run had, as far as anybody knows


@pytest.mark.parametrize("count", [0, 1, POINTS, POINTS + 1, 10 * POINTS + 7])
def test_a_long_run_is_thinned_out_but_keeps_its_end(count: int) -> None:
    samples: list[dict[str, Any]] = [{"seconds": at} for at in range(count)]
    kept = thin_out(samples)
    assert len(kept) <= POINTS
    assert kept[-1:] == samples[-1:]
    assert len(kept) >= min(count, POINTS // 2)


def test_gpu_figures_are_read_as_nvidia_smi_prints_them() -> None:
    assert parse_gpu_figures("0, 97, 81000, 512.34\n1, 3, 12, [N/A]\n") == {
        "gpu_0_utilization_percentage": 97.0,
        "gpu_0_memory_usage_mebibytes": 81000.0,
        "gpu_0_power_usage_watts": 512.34,
        "gpu_1_utilization_percentage": 3.0,
        "gpu_1_memory_usage_mebibytes": 12.0,
    }
    assert parse_gpu_figures("Failed to initialize NVML\n") == {}


def test_a_gpu_tool_that_fails_costs_only_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nsleep 5\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "GPU_TIMEOUT", 0.05)
    assert "cpu_utilization_percentage" in machine_figures()


def test_the_origin_names_the_commit_and_says_if_files_were_changed(tmp_path: Path) -> None:
    assert describe_origin()["packages"]["torch"]
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    state = git_state(tmp_path)
    assert state is not None
    assert (len(state["commit"]), state["changed"]) == (40, False)
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == {**state, "changed": True}


def test_plots_are_whole_svg_with_every_mark() -> None:
    lengths = plots.histogram("Lengths <of> rows", np.array([1, 1, 5, 9]), "tokens")
    ranges = plots.ranges("RMS", ["layer 1", "final"], [0.5, 1.0], [1.0, 2.0], [1.5, 4.0], "RMS")
    throughput = plots.line("Throughput", [2, 4, 6], [10.0, 20.0, 15.0], "s", "tokens/s")
    for text in (
        lengths,
        ranges,
        throughput,
        plots.histogram("none", np.array([]), ""),
        plots.line("", [], [], "", ""),
    ):
        assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "Lengths &lt;of&gt; rows" in lengths
    assert "layer 1" in ranges
    (points,) = [each.get("points") for each in ElementTree.fromstring(throughput) if each.tag.endswith("polyline")]
    assert points is not None
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights[1] < heights[2] < heights[0]  # pixels count from above


def test_a_trainer_imports_neither_prefect_nor_torch() -> None:
    code = "import sys, tasks.lineage.drafter; print({'prefect', 'torch', 'sglang', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
