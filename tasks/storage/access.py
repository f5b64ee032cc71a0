"""Asks a bucket, before anything starts, whether it lets us do what an extraction does, and does what we rely on.

A small object is written under the output's prefix, read, written over against conditions that must refuse it, and
deleted; an upload is begun and aborted.
"""

import contextlib
import uuid
from collections.abc import Iterator

from tasks.errors import OutputError, RemoteError
from tasks.storage.bucket import PreconditionError, code_of
from tasks.storage.checksums import FIELDS, digest_of, text_of
from tasks.storage.s3path import S3Path
from tasks.storage.upload import abort_uploads

HURRY = 20.0  # seconds for which a store that does not answer is tried
CONTENT = b"drillcore looks whether it may write here\n"
ADVICE = "Nothing was started."


def check_access(root: S3Path) -> None:
    """Raises OutputError naming the permission that is missing, or what the store does not do."""
    bucket = root.bucket
    patience, bucket.patience = bucket.patience, HURRY
    try:
        _check(root, root / f".probe-{uuid.uuid4().hex}.tmp")
    finally:
        bucket.patience = patience


def _check(root: S3Path, probe: S3Path) -> None:
    bucket = root.bucket
    with _needs(root, "s3:ListBucket"):
        try:
            bucket.call(f"find the bucket s3://{bucket.name}", lambda client: client.head_bucket(Bucket=bucket.name))
        except FileNotFoundError as error:
            raise OutputError(
                f"The bucket s3://{bucket.name} does not exist{_where(root)} (output.path): create it, or name another "
                f"one. {ADVICE}"
            ) from error
        next(bucket.list(f"{root.key}/"), None)
    with _needs(root, "s3:PutObject"):
        probe.write_bytes(CONTENT)
    try:
        with _needs(root, "s3:GetObject"):
            if probe.read_bytes() != CONTENT:
                raise OutputError(f"{probe} is not what was written to it a moment ago. {ADVICE}")
        _check_conditions(probe)
        _check_checksums(probe)
        with _needs(root, "s3:ListBucketMultipartUploads, s3:AbortMultipartUpload"):
            bucket.call(
                f"begin an upload under {root}",
                lambda client: client.create_multipart_upload(Bucket=bucket.name, Key=f"{probe.key}/upload"),
            )
            abort_uploads(probe)
    finally:
        with _needs(root, "s3:DeleteObject"):
            probe.unlink(missing_ok=True)


def _check_conditions(probe: S3Path) -> None:
    for conditions in ({"IfNoneMatch": "*"}, {"IfMatch": '"00000000000000000000000000000000"'}):
        try:
            probe.write_bytes(CONTENT, **conditions)
        except PreconditionError:
            continue
        raise OutputError(
            f"The store of {probe.parent} does not refuse a write against {', '.join(conditions)}, so two runs could "
            f"write to one output. Use a store with conditional writes, or a local output.path. {ADVICE}"
        )


def _check_checksums(probe: S3Path) -> None:
    """A wrong checksum must be refused."""
    bucket, kind = probe.bucket, probe.bucket.config.checksum
    wrong = {FIELDS[kind]: text_of(digest_of(kind, CONTENT + b"!"))}
    try:
        bucket.client().put_object(Bucket=bucket.name, Key=probe.key, Body=CONTENT, **wrong)
    except bucket.client().exceptions.ClientError as error:
        if code_of(error) in ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "InvalidRequest"):
            return
        raise OutputError(f"{probe} could not be written with a checksum: {error}. {ADVICE}") from error
    other = "use another store" if kind == "md5" else "set s3.checksum to md5"
    raise OutputError(f"The store of {probe.parent} takes an object with a wrong {kind} checksum: {other}. {ADVICE}")


@contextlib.contextmanager
def _needs(root: S3Path, permission: str) -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        if error.code in ("AccessDenied", "403", "Forbidden", "AllAccessDisabled"):
            raise OutputError(
                f"The credentials may not use {root}{_where(root)}: {permission} is denied. Allow it, or give others "
                f"(README.md, 'To a bucket'). {ADVICE}"
            ) from error
        raise OutputError(f"{str(error).rstrip('.')} (output.path). {ADVICE}") from error


def _where(root: S3Path) -> str:
    url = root.bucket.config.endpoint_url
    return f" at {url}" if url else ""
