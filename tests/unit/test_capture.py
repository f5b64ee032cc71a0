"""The capture plugin's own logic, on the CPU and without SGLang: which forward passes become which dumps."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tasks.server.dumps import open_dump
from tests.unit.helpers import CAPTURED, HIDDEN, PLUGIN, random_states, rms_of, wait_for


@dataclass
class Prompt:
    """One request with the states that the model would compute for it."""

    rid: str
    ids: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


def prompt(row: int, tokens: int, rid: str | None = None, seed: int | None = None) -> Prompt:
    aux, last = random_states(row if seed is None else seed, tokens)
    ids = torch.arange(tokens, dtype=torch.int64) + 10 * row
    return Prompt(rid or f"drillcore-abc123-{row}-0-{tokens}", ids, aux, last)


@pytest.fixture
def capture(tmp_path: Path) -> Any:
    capture = PLUGIN.Capture({"staging": tmp_path / "staging", "layers": CAPTURED.layers, "final_norm": "post"})
    capture.longest_prompt = 1000
    capture.writer = PLUGIN.Writer(capture.staging)
    return capture


def batch_of(*chunks: tuple[Prompt, int, int], extend: bool = True) -> Any:
    """SGLang's ForwardBatch for tokens [start, stop) of each prompt, as far as the plugin looks into it."""
    return SimpleNamespace(
        rids=[one.rid for one, _, _ in chunks],
        input_ids=torch.cat([one.ids[start:stop] for one, start, stop in chunks]),
        extend_seq_lens_cpu=[stop - start for _, start, stop in chunks],
        extend_prefix_lens_cpu=[start for _, start, _ in chunks],
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
    )


def forward_pass(
    capture: Any,
    *chunks: tuple[Prompt, int, int],
    padding: int = 0,
    packed: bool = True,
    extend: bool = True,
) -> None:
    """One pass of the model over tokens [start, stop) of each prompt."""
    aux = torch.cat([one.aux[start:stop] for one, start, stop in chunks] + [torch.full((padding, 2 * HIDDEN), 9.0)])
    last = torch.cat([one.last[start:stop] for one, start, stop in chunks] + [torch.full((padding, HIDDEN), 9.0)])
    ids = torch.cat([one.ids[start:stop] for one, start, stop in chunks] + [torch.full((padding,), 9)])
    aux = aux.to(torch.bfloat16)
    given = aux if packed else list(aux.split(HIDDEN, dim=-1))
    capture.take(ids, last.to(torch.bfloat16), batch_of(*chunks, extend=extend), given)


def written(capture: Any) -> list[str]:
    """Names of all files in staging, once the writer has done all that it was given."""
    end = capture.staging / "end.error.json"
    capture.writer.put_error("end", CAPTURED)
    wait_for(end.exists)
    end.unlink()
    return sorted(path.name for path in capture.staging.iterdir())


def dump_name(one: Prompt) -> str:
    return f"{one.rid}.safetensors"


def error_of(capture: Any, one: Prompt) -> str:
    """The message of the request's error record, which must be all that was written for it."""
    assert [name for name in written(capture) if name.startswith(one.rid)] == [f"{one.rid}.error.json"]
    return json.loads((capture.staging / f"{one.rid}.error.json").read_bytes())["error"]


def assert_dump(capture: Any, one: Prompt) -> None:
    """The dump is there, the client takes it, and it holds the prompt's states bit for bit."""
    assert dump_name(one) in written(capture)
    dump = open_dump(capture.staging / dump_name(one), one.ids.to(torch.int32).numpy(), CAPTURED)
    assert torch.equal(dump.aux, one.aux)
    assert torch.equal(dump.last, one.last)
    assert dump.rms == pytest.approx(rms_of(one.aux, one.last), rel=1e-5)


@pytest.mark.parametrize("packed", [True, False], ids=["packed aux", "list of aux"])
def test_requests_of_one_pass_get_a_dump_each_with_their_own_rows(capture: Any, packed: bool) -> None:
    prompts = [prompt(0, 3), prompt(1, 1), prompt(2, 7)]
    forward_pass(capture, *((one, 0, len(one.ids)) for one in prompts), packed=packed)
    assert written(capture) == sorted(map(dump_name, prompts))
    for one in prompts:
        assert_dump(capture, one)


