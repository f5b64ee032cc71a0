"""Verification against a real model's states: a right store passes, and every way to spoil one is found, by its row.

The states are SmolLM2's own, of conversations in ten languages, stored in bfloat16 as an extraction would store them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.__main__ import main
from tasks.errors import VerificationError
from tasks.model import read_model
from tasks.store.record import read_record
from tasks.verification import Outcome, read_outcome, verify_store
from tests.conftest import ROOT
from tests.integration.real_store import RealRun, RealStore, Sample, Spoil, only, with_states_of
from tests.integration.tiny_models import make_checkpoint, reference_states
from tests.unit.helpers import rms_of

LAYERS = [1, 14, 26]
ROWS = 24
LENGTHS = (48, 64, 80, 96)  # tokens: six rows of each


@pytest.fixture(scope="module")
def run(demo_model: Path, demo_dataset: Path) -> RealRun:
    lines = [json.loads(line) for line in demo_dataset.read_text().splitlines()]
    lines = [line for line in lines if len(line["input_ids"]) >= max(LENGTHS)]
    lines = [lines[at] for at in np.linspace(0, len(lines) - 1, ROWS).astype(int)]
    ids = torch.tensor([line["input_ids"][: max(LENGTHS)] for line in lines])
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model.model(ids, output_hidden_states=True).hidden_states
    samples = []
    for row in range(ROWS):
        length = LENGTHS[row % len(LENGTHS)]
        aux = torch.cat([states[layer + 1][row, :length] for layer in LAYERS], dim=-1).bfloat16()
        mask = (np.arange(length) >= 20).astype(np.uint8)
        last = states[-1][row, :length].bfloat16()
        samples.append(Sample(row, ids[row, :length].numpy().astype(np.int32), mask, aux, last))
    return RealRun(read_model(demo_model), LAYERS, "bfloat16", samples)


def verify(real: RealStore) -> Outcome:
    verify_store(real.store, real.dataset, 0.0)
    outcome = read_outcome(real.store)
    assert outcome is not None
    return outcome


def problems(real: RealStore) -> list[str]:
    with pytest.raises(VerificationError):
        verify_store(real.store, real.dataset, 0.0)
    assert not real.store.manifest.exists()
    outcome = read_outcome(real.store)
    assert outcome is not None
    return [problem["text"] for problem in outcome.problems]


def test_a_right_store_passes_and_both_proofs_speak(run: RealRun, tmp_path: Path) -> None:
    outcome = verify(run.write(tmp_path / "real"))
    assert outcome.verdict == "passed"
    for proof in outcome.proofs.values():
        assert proof["applies"]
        assert proof["judged"] >= ROWS // 2
        assert proof["weakest"] > 0.65
    assert outcome.doubtful == {}
    assert outcome.outlier_rows_judged == ROWS
    assert outcome.outliers == []


def nan_in(sample: Sample) -> Sample:
    last = sample.last.clone()
    last[17, 300] = float("nan")
    return replace(sample, last=last, rms=rms_of(sample.aux, sample.last))


def layer_zero(sample: Sample) -> Sample:
    aux = sample.aux.clone()
    aux[:, 576:1152] = 0
    return replace(sample, aux=aux)


def through_fp8(sample: Sample) -> Sample:
    """As a cache in fp8 (e4m3) with one scale a tensor would leave it."""
    scale = 2.0 ** torch.floor(torch.log2(sample.last.float().abs().max() / 448)) * 2
    last = (sample.last.float() / scale).to(torch.float8_e4m3fn).float() * scale
    return replace(sample, last=last.bfloat16())


def another_size(sample: Sample) -> Sample:
    aux = sample.aux.clone()
    aux[:, 576:1152] *= 9
    return replace(sample, aux=aux)


def rounded_twice(sample: Sample) -> Sample:
    return replace(sample, last=sample.last.float().bfloat16(), aux=sample.aux.half().bfloat16())


def one_off(sample: Sample) -> Sample:
    """Each state belongs to the token before."""
    return replace(sample, aux=torch.roll(sample.aux, 1, 0), last=torch.roll(sample.last, 1, 0))


MUTANTS: dict[str, tuple[Spoil, list[tuple[int, str]]]] = {
    "one NaN": (only(9, nan_in), [(9, "final is not finite at token 17")]),
    "a layer that is zero": (only(9, layer_zero), [(9, "layer 14 is all zero at token 0 and 63 more")]),
    "fp8": (only(9, through_fp8), [(9, "final has lost precision: the 4 low mantissa bits of its bfloat16 are zero")]),
    "ids of a neighbour": (
        lambda samples: only(9, lambda one: replace(one, ids=samples[13].ids))(samples),
        [(9, "the token ids are not the input's")],
    ),
    "mask off by one": (
        only(9, lambda one: replace(one, mask=np.roll(one.mask, 1))),
        [(9, "the loss mask is not the input's")],
    ),
    "two requests swapped": (
        with_states_of(3, 11),
        [(3, "its states are not those of its token ids"), (11, "its states are not those of its token ids")],
    ),
    "a stale dump": (
        # Of a prompt that the store does not have: the same length, states as right as any.
        lambda samples: only(3, lambda one: replace(one, aux=samples[23].aux, last=samples[23].last))(samples)[:23],
        [(3, "its states are not those of its token ids")],
    ),
    "one token off": (only(3, one_off), [(3, "they fit its ids moved by +1")]),
    "the same state for two rows": (
        lambda samples: only(3, lambda one: replace(one, aux=samples[7].aux, last=samples[7].last))(samples),
        [(3, "its last final state is that of row 7"), (7, "its last final state is that of row 3")],
    ),
    "a layer of another size": (
        only(9, another_size),
        [(9, "layer 14: the median token has RMS")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught_by_row_and_nothing_else_is_accused(run: RealRun, tmp_path: Path, mutant: str) -> None:
    spoil, expected = MUTANTS[mutant]
    real = run.write(tmp_path / "real", spoil)
    found = problems(real)
    assert len(found) == len(expected)
    for row, text in expected:
        assert any(f" row {row}: " in line and text in line for line in found), found


def test_rounding_to_bfloat16_twice_loses_nothing(run: RealRun, tmp_path: Path) -> None:
    assert verify(run.write(tmp_path / "real", only(9, rounded_twice))).verdict == "passed"


def test_swaps_of_two_rows_of_each_length_are_found(run: RealRun, tmp_path: Path) -> None:
    """Not one lucky pair: rows share the template, and some of them most of their text."""
    pairs = [(0, 4), (5, 17), (10, 22), (15, 19)]
    for at, (one, other) in enumerate(pairs):
        found = problems(run.write(tmp_path / str(at), with_states_of(one, other)))
        assert sorted(int(line.split(" row ")[1].split(":")[0]) for line in found) == [one, other]


def test_flipped_bytes_a_lost_shard_and_a_lost_row(run: RealRun, tmp_path: Path) -> None:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)

    def lose(path: Path) -> None:
        path.unlink()

    changes: dict[str, Callable[[Path], None]] = {"is damaged: checksum": flip, "its shard 000000.safetensors": lose}
    for at, (text, change) in enumerate(changes.items()):
        real = run.write(tmp_path / str(at))
        change(real.store.shard(0, 0))
        (line,) = problems(real)
        assert text in line
    real = run.write(tmp_path / "row", lambda samples: samples[:-1])
    assert main(["verify", str(real.store.root)]) == 1
    outcome = read_outcome(real.store)
    assert outcome is not None
    assert (outcome.verdict, outcome.rows["missing"]) == ("incomplete", 1)


def test_random_weights_and_random_ids_raise_no_alarm(tmp_path: Path) -> None:
    """There is no next token to favour: the argmax proof says so, and nothing is doubted."""
    make_checkpoint("llama", tmp_path / "llama")
    random = np.random.default_rng(5)
    ids = [random.integers(0, 1000, 40 + 5 * (row % 4)).astype(np.int32) for row in range(24)]
    states = reference_states(tmp_path / "llama", [one.tolist() for one in ids])
    samples = [
        Sample(row, one, np.ones(len(one), np.uint8), torch.cat([state[1], state[3]], -1), state[-1].contiguous())
        for row, (one, state) in enumerate(zip(ids, states))
    ]
    model = read_model(tmp_path / "llama")
    outcome = verify(RealRun(model, [1, 3], "float32", samples).write(tmp_path / "clean"))
    assert not outcome.proofs["argmax"]["applies"]
    assert "as with random ids or random weights" in outcome.proofs["argmax"]["reason"]
    assert outcome.doubtful == {}
    # Their input is still in the states: two rows that are swapped are found all the same.
    assert outcome.proofs["input"]["applies"]
    found = problems(RealRun(model, [1, 3], "float32", samples).write(tmp_path / "swapped", with_states_of(2, 10)))
    assert [line.split(":")[0].split(" row ")[1] for line in found] == ["2", "10"]


def test_a_bad_row_of_a_good_shard_is_repaired_without_the_others(run: RealRun, tmp_path: Path) -> None:
    real = run.write(tmp_path / "real", only(9, nan_in))
    before = read_record(real.record_path(9))
    assert main(["verify", str(real.store.root), "--repair"]) == 1
    after = read_record(real.record_path(9))
    assert [row.row for row in after.rows] == [row.row for row in before.rows if row.row != 9]
    assert [row.row for row in after.withdrawn] == [9]
    assert "final is not finite" in after.withdrawn[0].reason
    assert after.checksum == before.checksum
    assert 9 not in readme_rows(real)
    real.write_part(after.batch, 1, [run.samples[9]])
    assert main(["verify", str(real.store.root)]) == 0
    assert readme_rows(real) == list(range(ROWS))


def readme_rows(real: RealStore) -> list[int]:
    """The rows that the README's reader sees."""
    blocks = [part.split("```")[0] for part in (ROOT / "README.md").read_text().split("```python\n")[1:]]
    (code,) = [block for block in blocks if "safe_open" in block]
    code = code.replace(".drillcore/demo/hidden-states", str(real.store.root))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    return sorted(int(line.split()[0]) for line in printed.splitlines())
