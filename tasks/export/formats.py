"""What each trainer reads: fields, shapes, dtypes and names, as their own code has them.

Versions read: SpecForge 0.2.0 and a6b6b023, speculators 0.9.0 with hs-connectors 0.9.0, nvidia-modelopt 0.47.0,
TorchSpec's offline mode of 2026-07-13.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from tasks.export.vocabulary import count_tokens, map_vocabulary
from tasks.files import sync_directory, temporary_for, write_atomic, write_json
from tasks.store.reader import HiddenStates, Sample

FOLDER_ROWS = 2000  # files a folder, as SpecForge has it


@dataclass(frozen=True)
class ExportedRow:
    """A row on its way: its place among the exported rows, its states, the final one as the format wants it."""

    place: int
    id: str | None
    sample: Sample
    final: torch.Tensor
    """[tokens, hidden]."""
    prenorm: bool
    """Whether `final` is the state before the final norm."""

    @property
    def input_ids(self) -> torch.Tensor:
        """int64, as all trainers have them."""
        return self.sample.input_ids.long()

    @property
    def loss_mask(self) -> torch.Tensor:
        """int64 [tokens]: 1 where the token itself counts, not shifted."""
        return self.sample.loss_mask.long()


@dataclass(frozen=True)
class Tables:
    """What a format's closing files are made of."""

    states: HiddenStates
    places: np.ndarray
    """The exported rows' places in the store, in order."""
    ids: list[str | None]
    """By the rows' number in the dataset."""
    draft_vocab_size: int | None
    prenorm: bool


