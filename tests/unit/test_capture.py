"""The capture plugin's own logic, on the CPU and without SGLang: which forward passes become which dumps."""

import errno
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tasks.server.dumps import open_dump
from tests.unit.helpers import CAPTURED, HIDDEN, PLUGIN, random_states, rms_of


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


PENDING = 1 << 20  # bytes that may wait for the writers
PAGE = 4096


def new_capture(staging: Path, final_norm: str = "post", threads: int = 1) -> Any:
    capture = PLUGIN.Capture({"staging": staging, "layers": CAPTURED.layers, "final_norm": final_norm})
    capture.longest_prompt = 1000
    capture.writers = PLUGIN.Writers(capture.staging, PENDING, threads=threads)
    return capture


@pytest.fixture
def capture(tmp_path: Path) -> Any:
    return new_capture(tmp_path / "staging")


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


def settle(capture: Any) -> None:
    """Wait until the writers have done all that they were given."""
    for number, work in enumerate(capture.writers.queues):
        done = threading.Event()
        work.put((done.set,))
        assert done.wait(5), f"writer {number} is stuck"


def written(capture: Any) -> list[str]:
    """Names of all finished files in staging, once the writers have done all that they were given."""
    settle(capture)
    return sorted(path.name for path in capture.staging.iterdir() if path.suffix != ".part")


def half_way(capture: Any) -> list[str]:
    """Names of the unfinished files in staging, once the writers have done all that they were given."""
    settle(capture)
    return sorted(path.name for path in capture.staging.glob("*.part"))


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
    assert capture.dumps == {}


def test_requests_of_others_are_left_alone_but_their_rows_are_counted(capture: Any) -> None:
    foreign, ours = prompt(0, 5, rid="chatcmpl-17"), prompt(1, 3)
    forward_pass(capture, (foreign, 0, 5), (ours, 0, 3))
    assert written(capture) == [dump_name(ours)]
    assert_dump(capture, ours)


def test_a_decode_pass_writes_nothing(capture: Any) -> None:
    forward_pass(capture, (prompt(0, 1), 0, 1), extend=False)
    assert written(capture) == []
    assert capture.dumps == {}


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
    assert capture.dumps == {}


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
    assert capture.dumps == {}


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
    assert "a pass over 4 rows and 2 layers gave" in error_of(capture, one)
    assert "final torch.bfloat16 (3, 4)" in error_of(capture, one)


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


def test_a_request_that_does_not_go_on_is_forgotten_with_its_file(capture: Any) -> None:
    abandoned = prompt(0, 6)
    forward_pass(capture, (abandoned, 0, 3))
    for row in range(1, PLUGIN.PASSES_APART + 1):
        forward_pass(capture, (prompt(row, 2), 0, 2))
    assert list(capture.dumps) == [abandoned.rid]
    assert len(half_way(capture)) == 1
    forward_pass(capture, (prompt(99, 2), 0, 2))
    assert capture.dumps == {}
    assert half_way(capture) == []
    assert [name for name in written(capture) if name.startswith(abandoned.rid)] == []


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
    monkeypatch.setattr(PLUGIN, "attention_tp_rank", lambda: 0)
    monkeypatch.setattr(PLUGIN, "check_server", lambda arguments, model: {})
    monkeypatch.setattr(PLUGIN, "version", lambda package: "0.5.23")
    decoder = SimpleNamespace(layers=[None] * 6, layers_to_capture=[], norm=torch.nn.Identity())
    model = LlamaForCausalLM(model=decoder, capture_aux_hidden_states=False)
    config = SimpleNamespace(context_len=64, hidden_size=HIDDEN, dtype=torch.bfloat16)
    return SimpleNamespace(
        model=model, model_config=config, device="cpu", is_draft_worker=False, server_args=SimpleNamespace()
    )


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
    "layers", [[1, 5], [-1, 2], [4, 1], [1, 1], []], ids=["the last", "negative", "descending", "twice", "none"]
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


def test_another_norm_than_post_and_pre_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PLUGIN.CaptureError, match="'post' or 'pre', not 'before'"):
        PLUGIN.Capture({"staging": tmp_path, "layers": [1], "final_norm": "before"})


