"""The probe finds what is wrong with a capture and names it: on Transformers' own states of a tiny model, spoiled.

tests/integration/test_mutants.py does the same to the plugin of a real server.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.errors import ModelError, NoReferenceError, ProbeError
from tasks.model import read_model
from tasks.probe import ProbeReport, _excess, probe
from tasks.server.dumps import Captured, Dump
from tasks.server.facts import ServerFacts
from tests.integration.tiny_models import CONTEXT, HIDDEN, LAYERS, make_checkpoint, reference_states

FACTS = ServerFacts("0.5.23", "2", CONTEXT, chunked_prefill_size=64)
States = list[torch.Tensor]
"""A batch: [layers + 2, tokens, hidden] a prompt: every layer's output, and the last one's after the norm."""


@dataclass
class Pretender:
    """An engine whose server is Transformers. `spoil` changes a batch, `choose` takes what is captured."""

    model: Path
    captured: Captured
    spoil: Callable[[States], States] = lambda batch: batch
    choose: list[int] = field(default_factory=list)
    waiting: list[tuple[np.ndarray, "Future[Dump]"]] = field(default_factory=list)
    released: int = 0

    def submit(self, row: int, ids: np.ndarray) -> Any:
        outcome: Any = Future()
        outcome.result = lambda timeout=None: self.answer(outcome)
        self.waiting.append((ids, outcome))
        return outcome

    def answer(self, outcome: Any) -> Dump:
        if self.waiting:  # all that came before the first result was asked for are one batch
            batch = self.spoil([self.states(ids) for ids, _ in self.waiting])
            for (_, waiting), states in zip(self.waiting, batch, strict=True):
                *aux, last = states[self.choose].to(getattr(torch, self.captured.dtype))
                waiting.dump = Dump(Path("none"), torch.cat(aux, dim=-1), last, [], [], chunks=2)
            self.waiting.clear()
        return outcome.dump

    def states(self, ids: np.ndarray) -> torch.Tensor:
        key = ids.tobytes()
        if key not in CACHE:
            CACHE[key] = reference_states(self.model, [ids.tolist()])[0]
        return CACHE[key].clone()

    def release(self, dump: Dump) -> None:
        self.released += 1

    def discard(self, future: Any) -> None:
        self.released += 1

    def top_tokens(self, ids: np.ndarray) -> list[int]:
        return (self.states(ids)[-1] @ HEAD[0].T).argmax(-1).tolist()


CACHE: dict[bytes, torch.Tensor] = {}
HEAD: list[torch.Tensor] = []
LAYERS_ASKED = [1, 3]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file

    path = tmp_path_factory.mktemp("probe") / "llama"
    make_checkpoint("llama", path)
    HEAD[:] = [load_file(path / "model.safetensors")["lm_head.weight"]]
    CACHE.clear()
    return path


def run(
    llama: Path,
    spoil: Callable[[States], States] = lambda batch: batch,
    choose: list[int] | None = None,
    final_norm: str = "post",
    dtype: str = "float32",
    seed: int = 1,
) -> ProbeReport:
    captured = Captured(LAYERS_ASKED, final_norm, dtype, HIDDEN)
    default = [*LAYERS_ASKED, LAYERS if final_norm == "post" else LAYERS - 1]
    engine: Any = Pretender(llama, captured, spoil, default if choose is None else choose)
    try:
        return probe(engine, read_model(llama), FACTS, CONTEXT, seed)
    finally:
        assert engine.released > 0
        assert not engine.waiting


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[States], States]:
    return lambda batch: [change(states) for states in batch]


def in_one_pass(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[States], States]:
    """Change the rows of all prompts together, as the server has them."""

    def spoil(batch: States) -> States:
        return list(change(torch.cat(batch, dim=1)).split([states.shape[1] for states in batch], dim=1))

    return spoil


def swap(batch: States) -> States:
    """The first two prompts of the same length change places."""
    for one in range(len(batch)):
        for other in range(one):
            if batch[one].shape == batch[other].shape:
                batch[one], batch[other] = batch[other], batch[one]
                return batch
    return batch


def zero_a_layer(states: torch.Tensor) -> torch.Tensor:
    states[1] = 0
    return states


def spoil_one(state: int, token: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(states: torch.Tensor) -> torch.Tensor:
        if states.shape[1] > token:
            states[state, token, 7] = value
        return states

    return change


def cut(states: torch.Tensor) -> torch.Tensor:
    states[:, 64:] = 0
    return states


def roll_layer(by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(rows: torch.Tensor) -> torch.Tensor:
        rows[3] = rows[3].roll(by, 0)
        return rows

    return change


def lose_last_rows(states: torch.Tensor) -> torch.Tensor:
    """What was in a buffer before is taken for the last rows."""
    if states.shape[1] > 64:
        states[:, 64:] = states[:, : states.shape[1] - 64].clone()
    return states


def only_together(spoil: Callable[[States], States]) -> Callable[[States], States]:
    """Spoil batches of prompts of several lengths."""
    return lambda batch: spoil(batch) if len({states.shape[1] for states in batch}) > 1 else batch


def exchange(batch: States) -> States:
    """The first 33 rows of the two longest prompts change places."""
    one, other = sorted({states.shape[1]: states for states in batch}.values(), key=lambda states: states.shape[1])[-2:]
    one[:, :33], other[:, :33] = other[:, :33].clone(), one[:, :33].clone()
    return batch


SPOILED = [
    ("layers +1", {"choose": [2, 4, LAYERS]}, r"Every layer is shifted by \+1: layer 1 holds .* output of layer 2;"),
    ("layers -1", {"choose": [0, 2, LAYERS]}, r"Every layer is shifted by -1: layer 1 holds .* the output of layer 0;"),
    ("layers in another order", {"choose": [3, 1, LAYERS]}, r"in another order: asked \[1, 3\], captured \[3, 1\]"),
    ("another layer", {"choose": [1, 4, LAYERS]}, "other layers than asked for: layer 3 holds .* output of layer 4"),
    ("pre for post", {"choose": [1, 3, LAYERS - 1]}, "the one before the model's last norm; the config asks .* after"),
    (
        "post for pre",
        {"choose": [1, 3, LAYERS], "final_norm": "pre"},
        "the one after the model's last norm; the config asks for the one before it",
    ),
    ("all shifted", {"choose": [2, 4, LAYERS - 1]}, r"shifted by \+1.* The final state is the one before"),
    ("rows +1", {"spoil": in_one_pass(lambda rows: rows.roll(1, 1))}, "6 of 6 requests .* Rows are shifted, or"),
    ("rows -1 within a prompt", {"spoil": each(lambda states: states.roll(-1, 1))}, "row 63 comes nearest .* shifted"),
    ("rows +1 within a prompt", {"spoil": each(lambda states: states.roll(1, 1))}, "row 1 comes nearest .* shifted"),
    ("a layer's rows", {"spoil": in_one_pass(roll_layer(1))}, "Layer 3 of the prompt of token .* rows of one layer"),
    ("requests swapped", {"spoil": swap}, "2 of 6 requests of one batch .* Two requests are swapped"),
    ("last chunk missing", {"spoil": each(cut)}, "is all zero from token 64 of 81 on: the last chunk is missing"),
    ("a layer zero", {"spoil": each(zero_a_layer)}, "layer 1 is all zero at 1 of 1 tokens"),
    ("NaN", {"spoil": each(spoil_one(3, 5, float("nan")))}, "layer 3 is not finite at 1 of 7 tokens, first at 5"),
    ("constant", {"spoil": each(lambda states: states[..., :1].expand_as(states))}, "one and the same number in every"),
    ("same", {"spoil": each(lambda states: states[:, :1].expand_as(states))}, "is the same at each of 7 tokens"),
    (
        "fp8",
        {"spoil": each(lambda states: states.to(torch.float8_e4m3fn).float())},
        "lost precision: 64 values in a row have 8 different mantissas",
    ),
    (
        "half precision",
        {"spoil": each(lambda states: states.bfloat16().float())},
        "lost precision: every value is a bfloat16 number, although the state is float32",
    ),
    (
        "rows +1 in a batch",
        {"spoil": only_together(in_one_pass(lambda rows: rows.roll(1, 1)))},
        r"alone and among others .* rows differ: the rows of the prompt are shifted by \+1",
    ),
    (
        "requests swapped in a batch",
        {"spoil": only_together(exchange)},
        "alone and among others .* 33 of .* rows differ, and are those of other prompts: requests of one batch are",
    ),
    (
        "last chunk stale in a batch",
        {"spoil": only_together(each(lose_last_rows))},
        r"alone and among others .*17 of 81 rows differ: the rows of the prompt are shifted by \+64",
    ),
    (
        "noise in a batch",
        {"spoil": only_together(each(lambda states: states + 0.01 * states.roll(1, -1)))},
        "alone and among others .* rows differ. The server mixes requests or loses chunks",
    ),
    ("noise", {"spoil": each(lambda states: states + 0.1 * states.roll(1, -1))}, "is not what the checkpoint computes"),
]


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED])
def test_what_is_wrong_is_found_and_named(llama: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        run(llama, **arguments)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("final_norm", ["post", "pre"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_right_passes(llama: Path, dtype: str, final_norm: str, seed: int) -> None:
    report = run(llama, dtype=dtype, final_norm=final_norm, seed=seed)
    assert report.layers is not None
    assert report.layers.layers == LAYERS
    assert report.layers.tokens == 6
    assert report.layers_not_checked is None
    assert report.noise == [0.0, 0.0, 0.0]
    assert report.positions == 106
    assert max(report.layers.errors) < 0.005 < 0.2 < min(report.layers.other_errors)
    assert max(report.layers.leans) < 0.02


def lacking(what: Exception) -> Callable[..., Any]:
    def layer_outputs(path: Path, tokens: list[int]) -> Any:
        raise what

    return layer_outputs


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoReferenceError("the layers of Other are not known here"), "the layers of Other are not known here"),
        (ModelError("/model has no weight layers.0.mlp."), "/model has no weight layers.0.mlp."),
        (KeyError("kv_lora_rank"), "its config.json has no 'kv_lora_rank'"),
    ],
)
def test_where_the_layers_cannot_be_compared_report_and_log_say_so(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    monkeypatch.setattr("tasks.probe.layer_outputs", lacking(error))
    report = run(llama)
    assert report.layers is None
    assert report.layers_not_checked == reason
    assert f"the layers were NOT compared with the checkpoint's: {reason};" in report.text()
    assert f"not compared with the checkpoint's: {reason}" in caplog.text


WITHOUT_REFERENCE = [
    ("pre for post", {"choose": [1, 3, LAYERS - 1]}, "It is the state before the model's last norm, not the one after"),
    ("final rows +1", {"spoil": each(lambda states: states.roll(1, 1))}, "row 1 comes nearest"),
    ("requests swapped", {"spoil": swap}, "The first token of a prompt has another state at layer 1"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), [case[1:] for case in WITHOUT_REFERENCE], ids=[case[0] for case in WITHOUT_REFERENCE]
)
def test_much_is_found_without_a_comparison(
    llama: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("tasks.reference.PLAIN", ())
    with pytest.raises(ProbeError, match=message):
        run(llama, **arguments)


def test_a_token_in_twenty_may_take_another_expert_and_no_more() -> None:
    errors = torch.full((40,), 0.01)
    errors[:2] = 0.9
    assert _excess(errors, "bfloat16", experts=True) is None
    assert _excess(errors[:1], "bfloat16", experts=True) is None
    assert "relative error 0.9 at 1 token(s), 0.5 is the most" in str(_excess(errors, "bfloat16", experts=False))
    errors[2] = 0.9
    assert "relative error 0.9 at 3 token(s)" in str(_excess(errors, "bfloat16", experts=True))
    assert "0.9 at the median token" in str(_excess(errors[:5], "bfloat16", experts=True))
