"""Opens an export with a trainer's own code and writes what it reads as safetensors: run by the trainers' Python.

    python trainer_readers.py specforge|speculators|modelopt EXPORT RESULT.safetensors

The result has `N.name` for the N-th sample and, last, the trainer's own draft vocabulary of the same rows. Nothing of
drillcore is imported: this Python has other packages.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, DRAFT_VOCAB = 100, 12


def specforge(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Its reader lists the files, its store loads them, its EAGLE-3 code normalizes a sample."""
    from specforge.algorithms.eagle3.data import build_offline_normalizer, build_offline_reader
    from specforge.data.preprocessing import process_token_dict_to_mappings
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.training.vocab_mapping import count_effective_feature_tokens

    normalize = build_offline_normalizer(4096)
    for ref in build_offline_reader(str(folder), run_id="test", ttt_length=1, max_len=4096):
        yield normalize(load_feature_file(ref.feature_store_uri.removeprefix("file://")))
    counts = count_effective_feature_tokens(str(folder), target_vocab_size=VOCAB)
    d2t, t2d = process_token_dict_to_mappings(counts, len(counts), VOCAB)
    yield {"d2t": d2t, "t2d": t2d}


def speculators(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Its dataset class, as its trainer makes it."""
    from speculators.train.data import ArrowDataset
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    dataset = ArrowDataset(max_len=4096, datapath=folder, on_missing="raise")
    assert dataset.approx_lengths == [len(dataset[at]["input_ids"]) for at in range(len(dataset))]
    for at in range(len(dataset)):
        yield dataset[at]
    frequency = torch.load(folder / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(frequency, DRAFT_VOCAB, VOCAB)
    yield {"d2t": d2t, "t2d": t2d}


def modelopt(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Its dataset class, over the files as its example script lists them."""
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    dataset = OfflineSupervisedDataset(sorted(folder.rglob("*.pt")), answer_only_loss=True)
    EagleOfflineDataCollator(train_len=8)([dataset[at] for at in range(len(dataset))])  # of one kind, or it refuses
    for at in range(len(dataset)):
        sample = dataset[at]
        yield {name: torch.as_tensor(value) for name, value in sample.items()}


if __name__ == "__main__":
    read = {"specforge": specforge, "speculators": speculators, "modelopt": modelopt}[sys.argv[1]]
    tensors = {
        f"{number}.{name}": value.clone().contiguous()
        for number, sample in enumerate(read(Path(sys.argv[2])))
        for name, value in sample.items()
    }
    save_file(tensors, sys.argv[3])
