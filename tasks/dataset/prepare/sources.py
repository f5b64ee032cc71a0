"""Reading the sources of a dataset, streaming, a block of records at a time."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.dataset.formats import BUFFER, COMPRESSION, PARQUET
from tasks.errors import DatasetError

BLOCK_BYTES = 1 << 18  # of lines, that one worker gets at a time
BLOCK_ROWS = 128  # of a table


@dataclass(frozen=True)
class Block:
    """Consecutive records of one source: lines as bytes, or a table's rows."""

    source: int
    first: int
    """Place of the first record in the source, 0-based."""
    records: Sequence[bytes | dict[str, Any]]


def read_blocks(paths: list[Path]) -> Iterator[Block]:
    """All records of all sources, in order. Raises DatasetError naming the source that cannot be read."""
    for source, path in enumerate(paths):
        with _errors_named(path):
            first = 0
            for records in _table(path) if kind_of(path) == PARQUET else _lines(path):
                yield Block(source, first, records)
                first += len(records)


def kind_of(path: Path) -> str:
    """The ending that says what a source is. Raises DatasetError if it is none that is known."""
    known = [*COMPRESSION, PARQUET]
    for ending in known:
        if path.name.lower().endswith(ending):
            return ending
    hint = f" A JSON list becomes lines with: jq -c '.[]' {path.name}" if path.suffix == ".json" else ""
    raise DatasetError(f"The source {path} is of no known kind: its name must end in {', '.join(known)}.{hint}")


def _lines(path: Path) -> Iterator[list[bytes]]:
    compression = COMPRESSION[kind_of(path)]
    # Arrow's streams, unlike zstandard's own, say so when a packed file ends too early.
    stream = pa.input_stream(str(path), compression=compression, buffer_size=BUFFER)
    with cast(Any, io.BufferedReader(stream, BUFFER)) as file:
        while lines := file.readlines(BLOCK_BYTES):
            yield lines


def _table(path: Path) -> Iterator[list[dict[str, Any]]]:
    with pq.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True) as table:
        for batch in table.iter_batches(BLOCK_ROWS):
            yield batch.to_pylist()


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"The source {path} does not exist.") from error
    except (OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DatasetError(f"The source {path} cannot be read, or is damaged or cut short: {reason}") from error
