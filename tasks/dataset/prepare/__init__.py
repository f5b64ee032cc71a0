"""Conversations in, a dataset of token ids with loss masks out."""

from tasks.dataset.prepare.run import Progress, prepare_dataset
from tasks.dataset.prepare.settings import PrepareConfig

__all__ = ["PrepareConfig", "Progress", "prepare_dataset"]
