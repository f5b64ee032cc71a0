"""Exports a store: checks first, then shard by shard, the mark that it is complete last.

Every file appears whole. An export that was ended goes on with the same command: files that are there are kept. Where
store, format or settings differ from those that it was begun with, it is refused, field by field.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tasks.dataset.plan import load_plan
from tasks.errors import ConfigError, OutputError, SpaceError
from tasks.export.formats import DRAFT_VOCABULARY, FORMATS, ExportedRow, Format, Tables, write_whole
from tasks.export.norm import FinalNorm
from tasks.files import free_bytes, human_bytes, sha256_of, write_json
from tasks.store.layout import read_extraction
from tasks.store.reader import HiddenStates

MARK = "export.json"
SPARE = 256 << 20  # bytes that must stay free
FILE_OVERHEAD = 4096  # bytes of a row's file beside its tensors, at most


@dataclass(frozen=True)
class ExportJob:
    """A checked export."""

    states: HiddenStates
    format: Format
    output: Path
    places: np.ndarray
    """int64: the exported rows' places in the store, in order."""
    shards: list[np.ndarray]
    """The same, by shard, each as places in `places`."""
    ids: list[str | None]
    norm: FinalNorm | None
    """To apply to each final state."""
    prenorm: bool
    """Whether the exported final states are those before the norm."""
    mark: dict[str, Any]
    tables: Tables


def open_export(
    store: str | Path,
    to: str,
    output: Path,
    rows: str | None = None,
    draft_vocab_size: int | None = None,
    model: Path | None = None,
    endpoint_url: str | None = None,
) -> ExportJob:
    """Check everything, begin or resume. rows: 'START:STOP', places among the store's rows. endpoint_url: as for
    HiddenStates.open.

    Raises StoreError for a store that is not verified, ConfigError for a norm that does not fit the format, OutputError
    for a folder that holds something else, SpaceError if there is no room.
    """
    states = HiddenStates.open(store, endpoint_url=endpoint_url)
    root = states.store.root
    extraction = read_extraction(states.store)
    assert extraction is not None
    chosen = FORMATS[to]
    if chosen.norm == "pre" and states.final_norm == "post":
        raise ConfigError(
            f"{to} applies the model's final norm itself: it needs the final states before it, and {store} has those "
            "after it. The norm cannot be undone. Extract with capture.final_norm: pre, which serves every format."
        )
    if draft_vocab_size is not None and to not in DRAFT_VOCABULARY:
        raise ConfigError(f"--draft-vocab-size: {to} takes none; {', '.join(sorted(DRAFT_VOCABULARY))} do.")
    norm = None
    if chosen.norm == "post" and states.final_norm == "pre":
        norm = FinalNorm(model or Path(extraction["config"]["model"]["path"]), extraction["parts"]["model_identity"])
    places = np.arange(len(states))[parse_rows(rows)]
    if not len(places):
        raise ConfigError(f"--rows {rows}: the store has {len(states)} rows, and none of these.")
    final_norm = chosen.norm or states.final_norm
    mark = {
        "format": to,
        "store": str(root.absolute() if isinstance(root, Path) else root),
        "store_manifest_sha256": sha256_of(states.store.manifest),
        "layers": list(states.layers),
        "final_norm": final_norm,
        "rows": [int(places[0]), int(places[-1]) + 1],
        "draft_vocab_size": draft_vocab_size,
    }
    in_places = np.full(len(states), -1)
    in_places[places] = np.arange(len(places))
    shards = [kept for shard in states.shards if len(kept := np.sort(in_places[shard][in_places[shard] >= 0]))]
    ids = load_plan(states.store.plan).id.to_pylist()
    tables = Tables(states, places, ids, draft_vocab_size, final_norm == "pre")
    job = ExportJob(states, chosen, output, places, shards, ids, norm, final_norm == "pre", mark, tables)
    _begin(job)
    return job


def parse_rows(text: str | None) -> slice:
    """'START:STOP', either of which may be left out. Raises ConfigError."""
    if text is None:
        return slice(None)
    start, colon, stop = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (start, stop)):
        raise ConfigError(f"--rows {text!r} is not of the form START:STOP.")
    return slice(int(start) if start else None, int(stop) if stop else None)


def export_shard(job: ExportJob, number: int) -> tuple[int, int]:
    """Write the rows of one shard that are not there yet; returns (rows, bytes) written."""
    rows = written = 0
    for place in job.shards[number].tolist():
        at = int(job.places[place])
        path = job.output / job.format.name(place, int(job.states.rows[at]))
        if path.exists():
            continue
        sample = job.states[at]
        final = job.norm(sample.last_hidden_state) if job.norm else sample.last_hidden_state
        row = ExportedRow(place, job.ids[sample.row], sample, final, job.prenorm)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, partial(job.format.write, row))
        rows, written = rows + 1, written + path.stat().st_size
    return rows, written


def finish_export(job: ExportJob) -> dict[str, Any]:
    """Write what belongs to all rows, then the mark that the export is complete; returns the mark."""
    job.format.finish(job.output, job.tables)
    for remains in job.output.rglob(".*.tmp"):
        remains.unlink()
    mark = job.mark | {
        "complete": True,
        "exported_rows": len(job.places),
        "tokens": int(job.states.tokens[job.places].sum(dtype=np.int64)),
    }
    write_json(job.output / MARK, mark)
    return mark


def _token_bytes(job: ExportJob) -> int:
    """Bytes of a token in the export, at most."""
    return (len(job.states.layers) + 1) * job.states.hidden_size * job.states.dtype.itemsize + 24


def _begin(job: ExportJob) -> None:
    path = job.output / MARK
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        if job.output.exists() and any(job.output.iterdir()):
            raise OutputError(
                f"{job.output} is not empty and holds no export (no {MARK}). Choose another --out."
            ) from None
        found = None
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} cannot be read: {error}. Choose another --out.") from error
    if found is not None:
        differing = [
            f"  {name}: it has {found.get(name)!r}, this export has {value!r}"
            for name, value in job.mark.items()
            if name != "store" and found.get(name) != value
        ]
        if differing:
            raise OutputError(
                f"{job.output} holds another export:\n" + "\n".join(differing) + "\nChoose another --out."
            )
    _check_space(job)
    job.output.mkdir(parents=True, exist_ok=True)
    write_json(path, job.mark | {"complete": False})


def _check_space(job: ExportJob) -> None:
    missing = [
        int(job.places[place])
        for place in range(len(job.places))
        if not (job.output / job.format.name(place, int(job.states.rows[job.places[place]]))).exists()
    ]
    needed = int(job.states.tokens[missing].sum(dtype=np.int64)) * _token_bytes(job) + len(missing) * FILE_OVERHEAD
    free = free_bytes(job.output)
    if missing and needed + SPARE > free:
        raise SpaceError(
            f"{job.output} has {human_bytes(free)} free; {len(missing)} rows need {human_bytes(needed)} and "
            f"{human_bytes(SPARE)} to spare. Free some, or choose another --out."
        )
