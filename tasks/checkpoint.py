"""Single weights out of a checkpoint, without loading the rest."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tasks.errors import ModelError

EMBEDDING, HEAD, LAST_NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"


class Checkpoint:
    """A checkpoint's config and, one by one, its weights, under the text model's own names."""

    def __init__(self, path: Path):
        """Reads config.json and the names in each safetensors file. Raises ModelError."""
        self.path = path
        self.config: dict[str, Any] = json.loads((path / "config.json").read_bytes())
        self.text: dict[str, Any] = self.config.get("text_config") or self.config
        """The text model's part of the config, where it is wrapped."""
        self._files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                self._files |= dict.fromkeys(weights.keys(), file)
        # The shortest: the layers of a multi-token predictor may have an embedding of their own.
        embeddings = sorted((name for name in self._files if f".{name}".endswith(f".{EMBEDDING}")), key=len)
        if not embeddings:
            raise ModelError(f"{path} has no {EMBEDDING}.")
        self._prefix = embeddings[0].removesuffix(EMBEDDING)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(self.text.get("n_routed_experts"))

    def has(self, name: str) -> bool:
        """Whether there is a weight of this name (below the text model's prefix)."""
        return self._prefix + name in self._files

    def read(self, name: str) -> torch.Tensor:
        """A weight as it is stored, as `layers.0.mlp.gate.weight`. Raises ModelError if there is none."""
        return self._read(self._prefix + name)

    def rows(self, name: str, rows: list[int]) -> torch.Tensor:
        """Some rows of a weight [rows, ...], without reading the others."""
        with safe_open(self._file(self._prefix + name), framework="pt") as weights:
            stored = weights.get_slice(self._prefix + name)
            return torch.cat([stored[row : row + 1] for row in rows])

    def embedding(self) -> torch.Tensor:
        """The input embedding [vocab, hidden]."""
        return self.read(EMBEDDING)

    def lm_head(self) -> torch.Tensor:
        """The output projection [vocab, hidden], or the embedding it is tied to."""
        heads = [name for name in self._files if f".{name}".endswith(f".{HEAD}")]
        return self._read(heads[0] if heads else self._prefix + EMBEDDING)

    def apply_final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """The model's last norm (RMSNorm, as all supported models have it) of float32 states [..., hidden]."""
        return self.rms_norm(LAST_NORM, states)

    def rms_norm(self, name: str, states: torch.Tensor) -> torch.Tensor:
        """An RMSNorm with the weight `name` of float32 states [..., width]."""
        weight = self.read(name).float()
        return torch.nn.functional.rms_norm(states, weight.shape, weight, self.text.get("rms_norm_eps", 1e-6))

    def _file(self, name: str) -> Path:
        if name not in self._files:
            raise ModelError(f"{self.path} has no weight {name}.")
        return self._files[name]

    def _read(self, name: str) -> torch.Tensor:
        file = self._file(name)
        try:
            with safe_open(file, framework="pt") as weights:
                return weights.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
