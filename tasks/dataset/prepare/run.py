"""Prepares a dataset: tokenize in processes, spool to the disk, drop duplicates, shuffle by offsets, write.

Of a row, 39 bytes stay in memory; its text goes through a spool file without a name, beside the output, that is gone
when this process is. The dataset appears whole, its manifest after it.
"""

import hashlib
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np

from tasks.dataset.formats import identity_of
from tasks.dataset.manifest import FORMAT, manifest_path, tokenizer_identity
from tasks.dataset.prepare.settings import PrepareConfig
from tasks.dataset.prepare.sources import kind_of, read_blocks
from tasks.dataset.prepare.tokenizing import (
    DIGEST,
    BlockTokenizer,
    Dropped,
    Tokenized,
    begin_worker,
    tokenize_block,
)
from tasks.errors import DatasetError
from tasks.files import atomic_file, sha256_of, write_json
from tasks.origin import describe_origin

DUPLICATE = "duplicate"
SMALL = 2 << 20  # bytes of sources that are done before another process has loaded its tokenizer
SHOWN = 5  # examples a reason, in the manifest
COLUMNS: dict[str, Any] = {
    "source": np.uint16,
    "offset": np.int64,
    "size": np.int32,
    "tokens": np.int32,
    "loss_tokens": np.int32,
    "truncated": np.bool_,
}


@dataclass
class Progress:
    """How far it is."""

    read: int = 0
    """Records, of all sources."""
    tokens: int = 0
    dropped: int = 0
    """Of them, for whatever reason; duplicates are found later."""
    rows: int = 0
    """To write; 0 until that is known."""
    written: int = 0


Show = Callable[[Progress], None]


@dataclass
class Spool:
    """The rows on the disk, unordered, and what is known of each. All arrays are [rows]."""

    file: BinaryIO
    columns: dict[str, np.ndarray]
    digests: np.ndarray
    """uint8 [rows, DIGEST]."""
    read: Counter[int]
    """Records by source."""
    dropped: Counter[tuple[int, str]]
    """By source and reason."""
    examples: dict[str, list[str]]
    largest_id: int


def prepare_dataset(config: PrepareConfig, show: Show = lambda progress: None) -> dict[str, Any]:
    """Write the dataset and its manifest; returns the manifest. Raises DatasetError, which leaves nothing behind."""
    if config.output.exists():
        raise DatasetError(f"{config.output} exists already. Remove it, or choose another --out.")
    if kind_of(config.output) != ".jsonl":
        raise DatasetError(f"The output {config.output} must be a .jsonl file: rows are read at their offsets.")
    for path in config.sources:
        kind_of(path)
        if not path.is_file():
            raise DatasetError(f"The source {path} does not exist, or is no file.")
    here = BlockTokenizer(config)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    before = [identity_of(path) for path in config.sources]
    with TemporaryFile(dir=config.output.parent) as file, ThreadPoolExecutor(1) as thread:
        spool = _spool(config, _tokenized(config, here), file, progress, show)
        kept = _without_duplicates(spool) if config.deduplicate else np.arange(len(spool.digests))
        if not len(kept):
            reasons = ", ".join(f"{kind}: {count}" for (_, kind), count in spool.dropped.items())
            raise DatasetError(
                f"No row is left of {spool.read.total()} records ({reasons or 'the sources are empty'})."
            )
        hashes = thread.map(sha256_of, config.sources)
        order = np.random.Generator(np.random.PCG64(config.seed)).permutation(kept) if config.shuffle else kept
        progress.rows = len(order)
        manifest_path(config.output).unlink(missing_ok=True)
        sha256 = _write(config.output, spool, order, progress, show)
        manifest = _manifest(config, here, spool, order, sha256, list(hashes))
        changed = [path for path, was in zip(config.sources, before, strict=True) if identity_of(path) != was]
    if changed:
        config.output.unlink()
        raise DatasetError(
            f"The source {changed[0]} was written to while it was read. Start again when it is complete."
        )
    write_json(manifest_path(config.output), manifest)
    return manifest


