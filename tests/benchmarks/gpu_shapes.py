"""Models for benchmarks: published shapes with random weights, written as checkpoints that any engine loads.

Weights are random but not degenerate: every layer changes its input, every prompt has states of its own, and the output
projection is the model's, so that an extraction's probe and verification mean what they mean for a real model.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 32_768
POSITIONS = 16_384
WRITERS = 4  # threads: layers that are made and written at the same time
# Where a router's last two experts are nearly tied, rounding decides between them. A trained model's experts agree more
# than random ones would: routed experts' outputs are this much smaller than other layers'.
ROUTED_GAIN = 0.1

SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
LLAMA = SHARED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
}
# Hidden size, attention and experts' size of DeepSeek-V3 and Kimi-K2.5; as many layers and experts as two servers have
# room for on one card.
DEEPSEEK = SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": POSITIONS // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@dataclass(frozen=True)
class Shape:
    """A model's shape, and what a benchmark does with it."""

    config: dict[str, Any]
    """As in config.json."""
    tokens: int
    """Of one run."""
    cache_tokens: int
    """Of each server's KV cache."""
    transformers_beside: bool
    """Whether Transformers' copy of the weights has room beside two servers on one card."""

    @property
    def layers(self) -> list[int]:
        """Captured decoder layers, as EAGLE-3 wants them."""
        count = self.config["num_hidden_layers"]
        return [1, count // 2 - 1, count - 4]

    @property
    def token_bytes(self) -> int:
        """Of the captured states, in bfloat16."""
        return (len(self.layers) + 1) * self.config["hidden_size"] * 2


SHAPES = {
    "llama-8b": Shape(LLAMA, 1_000_000, 131_072, transformers_beside=True),
    "deepseek": Shape(DEEPSEEK, 500_000, 262_144, transformers_beside=False),
    # For a machine without a GPU: does everything run?
    "tiny-llama": Shape(
        LLAMA
        | {
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        40_000,
        32_768,
        transformers_beside=True,
    ),
    "tiny-deepseek": Shape(
        DEEPSEEK
        | {
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
        },
        40_000,
        32_768,
        transformers_beside=False,
    ),
}


def parts_of(config: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The checkpoint's weights, name -> shape, in the parts in which they are written: layers, then the rest."""
    hidden = config["hidden_size"]
    attention = _mla(config) if config["model_type"] == "deepseek_v3" else _attention(config)
    for layer in range(config["num_hidden_layers"]):
        sparse = layer >= config.get("first_k_dense_replace", config["num_hidden_layers"])
        names = attention | (_experts(config) if sparse else _mlp("mlp", hidden, config["intermediate_size"]))
        names |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        yield {
            f"model.layers.{layer}.{name}" + ("" if name.endswith("_bias") else ".weight"): shape
            for name, shape in names.items()
        }
    matrix = (config["vocab_size"], hidden)
    yield {"model.embed_tokens.weight": matrix, "model.norm.weight": (hidden,), "lm_head.weight": matrix}


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    return {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}


def _mla(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes = {
        "q_a_proj": (q_rank, hidden),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * (plain + rotary), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rotary, hidden),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (plain + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mlp(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj": (width, hidden),
        f"{name}.up_proj": (width, hidden),
        f"{name}.down_proj": (hidden, width),
    }


def _experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    weights = {"mlp.gate": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
    for expert in range(count):
        weights |= _mlp(f"mlp.experts.{expert}", hidden, width)
    return weights | _mlp("mlp.shared_experts", hidden, width * config["n_shared_experts"])


def write_checkpoint(config: dict[str, Any], folder: Path, device: str) -> None:
    """Write config.json and random bfloat16 weights, made on `device`, into the new folder: a file a layer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    parts = list(parts_of(config))

    def write(number: int) -> str:
        generator = torch.Generator(device).manual_seed(number)

        def random(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        name = f"model-{number:05d}.safetensors"
        weights = {weight: _weight(weight, shape, random).cpu() for weight, shape in parts[number].items()}
        save_file(weights, folder / name, {"format": "pt"})
        return name

    with ThreadPoolExecutor(WRITERS) as threads:
        files = list(threads.map(write, range(len(parts))))
    index = {weight: file for file, part in zip(files, parts, strict=True) for weight in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _weight(name: str, shape: tuple[int, ...], random: Callable[[tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return 1 + 0.1 * random(shape)  # a norm's
    if name == "model.embed_tokens.weight":
        return random(shape)
    gain = ROUTED_GAIN if ".experts." in name and name.endswith("down_proj.weight") else 1.0
    return random(shape) * (gain / shape[-1] ** 0.5)


def operations(config: dict[str, Any], lengths: list[int]) -> float:
    """Floating-point operations that a prefill of prompts of these lengths takes; embedding and output left out."""
    chosen = config.get("num_experts_per_tok", 0) / config.get("n_routed_experts", 1)
    active = 0.0
    for part in parts_of(config):
        for name, shape in part.items():
            if len(shape) == 2 and ".layers." in name:
                active += shape[0] * shape[1] * (chosen if ".experts." in name else 1)
    if config["model_type"] == "deepseek_v3":
        width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
    else:
        width = 2 * config["head_dim"]
    pairs = sum(length * (length + 1) / 2 for length in lengths)  # of a token and one that it sees
    attention = 2 * config["num_hidden_layers"] * config["num_attention_heads"] * width * pairs
    return 2 * active * sum(lengths) + attention
