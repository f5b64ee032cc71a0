"""One writer a store: a lock file with owner and heartbeat. No flock, which NFS does not keep.

Whether an owner lives is never judged by a clock of another host. One on this host is looked up by its process; one
elsewhere is watched: a lock that does not change for STALE seconds, by the watcher's own clock, is a dead writer's.

Such a writer may only have been paused, and it may wake up between its last look at the lock and a rename. So each
writer has a workspace, a folder beside the lock, and what it writes gets its final name by a rename out of it, the
heartbeat too. Who takes over removes the workspaces of all others before anything else: from then on no rename of
theirs can succeed, at whatever point they were paused.

Several may write to one store, each to a partition of its batches with a lock of its own. The store's lock excludes the
partitions' and each of them excludes the store's: who has made his own looks for the other kind's, so that of two that
start together at least one sees the other. (Over NFS, too: making a file has a client ask the server for the folder.)
"""

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from tasks.errors import LostLockError, OutputError, WriterAliveError
from tasks.files import write_atomic
from tasks.processes import identity, is_dead
from tasks.storage import Location
from tasks.store.layout import Store
from tasks.store.record import record_path

HEARTBEAT = 15.0  # seconds between two signs of life
# Seconds without one after which an owner elsewhere counts as dead: more than a heartbeat and the 60 s for which an NFS
# client may go on showing what a file was (acregmax, acdirmax in nfs(5)).
STALE = 120.0
LOOK = 1.0  # seconds between two looks at a lock that is watched
REMOVAL = 10.0  # seconds in which a workspace must be gone, while its owner may still be adding files
FIELDS = {"owner", "host", "world", "pid", "started", "since", "beat"}

logger = logging.getLogger(__name__)


