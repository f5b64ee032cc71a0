"""An object or a prefix in a bucket, with the part of pathlib's interface that a store needs."""

import fnmatch
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from tasks.storage.bucket import Bucket, whole
from tasks.storage.checksums import header_of
from tasks.storage.reader import ObjectReader

KEPT_BELOW = 4 << 20  # bytes of an object that a listing found, up to which its content is kept once it was read


@dataclass(frozen=True)
class ObjectFacts:
    """What a listing or HEAD says; named as in os.stat_result."""

    st_size: int
    st_mtime: float
    etag: str


@total_ordering
class S3Path:
    """`s3://bucket/key`. Folders are prefixes: they need not be made. One from a listing knows its facts already.

    Raises FileNotFoundError for what is missing, RemoteError (an OSError) for what else goes wrong.
    """

    __slots__ = ("bucket", "facts", "key")

    def __init__(self, bucket: Bucket, key: str, facts: ObjectFacts | None = None):
        self.bucket, self.key, self.facts = bucket, key.strip("/"), facts

    def __str__(self) -> str:
        return f"s3://{self.bucket.name}/{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"S3Path({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Path) and str(self) == str(other)

    def __lt__(self, other: "S3Path") -> bool:
        return self.key < other.key

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "S3Path":
        return S3Path(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket.name

    @property
    def suffix(self) -> str:
        stem, dot, last = self.name.rpartition(".")
        return f".{last}" if dot and stem else ""

    @property
    def parent(self) -> "S3Path":
        return S3Path(self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "S3Path":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "S3Path":
        return self.with_name(self.name.removesuffix(self.suffix) + suffix)

    def absolute(self) -> "S3Path":
        return self

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a prefix is there as soon as something lies in it."""

    def stat(self) -> ObjectFacts:
        """Size and time, from the listing that found this path, or asked now."""
        return self.facts or self.head()

    def head(self) -> ObjectFacts:
        """Size, time and ETag as they are now."""
        found = self.bucket.call(
            f"look at {self}", lambda client: whole(client.head_object(Bucket=self.bucket.name, Key=self.key))
        )
        return ObjectFacts(found["ContentLength"], found["LastModified"].timestamp(), found["ETag"])

    def exists(self) -> bool:
        """Whether there is such an object, or anything under this prefix."""
        if self.key:
            try:
                self.head()
                return True
            except FileNotFoundError:
                pass
        return self.is_dir()

    def is_dir(self) -> bool:
        """Whether anything lies under this prefix."""
        return next(self.bucket.list(self._folder()), None) is not None

    def read_bytes(self) -> bytes:
        keep = self.facts.etag if self.facts and self.facts.st_size <= KEPT_BELOW else None
        return self.bucket.read(self.key, keep)[0]

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def read_range(self, start: int, size: int) -> bytes:
        """`size` bytes from `start` on; fewer where the object ends before."""
        return self.bucket.read_range(self.key, start, size)

    def read_with_etag(self) -> tuple[bytes, str]:
        """What is there now, and the ETag for a conditional write over it."""
        return self.bucket.read(self.key)

    def write_bytes(self, data: bytes, **conditions: str) -> str:
        """Replace the object; returns its ETag. conditions: IfMatch (an ETag) or IfNoneMatch ('*').

        Raises PreconditionError where a condition does not hold. A write that was made is never taken for refused,
        though its answer was lost and it was sent again: the content is compared by who sets conditions.
        """
        checksum = header_of(self.bucket.config.checksum, data)
        answer = self.bucket.call(
            f"write {self}",
            lambda client: client.put_object(
                Bucket=self.bucket.name, Key=self.key, Body=data, **checksum, **conditions
            ),
        )
        return str(answer["ETag"])

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.head()
        self.bucket.call(f"delete {self}", lambda client: client.delete_object(Bucket=self.bucket.name, Key=self.key))

    def iterdir(self) -> Iterator["S3Path"]:
        yield from self._listed(self._folder())

    def glob(self, pattern: str) -> Iterator["S3Path"]:
        """What lies directly under this prefix and has such a name, in the order of the names."""
        literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        for path in self._listed(self._folder() + literal):
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def open(self, mode: str = "r", buffering: int = -1) -> Any:
        """For reading, as text from memory or as bytes that are fetched as they are read."""
        if mode == "rb":
            return ObjectReader(self.bucket, self.key)
        if mode == "r":
            return io.StringIO(self.read_text())
        raise ValueError(f"{self} cannot be opened with mode {mode!r}")

    def _folder(self) -> str:
        return f"{self.key}/" if self.key else ""

    def _listed(self, prefix: str) -> Iterator["S3Path"]:
        for found in self.bucket.list(prefix, "/"):
            if "Prefix" in found:
                yield S3Path(self.bucket, found["Prefix"])
            elif not found["Key"].endswith("/"):  # an object that some make to show an empty folder
                facts = ObjectFacts(found["Size"], found["LastModified"].timestamp(), found["ETag"])
                yield S3Path(self.bucket, found["Key"], facts)
