"""Conversations in, a dataset of token ids with loss masks out: `run.prepare_dataset`."""
