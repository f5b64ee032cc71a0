"""Single weights out of a checkpoint, without loading the rest."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from tasks.errors import ModelError


def read_lm_head(path: Path) -> torch.Tensor:
    """The output projection [vocab, hidden], or the embedding it is tied to. Raises ModelError."""
    return _read_weight(path, "lm_head.weight", "embed_tokens.weight")


def read_embedding(path: Path) -> torch.Tensor:
    """The input embedding [vocab, hidden]. Raises ModelError."""
    return _read_weight(path, "embed_tokens.weight")


def apply_final_norm(path: Path, states: torch.Tensor) -> torch.Tensor:
    """The model's last norm (RMSNorm, as all supported models have it) of float32 states [..., hidden].

    Raises ModelError if the checkpoint has no weight for it.
    """
    config = json.loads((path / "config.json").read_bytes())
    epsilon = (config.get("text_config") or config).get("rms_norm_eps", 1e-6)
    weight = _read_weight(path, "model.norm.weight").float()
    return torch.nn.functional.rms_norm(states, weight.shape, weight, epsilon)


def _read_weight(path: Path, *endings: str) -> torch.Tensor:
    """The weight whose name has the first of `endings` that there is."""
    names: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names |= dict.fromkeys(weights.keys(), file)
    for ending in endings:
        for name, file in names.items():
            if f".{name}".endswith(f".{ending}"):
                with safe_open(file, framework="pt") as weights:
                    return weights.get_tensor(name)
    raise ModelError(f"{path} has no {' and no '.join(endings)}.")
