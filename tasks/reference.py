"""What a checkpoint's layers compute for a prompt of one token: straight from its weights, without a server.

A second opinion on the states that a server gives, written from the models' definition and sharing no code with it. One
token attends to nothing but itself, so attention is its own value: no query, no key, no position. What is left is
    x += o_proj(value(norm(x)));  x += mlp(norm(x))
in float32, layer by layer; of a mixture of experts only the chosen ones are read. Of Kimi-K2.5's trillion parameters
that is 14 GB for what every token needs, and 11 GB of experts for each token.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu

from tasks.checkpoint import EMBEDDING, Checkpoint
from tasks.errors import ModelError, NoReferenceError
from tasks.quantization import weight_reader

PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
THREADS = min(16, os.cpu_count() or 1)
PIECE = 1 << 20  # elements of a weight that a thread widens and multiplies at a time: they stay in its core's cache
TORCH_THREADS = torch.get_num_threads()  # of each operation; asked here, so that the importing thread keeps them


def layer_outputs(path: Path, tokens: list[int]) -> Iterator[torch.Tensor]:
    """The residual stream after the embedding and after each decoder layer: layers + 1 times float32 [tokens, hidden].

    Each token is a prompt of its own. A layer's weights are read when its output is asked for. Raises NoReferenceError
    if this kind of model or of quantization is not known here, ModelError if a weight is missing.
    """
    return _Forward(Checkpoint(path)).run(tokens)


class _Forward:
    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.config = checkpoint, checkpoint.text
        kinds = [*(checkpoint.text.get("architectures") or []), *(checkpoint.config.get("architectures") or [])]
        known = [kind for kind in kinds if kind in PLAIN + LATENT]
        if not known:
            raise NoReferenceError(f"the layers of {kinds[-1] if kinds else 'an unnamed model'} are not known here")
        if (activation := self.config.get("hidden_act", "silu")) != "silu":
            raise NoReferenceError(f"the activation {activation!r} is not known here")
        self.latent = known[0] in LATENT
        self.weight = weight_reader(checkpoint)
        # A product with so few rows runs on one core, and a whole weight in float32 is fresh memory each time.
        self.threads = ThreadPoolExecutor(THREADS, "reference", torch.set_num_threads, (1,))

    def run(self, tokens: list[int]) -> Iterator[torch.Tensor]:
        try:
            with self.threads:
                yield from self._run(tokens)
        finally:
            torch.set_num_threads(TORCH_THREADS)  # new threads begin with what any thread set last

    def _run(self, tokens: list[int]) -> Iterator[torch.Tensor]:
        checkpoint = self.checkpoint
        states = checkpoint.rows(EMBEDDING, tokens).float()
        yield states
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = checkpoint.rms_norm(f"{name}.input_layernorm.weight", states)
            value = self.latent_value(name, normed) if self.latent else self.plain_value(name, normed)
            states = states + self.linear(f"{name}.self_attn.o_proj", value)
            normed = checkpoint.rms_norm(f"{name}.post_attention_layernorm.weight", states)
            states = states + (self.experts if self.has_experts(layer) else self.mlp)(f"{name}.mlp", normed)
            yield states

    def linear(self, name: str, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight(name)
        parts = weight.split(max(1, PIECE // weight.shape[1]))
        product = torch.cat(list(self.threads.map(lambda part: states @ part.float().T, parts)), dim=-1)
        return (
            product + self.checkpoint.read(f"{name}.bias").float() if self.checkpoint.has(f"{name}.bias") else product
        )

    def plain_value(self, name: str, states: torch.Tensor) -> torch.Tensor:
        """Grouped queries: each value head serves several query heads, which follow each other."""
        heads = self.config["num_attention_heads"]
        groups = self.config.get("num_key_value_heads") or heads
        value = self.linear(f"{name}.self_attn.v_proj", states)
        return value.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=-2).flatten(-2)

    def latent_value(self, name: str, states: torch.Tensor) -> torch.Tensor:
        """Multi-head latent attention: values come out of a small latent, beside keys."""
        config, name = self.config, f"{name}.self_attn"
        latent = self.linear(f"{name}.kv_a_proj_with_mqa", states)[..., : config["kv_lora_rank"]]
        latent = self.checkpoint.rms_norm(f"{name}.kv_a_layernorm.weight", latent)
        heads = self.linear(f"{name}.kv_b_proj", latent).unflatten(-1, (config["num_attention_heads"], -1))
        return heads[..., config["qk_nope_head_dim"] :].flatten(-2)

    def mlp(self, name: str, states: torch.Tensor) -> torch.Tensor:
        gated = silu(self.linear(f"{name}.gate_proj", states)) * self.linear(f"{name}.up_proj", states)
        return self.linear(f"{name}.down_proj", gated)

    def has_experts(self, layer: int) -> bool:
        config = self.config
        if not self.latent or not config.get("n_routed_experts"):
            return False
        return layer >= config.get("first_k_dense_replace", 0) and layer % config.get("moe_layer_freq", 1) == 0

    def experts(self, name: str, states: torch.Tensor) -> torch.Tensor:
        """The shared experts, and each token's chosen ones by their weights."""
        chosen, weights = route(self.config, *self.gate(name, states))
        output = torch.zeros_like(states)
        if self.config.get("n_shared_experts"):
            output += self.mlp(f"{name}.shared_experts", states)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            output[token] += weights[token, place, None] * self.mlp(f"{name}.experts.{expert}", states[token])
        return output

    def gate(self, name: str, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = f"{name}.gate.e_score_correction_bias"
        logits = states @ self.checkpoint.read(f"{name}.gate.weight").float().T
        return logits, self.checkpoint.read(bias).float() if self.checkpoint.has(bias) else None


def route(config: dict[str, Any], logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts and their weights, both [tokens, experts a token], from the gate's logits [tokens, experts].

    DeepSeek-V3 ("noaux_tc"): chosen by score + bias, best groups by their two best; V2: groups by their best one.
    """
    scoring, method = config.get("scoring_func", "softmax"), config.get("topk_method", "greedy")
    if scoring not in ("sigmoid", "softmax") or method not in ("noaux_tc", "greedy", "group_limited_greedy"):
        raise NoReferenceError(f"experts chosen by {scoring!r} and {method!r} are not known here")
    if method == "noaux_tc" and bias is None:
        raise ModelError("The checkpoint's gates lack e_score_correction_bias, which its topk_method needs.")
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    groups, kept = config.get("n_group") or 1, config.get("topk_group") or 1
    if method != "greedy" and groups > kept:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(2 if method == "noaux_tc" else 1, dim=-1).values.sum(-1)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(kept, dim=-1).indices, False)
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    chosen = choice.topk(config["num_experts_per_tok"], dim=-1).indices
    weights = scores.gather(1, chosen)
    if config.get("norm_topk_prob"):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights * config.get("routed_scaling_factor", 1.0)
