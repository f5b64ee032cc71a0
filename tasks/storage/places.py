"""What works on either kind of place."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.state import state_home
from tasks.storage.bucket import Bucket, CredentialsSource
from tasks.storage.s3path import S3Path
from tasks.uris import S3_SCHEME, parse_s3_uri

if TYPE_CHECKING:
    from tasks.config import S3Config

Location = Path | S3Path


def is_remote(place: str | Path | S3Path) -> bool:
    """Whether it is, or names, a place in a bucket."""
    return isinstance(place, S3Path) or str(place).startswith(S3_SCHEME)


def as_location(
    place: str | Path | S3Path, config: "S3Config | None" = None, credentials: CredentialsSource | None = None
) -> Location:
    """The place that is named: `s3://bucket/prefix`, or a local path. Nothing is read yet.

    credentials: asked for keys, again when they have expired; default: boto3's standard chain. Raises ConfigError if
    an `s3://` name is none of a bucket.
    """
    if isinstance(place, S3Path):
        return place
    if not is_remote(place):
        return Path(place)
    from tasks.config import S3Config

    bucket, key = parse_s3_uri(str(place))
    return S3Path(Bucket(bucket, config or S3Config(), credentials), key)


def as_argument(root: Location) -> str:
    """OUTPUT as the command line takes it to reach the same place."""
    if not isinstance(root, S3Path):
        return str(root)
    config = root.bucket.config
    options = [("--endpoint-url", config.endpoint_url), ("--credentials-block", config.credentials_block)]
    return " ".join([str(root), *(f"{name} {value}" for name, value in options if value)])


def read_all(places: Iterable[Location]) -> Iterator[bytes]:
    """The contents of many small files, in order; objects are read several at a time. Raises OSError."""
    places = list(places)
    if places and isinstance(places[0], S3Path):
        yield from places[0].bucket.pool.map(lambda place: place.read_bytes(), places)
    else:
        for place in places:
            yield place.read_bytes()


def side_folder(root: Location) -> Path:
    """Where a remote store's files that need a local disk lie: in the state folder, one folder a store."""
    text = str(root)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.removeprefix(S3_SCHEME))[:60]
    return state_home() / "remote" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