def test_the_final_state_before_the_norm_is_what_the_norm_was_given(tmp_path: Path, runner: Any) -> None:
    class Norm(torch.nn.Module):
        """As SGLang's RMSNorm: adds the residual, returns the normed sum and the sum."""

        def forward(self, states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = states + residual
            return total * 7, total

    capture = new_capture(tmp_path / "staging", "pre")
    runner.model.model.norm = Norm()
    capture.after_load_model(None, runner)
    one = prompt(0, 3)
    normed, _ = runner.model.model.norm(one.last - 1, torch.ones_like(one.last))
    capture.around_logits_processor(lambda *a, **k: None, None, one.ids, normed, None, batch_of((one, 0, 3)), one.aux)
    (dump,) = written(capture)[:1]
    last = load_file(capture.staging / dump)["last_hidden_state"]
    assert torch.equal(last, (one.last - 1) + torch.ones_like(one.last))


def test_a_final_state_of_an_earlier_pass_is_never_taken_for_this_ones(tmp_path: Path) -> None:
    capture = new_capture(tmp_path / "staging", "pre")
    one, other = prompt(0, 3), prompt(1, 3)
    capture.keep_before_norm(None, (one.last,), one.last)
    hook = (lambda *a, **k: None, None)
    capture.around_logits_processor(*hook, one.ids, one.last, None, batch_of((one, 0, 3)), one.aux)
    capture.around_logits_processor(*hook, other.ids, other.last, None, batch_of((other, 0, 3)), other.aux)
    assert "the last norm was not seen" in error_of(capture, other)


@pytest.mark.parametrize(
    ("several", "values"),
    [
        (False, {"pp_size": 2}),
        (False, {"enable_two_batch_overlap": True}),
        (False, {"speculative_algorithm": "EAGLE3"}),
        (False, {"enable_layernorm_sp": True}),
        (True, {"flashinfer_allreduce_fusion_backend": "auto"}),
        (True, {"enable_flashinfer_allreduce_fusion": True}),
        (True, {"moe_a2a_backend": "deepep"}),
        (True, {"enable_dp_attention": True}),
    ],
)
def test_arguments_that_would_spoil_states_are_refused_by_name(several: bool, values: dict[str, Any]) -> None:
    (name,) = values
    harmless = {"pp_size": 1, "speculative_algorithm": None, "moe_a2a_backend": "none", "enable_dp_attention": False}
    PLUGIN.check_arguments(harmless, "LlamaForCausalLM", several)
    with pytest.raises(PLUGIN.CaptureError, match=f"{name} is "):
        PLUGIN.check_arguments(harmless | values, "LlamaForCausalLM", several)


def test_what_only_several_processes_get_wrong_is_allowed_to_one() -> None:
    PLUGIN.check_arguments({"enable_flashinfer_allreduce_fusion": True}, "LlamaForCausalLM", False)
    PLUGIN.check_arguments({"enable_dp_attention": True}, "DeepseekV3ForCausalLM", True)


def test_a_server_that_is_refused_is_not_switched_to_capture(
    capture: Any, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: Any, model: str) -> None:
        raise PLUGIN.CaptureError("no")

    monkeypatch.setattr(PLUGIN, "check_server", refuse)
    with pytest.raises(PLUGIN.CaptureError, match="no"):
        capture.after_load_model(None, runner)
    assert runner.model.capture_aux_hidden_states is False
    assert list(capture.staging.iterdir()) == []


def test_a_row_that_a_request_decodes_beside_prefills_is_not_its_prompts(capture: Any) -> None:
    done, other = prompt(0, 4), prompt(1, 3)
    forward_pass(capture, (done, 0, 4))
    longer = prompt(0, 5, rid=done.rid)
    forward_pass(capture, (other, 0, 3), (longer, 4, 5))
    assert written(capture) == sorted([dump_name(done), dump_name(other)])
    assert_dump(capture, done)
    assert_dump(capture, other)


def test_a_process_that_shares_its_attention_with_another_writes_nothing(
    capture: Any, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PLUGIN, "attention_tp_rank", lambda: 1)
    capture.writers = None
    capture.after_load_model(None, runner)
    assert runner.model.model.layers_to_capture == [2, 5]  # its part of each layer is computed in the same way
    one = prompt(0, 2)
    capture.around_logits_processor(lambda *a, **k: 1, None, one.ids, one.last, None, batch_of((one, 0, 2)), one.aux)
    assert list(capture.staging.iterdir()) == []


def test_several_writers_write_what_one_would(tmp_path: Path) -> None:
    capture = new_capture(tmp_path / "staging", threads=3)
    prompts = [prompt(row, 9) for row in range(8)]
    for start in range(0, 9, 3):
        forward_pass(capture, *((one, start, start + 3) for one in prompts))
    assert written(capture) == sorted(map(dump_name, prompts))
    for one in prompts:
        assert_dump(capture, one)
    assert capture.writers.pending == 0


def test_one_request_repeated_while_its_dump_is_written_gives_one_whole_dump(capture: Any) -> None:
    first, again = prompt(0, 6, seed=1), prompt(0, 6, seed=2)
    forward_pass(capture, (first, 0, 3))
    forward_pass(capture, (first, 3, 6))
    forward_pass(capture, (again, 0, 6))
    assert_dump(capture, again)
    assert half_way(capture) == []


def test_full_staging_is_an_error_of_that_request_and_the_next_one_works_when_there_is_room(
    capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake: the write that fails as on a full file system."""

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one, other = prompt(0, 6), prompt(1, 6)
    forward_pass(capture, (one, 0, 3))
    settle(capture)
    with monkeypatch.context() as patch:
        patch.setattr(PLUGIN.os, "pwrite", full)
        forward_pass(capture, (one, 3, 6), (other, 0, 3))
        settle(capture)
    forward_pass(capture, (other, 3, 6))
    assert "No space left on device" in error_of(capture, one)
    assert "No space left on device" in error_of(capture, other)
    assert half_way(capture) == []
    assert capture.writers.pending == 0
    forward_pass(capture, (again := prompt(0, 6, rid="drillcore-abc123-0-1-6"), 0, 6))
    assert_dump(capture, again)


def test_clients_are_asked_to_wait_while_the_writers_are_behind(capture: Any) -> None:
    busy = capture.staging / f"busy.{os.getpid()}"
    go_on = threading.Event()
    capture.writers.queues[0].put((go_on.wait,))
    one = prompt(0, 900)  # aux, last, ids and norms, each on pages of their own
    passes = 0
    while not busy.exists():
        forward_pass(capture, (one, 0, 900))
        passes += 1
        assert passes < 1000, "the writers are never behind"
    assert capture.writers.pending > PENDING // 2
    go_on.set()
    settle(capture)
    assert not busy.exists()
    assert capture.writers.pending == 0
    assert_dump(capture, one)


def test_a_ring_hands_out_segments_that_never_overlap_and_takes_them_back_in_any_order() -> None:
    ring = PLUGIN.PinnedRing(10 * PAGE, pin_memory=False)
    assert ring.take(11 * PAGE) is None
    first, second, third = (ring.take(size * PAGE) for size in (4, 3, 3))
    assert ring.take(1) is None
    ring.give_back(second)
    assert ring.take(PAGE) is None  # the circle goes on where the oldest segment ends
    ring.give_back(first)
    fourth = ring.take(5 * PAGE)
    assert (fourth.start, fourth.end) == (0, 5 * PAGE)
    assert ring.take(3 * PAGE) is None
    fifth = ring.take(2 * PAGE)
    assert (fifth.start, fifth.end) == (5 * PAGE, 7 * PAGE)
    assert ring.take(1) is None
    for segment in (fifth, third, fourth):
        ring.give_back(segment)
    assert (whole := ring.take(10 * PAGE)).start == 0
    assert len(whole.memory) == 10 * PAGE


def test_random_use_of_a_ring_never_gives_a_byte_twice() -> None:
    random = np.random.default_rng(3)
    ring = PLUGIN.PinnedRing(100, pin_memory=False)
    held: list[Any] = []
    served = refused = 0
    for _ in range(5000):
        if held and random.random() < 0.5:
            ring.give_back(held.pop(random.integers(len(held))))
            continue
        segment = ring.take(int(random.integers(1, 40)))
        if segment is None:
            refused += 1
            assert held, "an empty ring has room"
            continue
        served += 1
        assert 0 <= segment.start < segment.end <= 100
        assert all(segment.end <= other.start or other.end <= segment.start for other in held)
        held.append(segment)
    assert min(served, refused) > 100


def test_states_go_through_the_ring_and_beside_it_when_it_is_full(tmp_path: Path) -> None:
    """A GPU server's way without a GPU: the ring is ordinary memory, and copies are done at once."""
    capture = new_capture(tmp_path / "staging")
    capture.writers.ring = ring = PLUGIN.PinnedRing(8 * PAGE, pin_memory=False)
    go_on = threading.Event()
    capture.writers.queues[0].put((go_on.wait,))
    prompts = [prompt(row, 50) for row in range(5)]  # four pages each
    for one in prompts:
        forward_pass(capture, (one, 0, 50))
    assert len(ring.taken) == 2
    go_on.set()
    for one in prompts:
        assert_dump(capture, one)
    assert len(ring.taken) == 0


def test_a_mark_of_an_earlier_process_of_this_number_is_taken_away(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir(mode=0o700)
    (staging / f"busy.{os.getpid()}").write_text("1")
    new_capture(staging)
    assert list(staging.iterdir()) == []


def test_what_dead_processes_left_is_removed_and_what_living_ones_say_is_kept(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir(mode=0o700)
    for name in ("ready.999999999.json", "busy.999999999", f"ready.{os.getppid()}.json"):
        (staging / name).write_text("{}")
    new_capture(staging)
    assert [file.name for file in staging.iterdir()] == [f"ready.{os.getppid()}.json"]


def test_a_staging_directory_that_others_may_write_in_is_refused(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging").chmod(0o777)
    with pytest.raises(PLUGIN.CaptureError, match="others may write in it"):
        new_capture(tmp_path / "staging")


def test_a_link_that_lies_in_the_way_of_a_file_is_replaced_and_not_followed(capture: Any, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    one = prompt(0, 2)
    (capture.staging / dump_name(one)).symlink_to(target)
    forward_pass(capture, (one, 0, 2))
    assert_dump(capture, one)
    assert target.read_text() == "mine"


def test_a_pass_that_cannot_be_read_at_all_is_an_error_of_each_of_our_requests(capture: Any) -> None:
    one = prompt(0, 2)
    batch = batch_of((one, 0, 2))
    batch.extend_seq_lens_cpu = None
    capture.around_logits_processor(lambda *a, **k: None, None, one.ids, one.last, None, batch, one.aux)
    assert "TypeError" in error_of(capture, one)


def test_a_dump_whose_client_has_gone_is_no_error(capture: Any) -> None:
    one = prompt(0, 4)
    forward_pass(capture, (one, 0, 2))
    (name,) = half_way(capture)
    (capture.staging / name).unlink()
    forward_pass(capture, (one, 2, 4))
    assert written(capture) == []


def stub_sglang(monkeypatch: pytest.MonkeyPatch, *, wrapped: bool, ranks: int, context_ranks: int, graph: str) -> None:
    """The modules of SGLang that the plugin asks, with these answers."""

    def forward() -> None:
        pass

    if wrapped:
        forward.__wrapped__ = forward  # type: ignore[attr-defined]
    state = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: ranks,
        get_attn_context_model_parallel_world_size=lambda: context_ranks,
    )
    graphs = SimpleNamespace(check_cuda_graph_backend=lambda phase, backend: (phase, backend) == ("prefill", graph))
    stubs = {
        "sglang.srt.distributed": SimpleNamespace(parallel_state=state),
        "sglang.srt.layers.logits_processor": SimpleNamespace(LogitsProcessor=SimpleNamespace(forward=forward)),
        "sglang.srt.model_executor.cuda_graph_config": graphs,
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.model_executor"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))


GOOD_SERVER: dict[str, Any] = {"wrapped": True, "ranks": 1, "context_ranks": 1, "graph": "disabled"}


@pytest.mark.parametrize(
    ("answers", "values", "reason"),
    [
        ({"wrapped": False}, {}, "the hook around .*LogitsProcessor.forward was not applied"),
        ({"context_ranks": 2}, {}, "the attention is context parallel"),
        ({"graph": "breakable"}, {}, "prefill runs as a CUDA graph"),
        ({}, {"pp_size": 2}, "pp_size is 2"),
        ({"ranks": 2}, {"moe_dense_tp_size": 1}, "moe_dense_tp_size is 1"),
    ],
)
def test_a_server_that_would_give_other_states_is_refused(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], values: dict[str, Any], reason: str
) -> None:
    good = {"pp_size": 1, "moe_dense_tp_size": None}
    stub_sglang(monkeypatch, **GOOD_SERVER)
    assert PLUGIN.check_server(SimpleNamespace(**good), "LlamaForCausalLM") == good
    stub_sglang(monkeypatch, **GOOD_SERVER | answers)
    with pytest.raises(PLUGIN.CaptureError, match=reason):
        PLUGIN.check_server(SimpleNamespace(**good | values), "LlamaForCausalLM")


def test_where_asked_for_and_resolved_arguments_differ_the_resolved_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_sglang(monkeypatch, **GOOD_SERVER)
    arguments = SimpleNamespace(pp_size=1, resolved_dict=lambda: {"pp_size": 2})
    with pytest.raises(PLUGIN.CaptureError, match="pp_size is 2"):
        PLUGIN.check_server(arguments, "LlamaForCausalLM")
