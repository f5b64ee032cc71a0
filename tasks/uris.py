"""Names of places outside this machine, as configs and command lines give them."""

import re

from tasks.errors import ConfigError

S3_SCHEME = "s3://"
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; other stores also allow _ and capitals.
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


def parse_s3_uri(uri: str) -> tuple[str, str]:
    """('bucket', 'prefix') of `s3://bucket/prefix`; the prefix without slashes at its ends. Raises ConfigError."""
    bucket, _, key = uri.removeprefix(S3_SCHEME).partition("/")
    key = key.strip("/")
    parts = key.split("/")
    if not BUCKET.fullmatch(bucket) or not key or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"{uri!r} names no place in a bucket: s3://BUCKET/PREFIX is expected, both given.")
    return bucket, key
