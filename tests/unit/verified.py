"""Small stores that count as verified, for what reads them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.model import read_model
from tasks.store.books import balance, records_digest, write_ledger
from tasks.store.layout import read_extraction
from tasks.store.record import read_records
from tasks.verification.manifest import write_manifest
from tests.unit.helpers import HIDDEN, VOCAB, SmallStore, make_store


def make_checkpoint(folder: Path) -> Path:
    """A checkpoint of the small stores' shape: an embedding and a final norm."""
    folder.mkdir(parents=True)
    config = (
        f'{{"num_hidden_layers": 8, "hidden_size": {HIDDEN}, "vocab_size": {VOCAB}, "rms_norm_eps": 0.001,'
        ' "max_position_embeddings": 64}'
    )
    (folder / "config.json").write_text(config)
    generator = torch.Generator().manual_seed(1)
    weights = {
        "model.embed_tokens.weight": torch.randn((VOCAB, HIDDEN), generator=generator),
        "model.norm.weight": torch.rand(HIDDEN, generator=generator) + 0.5,
    }
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def mark_verified(small: SmallStore) -> SmallStore:
    """Write the ledger and the manifest, as `verify` does for a store that passed."""
    extraction = read_extraction(small.store)
    assert extraction is not None
    records = read_records(small.store)
    books = balance(small.plan, records)
    write_ledger(small.store.ledger, small.plan, books)
    write_manifest(small.store, extraction, records, records_digest(small.store, records), books)
    return small


def make_verified(folder: Path, final_norm: str = "post", **options: Any) -> SmallStore:
    """As make_store, verified; its model is in `folder`."""
    model = make_checkpoint(folder / "model")
    parts = {"final_norm": final_norm, "model_identity": read_model(model).identity}
    kept = {"name": "small", "model": {"path": str(model)}}
    return mark_verified(make_store(folder, more_parts=parts, kept=kept, **options))