@pytest.mark.parametrize("packed", [True, False], ids=["packed aux", "list of aux"])
def test_chunks_over_several_passes_are_joined_in_order(capture: Any, packed: bool) -> None:
    one, other = prompt(0, 9), prompt(1, 6)
    forward_pass(capture, (one, 0, 4), packed=packed)
    forward_pass(capture, (other, 0, 2), (one, 4, 5), packed=packed)
    assert written(capture) == []
    forward_pass(capture, (one, 5, 9), (other, 2, 6), packed=packed)
    assert written(capture) == sorted([dump_name(one), dump_name(other)])
    assert_dump(capture, one)
    assert_dump(capture, other)
    assert capture.assemblies == {}


def test_requests_of_others_are_left_alone_but_their_rows_are_counted(capture: Any) -> None:
    foreign, ours = prompt(0, 5, rid="chatcmpl-17"), prompt(1, 3)
    forward_pass(capture, (foreign, 0, 5), (ours, 0, 3))
    assert written(capture) == [dump_name(ours)]
    assert_dump(capture, ours)


def test_a_decode_pass_writes_nothing(capture: Any) -> None:
    forward_pass(capture, (prompt(0, 1), 0, 1), extend=False)
    assert written(capture) == []
    assert capture.assemblies == {}


def test_padding_rows_at_the_end_belong_to_nobody(capture: Any) -> None:
    one, other = prompt(0, 3), prompt(1, 2)
    forward_pass(capture, (one, 0, 3), (other, 0, 2), padding=11)
    assert written(capture) == sorted([dump_name(one), dump_name(other)])
    assert_dump(capture, one)
    assert_dump(capture, other)


def test_a_prompt_whose_beginning_came_from_a_cache_is_an_error_that_names_the_radix_cache(capture: Any) -> None:
    one, other = prompt(0, 8), prompt(1, 2)
    forward_pass(capture, (one, 4, 8), (other, 0, 2))
    assert "starts at token 4, but 0 tokens are here" in error_of(capture, one)
    assert "radix cache" in error_of(capture, one)
    assert_dump(capture, other)


def test_a_gap_between_two_chunks_is_an_error(capture: Any) -> None:
    one = prompt(0, 8)
    forward_pass(capture, (one, 0, 3))
    forward_pass(capture, (one, 5, 8))
    assert "starts at token 5, but 3 tokens are here" in error_of(capture, one)
    assert capture.assemblies == {}


def test_more_tokens_than_the_id_names_is_an_error(capture: Any) -> None:
    one = prompt(0, 6, rid="drillcore-abc123-0-0-5")
    forward_pass(capture, (one, 0, 6))
    assert "6 tokens were prefilled, but the request id names 5" in error_of(capture, one)


def test_a_prompt_cut_short_is_never_written(capture: Any) -> None:
    one = prompt(0, 6, rid="drillcore-abc123-0-0-7")
    forward_pass(capture, (one, 0, 6))
    assert written(capture) == []


@pytest.mark.parametrize("tokens", [0, 1001, 99_999_999])
def test_a_token_count_that_the_server_cannot_take_is_an_error_and_takes_no_memory(capture: Any, tokens: int) -> None:
    one = prompt(0, 2, rid=f"drillcore-abc123-0-0-{tokens}")
    forward_pass(capture, (one, 0, 2))
    assert f"names {tokens} tokens; this server takes 1 to 1000" in error_of(capture, one)
    assert capture.assemblies == {}


def test_a_request_that_starts_anew_forgets_its_first_chunks(capture: Any) -> None:
    aborted, again = prompt(0, 6, seed=1), prompt(0, 6, seed=2)
    forward_pass(capture, (aborted, 0, 4))
    forward_pass(capture, (again, 0, 3))
    forward_pass(capture, (again, 3, 6))
    assert_dump(capture, again)


@pytest.mark.parametrize(
    "rid",
    [
        "../drillcore-abc123-0-0-2",
        "drillcore-../../x-0-0-2",
        "drillcore-abc/../../../x-0-0-2",
        "drillcore-abc123-0-0-2/../../x",
        "/tmp/drillcore-abc123-0-0-2",
        "drillcore-abc123-0-0-2\n",
        "drillcore-ABC-0-0-2",
        "drillcore-abc123-0-0-\u0662",  # a digit, but not an ASCII one
        "drillcore-abc123-0-0",
        "drillcore-abc123-0-0-2.safetensors",
        "drillcore-" + "a" * 10_000 + "-0-0-2",
        "drillcore-abc123-" + "0" * 10_000 + "-0-2",
        "",
    ],
)
def test_an_id_of_another_form_never_creates_a_file(capture: Any, tmp_path: Path, rid: str) -> None:
    one = prompt(0, 2)
    one.rid = rid
    forward_pass(capture, (one, 0, 2))
    assert written(capture) == []
    assert [path.name for path in tmp_path.rglob("*")] == ["staging"]


