"""The stored states are the model's: every row of the demo against Hugging Face Transformers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.serving import Serving, cpu_config, serving, stored_states

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

LAYERS = [1, 14, 26]  # "eagle3" of 30 layers
UNCHUNKED = 32768  # tokens: more than the dataset has
CHUNKED = 256  # tokens: every pass is full, so most rows are split
BATCHED, ALONE = 64, 1  # requests in flight
States = dict[int, torch.Tensor]  # by row: float32 [layers + 1, tokens, hidden]


def transformers_states(model: Path, dataset: Path, dtype: torch.dtype) -> States:
    """Transformers' own states by row, each prompt alone and in one piece."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    states = {}
    with torch.inference_mode():
        for number, line in enumerate(dataset.read_text().splitlines()):
            ids = torch.tensor([json.loads(line)["input_ids"]])
            # The base model: hidden_states[k + 1] is the output of layer k, the last one has passed the final norm.
            hidden = lm.model(ids, output_hidden_states=True).hidden_states
            states[number] = torch.stack([hidden[layer + 1][0] for layer in LAYERS] + [hidden[-1][0]]).float()
    return states


@pytest.fixture(scope="module")
def exact(demo_model: Path, demo_dataset: Path) -> States:
    """What the model says without rounding: float32."""
    return transformers_states(demo_model, demo_dataset, torch.float32)


@pytest.fixture(scope="module")
def rounded(demo_model: Path, demo_dataset: Path) -> States:
    """What Transformers itself makes of the model in bfloat16: how much rounding to expect, and at which tokens.

    Products are summed in float32 and rounded once, as any bfloat16 kernel does; PyTorch's own on a CPU without AVX-512
    takes 7 times as long for the same.
    """
    linear = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda x, w, b=None: linear(x.float(), w.float()).to(x.dtype))
        return transformers_states(demo_model, demo_dataset, torch.bfloat16)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest,
    demo_model: Path,
    demo_dataset: Path,
    staging: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    dtype, chunk = request.param
    folder = tmp_path_factory.mktemp("exact")
    config = cpu_config(
        demo_model,
        demo_dataset,
        folder / "unused",
        staging,
        server={"dtype": dtype, "chunked_prefill_size": chunk},
    )
    with serving(config, folder / "server.log") as running:
        yield running


@pytest.mark.parametrize(
    ("server", "in_flight"),
    [
        pytest.param(("float32", CHUNKED), BATCHED, id="chunked-batched"),
        pytest.param(("float32", CHUNKED), ALONE, id="chunked-alone", marks=pytest.mark.slow),
        pytest.param(("float32", UNCHUNKED), BATCHED, id="unchunked-batched", marks=pytest.mark.slow),
        pytest.param(("float32", UNCHUNKED), ALONE, id="unchunked-alone", marks=pytest.mark.slow),
    ],
    indirect=["server"],
)
def test_float32_states_equal_transformers(server: Serving, in_flight: int, exact: States, tmp_path: Path) -> None:
    states = extract(server, tmp_path, in_flight, exact)
    errors = torch.cat([token_errors(states[row], exact[row]).flatten() for row in exact])
    print(f"\nlargest relative error of a token's state: {errors.max():.2g}")
    assert (errors < 1e-4).all()  # not so for what is no number


@pytest.mark.parametrize(
    ("server", "in_flight"),
    [
        pytest.param(("bfloat16", CHUNKED), BATCHED, id="chunked-batched", marks=pytest.mark.slow),
        pytest.param(("bfloat16", UNCHUNKED), ALONE, id="unchunked-alone", marks=pytest.mark.slow),
    ],
    indirect=["server"],
)
def test_bfloat16_states_are_as_near_as_bfloat16_allows(
    server: Serving, in_flight: int, exact: States, rounded: States, tmp_path: Path
) -> None:
    """Cosine > 0.999 with float32, but for the few tokens at which rounding costs Transformers as much."""
    states = extract(server, tmp_path, in_flight, exact)
    ours = torch.cat([cosines(states[row], exact[row]) for row in exact], dim=1)
    theirs = torch.cat([cosines(rounded[row], exact[row]) for row in exact], dim=1)
    assert ours.isfinite().all()
    below = [(cosine < 0.999).sum(1).tolist() for cosine in (ours, theirs)]
    print(
        f"\nbelow 0.999 by state, of {ours.shape[1]} tokens: ours {below[0]}, Transformers {below[1]}; lowest: ours "
        f"{ours.min():.4f}, Transformers {theirs.min():.4f}; mean 1 - cosine: ours {(1 - ours).mean():.2g}, "
        f"Transformers {(1 - theirs).mean():.2g}"
    )
    assert (ours < 0.999).sum() <= 1.5 * (theirs < 0.999).sum()
    assert (ours < 0.999).float().mean() < 0.003
    assert 1 - ours.min() <= 1.5 * (1 - theirs.min())
    assert (1 - ours).mean() <= 1.25 * (1 - theirs).mean()


def extract(server: Serving, folder: Path, in_flight: int, expected: States) -> States:
    """Extract every row into a store and read it back."""
    states = dict(stored_states(server.extract(folder / "store", requests_in_flight=in_flight)))
    assert {row: state.shape for row, state in states.items()} == {row: s.shape for row, s in expected.items()}
    return states


def token_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error (L2) of each token's state, [states, tokens]."""
    return torch.linalg.vector_norm(actual - expected, dim=-1) / torch.linalg.vector_norm(expected, dim=-1)


def cosines(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Cosine of each token's state, [states, tokens]."""
    return torch.cosine_similarity(actual, expected, dim=-1)
