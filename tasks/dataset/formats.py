"""Which kind of file the dataset is, by its name, and opening it.

A packed file is read as the stream that it is; nothing is unpacked to a disk.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import DatasetError

PARQUET = ".parquet"
# Arrow's name of the compression. Its streams, unlike zstandard's own, say so when a file ends too early.
COMPRESSION = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
MAGIC = {b"\x1f\x8b": ".jsonl.gz", b"\x28\xb5\x2f\xfd": ".jsonl.zst", b"PAR1": PARQUET}
BUFFER = 1 << 20  # bytes read at a time, of a packed file and of a Parquet column
IDS, MASK, ID = COLUMNS = "input_ids", "loss_mask", "id"


def ending_of(path: Path) -> str:
    """The ending that says what the file is. Raises DatasetError if it is none that is known."""
    known = [*COMPRESSION, PARQUET]
    for ending in known:
        if path.name.lower().endswith(ending):
            return ending
    raise DatasetError(
        f"The dataset {path} is of no known kind: its name must end in {', '.join(known[:-1])} or {known[-1]} "
        "(dataset.path)."
    )


def is_parquet(path: Path) -> bool:
    """Whether the rows are those of a table, not lines."""
    return ending_of(path) == PARQUET


def is_plain(path: Path) -> bool:
    """Whether a row can be read at its offset in the file."""
    return ending_of(path) == ".jsonl"


def identity_of(path: Path) -> tuple[int, ...]:
    """What changes when the file is written or replaced. Raises DatasetError if it cannot be opened."""
    with errors_named(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_lines(path: Path) -> BinaryIO:
    """The bytes of a JSONL file, unpacked if it is packed. Raises DatasetError; reading on may raise what
    `errors_named` translates."""
    with errors_named(path):
        file = path.open("rb")
        ending = ending_of(path)
        start = file.peek(4)[:4]
        for magic, other in MAGIC.items():
            if ending == ".jsonl" and start.startswith(magic):
                file.close()
                raise DatasetError(
                    f"The dataset {path} holds no JSON lines, but what belongs into a {other} file: rename it "
                    "(dataset.path)."
                )
        if COMPRESSION[ending] is None:
            return file
        file.close()
        stream = pa.input_stream(str(path), compression=COMPRESSION[ending], buffer_size=BUFFER)
        return cast(BinaryIO, io.BufferedReader(stream, BUFFER))


def open_table(path: Path) -> pq.ParquetFile:
    """A Parquet file whose columns are of the right types. Raises DatasetError."""
    with errors_named(path):
        # Else whole column chunks are held: all rows, where a file is one row group.
        table = pq.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)
    schema = table.schema_arrow
    if IDS not in schema.names:
        raise DatasetError(
            f"The dataset {path} has no column {IDS}; it has {', '.join(map(repr, schema.names)) or 'none'} "
            "(dataset.path)."
        )
    integers = pa.types.is_integer
    _check_column(path, schema.field(IDS), "integers", integers)
    if MASK in schema.names:
        field = schema.field(MASK)
        _check_column(path, field, "integers or booleans", lambda kind: integers(kind) or pa.types.is_boolean(kind))
    return table


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Turns what the system and Arrow raise on a missing, unreadable or damaged file into a DatasetError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"The dataset {path} does not exist (dataset.path).") from error
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DatasetError(f"The dataset {path} cannot be read: {error.strerror} (dataset.path).") from error
        raise DatasetError(
            f"The dataset {path} is damaged, cut short, or no {ending_of(path)} file: {error}. Copy or write it anew "
            "(dataset.path)."
        ) from error


def _check_column(path: Path, field: pa.Field, wanted: str, fits: Callable[[pa.DataType], bool]) -> None:
    kind = field.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not fits(kind.value_type):
        raise DatasetError(
            f"The dataset {path} has a column {field.name} of type {kind}; lists of {wanted} are expected "
            "(dataset.path)."
        )