def test_health_figures_are_those_of_the_whole_prompt(capture: Any) -> None:
    one = prompt(0, 5)
    one.aux[1, :HIDDEN] = 0  # layer 1
    one.aux[4, :HIDDEN] = 0
    one.last[0] = 0
    one.aux[2, HIDDEN] = float("nan")  # layer 4
    one.aux[3, HIDDEN + 1] = float("inf")
    forward_pass(capture, (one, 0, 2))
    forward_pass(capture, (one, 2, 5))
    assert written(capture) == [dump_name(one)]
    with safe_open(capture.staging / dump_name(one), framework="pt") as dump:
        metadata = json.loads(dump.metadata()["drillcore"])
    assert metadata["chunks"] == 2
    assert metadata["zero_rows"] == [2, 0, 1]
    assert metadata["nonfinite_rows"] == [0, 2, 0]
    layer_1, _, final = rms_of(one.aux, one.last)
    assert metadata["rms"] == [pytest.approx(layer_1, rel=1e-5), None, pytest.approx(final, rel=1e-5)]


def test_a_dump_is_a_safetensors_file_that_says_what_it_holds(capture: Any) -> None:
    one = prompt(3, 5)
    forward_pass(capture, (one, 0, 5))
    assert written(capture) == [dump_name(one)]
    tensors = load_file(capture.staging / dump_name(one))
    assert sorted(tensors) == ["aux_hidden_states", "input_ids", "last_hidden_state"]
    assert tensors["input_ids"].dtype == torch.int32
    assert tensors["input_ids"].tolist() == one.ids.tolist()
    with safe_open(capture.staging / dump_name(one), framework="pt") as dump:
        metadata = json.loads(dump.metadata()["drillcore"])
    assert metadata["format"] == "drillcore.dump/1"
    assert metadata["request"] == one.rid
    assert metadata["layers"] == CAPTURED.layers
    assert metadata["final_norm"] == "post"
    assert metadata["chunks"] == 1


def test_an_error_of_the_writer_becomes_an_error_record_and_the_writer_lives_on(capture: Any) -> None:
    one, other = prompt(0, 2), prompt(1, 2)
    blocked = capture.staging / dump_name(one)
    blocked.mkdir()  # the rename onto a directory fails
    forward_pass(capture, (one, 0, 2), (other, 0, 2))
    assert_dump(capture, other)
    assert written(capture) == sorted([dump_name(one), f"{one.rid}.error.json", dump_name(other)])
    assert "IsADirectoryError" in json.loads((capture.staging / f"{one.rid}.error.json").read_bytes())["error"]


def test_a_model_without_aux_states_is_an_error_of_each_request(capture: Any) -> None:
    one = prompt(0, 2)
    batch = batch_of((one, 0, 2))
    capture.take(one.ids, one.last, batch, None)
    assert "no aux hidden states" in error_of(capture, one)


def test_fewer_states_than_the_batch_has_tokens_is_an_error(capture: Any) -> None:
    one = prompt(0, 4)
    batch = batch_of((one, 0, 4))
    capture.take(one.ids, one.last[:3], batch, one.aux)
    assert "the batch has 3 rows, the request ends at 4" in error_of(capture, one)


def test_a_chunk_of_another_dtype_than_the_first_is_an_error(capture: Any) -> None:
    one = prompt(0, 4)
    forward_pass(capture, (one, 0, 2))
    batch = batch_of((one, 2, 4))
    capture.take(one.ids[2:], one.last[2:].float(), batch, one.aux[2:].float())
    assert "torch.float32" in error_of(capture, one)


def test_a_chunk_with_fewer_aux_states_than_layers_is_an_error(capture: Any) -> None:
    one = prompt(0, 4)
    one.aux = one.aux[:, :HIDDEN]
    batch = batch_of((one, 0, 4))
    capture.take(one.ids, one.last, batch, one.aux)
    assert "(4, 4)" in error_of(capture, one)


def test_a_wrapper_that_embeds_the_ids_itself_gets_them_from_the_batch(capture: Any) -> None:
    one = prompt(0, 2)
    batch = batch_of((one, 0, 2))
    capture.around_logits_processor(lambda *a, **k: None, None, None, one.last, None, batch, one.aux)
    assert_dump(capture, one)


