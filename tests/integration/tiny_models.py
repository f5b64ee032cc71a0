"""Tiny random checkpoints of the model families that SGLang serves differently, and their true hidden states.

Promises
- Layers do something: each changes its input by more than a tenth (L2, relative), and no norm's weight is all ones. So
  a state taken one layer off, or before a norm instead of after it, cannot pass for the right one.
- The configs are written as the published ones are (`rope_theta` and `rope_scaling` beside each other, Kimi's text
  model under `text_config`), so that every version of SGLang reads them its own way.
- Weights depend on the family alone. All dimensions are even where tensor parallelism 2 divides them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

LAYERS, HIDDEN, VOCABULARY, CONTEXT = 6, 64, 1000, 2048
SEED = 20
WEIGHTS = "model.safetensors"
WRAPPED = "language_model."  # before each name of the text model's weights in Kimi's checkpoint

SHARED = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
DEEPSEEK = SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": CONTEXT // 8,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHARED
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "head_dim": 16},
    "qwen3": SHARED
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "deepseek-v3": DEEPSEEK,
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": DEEPSEEK,
        "vision_config": {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "hidden_size": 32,
            "vt_hidden_size": 32,
            "intermediate_size": 32,
            "text_hidden_size": HIDDEN,
        },
        "media_placeholder_token_id": VOCABULARY - 1,
        "torch_dtype": "float32",
    },
}
FAMILIES = list(CONFIGS)


def make_checkpoint(family: str, path: Path) -> None:
    """Write a checkpoint of one of FAMILIES, float32, 1 to 3 MB, into the new folder `path`.

    Kimi's holds no vision weights: SGLang leaves those as they are, and no text ever reaches them.
    """
    config = CONFIGS[family]
    model = AutoModelForCausalLM.from_config(_text_config(config), dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(SEED))
    model.save_pretrained(path)
    if "text_config" in config:
        weights = load_file(path / WEIGHTS)
        save_file({WRAPPED + name: weight for name, weight in weights.items()}, path / WEIGHTS, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=1))


def reference_states(
    path: Path, prompts: list[list[int]], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[torch.Tensor]:
    """What Transformers computes for each prompt, alone and in one piece: [layers + 1, tokens, hidden], on the CPU.

    State k is the output of decoder layer k, 0-based, before any norm; the last one is the final state, after the norm.
    """
    config = _text_config(json.loads((path / "config.json").read_bytes()))
    lm = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, key_mapping={f"^{WRAPPED}": ""})
    lm.to(device)
    # `output_hidden_states` would give the last layer's output after the final norm only.
    states: list[torch.Tensor] = []
    for layer in lm.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    references = []
    with torch.inference_mode():
        for ids in prompts:
            states.clear()
            final = lm.model(torch.tensor([ids], device=device), use_cache=False).last_hidden_state[0]
            references.append(torch.stack([*states, final]).cpu())
    return references


def _text_config(config: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**config.get("text_config", config))


def randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Give each sublayer an output as large as its input: with the usual 0.02, tiny layers are nearly identities."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.data = 1 + 0.25 * noise
        elif name.endswith("e_score_correction_bias"):
            tensor.data = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            tensor.data = noise
        elif isinstance(tensor, torch.nn.Parameter):  # [..., out, in]; other buffers are tables of the rotary embedding
            tensor.data = 1.5 * noise / tensor.shape[-1] ** 0.5
