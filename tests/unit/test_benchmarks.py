"""The GPU benchmark's own arithmetic and models, without a GPU."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.server.dumps import open_dump
from tests.benchmarks import client_path, gpu_methods
from tests.benchmarks.gpu_report import fill, print_table, ratio_of, reference_figures
from tests.benchmarks.gpu_server import prefill_all
from tests.benchmarks.gpu_shapes import SHAPES, operations, parts_of, write_checkpoint
from tests.benchmarks.pretend_server import VOCABULARY, PretendModel
from tests.unit.helpers import ROOT, FakeSGLang, random_states, rms_of


def run(method: str, number: int, rate: float, **more: Any) -> dict[str, Any]:
    return {"method": method, "round": number, "tokens_per_second": rate, **more}


def result(*runs: dict[str, Any]) -> dict[str, Any]:
    versions = {"sglang": "1", "torch": "2", "transformers": "3", "prefect": "4", "python": "5"}
    return {
        "shape": "some",
        "command": "the command",
        "facts": {"card": "a card", "date": "a day", **versions},
        "bytes a token": 100,
        "rows": {"rows": 2, "tokens": 10, "longest": 8},
        "operations": 2e10,
        "limits": {"bf16, TFLOP/s": 4.0, "device to host, GB/s": 1.0},
        "runs": list(runs),
        "not run": [{"method": "disk", "round": 1, "reason": "no time left"}],
    }


FLOW = {
    "verified": True,
    "command_seconds": 30.0,
    "step_seconds": {"verify": 2.0, "probe": 1.5},
    "bytes": 4e9,
    "usage": {"full": 1.0, "starved": 0.0, "blocked": 0.0, "behind": 0.0},
    "rows extracted again": 2,
    "largest difference": 0.01,
}


def test_a_ratio_is_the_median_over_the_rounds_in_which_both_ran():
    runs = [run("bare", 0, 100), run("memory", 0, 90), run("bare", 1, 200), run("memory", 1, 100), run("bare", 2, 1)]
    assert ratio_of(result(*runs), "memory", "bare") == pytest.approx(0.7)
    assert ratio_of(result(*runs), "memory", "serial") is None


def test_the_table_has_each_run_and_what_did_not_run():
    table = print_table([result(run("bare", 0, 2000.0), run("memory", 0, 1000.0, **FLOW), run("odd", 0, 7.0))])
    assert "| (a) bare SGLang, nothing captured | 2,000 | 2,000 | 100.0% |  |" in table
    assert "| **(b) drillcore, whole flow, to shared memory** | 1,000 | 1,000 | 50.0% | 0.00 GB/s |" in table
    assert "| odd | 7 |" in table
    assert "not run: disk 1, no time left" in table
    assert "2 TFLOP/s, 50% of the bf16 rate" in table  # 1,000 tokens/s of 2 GFLOP each


def test_every_figure_that_the_reference_page_wants_is_known():
    page = Path(ROOT, "tests/benchmarks/reference-case.template.md").read_text()
    figures = reference_figures(result(run("bare", 0, 2000.0), run("memory", 0, 1000.0, **FLOW)))
    assert "⟨" not in fill(page, figures)
    assert figures["verify"] == "2.00"
    with pytest.raises(KeyError):
        fill("⟨unheard_of⟩", figures)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek"])
def test_transformers_loads_a_checkpoint_and_its_layers_do_something(name: str, tmp_path: Path):
    config = SHAPES[name].config
    write_checkpoint(config, tmp_path / "model", "cpu")
    lm, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    with torch.inference_mode():
        states = lm.model(torch.arange(40)[None], output_hidden_states=True, use_cache=False).hidden_states
    for before, after in itertools.pairwise(states):
        assert torch.linalg.vector_norm((after - before).float()) > 0.1 * torch.linalg.vector_norm(before.float())


def test_shapes_have_the_published_sizes():
    weights = {
        name: sum(torch.Size(shape).numel() for part in parts_of(SHAPES[name].config) for shape in part.values())
        for name in ("llama-8b", "deepseek")
    }
    vocabulary = 2 * 4096 * (128_256 - 32_768)  # Llama 3's, beside ours
    assert weights["llama-8b"] + vocabulary == 8_030_261_248
    assert SHAPES["llama-8b"].token_bytes == 32_768
    assert SHAPES["deepseek"].token_bytes == 57_344


def test_a_prefill_takes_two_operations_a_weight_and_token_and_attention():
    config = SHAPES["tiny-llama"].config
    matrices = 8 * (128 * 128 * 2 + 64 * 128 * 2 + 3 * 128 * 256)
    one = 2 * matrices + 4 * 8 * 128  # a token that sees itself
    assert operations(config, [1]) == one
    assert operations(config, [1, 1]) == 2 * one
    assert operations(config, [2]) == 2 * 2 * matrices + 3 * 4 * 8 * 128


def test_prompts_of_a_pretended_server_share_what_they_must_and_no_more(tmp_path: Path):
    model = PretendModel(tmp_path)
    one, other, begun = np.array([5, 6, 7]), np.array([9, 6, 7]), np.array([5, 6])
    states, others = model.final_states(one), model.final_states(other)
    assert np.array_equal(states[:2], model.final_states(begun))
    assert not (states[1:] == others[1:]).all(axis=1).any()
    assert ((states @ model.head.T).argmax(axis=1) == model.next[one]).all()
    longest = np.random.default_rng(1).integers(0, VOCABULARY, 4096)
    assert ((model.final_states(longest) @ model.head.T).argmax(axis=1) == model.next[longest]).all()


def test_dumps_that_lie_ready_are_what_the_extraction_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_path, "TOKENS", 3)
    monkeypatch.setattr(client_path, "IDS", np.arange(3, dtype=np.int32))
    for name in (client_path.PREPARED, client_path.STAGING):
        (tmp_path / name).mkdir()
    dumps = client_path.PreparedDumps(tmp_path, 2)
    for request in ("drillcore-ab-0-0-3", "drillcore-ab-1-1-3"):
        dumps.generate({"rid": request})
        path = tmp_path / client_path.STAGING / f"{request}.safetensors"
        dump = open_dump(path, client_path.IDS, client_path.CAPTURED)
        aux, last = random_states(1, 3, client_path.CAPTURED)
        assert torch.equal(dump.aux, aux)
        assert torch.equal(dump.last, last)
        assert dump.rms == rms_of(aux, last)


def test_the_plain_client_waits_for_dumps_and_deletes_them(tmp_path: Path):
    with FakeSGLang(tmp_path / "staging") as fake:
        prompts = [[1, 2, 3], [4], [5, 6]]
        seconds, dumps = prefill_all(fake.url, "ab", prompts, fake.staging)
        assert seconds > 0
        names = [f"drillcore-ab-{number}-0-{len(ids)}.safetensors" for number, ids in enumerate(prompts)]
        assert [dump.name for dump in dumps] == names
        assert list(fake.staging.iterdir()) == []
        _, dumps = prefill_all(fake.url, "cd", prompts, fake.staging, keep=True)
        assert all(dump.exists() for dump in dumps)


def test_one_row_at_a_time_ends_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_methods, "SERIAL_SECONDS", 0.0)
    seen: list[int] = []
    figures = gpu_methods._one_at_a_time([[1, 2, 3], [4]], lambda row, ids: seen.append(row))
    assert seen == [0]
    assert (figures["tokens"], figures["rows"]) == (3, 1)
