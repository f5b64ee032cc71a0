"""The stored states are the model's: every row of the demo against Hugging Face Transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.serving import Serving, cpu_config, serving, stored_states

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

LAYERS = [1, 14, 26]  # "eagle3" of 30 layers
UNCHUNKED = 32768  # tokens: more than the dataset has
CHUNKED = 192  # tokens: splits most rows


@pytest.fixture(scope="module")
def reference(demo_model: Path, demo_dataset: Path) -> dict[int, torch.Tensor]:
    """By row: Transformers' own float32 states [layers + 1, tokens, hidden], each prompt alone and in one piece."""
    import json

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    states = {}
    with torch.inference_mode():
        for number, line in enumerate(demo_dataset.read_text().splitlines()):
            ids = torch.tensor([json.loads(line)["input_ids"]])
            # The base model: hidden_states[k + 1] is the output of layer k, the last one has passed the final norm.
            hidden = model.model(ids, output_hidden_states=True).hidden_states
            states[number] = torch.stack([hidden[layer + 1][0] for layer in LAYERS] + [hidden[-1][0]])
    return states


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[CHUNKED, UNCHUNKED], ids=["chunked", "unchunked"])
def server(
    request: pytest.FixtureRequest,
    dtype: str,
    demo_model: Path,
    demo_dataset: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("exact")
    config = cpu_config(
        demo_model,
        demo_dataset,
        folder / "unused",
        Path("/dev/shm") / f"drillcore-test-{folder.name}",
        server={"dtype": dtype, "chunked_prefill_size": request.param},
    )
    with serving(config, folder / "server.log") as running:
        yield running


@pytest.mark.parametrize("in_flight", [64, 1], ids=["batched", "alone"])
def test_stored_states_equal_transformers(
    server: Serving, dtype: str, in_flight: int, reference: dict[int, torch.Tensor], tmp_path: Path
) -> None:
    store = server.extract(tmp_path / "store", requests_in_flight=in_flight)
    states = dict(stored_states(store))
    assert sorted(states) == sorted(reference)
    worst: dict[str, float] = {}
    for row, expected in reference.items():
        actual = states[row]
        assert actual.shape == expected.shape
        if dtype == "float32":
            error = torch.linalg.vector_norm(actual - expected, dim=-1) / torch.linalg.vector_norm(expected, dim=-1)
            worst["relative error"] = max(worst.get("relative error", 0), float(error.max()))
        else:
            cosine = torch.cosine_similarity(actual, expected, dim=-1)
            worst["1 - cosine"] = max(worst.get("1 - cosine", 0), float(1 - cosine.min()))
    print(f"\n{dtype}, {server.facts.chunked_prefill_size} a pass, {in_flight} in flight: {worst}")
    limit = {"relative error": 1e-4, "1 - cosine": 1e-3}
    assert {name: value for name, value in worst.items() if not value < limit[name]} == {}
