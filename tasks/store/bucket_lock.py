"""One writer a store in a bucket: a lock object that only conditional writes change.

The lock is taken by a write that is refused if there is one (If-None-Match), renewed and taken over by writes that are
refused if it changed (If-Match). Whether its owner lives is judged as for a local store.

A writer that lost the lock while it was paused may still send what it was about to. So a shard's name has a mark of its
own, and nothing overwrites or reuses it; a record names its shard; a record's write is refused if there is one by now,
and replaces one that was not there when the lock was taken. What a lost writer sends late is then either refused, or
replaced, or a record whose shard is gone, which counts as damaged: it never makes other bytes count.
"""

import contextlib
import itertools
import json
import logging
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tasks.errors import LostLockError, RemoteError
from tasks.files import write_json
from tasks.processes import identity, is_dead
from tasks.storage import Location, S3Path, side_folder
from tasks.storage.bucket import PreconditionError
from tasks.storage.spool import Spool, spool_limit
from tasks.storage.upload import abort_uploads, upload
from tasks.store.layout import Store, in_batches, shard_stem
from tasks.store.lock import WriterLock, parse_lock
from tasks.store.partitions import Partition
from tasks.store.record import record_name, record_path, record_paths

OWNER = "owner.json"  # in a workspace: the process whose it is
TRIES = 5  # of a record's write, each refused because the record changed

logger = logging.getLogger(__name__)


def writer_lock(store: Store, partition: Partition | None = None) -> WriterLock:
    """The lock of a store, wherever it lies; or of one partition of it, beside the writers of others."""
    if partition is None:
        path, batches = store.lock, None
    else:
        path, batches = store.partition_lock(partition.number), partition.batches

    def excluded() -> list[Location]:
        return partition_locks(store) if partition is None else [store.lock]

    return BucketLock(path, excluded, batches) if isinstance(path, S3Path) else WriterLock(path, excluded)


def partition_locks(store: Store) -> list[Location]:
    """Those that are there, also where only the workspace of a writer is left."""
    names = {path.name.partition(".")[0] for path in store.root.glob("lock-*") if ".json" in path.name}
    return [store.root / f"{name}.json" for name in sorted(names)]


def spool_folder(root: S3Path) -> Path:
    """Where this store's shards lie until they are uploaded; each writer has a folder of its own inside."""
    chosen, side = root.bucket.config.spool, side_folder(root)
    return chosen / side.name if chosen else side / "spool"


