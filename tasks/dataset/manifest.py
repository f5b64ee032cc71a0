"""The manifest beside a prepared dataset: what it was made of, and what an extraction must agree with.

`prepare` writes it last. An extraction of a dataset that has one refuses to start with another tokenizer, with rows
that were cut shorter than it asks for, or with a file that has changed since.
"""

import json
from pathlib import Path
from typing import Any

from tasks.config import DatasetConfig
from tasks.errors import DatasetError
from tasks.files import sha256_of, sha256_of_json
from tasks.model import Model

FORMAT = "drillcore.dataset/1"
# What decides which ids a text becomes. Of several, a tokenizer has one or two.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "spiece.model")


def manifest_path(dataset: Path) -> Path:
    """Beside the dataset, with its name."""
    return dataset.with_name(f"{dataset.name}.manifest.json")


def tokenizer_identity(folder: Path) -> str | None:
    """SHA-256 over the tokenizer's files in a folder; None if it has none that is known."""
    files = {name: sha256_of(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    return sha256_of_json(files) if files else None


def read_dataset_manifest(dataset: Path) -> dict[str, Any] | None:
    """The manifest of a prepared dataset; None where there is none. Raises DatasetError if it cannot be read."""
    path = manifest_path(dataset)
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, not {FORMAT!r}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"The dataset's manifest {path} cannot be used: {error!r}. Prepare the dataset again, or remove that file "
            "if the dataset is not what `prepare` wrote."
        ) from error
    return manifest


def check_agreement(config: DatasetConfig, model: Model) -> dict[str, Any] | None:
    """Before the dataset is read: does its manifest, if it has one, agree with what is to be extracted?

    Returns the manifest. Raises DatasetError naming what differs.
    """
    manifest = read_dataset_manifest(config.path)
    if manifest is None:
        return None
    name = manifest_path(config.path)
    try:
        size = config.path.stat().st_size
    except OSError:
        return manifest  # the scan says what is wrong with it
    if size != manifest["bytes"]:
        raise DatasetError(_changed(config.path, f"it has {size} bytes, not {manifest['bytes']}"))
    tokenizer = manifest["tokenizer"]
    found = tokenizer_identity(model.path)
    if found and tokenizer["sha256"] and found != tokenizer["sha256"]:
        raise DatasetError(
            f"The dataset {config.path} was prepared with another tokenizer ({tokenizer['path']}, sha256 "
            f"{tokenizer['sha256'][:12]}...) than that of the model {model.path} ({found[:12]}...): its ids would mean "
            "other text. Prepare it again with --tokenizer of the model (model.path)."
        )
    if manifest["largest_id"] >= model.vocab_size:
        raise DatasetError(
            f"The dataset {config.path} has the id {manifest['largest_id']}; the vocabulary of the model {model.path} "
            f"has ids 0 to {model.vocab_size - 1} ({name})."
        )
    if manifest["truncated"] and config.max_seq_len > manifest["max_seq_len"]:
        raise DatasetError(
            f"{manifest['truncated']} rows of the dataset {config.path} were cut to {manifest['max_seq_len']} tokens "
            f"when it was prepared; dataset.max_seq_len asks for up to {config.max_seq_len}. Prepare it again with "
            f"--max-seq-len {config.max_seq_len}, or set dataset.max_seq_len to {manifest['max_seq_len']}."
        )
    if config.on_too_long == "fail" and manifest["longest"] > config.max_seq_len:
        raise DatasetError(
            f"The longest row of the dataset {config.path} has {manifest['longest']} tokens (prepared with max_seq_len "
            f"{manifest['max_seq_len']}); dataset.max_seq_len is {config.max_seq_len}. Raise it, or set "
            "dataset.on_too_long to 'truncate' or 'skip'."
        )
    return manifest


def check_contents(path: Path, manifest: dict[str, Any] | None, sha256: str) -> None:
    """After the dataset was read: is it the file that the manifest speaks of? Raises DatasetError."""
    if manifest is not None and manifest["sha256"] != sha256:
        raise DatasetError(_changed(path, f"its sha256 is {sha256[:12]}..., not {manifest['sha256'][:12]}..."))


def _changed(path: Path, difference: str) -> str:
    return (
        f"The dataset {path} changed since it was prepared: {difference}. Prepare it again, or, if the change is "
        f"meant, remove {manifest_path(path).name}."
    )