def _tokenized(config: PrepareConfig, here: BlockTokenizer) -> Iterator[Tokenized]:
    """The blocks of all sources, in order, tokenized by several processes where there are several."""
    blocks = read_blocks(config.sources)
    if config.workers == 1 or sum(path.stat().st_size for path in config.sources) < SMALL:
        yield from map(here.tokenize, blocks)
        return
    # Not forked: this process has threads. A worker that dies takes the pool with it.
    processes = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(config.workers, processes, initializer=begin_worker, initargs=(config,))
    running: deque[Future[Tokenized]] = deque()
    try:
        for block in blocks:
            running.append(pool.submit(tokenize_block, block))
            if len(running) > 2 * config.workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise DatasetError("A process that tokenizes died: out of memory? Fewer --workers need less.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _spool(config: PrepareConfig, blocks: Iterator[Tokenized], file: BinaryIO, progress: Progress, show: Show) -> Spool:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    digests = bytearray()
    spool = Spool(file, {}, np.empty((0, DIGEST), np.uint8), Counter(), Counter(), {}, 0)
    end = 0
    for block in blocks:
        file.write(block.lines)
        sizes = np.array(block.sizes, dtype=np.int64)
        values = {
            "source": np.full(len(sizes), block.source),
            "offset": end + np.cumsum(sizes) - sizes,
            "size": sizes,
            "tokens": block.tokens,
            "loss_tokens": block.loss_tokens,
            "truncated": block.truncated,
        }
        for name, kind in COLUMNS.items():
            columns[name].append(np.asarray(values[name]).astype(kind))
        digests += block.digests
        end += len(block.lines)
        spool.read[block.source] += block.records
        spool.largest_id = max(spool.largest_id, block.largest_id)
        _count_dropped(config, spool, block.source, block.dropped)
        progress.read += block.records
        progress.tokens += sum(block.tokens)
        progress.dropped += len(block.dropped)
        show(progress)
    file.flush()
    spool.columns = {
        name: np.concatenate(parts) if parts else np.empty(0, COLUMNS[name]) for name, parts in columns.items()
    }
    spool.digests = np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST)
    return spool


def _count_dropped(config: PrepareConfig, spool: Spool, source: int, dropped: list[Dropped]) -> None:
    for one in dropped:
        spool.dropped[source, one.kind] += 1
        examples = spool.examples.setdefault(one.kind, [])
        if len(examples) < SHOWN:
            examples.append(f"{config.sources[source].name} record {one.place}: {one.detail}")


def _without_duplicates(spool: Spool) -> np.ndarray:
    """The first row of each digest, in order; the others are counted."""
    halves = spool.digests.view("<u8")
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal rows stay in order
    sorted_halves = halves[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (sorted_halves[1:] != sorted_halves[:-1]).any(axis=1)
    for source, count in zip(*np.unique(spool.columns["source"][order[~is_first]], return_counts=True)):
        spool.dropped[int(source), DUPLICATE] += int(count)
    return np.sort(order[is_first])


def _write(path: Path, spool: Spool, order: np.ndarray, progress: Progress, show: Show) -> str:
    """The rows in this order, whole or not at all; returns the file's SHA-256."""
    digest, source = hashlib.sha256(), spool.file.fileno()
    with atomic_file(path, buffering=1 << 20) as file:
        for offset, size in zip(spool.columns["offset"][order].tolist(), spool.columns["size"][order].tolist()):
            line = os.pread(source, size, offset)
            if len(line) != size:
                raise DatasetError(f"The spool file beside {path} was cut short.")
            file.write(line)
            digest.update(line)
            progress.written += 1
            if progress.written % 1000 == 0:
                show(progress)
    show(progress)
    return digest.hexdigest()


def _manifest(
    config: PrepareConfig, here: BlockTokenizer, spool: Spool, order: np.ndarray, sha256: str, hashes: list[str]
) -> dict[str, Any]:
    columns = {name: column[order] for name, column in spool.columns.items()}
    written = Counter(columns["source"].tolist())
    dropped: Counter[str] = Counter()
    sources = []
    for number, (path, digest) in enumerate(zip(config.sources, hashes, strict=True)):
        by_reason = {kind: count for (source, kind), count in sorted(spool.dropped.items()) if source == number}
        dropped.update(by_reason)
        sources.append(
            {
                "path": str(path),
                "bytes": path.stat().st_size,
                "sha256": digest,
                "read": spool.read[number],
                "written": written[number],
                "dropped": by_reason,
            }
        )
    read = spool.read.total()
    assert read == len(order) + dropped.total(), "the books do not add up"
    return {
        "format": FORMAT,
        "file": config.output.name,
        "bytes": int(columns["size"].sum(dtype=np.int64)),
        "sha256": sha256,
        "rows": len(order),
        "tokens": int(columns["tokens"].sum(dtype=np.int64)),
        "loss_tokens": int(columns["loss_tokens"].sum(dtype=np.int64)),
        "longest": int(columns["tokens"].max()),
        "largest_id": spool.largest_id,
        "max_seq_len": config.max_seq_len,
        "read": read,
        "truncated": int(columns["truncated"].sum()),
        "dropped": dict(dropped),
        "examples": spool.examples,
        "sources": sources,
        "tokenizer": {
            "path": str(config.tokenizer),
            "sha256": tokenizer_identity(config.tokenizer),
            "class": type(here.tokenizer).__name__,
            "vocab_size": here.vocab_size,
        },
        "template": here.describe_template(),
        "settings": config.model_dump(mode="json", exclude={"sources", "tokenizer", "output", "workers"}),
        "origin": describe_origin(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
