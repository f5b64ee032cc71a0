"""Which layers a config asks for, in whatever numbers; single weights out of a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.checkpoint import Checkpoint
from tasks.config import CaptureConfig
from tasks.errors import ModelError
from tasks.model import Model, capture_layers


def model(layers: int) -> Model:
    return Model(Path("/model"), "LlamaForCausalLM", layers, 64, 1000, 2048, "identity")


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ({"layers": "eagle3"}, [1, 29, 57]),
        ({"layers": [0, 30, 59]}, [0, 30, 59]),
        ({"layers": [2, 30, 58], "layer_convention": "layer_input"}, [1, 29, 57]),
        ({"layers": [2, 30, 58], "layer_convention": "vllm"}, [1, 29, 57]),
        ({"layers": [2, 30, 58, 61], "layer_convention": "vllm", "final_norm": "pre"}, [1, 29, 57]),
        ({"layers": "eagle3", "layer_convention": "vllm"}, [1, 29, 57]),
    ],
)
def test_layers_of_kimi_in_every_convention_are_the_same_outputs(asked: dict, stored: list[int]) -> None:
    assert capture_layers(model(61), CaptureConfig(**asked)) == stored


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"layers": [1, 60]}, r"\[1, 60\] .* must ascend, between 0 and 59"),
        ({"layers": [4, 1]}, "must ascend"),
        ({"layers": [1, 1]}, "must ascend"),
        ({"layers": []}, "must ascend"),
        ({"layers": [0, 4], "layer_convention": "layer_input"}, r"outputs of layers \[-1, 3\]"),
        ({"layers": [2, 61], "layer_convention": "layer_input"}, r"outputs of layers \[1, 60\]"),
        ({"layers": [2, 61], "layer_convention": "vllm"}, r"ends with 61, .* set capture\.final_norm to 'pre'"),
        ({"layers": [61], "layer_convention": "vllm", "final_norm": "pre"}, r"outputs of layers \[\]"),
    ],
)
def test_layers_that_cannot_be_had_are_refused_with_the_numbers_asked_for(asked: dict, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        capture_layers(model(61), CaptureConfig(**asked))


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor], config: dict) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    for number, (name, weight) in enumerate(weights.items()):  # a file each: as large checkpoints are split
        save_file({name: weight}, folder / f"model-{number}.safetensors")


def test_the_head_is_found_in_any_file_and_the_embedding_where_they_are_tied(tmp_path: Path) -> None:
    head, embedding = torch.randn(5, 4), torch.randn(5, 4)
    write_checkpoint(tmp_path, {"model.embed_tokens.weight": embedding}, {})
    assert torch.equal(Checkpoint(tmp_path).lm_head(), embedding)
    write_checkpoint(tmp_path, {"model.embed_tokens.weight": embedding, "lm_head.weight": head}, {})
    assert torch.equal(Checkpoint(tmp_path).lm_head(), head)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "inside a wrapper"])
def test_the_last_norm_is_the_models_own(tmp_path: Path, wrapped: bool) -> None:
    weight, states = torch.tensor([2.0, 0.5]), torch.tensor([[3.0, 4.0]])
    text = {"rms_norm_eps": 7.5}
    prefix = "language_model." if wrapped else ""
    write_checkpoint(
        tmp_path,
        {
            f"{prefix}model.embed_tokens.weight": torch.ones(1, 2),
            f"{prefix}model.layers.1.embed_tokens.weight": torch.ones(1, 2),  # a multi-token predictor's
            f"{prefix}model.layers.0.input_layernorm.weight": torch.ones(2),
            f"{prefix}model.layers.0.mlp.norm.weight": torch.ones(2) * 9,
            f"{prefix}model.norm.weight": weight,
        },
        {"text_config": text} if wrapped else text,
    )
    expected = states / (12.5 + 7.5) ** 0.5 * weight  # the mean square of 3 and 4 is 12.5
    assert torch.allclose(Checkpoint(tmp_path).apply_final_norm(states), expected)


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"lm_head.weight": torch.ones(2, 2)}, {})
    with pytest.raises(ModelError, match=r"has no embed_tokens\.weight"):
        Checkpoint(tmp_path)
    write_checkpoint(tmp_path, {"lm_head.weight": torch.ones(2, 2), "model.embed_tokens.weight": torch.ones(2, 2)}, {})
    with pytest.raises(ModelError, match=r"has no weight model\.norm\.weight"):
        Checkpoint(tmp_path).apply_final_norm(torch.ones(1, 2))