class BucketLock(WriterLock):
    """The lock of a store in a bucket, and the way of its shards: a local spool, an upload, then the record."""

    durable: ClassVar[bool] = False

    def __init__(self, path: S3Path, excluded: Callable[[], list[Any]] = list, batches: range | None = None):
        """batches: that it covers; None: all."""
        super().__init__(path, excluded)
        self.batches = batches
        self.spool = Spool(path.bucket.config.spool_bytes)
        self._etag = ""
        self._over: str | None = None  # ETag of the dead lock that ours replaces
        self._known: set[str] = set()  # records that were there when the lock was taken, and ours

    def next_part(self, store: Store, batch: int) -> int:
        return next(
            number
            for number in itertools.count()
            if record_name(batch, number) not in self._known or not record_path(store, batch, number).exists()
        )

    def shard_file(self, store: Store, batch: int, part: int) -> Path:
        return self.workspace / f"{shard_stem(batch, part)}-{secrets.token_hex(4)}.safetensors"

    def room(self, size: int, held: Callable[[int], None]) -> contextlib.AbstractContextManager[None]:
        return self.spool.room(size, held)

    def deliver(self, store: Store, path: Path) -> dict[str, Any]:
        target = store.shards / path.name
        assert isinstance(target, S3Path)
        try:
            done = upload(path, target)
        finally:
            path.unlink(missing_ok=True)
        return {
            "upload": {"seconds": done.seconds, "parts": done.parts, self.path.bucket.config.checksum: done.checksum}
        }

    def write(self, path: Location, data: bytes) -> None:
        assert isinstance(path, S3Path)
        for _ in range(TRIES):
            self.check()
            try:
                conditions = {"IfMatch": path.head().etag}
            except FileNotFoundError:
                conditions = {"IfNoneMatch": "*"}
            with contextlib.suppress(PreconditionError):
                path.write_bytes(data, **conditions)
                self._known.add(path.name)
                return
            with contextlib.suppress(FileNotFoundError):
                if path.read_bytes() == data:  # written, and the answer was lost
                    self._known.add(path.name)
                    return
        raise RemoteError(f"{path} is changed by somebody else again and again.")

    def shut_out(self) -> None:
        while True:
            try:
                found, etag = self.path.read_with_etag()
            except FileNotFoundError:
                return
            if _is_released(found):
                return
            if self._is_abandoned(found) and self._put(self._released(), {"IfMatch": etag}):
                return

    def _workspace(self) -> Path:
        folder, stem = spool_folder(self.path.parent), self.path.name.removesuffix(".json")
        # A partition's in a folder of its own: others on this host write to the same store.
        return (folder if stem == "lock" else folder / stem) / f"{self.owner}.work"

    def _create(self) -> bool:
        conditions = {"IfMatch": self._over} if self._over else {"IfNoneMatch": "*"}
        return self._put(self._text(0), conditions)

    def _put(self, text: str, conditions: dict[str, str]) -> bool:
        """Write the lock; False if a condition refused it."""
        try:
            self._etag = self.path.write_bytes(text.encode(), **conditions)
        except PreconditionError:
            try:
                found, etag = self.path.read_with_etag()
            except FileNotFoundError:
                return False
            if found != text.encode():
                return False
            self._etag = etag  # written, and the answer was lost
        return True

    def _remove_dead_lock(self) -> None:
        """Find out which lock ours may replace."""
        self._over = None
        try:
            found, etag = self.path.read_with_etag()
        except FileNotFoundError:
            return
        if _is_released(found):
            self._over = etag
        elif self._is_abandoned(found):
            logger.warning("taking over %s from a writer that died", self.path.parent)
            self._over = etag

    def _shut_out_others(self) -> None:
        try:
            self.workspace.mkdir(parents=True)
            write_json(self.workspace / OWNER, identity())
            folder = spool_folder(self.path.parent)
            for workspace in [*folder.glob("*.work"), *folder.glob("*/*.work")]:
                if workspace != self.workspace and (workspace.parent == self.workspace.parent or _is_left(workspace)):
                    shutil.rmtree(workspace, ignore_errors=True)
            self.spool.limit = spool_limit(self.workspace, self.spool.limit)
            self.check()
        except LostLockError as error:
            self._release()
            raise self._taken() from error
        except BaseException:
            self._release()
            raise

    def _exclude(self) -> None:
        super()._exclude()
        store = Store(self.path.parent)
        if aborted := abort_uploads(store.shards, lambda path: in_batches(path, self.batches)):  # type: ignore[arg-type]
            logger.warning("%d unfinished uploads of an earlier run to %s aborted", aborted, store.root)
        self._known = {path.name for path in record_paths(store) if in_batches(path, self.batches)}
        self.check()

    def _released(self) -> str:
        return json.dumps({"released": True, "owner": self.owner})

    def _release(self) -> None:
        """The lock stays as an object that says so: a deletion might hit another writer's."""
        try:
            if not self._put(self._released(), {"IfMatch": self._etag}):
                logger.warning("%s was taken over by another writer meanwhile", self.path.parent)
        except OSError as error:
            logger.warning("the lock %s could not be given back: %s", self.path, error)
        shutil.rmtree(self.workspace, ignore_errors=True)

    def _renew(self, text: str) -> None:
        if not self._put(text, {"IfMatch": self._etag}):
            raise LostLockError(f"{self.path.parent} was taken over by another writer.")


def _is_left(workspace: Path) -> bool:
    """Whether its writer, on this host, is dead."""
    try:
        return is_dead(json.loads((workspace / OWNER).read_bytes())) is True
    except (OSError, ValueError):
        return False  # being made at this moment


def _is_released(content: bytes) -> bool:
    try:
        return parse_lock(content) is None and json.loads(content).get("released") is True
    except (ValueError, AttributeError):
        return False
