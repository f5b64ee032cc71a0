"""Reads an object as a file: in one stream while it is read in order, a new one after a seek or a lost connection."""

import io
from contextlib import suppress
from typing import Any

from tasks.storage.bucket import Bucket, whole


class ObjectReader(io.RawIOBase):
    """A binary file over an object. For one thread. Reading goes on where it was if the connection is lost.

    The object must stay the same meanwhile: its ETag is held to, and a change raises RemoteError.
    """

    def __init__(self, bucket: Bucket, key: str):
        self.bucket, self.key = bucket, key
        self.what = f"read s3://{bucket.name}/{key}"
        facts = bucket.call(self.what, lambda client: whole(client.head_object(Bucket=bucket.name, Key=key)))
        self.size, self.etag = int(facts["ContentLength"]), facts["ETag"]
        self.at = 0
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        if target != self.at:
            self._drop()
            self.at = target
        return target

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.size - self.at)]
        if not view:
            return 0
        count: int = self.bucket.call(self.what, lambda client: self._fill(client, view))
        self.at += count
        return count

    def close(self) -> None:
        self._drop()
        super().close()

    def _fill(self, client: Any, view: memoryview) -> int:
        try:
            if self._stream is None:
                limits = {"Range": f"bytes={self.at}-"} if self.at else {}
                asked = {"Bucket": self.bucket.name, "Key": self.key, "IfMatch": self.etag}
                answer = whole(client.get_object(**asked, **limits))
                self._stream = answer["Body"]
            count = int(self._stream.readinto(view))
            if not count:
                raise ConnectionError("the connection was closed before the end")
            return count
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._stream is not None:
            with suppress(Exception):
                self._stream.close()
            self._stream = None
