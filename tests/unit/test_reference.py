"""The forward pass that shares no code with a server: every layer of every family as Transformers computes it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.checkpoint import Checkpoint
from tasks.errors import ModelError, NoReferenceError
from tasks.quantization import dequantize_blocks, dequantize_int4, weight_reader
from tasks.reference import layer_outputs, route
from tests.integration.tiny_models import (
    CONFIGS,
    DEEPSEEK,
    FAMILIES,
    HIDDEN,
    LAYERS,
    SEED,
    SHARED,
    WEIGHTS,
    WRAPPED,
    make_checkpoint,
    randomize,
    reference_states,
)

TOKENS = [3, 17, 400, 999, 0]
TOLERANCE = 1e-5  # relative, L2; seen: up to 2.1e-6, of SmolLM2's 30 layers
BLOCK = [128, 128]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each family."""
    folder = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        make_checkpoint(family, folder / family)
    return folder


def states_of_layers(path: Path) -> torch.Tensor:
    """[layers + 1, tokens, hidden]: every layer's output, then the final state."""
    outputs = list(layer_outputs(path, TOKENS))[1:]
    return torch.stack([*outputs, Checkpoint(path).apply_final_norm(outputs[-1])])


def assert_equal(path: Path, transformers_states: list[torch.Tensor]) -> None:
    """transformers_states: [layers + 1, 1, hidden] a token."""
    expected = torch.cat(transformers_states, dim=1)
    errors = (states_of_layers(path) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (errors < TOLERANCE).all(), errors.amax(dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_as_transformers_computes_it(tiny: Path, family: str) -> None:
    assert_equal(tiny / family, reference_states(tiny / family, [[token] for token in TOKENS]))


def test_every_layer_of_a_real_model_is_as_transformers_computes_it(demo_model: Path) -> None:
    assert_equal(demo_model, reference_states(demo_model, [[token] for token in TOKENS]))


LLAMA = SHARED | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
V2 = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2},
        LLAMA | {"num_key_value_heads": 2} | BIASES,
        V2 | {"topk_method": "greedy"},
        V2 | {"topk_method": "group_limited_greedy"},
    ],
    ids=["qwen2: biases of queries, keys, values", "llama: all biases, tied embeddings", "v2", "v2, groups of experts"],
)
def test_other_models_of_the_families_too(tmp_path: Path, config: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(SEED))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    biased = any(name.endswith(("v_proj.bias", "correction_bias")) for name in load_file(tmp_path / WEIGHTS))
    assert biased == (config["model_type"] != "deepseek_v2")
    assert_equal(tmp_path, reference_states(tmp_path, [[token] for token in TOKENS]))


def test_a_weight_in_many_pieces_gives_the_same(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    whole = torch.stack(list(layer_outputs(tiny / "llama", TOKENS)))
    monkeypatch.setattr("tasks.reference.PIECE", 3 * HIDDEN)
    pieces = torch.stack(list(layer_outputs(tiny / "llama", TOKENS)))
    assert (pieces - whole).norm() < TOLERANCE * whole.norm()
    assert torch.get_num_threads() == threads


def test_layers_are_read_when_they_are_asked_for(tiny: Path, tmp_path: Path) -> None:
    weights = load_file(tiny / "llama" / WEIGHTS)
    kept = {name: weight for name, weight in weights.items() if "layers.3." not in name}
    save_file(kept, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    outputs = layer_outputs(tmp_path, TOKENS)
    assert len([next(outputs) for _ in range(4)]) == 4
    with pytest.raises(ModelError, match=r"has no weight model\.layers\.3\.input_layernorm\.weight"):
        next(outputs)


def test_only_the_chosen_experts_are_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    plain = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: [read.append(name), plain(self, name)][1])
    assert len(list(layer_outputs(tiny / "kimi-k2.5", [5]))) == LAYERS + 1
    experts = {
        name.rpartition(".experts.")[2].split(".")[0]
        for name in read
        if ".layers.2" in f".{name}" and ".experts." in name
    }
    assert len(experts) == CONFIGS["kimi-k2.5"]["text_config"]["num_experts_per_tok"]


# Experts


def test_v2_chooses_by_the_best_expert_of_a_group_and_v3_by_the_two_best_and_the_bias() -> None:
    config = {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0}
    logits = torch.tensor([[3.0, -9.0, 2.5, 2.4]])
    scores = logits.softmax(-1)
    chosen, weights = route(config | {"topk_method": "group_limited_greedy", "scoring_func": "softmax"}, logits, None)
    assert chosen.tolist() == [[0, 1]]
    assert torch.allclose(weights, 2 * scores[:, [0, 1]])
    v3 = config | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    chosen, weights = route(v3, logits, torch.zeros(4))
    assert chosen.tolist() == [[2, 3]]
    assert weights.sum().item() == pytest.approx(2.0)
    chosen, _ = route(v3, logits, torch.tensor([0.0, 2.0, 0.0, 0.0]))
    assert sorted(chosen[0].tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "the layers of GemmaForCausalLM are not known here"),
        ({"hidden_act": "gelu"}, "the activation 'gelu' is not known here"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights packed by 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights packed by 'fp8' in this way"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
            "weights packed by 'compressed-tensors' in this way",
        ),
    ],
)
def test_what_is_not_known_is_refused_and_not_guessed(
    tiny: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    (tmp_path / WEIGHTS).symlink_to(tiny / "llama" / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | change))
    with pytest.raises(NoReferenceError, match=reason):
        next(layer_outputs(tmp_path, TOKENS))


