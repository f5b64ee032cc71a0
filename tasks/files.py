"""Small file operations with promises: atomic writes, checksums, hashes."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # a trainer that reads a store has neither PyArrow nor xxhash
    import pyarrow as pa

from tasks.storage import Location, S3Path

CHUNK = 4 << 20  # bytes read at a time


def temporary_for(path: Path, workspace: Path | None = None) -> Path:
    """Where a file lies until it is complete: beside its final name, or in a workspace on the same file system."""
    return (workspace or path.parent) / f".{path.name}.{os.getpid()}.tmp"


def write_atomic(path: Location, data: bytes, workspace: Path | None = None) -> None:
    """Write `data` so that `path` holds all of it or what it held before, also after a power cut."""
    if isinstance(path, S3Path):
        path.write_bytes(data)
        return
    with atomic_file(path, workspace) as file:
        file.write(data)


@contextlib.contextmanager
def atomic_file(path: Path, workspace: Path | None = None, buffering: int = -1) -> Iterator[BinaryIO]:
    """A local file to fill, which has its name once it is whole and on the disk; buffering: as for `open`."""
    temporary = temporary_for(path, workspace)
    try:
        with temporary.open("wb", buffering=buffering) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Location, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Indented JSON, with a newline at its end."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def append_line(path: Location, line: str) -> None:
    """Add a line to a text file that one writer adds to. An object is written anew, whole."""
    if isinstance(path, S3Path):
        before = path.read_bytes() if path.exists() else b""
        path.write_bytes(before + f"{line}\n".encode())
        return
    with path.open("a") as file:
        file.write(f"{line}\n")


def write_parquet(path: Location, table: "pa.Table") -> None:
    """Write a table as Parquet, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def sync_directory(directory: Path) -> None:
    """Make a rename inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Location) -> str:
    """SHA-256 of a file, hexadecimal."""
    return _digest_of(path, hashlib.sha256())


def sha256_of_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON (sorted keys, no spaces), hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checksum_of(path: Location) -> str:
    """XXH3-128 of a file, hexadecimal: what `xxh128sum` prints."""
    import xxhash

    return _digest_of(path, xxhash.xxh3_128())


def _digest_of(path: Location, digest: Any) -> str:
    """In large pieces: between two of them, a thread that hashes waits until the others let it."""
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        # One for all: fresh memory costs as much as the reading. Of a small file no more: many are read at once.
        piece = memoryview(bytearray(min(CHUNK, max(size, 1))))
        while length := file.readinto(piece):
            digest.update(piece[:length])
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """Free space where `path` is or would be, in bytes."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def human_seconds(seconds: float) -> str:
    """3725 -> '1 h 02 min', 64 -> '1 min 04 s', 4.2 -> '4.2 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