def test_a_request_that_never_ends_is_forgotten(capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = prompt(0, 6)
    forward_pass(capture, (abandoned, 0, 3))
    assert list(capture.assemblies) == [abandoned.rid]
    monkeypatch.setattr(PLUGIN, "ABANDONED_AFTER", -1.0)
    forward_pass(capture, (prompt(1, 2), 0, 2))
    assert capture.assemblies == {}


def test_a_failing_capture_never_stops_the_logits_processor(capture: Any) -> None:
    def original(*arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        return arguments, keywords

    broken = SimpleNamespace(rids=["drillcore-abc123-0-0-2"])  # no forward_mode
    result = capture.around_logits_processor(original, "self", "ids", "states", "head", broken, "aux", more=1)
    assert result == (("self", "ids", "states", "head", broken, "aux"), {"more": 1})


@pytest.mark.parametrize("as_keyword", [True, False])
def test_the_hook_finds_aux_states_by_position_and_by_keyword(capture: Any, as_keyword: bool) -> None:
    one = prompt(0, 2)
    batch = batch_of((one, 0, 2))
    arguments, keywords = ((), {"aux_hidden_states": one.aux}) if as_keyword else ((one.aux,), {})
    capture.around_logits_processor(lambda *a, **k: None, None, one.ids, one.last, None, batch, *arguments, **keywords)
    assert_dump(capture, one)


class LlamaForCausalLM(SimpleNamespace):
    """A model that the plugin knows by its name."""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model runner of SGLang, as far as the plugin looks into it."""
    monkeypatch.setattr(PLUGIN, "_writes_here", lambda: True)
    monkeypatch.setattr(PLUGIN, "version", lambda package: "0.5.23")
    decoder = SimpleNamespace(layers=[None] * 6, layers_to_capture=[])
    model = LlamaForCausalLM(model=decoder, capture_aux_hidden_states=False)
    config = SimpleNamespace(context_len=64, hidden_size=HIDDEN, dtype=torch.bfloat16)
    return SimpleNamespace(model=model, model_config=config, device="cpu", is_draft_worker=False)


def test_loading_a_model_switches_the_capture_on_and_leaves_a_ready_file(capture: Any, runner: Any) -> None:
    assert capture.after_load_model("result", runner) == "result"
    assert runner.model.model.layers_to_capture == [2, 5]  # the input of layer k + 1 is the output of layer k
    assert runner.model.capture_aux_hidden_states is True
    assert capture.longest_prompt == 64
    (ready,) = capture.staging.glob("ready.*.json")
    assert (
        json.loads(ready.read_bytes()).items()
        >= {
            "layers": [1, 4],
            "final_norm": "post",
            "model_layers": 6,
            "hidden_size": HIDDEN,
            "dtype": "bfloat16",
            "context_length": 64,
        }.items()
    )


def test_the_language_model_inside_a_wrapper_is_the_one_that_captures(capture: Any, runner: Any) -> None:
    inner = runner.model
    runner.model = SimpleNamespace(language_model=inner)
    capture.after_load_model(None, runner)
    assert inner.model.layers_to_capture == [2, 5]


@pytest.mark.parametrize(
    "layers", [[1, 5], [-1, 2], [4, 1], [1, 1]], ids=["the last", "negative", "descending", "twice"]
)
def test_layers_that_cannot_be_had_are_refused(capture: Any, runner: Any, layers: list[int]) -> None:
    capture.layers = layers
    with pytest.raises(PLUGIN.CaptureError, match="must ascend between 0 and 4: there are 6 layers"):
        capture.after_load_model(None, runner)
    assert runner.model.model.layers_to_capture == []


def test_a_model_whose_way_to_capture_is_not_known_is_refused(capture: Any, runner: Any) -> None:
    runner.model = SimpleNamespace(**vars(runner.model))
    with pytest.raises(PLUGIN.CaptureError, match="SimpleNamespace has no known way to capture"):
        capture.after_load_model(None, runner)


def test_a_model_that_cannot_capture_is_refused(capture: Any, runner: Any) -> None:
    del runner.model.model.layers_to_capture
    with pytest.raises(PLUGIN.CaptureError, match="no known way to capture"):
        capture.after_load_model(None, runner)


def test_a_draft_model_is_left_alone(capture: Any, runner: Any) -> None:
    runner.is_draft_worker = True
    capture.after_load_model(None, runner)
    assert runner.model.model.layers_to_capture == []
    assert list(capture.staging.iterdir()) == []


def test_another_norm_than_post_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PLUGIN.CaptureError, match="'pre' is not supported"):
        PLUGIN.Capture({"staging": tmp_path, "layers": [1], "final_norm": "pre"})
