"""The final norm, applied to states that were stored before it."""

from pathlib import Path

import torch

from tasks.checkpoint import LAST_NORM, Checkpoint
from tasks.errors import ModelError
from tasks.model import read_model


class FinalNorm:
    """A checkpoint's last norm (RMSNorm, as all supported models have it). For any number of threads."""

    def __init__(self, path: Path, identity: str):
        """identity: of the model that the states are of. Raises ModelError if the checkpoint is another one."""
        if read_model(path).identity != identity:
            raise ModelError(f"{path} is not the model that these hidden states are of: its files differ (--model).")
        checkpoint = Checkpoint(path)
        self.weight = checkpoint.read(LAST_NORM).float()
        self.epsilon = float(checkpoint.text.get("rms_norm_eps", 1e-6))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], normed in float32, in the dtype that it came in."""
        normed = torch.nn.functional.rms_norm(states.float(), self.weight.shape, self.weight, self.epsilon)
        return normed.to(states.dtype)