def test_experts_that_are_chosen_in_an_unknown_way_are_refused() -> None:
    with pytest.raises(NoReferenceError, match="'tanh' and 'greedy'"):
        route({"scoring_func": "tanh"}, torch.ones(1, 4), None)


# Packed weights


def test_fp8_blocks_are_unpacked_as_they_were_packed() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    scale = 0.001 + torch.rand(3, 2, generator=torch.Generator().manual_seed(2))
    wide = torch.empty(300, 200)
    for row in range(300):  # the definition, value by value
        for column in range(200):
            wide[row, column] = scale[row // 128, column // 128]
    packed = (weight / wide).to(torch.float8_e4m3fn)
    assert torch.equal(dequantize_blocks(packed, scale, BLOCK), packed.float() * wide)
    assert (dequantize_blocks(packed, scale, BLOCK) - weight).abs().max() < 0.3


@pytest.mark.parametrize("columns", [64, 96])
def test_int4_is_unpacked_as_compressed_tensors_packs_it(columns: int) -> None:
    numbers = torch.randint(-8, 8, (16, columns), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scale = torch.rand(16, columns // 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    unpacked = dequantize_int4(pack_to_int32(numbers, 4), scale, torch.tensor([16, columns]))
    assert torch.equal(unpacked, numbers.float() * scale.float().repeat_interleave(32, dim=1))


def pack_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight in compressed-tensors' form, groups of 32, symmetric."""
    grouped = weight.unflatten(-1, (-1, 32))
    scale = (grouped.abs().amax(-1) / 7).bfloat16()
    numbers = (grouped / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(-2)
    return {"packed": pack_to_int32(numbers, 4), "scale": scale, "shape": torch.tensor(weight.shape)}


def pack_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of at most one block in DeepSeek's form."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale.view(1, 1).repeat(-(-weight.shape[0] // 128), 1)


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}
FP8 = {"quant_method": "fp8", "weight_block_size": BLOCK, "fmt": "e4m3"}


@pytest.mark.parametrize(("family", "packing"), [("kimi-k2.5", INT4), ("deepseek-v3", FP8)], ids=["int4", "fp8"])
def test_packed_layers_compute_what_their_unpacked_weights_do(
    tiny: Path, tmp_path: Path, family: str, packing: dict[str, Any]
) -> None:
    """Kimi-K2.5's experts are int4, all of DeepSeek-V3's linear layers fp8; the rest is plain."""
    weights, packed, names = load_file(tiny / family / WEIGHTS), {}, []
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        if packing is INT4 and ".experts." in name:
            packed |= {f"{stem}.weight_{part}": value for part, value in pack_int4(weight).items()}
        elif packing is FP8 and "_proj" in name:
            packed[name], packed[f"{stem}.weight_scale_inv"] = pack_fp8(weight)
        else:
            packed[name] = weight
            continue
        names.append(name)
    text = CONFIGS[family].get("text_config", CONFIGS[family]) | {"quantization_config": packing}
    write_model(tmp_path / "packed", CONFIGS[family] | {"text_config": text} if WRAPPED in names[0] else text, packed)
    read = weight_reader(Checkpoint(tmp_path / "packed"))
    unpacked = {name: read(name.rpartition("model.")[2].removesuffix(".weight")) for name in names}
    assert len(unpacked) > 50
    for name, weight in unpacked.items():
        assert 0 < (weight - weights[name]).norm() < 0.2 * weights[name].norm()
    write_model(tmp_path / "unpacked", CONFIGS[family], weights | unpacked)
    states = states_of_layers(tmp_path / "packed")
    assert torch.equal(states, states_of_layers(tmp_path / "unpacked"))
    assert states.shape == (LAYERS + 1, len(TOKENS), HIDDEN)


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / WEIGHTS)
