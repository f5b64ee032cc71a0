"""Single weights out of a checkpoint, without loading the rest."""

from pathlib import Path

import torch
from safetensors import safe_open

from tasks.errors import ModelError


def read_lm_head(path: Path) -> torch.Tensor:
    """The output projection [vocab, hidden], or the embedding it is tied to. Raises ModelError."""
    names: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names |= dict.fromkeys(weights.keys(), file)
    for ending in ("lm_head.weight", "embed_tokens.weight"):
        for name, file in names.items():
            if name.endswith(ending):
                with safe_open(file, framework="pt") as weights:
                    return weights.get_tensor(name)
    raise ModelError(f"{path} has neither an lm_head.weight nor an embed_tokens.weight.")
