"""The checksums that a store is sent and must send back.

`crc32` and `sha256` are S3's own (x-amz-checksum-*, composite over the parts of a multipart upload); `md5` is for
stores without them: Content-MD5 with each part, and the ETag.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

import base64
import hashlib
import zlib
from typing import Any, Literal

Kind = Literal["crc32", "sha256", "md5"]
FIELDS: dict[Kind, str] = {"crc32": "ChecksumCRC32", "sha256": "ChecksumSHA256", "md5": "ContentMD5"}


def digest_of(kind: Kind, data: bytes) -> bytes:
    """Of one part."""
    if kind == "crc32":
        return zlib.crc32(data).to_bytes(4, "big")
    return hashlib.sha256(data).digest() if kind == "sha256" else hashlib.md5(data, usedforsecurity=False).digest()


def text_of(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def header_of(kind: Kind, data: bytes) -> dict[str, str]:
    """The argument of put_object or upload_part that has the store compare."""
    return {FIELDS[kind]: text_of(digest_of(kind, data))}


def wanted_of(kind: Kind, digests: list[bytes], multipart: bool) -> str:
    """What the store must say of the whole object."""
    if not multipart:
        return digests[0].hex() if kind == "md5" else text_of(digests[0])
    whole = digest_of(kind, b"".join(digests))
    return f"{whole.hex() if kind == 'md5' else text_of(whole)}-{len(digests)}"


def found_in(kind: Kind, answer: dict[str, Any]) -> str | None:
    """What a store's answer says of an object or a part; None if it says nothing."""
    found = answer.get("ETag" if kind == "md5" else FIELDS[kind])
    return None if found is None else str(found).strip('"')