@dataclass(frozen=True)
class Format:
    """One trainer's files."""

    about: str
    norm: str | None
    """The final state that its trainer expects; None: it is told which one it is."""
    name: Callable[[int, int], str]
    """A row's file, from its place among the exported rows and its number in the dataset."""
    write: Callable[[ExportedRow, Path], None]
    """Write one row to a path."""
    finish: Callable[[Path, Tables], None]
    """Write what belongs to all rows, each file whole or not at all."""


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file that has its name only when it is complete and durable."""
    temporary = temporary_for(path)
    try:
        write(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _in_folders(name: str) -> Callable[[int, int], str]:
    def file(place: int, row: int) -> str:
        first = row - row % FOLDER_ROWS
        return f"rows_{first}-{first + FOLDER_ROWS}/{name.format(row=row)}"

    return file


def _nothing(folder: Path, tables: Tables) -> None:
    """The rows are all there is."""


def _write_specforge(row: ExportedRow, path: Path) -> None:
    torch.save(
        {
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
            "aux_hidden_state": row.sample.aux_hidden_states.clone()[None],
            "hidden_state": row.final.clone()[None],
        },
        path,
    )


def _finish_specforge(folder: Path, tables: Tables) -> None:
    if tables.draft_vocab_size is None:
        return  # the trainer chooses by itself
    d2t, t2d = map_vocabulary(count_tokens(tables.states, tables.places), tables.draft_vocab_size)
    (folder / "vocab_mapping").mkdir(exist_ok=True)
    mapping = {"d2t": d2t, "t2d": t2d}
    write_whole(folder / "vocab_mapping/vocab_mapping.pt", lambda path: torch.save(mapping, path))


def _write_speculators(row: ExportedRow, path: Path) -> None:
    width = row.final.shape[-1]
    states = torch.cat([row.sample.aux_hidden_states, row.final], dim=1).unflatten(1, (-1, width))
    save_file({"hidden_states": states, "token_ids": row.input_ids}, path)


def _finish_speculators(folder: Path, tables: Tables) -> None:
    """The dataset that the files belong to by their number, in the format of datasets.load_from_disk."""
    data = "data-00000-of-00001.arrow"
    write_whole(folder / data, lambda path: _write_arrow(path, tables))
    counts = count_tokens(tables.states, tables.places)
    frequency = {int(token): int(counts[token]) for token in np.flatnonzero(counts)}
    write_whole(folder / "token_freq.pt", lambda path: torch.save(frequency, path))
    if size := tables.draft_vocab_size:
        for name, mapping in zip(("d2t", "t2d"), map_vocabulary(counts, size), strict=True):
            write_whole(folder / f"{name}-{size}.npy", partial(_save_npy, mapping.numpy()))
    write_json(folder / "dataset_info.json", {})
    state: dict[str, Any] = {
        "_data_files": [{"filename": data}],
        "_fingerprint": tables.states.digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(folder / "state.json", state)


def _write_arrow(path: Path, tables: Tables) -> None:
    numbers = pa.list_(pa.int32())
    schema = pa.schema({"input_ids": numbers, "loss_mask": pa.list_(pa.int8()), "seq_len": pa.int32()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for part in np.array_split(tables.places, max(1, len(tables.places) // 256)):
            rows = [tables.states.tokens_of(place) for place in part.tolist()]
            ids = pa.array([ids.numpy() for ids, _ in rows], numbers)
            masks = pa.array([mask.numpy().astype(np.int8) for _, mask in rows], pa.list_(pa.int8()))
            stream.write(pa.record_batch([ids, masks, tables.states.tokens[part]], schema=schema))


def _save_npy(array: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def _write_modelopt(row: ExportedRow, path: Path) -> None:
    torch.save(
        {
            "conversation_id": _data_id(row.id, row.sample.row),
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
            "hidden_states": row.final.clone(),
            "aux_hidden_states": row.sample.aux_hidden_states.clone(),
            "hidden_states_prenorm": row.prenorm,
        },
        path,
    )


def _torchspec_file(place: int, row: int) -> str:
    return f"samples/{hashlib.sha1(_torchspec_id(row).encode(), usedforsecurity=False).hexdigest()}.pt"


def _torchspec_id(row: int) -> str:
    """Ids of the dataset may be there twice, which TorchSpec refuses; they are kept in `metadata`."""
    return f"row-{row:06d}"


def _write_torchspec(row: ExportedRow, path: Path) -> None:
    torch.save(
        {
            "data_id": _torchspec_id(row.sample.row),
            "input_ids": row.input_ids[None],
            "hidden_states": row.sample.aux_hidden_states.clone()[None],
            "last_hidden_states": row.final.clone()[None],
            "packed_loss_mask": pack_mask(row.sample.loss_mask.tolist()),
            "metadata": {"row": row.sample.row, "id": row.id},
        },
        path,
    )


def pack_mask(mask: list[int]) -> str:
    """Lengths of the runs of a mask, the first one of zeros, which may be empty: [1, 1, 0] is '0,2,1'."""
    lengths = [len(list(run)) for _, run in groupby(mask)]
    return ",".join(map(str, [0, *lengths] if mask[0] else lengths))


def _finish_torchspec(folder: Path, tables: Tables) -> None:
    rows = tables.states.rows[tables.places].tolist()
    lines = [
        json.dumps({"split": "train", "data_id": _torchspec_id(row), "file": _torchspec_file(0, row)}) for row in rows
    ]
    write_atomic(folder / "manifest.jsonl", ("\n".join(lines) + "\n").encode())
    write_json(folder / "dataset.json", {"version": 1, "last_hidden_states_prenorm": tables.prenorm})


def _write_pt(row: ExportedRow, path: Path) -> None:
    sample = row.sample
    value: dict[str, Any] = {
        "row": sample.row,
        "id": row.id,
        "input_ids": sample.input_ids.clone(),
        "loss_mask": sample.loss_mask.clone(),
        "layers": list(sample.layers),
        "aux_hidden_states": sample.aux_hidden_states.clone(),
        "last_hidden_state": row.final.clone(),
        "final_norm": "pre" if row.prenorm else "post",
    }
    torch.save(value, path)


def _data_id(row_id: str | None, row: int) -> str:
    return f"row-{row:06d}" if row_id is None else row_id


FORMATS = {
    "specforge": Format(
        "SpecForge: rows_A-B/data_ROW.ckpt (data.hidden_states_path), vocab_mapping.pt with --draft-vocab-size",
        "post",
        _in_folders("data_{row}.ckpt"),
        _write_specforge,
        _finish_specforge,
    ),
    "speculators": Format(
        "speculators: an Arrow dataset with token_freq.pt (--data-path) and hidden_states/hs_N.safetensors",
        "pre",
        lambda place, row: f"hidden_states/hs_{place}.safetensors",
        _write_speculators,
        _finish_speculators,
    ),
    "modelopt": Format(
        "NVIDIA Model-Optimizer: rows_A-B/ROW.pt for offline EAGLE training",
        "post",
        _in_folders("{row:06d}.pt"),
        _write_modelopt,
        _nothing,
    ),
    "torchspec": Format(
        "TorchSpec: dataset.json, manifest.jsonl, samples/*.pt (inference_engine_type: offline)",
        None,
        _torchspec_file,
        _write_torchspec,
        _finish_torchspec,
    ),
    "pt": Format(
        "plain PyTorch: rows_A-B/ROW.pt, a dictionary a row", None, _in_folders("{row:06d}.pt"), _write_pt, _nothing
    ),
}
DRAFT_VOCABULARY = {"specforge", "speculators"}
"""Formats that a draft vocabulary is written for."""
