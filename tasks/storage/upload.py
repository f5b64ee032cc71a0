"""Sends one file to a bucket: in parts, several at a time, each with a checksum that the store compares.

Nothing is there under the name until all parts are, and it counts as there only when the store has said the size and
the checksum that were computed here. A shard's commit record is written after that.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import RemoteError
from tasks.storage.bucket import code_of
from tasks.storage.checksums import FIELDS, digest_of, found_in, text_of, wanted_of
from tasks.storage.s3path import S3Path

MOST_PARTS = 10_000  # S3's limit


@dataclass(frozen=True)
class Uploaded:
    """What became of a file."""

    bytes: int
    parts: int
    checksum: str
    """As the store says it: of the object, or of its parts' checksums with their number."""
    seconds: float


def upload(path: Path, to: S3Path) -> Uploaded:
    """Send a file and have the store confirm it. Raises RemoteError; nothing is left under the name then."""
    started = time.monotonic()
    config = to.bucket.config
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        part = max(config.part_bytes, -(-size // MOST_PARTS))
        if size <= part:
            data = file.read()
            to.write_bytes(data)
            digests = [digest_of(config.checksum, data)]
        else:
            digests = _Multipart(to, file.fileno(), size, part).send()
    wanted = wanted_of(config.checksum, digests, multipart=size > part)
    _confirm(to, size, wanted)
    return Uploaded(size, len(digests), wanted, round(time.monotonic() - started, 3))


def abort_uploads(prefix: S3Path, ours: Callable[[S3Path], bool] = lambda path: True) -> int:
    """Abort the unfinished uploads under a prefix that are `ours`; returns their number. The caller holds the lock."""
    bucket, markers, count = prefix.bucket, dict[str, str](), 0
    while True:
        page = bucket.call(
            f"list unfinished uploads of {prefix}",
            lambda client: client.list_multipart_uploads(
                Bucket=bucket.name,
                Prefix=f"{prefix.key}/",
                **markers,  # noqa: B023 - called at once
            ),
        )
        for found in page.get("Uploads", []):
            if ours(path := S3Path(bucket, found["Key"])):
                _abort(path, found["UploadId"])
                count += 1
        if not page.get("IsTruncated"):
            return count
        markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _abort(to: S3Path, upload_id: str) -> None:
    with suppress(FileNotFoundError):
        try:
            to.bucket.call(
                f"abort an upload of {to}",
                lambda client: client.abort_multipart_upload(Bucket=to.bucket.name, Key=to.key, UploadId=upload_id),
            )
        except RemoteError as error:
            if error.code != "NoSuchUpload":
                raise


class _Multipart:
    """One multipart upload."""

    def __init__(self, to: S3Path, descriptor: int, size: int, part: int):
        self.to, self.bucket, self.kind = to, to.bucket, to.bucket.config.checksum
        self.descriptor, self.size, self.part = descriptor, size, part
        self.place: dict[str, Any] = {"Bucket": self.bucket.name, "Key": to.key}

    def send(self) -> list[bytes]:
        """The parts' digests."""
        algorithm = {} if self.kind == "md5" else {"ChecksumAlgorithm": self.kind.upper(), "ChecksumType": "COMPOSITE"}
        begun = self.bucket.call(
            f"begin an upload of {self.to}", lambda client: client.create_multipart_upload(**self.place, **algorithm)
        )
        self.place["UploadId"] = begun["UploadId"]
        futures: list[Future[tuple[bytes, dict[str, Any]]]] = []
        try:
            count = -(-self.size // self.part)
            futures = [self.bucket.uploads.submit(self._send_part, number) for number in range(1, count + 1)]
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
            sent = [future.result() for future in futures]
            self._complete([part for _, part in sent])
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)  # they read from the file that is about to be closed
            with suppress(OSError):  # it is listed, and aborted, at the next start
                _abort(self.to, self.place["UploadId"])
            raise
        return [digest for digest, _ in sent]

    def _send_part(self, number: int) -> tuple[bytes, dict[str, Any]]:
        """Its digest, and its line in the request that completes the upload."""
        start = (number - 1) * self.part
        data = os.pread(self.descriptor, min(self.part, self.size - start), start)
        if len(data) < min(self.part, self.size - start):
            raise RemoteError(f"The file of {self.to} became shorter while it was uploaded.")
        digest = digest_of(self.kind, data)
        header = {FIELDS[self.kind]: text_of(digest)}
        answer = self.bucket.call(
            f"upload part {number} of {self.to}",
            lambda client: client.upload_part(**self.place, PartNumber=number, Body=data, **header),
        )
        wanted = digest.hex() if self.kind == "md5" else text_of(digest)
        if (found := found_in(self.kind, answer)) != wanted:
            raise RemoteError(_unconfirmed(f"part {number} of {self.to}", wanted, found, self.kind))
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        return digest, part if self.kind == "md5" else part | {FIELDS[self.kind]: wanted}

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        def complete(client: Any) -> Any:
            try:
                return client.complete_multipart_upload(**self.place, MultipartUpload={"Parts": parts})
            except client.exceptions.ClientError as error:
                # Completed already, and the answer was lost; `_confirm` asks what is there.
                if code_of(error) != "NoSuchUpload":
                    raise
                return None

        self.bucket.call(f"complete the upload of {self.to}", complete)


def _confirm(to: S3Path, size: int, wanted: str) -> None:
    """Raises RemoteError, and removes the object, unless the store says that it is what was sent."""
    kind = to.bucket.config.checksum
    try:
        found = to.bucket.call(
            f"look at {to}",
            lambda client: client.head_object(Bucket=to.bucket.name, Key=to.key, ChecksumMode="ENABLED"),
        )
    except FileNotFoundError as error:
        raise RemoteError(f"{to} is not there after its upload: another writer, or a rule, removed it.") from error
    if found["ContentLength"] != size:
        to.unlink(missing_ok=True)
        raise RemoteError(f"{to} has {found['ContentLength']} bytes after its upload, {size} were sent.")
    if (checksum := found_in(kind, found)) != wanted:
        to.unlink(missing_ok=True)
        raise RemoteError(_unconfirmed(str(to), wanted, checksum, kind))


def _unconfirmed(what: str, wanted: str, found: str | None, kind: str) -> str:
    if found is None:
        return f"The store says no {kind} checksum of {what}: set s3.checksum to md5 for a store that knows no other."
    return f"{what} arrived damaged: the store has the {kind} {found}, {wanted} was sent."