class WriterLock:
    """Held while a run writes to a store. `check` raises once the lock is lost, so that nothing more is committed.

    This one is of a local store; `writer_lock` takes the right one. What a writer may do is here, too: shards and
    records get to their places by `shard_file`, `room`, `deliver` and `write`.
    """

    durable: ClassVar[bool] = True
    """Whether a shard is on the disk before it is delivered."""

    def __init__(self, path: Any, excluded: Callable[[], list[Any]] = list):
        """path: of the lock's file, a Path. excluded: the locks whose owners may not write beside this one's."""
        self.path, self.excluded = path, excluded
        self.owner = uuid.uuid4().hex
        self.workspace: Path = self._workspace()
        """Where files of this writer lie until a rename gives them their final names; there while the lock is held."""
        self._content: dict[str, Any] = {
            "owner": self.owner,
            **identity(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)

    def __enter__(self) -> "WriterLock":
        """Take the lock. Raises WriterAliveError naming the owner if there is another writer that lives.

        Where the owner is on another host, or in another container, that takes up to STALE seconds.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._remove_dead_lock()
            self._shut_out_others()
            self._thread.start()
            try:
                self._exclude()
            except BaseException as error:
                self.__exit__()
                if isinstance(error, LostLockError):
                    raise self._taken() from error
                raise
        except OSError as error:
            raise OutputError(f"{self.path.parent} cannot be written: {error.strerror} (output.path).") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._release()

    def check(self) -> None:
        """Raises LostLockError if another writer holds the lock by now, or nobody does."""
        if not self.workspace.is_dir() or _owner_of(self.path) != self.owner:
            raise LostLockError(f"{self.path.parent} was taken over by another writer; this run commits nothing more.")

    def next_part(self, store: Store, batch: int) -> int:
        """The number of the batch's next shard."""
        return next(number for number in itertools.count() if not record_path(store, batch, number).exists())

    def shard_file(self, store: Store, batch: int, part: int) -> Path:
        """The local file that a shard is written to, its final name if the store is local."""
        path = store.shard(batch, part)
        assert isinstance(path, Path)
        return path

    def room(self, size: int, held: Callable[[int], None]) -> contextlib.AbstractContextManager[None]:
        """Wait until there is room for a shard's file, and keep it for the time of the context.

        held: told +1 when the waiting begins and -1 when it ends. A local store needs none: preflight has measured it.
        """
        return contextlib.nullcontext()

    def deliver(self, store: Store, path: Path) -> dict[str, Any]:
        """Bring a finished shard from `shard_file` to its place; returns what its record says of that."""
        return {}

    def write(self, path: Location, data: bytes) -> None:
        """Write a small file whole, or nothing once the lock is lost."""
        write_atomic(path, data, self.workspace)

    def _workspace(self) -> Path:
        workspace: Path = self.path.with_name(f"{self.path.name}.{self.owner}.work")
        return workspace

    def _create(self) -> bool:
        """Put a lock with all its content in place, unless there is one."""
        draft = self.path.with_name(f"{self.path.name}.{self.owner}.new")
        draft.write_text(self._text(0))
        try:
            os.link(draft, self.path)
        except OSError as error:
            # Over NFS a link that was made may be answered with an error; the number of links tells (open(2), O_EXCL).
            if draft.stat().st_nlink == 1:
                if isinstance(error, FileExistsError):
                    return False
                raise
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _remove_dead_lock(self) -> None:
        """Take the present lock out of the way if its owner is dead; raises WriterAliveError if it lives."""
        found = read_lock(self.path)
        if found is None or not self._is_abandoned(found):
            return
        # Of two that find a dead owner, one moves its lock aside first; the other one's rename fails.
        aside = self.path.with_name(f"{self.path.name}.{self.owner}.old")
        try:
            os.rename(self.path, aside)
            if read_lock(aside) == found:
                logger.warning("taking over %s from a writer that died", self.path.parent)
            else:  # the other one was faster, and this is its new lock: put it back
                os.link(aside, self.path)
        except (FileNotFoundError, FileExistsError):
            pass
        finally:
            aside.unlink(missing_ok=True)

    def _is_abandoned(self, found: bytes) -> bool:
        """Whether the owner of the lock with this content is dead; False if the lock became another one meanwhile."""
        owner = parse_lock(found)
        dead = is_dead(owner) if owner else None
        if dead is None:
            logger.warning(
                "%s has a lock of %s, which cannot be looked up from here: watching it for %.0f s",
                *(self.path.parent, _name(owner), STALE),
            )
            changed = self._wait_for_change(found)
            if changed == found:
                return True
            after = parse_lock(changed) if changed else None
            if owner is None or after is None or after["owner"] != owner["owner"]:
                return False
        elif dead:
            return True
        raise WriterAliveError(
            f"{self.path.parent} is being written by {_name(owner)}, which is alive. Wait for it, or end it and "
            "try again.",
            self.path.name,
        )

    def _wait_for_change(self, found: bytes) -> bytes | None:
        """What the lock is after STALE seconds, or as soon as it is not `found` any more."""
        deadline = time.monotonic() + STALE
        while (now := read_lock(self.path)) == found and time.monotonic() < deadline:
            time.sleep(LOOK)
        return now

    def _shut_out_others(self) -> None:
        """Make our workspace and remove all others. Raises WriterAliveError if the lock was lost meanwhile."""
        self.workspace.mkdir()
        try:
            for workspace in self.path.parent.glob(f"{self.path.name}.*.work"):
                if workspace != self.workspace:
                    _remove(workspace)
            self.check()  # a heartbeat that was on its way may have put the old lock back
        except LostLockError as error:
            self._release()
            raise self._taken() from error
        except BaseException:
            self._release()
            raise

    def _taken(self) -> WriterAliveError:
        text = f"{self.path.parent} was taken by another writer just now. Try again."
        return WriterAliveError(text, self.path.name)

    def _exclude(self) -> None:
        """Shut out the owners of the excluded locks; raises WriterAliveError if one lives."""
        if locks := [type(self)(path) for path in self.excluded()]:
            with ThreadPoolExecutor(len(locks), thread_name_prefix="lock") as threads:  # each may take STALE seconds
                for _ in threads.map(type(self).shut_out, locks):
                    pass
            self.check()

    def shut_out(self) -> None:
        """This lock is another's: take it out of the way, for good. Raises WriterAliveError if its owner lives."""
        while True:
            while read_lock(self.path) is not None:
                self._remove_dead_lock()
            for workspace in self.path.parent.glob(f"{self.path.name}.*.work"):
                _remove(workspace)
            if read_lock(self.path) is None:  # a heartbeat that was on its way may have put it back
                return

    def _release(self) -> None:
        if _owner_of(self.path) == self.owner:
            try:
                # Not unlink: were the lock another's by now, our workspace would be gone, and the rename fail.
                os.rename(self.path, self.workspace / "released")
            except OSError as error:
                logger.warning("the lock %s could not be given back: %s", self.path, error)
        shutil.rmtree(self.workspace, ignore_errors=True)

    def _text(self, beat: int) -> str:
        return json.dumps(self._content | {"beat": beat})

    def _beat(self) -> None:
        beat = 0
        while not self._stop.wait(HEARTBEAT):
            beat += 1
            try:
                self._renew(self._text(beat))
            except LostLockError:
                return
            except OSError as error:
                logger.warning("the heartbeat of %s failed: %s", self.path, error)

    def _renew(self, text: str) -> None:
        """Give a sign of life. Raises LostLockError."""
        self.check()
        draft = self.workspace / self.path.name
        draft.write_text(text)
        os.replace(draft, self.path)


def read_lock(path: Location) -> bytes | None:
    """The bytes of a lock; None if there is none at this moment."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # NFS: replaced between opening and reading
            return None
        raise


def parse_lock(content: bytes) -> dict[str, Any] | None:
    """What a lock says; None if it is not one of ours."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) and set(value) >= FIELDS else None


def _name(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "an unknown writer"
    return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"


def _owner_of(path: Location) -> str | None:
    """Who holds the lock; None where nobody does, also not a moment later: a take-over that fails puts it back."""
    for pause in (0.05, 0.2, None):
        if (content := read_lock(path)) is not None:
            owner = parse_lock(content)
            return owner["owner"] if owner else None
        if pause is not None:
            time.sleep(pause)
    return None


def _remove(workspace: Path) -> None:
    """Remove another writer's workspace for good: it may be adding files to it at this moment."""
    deadline = time.monotonic() + REMOVAL
    while True:
        try:
            for file in workspace.iterdir():
                file.unlink(missing_ok=True)
            workspace.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline:
                raise
