"""Names of places outside this machine, as configs and command lines give them."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator, WithJsonSchema

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


def _output_place(value: Any) -> Path | str:
    if isinstance(value, str) and value.startswith(S3_SCHEME):
        try:
            return f"{S3_SCHEME}{'/'.join(parse_s3_uri(value))}"
        except ConfigError as error:
            raise ValueError(str(error)) from error
    if not isinstance(value, (str, Path)) or "://" in str(value):
        raise ValueError("a directory, or s3://BUCKET/PREFIX, is expected")
    return Path(value).expanduser().absolute()


def _without_keys(value: str | None) -> str | None:
    if value is not None and (not re.match(r"https?://", value) or "@" in value):
        raise ValueError("http:// or https:// is expected, without user or password")
    return value


OutputPlace = Annotated[Path | str, PlainValidator(_output_place), WithJsonSchema({"type": "string"})]
"""In a config: a directory, made absolute, or `s3://BUCKET/PREFIX`."""
EndpointUrl = Annotated[str | None, AfterValidator(_without_keys)]
"""In a config: of a store, with no secret in it."""
