"""One writer a store: a lock file with owner and heartbeat. No flock, which NFS does not keep."""

import json
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from tasks.errors import LostLockError, OutputError
from tasks.files import write_json
from tasks.processes import identity, is_dead, seconds_since

HEARTBEAT = 15.0  # seconds between two signs of life
STALE = 120.0  # seconds without one after which an owner elsewhere counts as dead
FIELDS = {"owner", "host", "world", "pid", "started", "heartbeat"}

logger = logging.getLogger(__name__)


class WriterLock:
    """Held while a run writes to a store. `check` raises once the lock is lost, so that nothing more is committed."""

    def __init__(self, path: Path):
        self.path = path
        self.owner = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)

    def __enter__(self) -> "WriterLock":
        """Take the lock. Raises OutputError naming the owner if another writer is alive."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._create():
                self._take_over()
        except OSError as error:
            raise OutputError(f"{self.path.parent} cannot be written: {error.strerror} (output.path).") from error
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if _owner_of(self.path) == self.owner:
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises LostLockError if another writer holds the lock by now, or nobody does."""
        if _owner_of(self.path) != self.owner:
            raise LostLockError(f"{self.path.parent} was taken over by another writer; this run commits nothing more.")

    def _take_over(self) -> None:
        owner = _read(self.path)
        if owner is not None and not _gone(owner):
            raise OutputError(
                f"{self.path.parent} is being written by process {owner['pid']} on {owner['host']} (last sign of life "
                f"{seconds_since(owner['heartbeat']):.0f} s ago). Wait for it, or end it and try again."
            )
        # Of two that find a dead owner, one moves its lock aside first; the other one's rename fails.
        aside = self.path.with_name(f"{self.path.name}.{self.owner}")
        try:
            os.rename(self.path, aside)
            moved = _read(aside)
            if moved == owner and self._create():
                logger.warning("took over %s from a writer that died", self.path.parent)
                return
            if moved != owner:  # the other one was faster, and this is its new lock: put it back
                os.link(aside, self.path)
        except (FileNotFoundError, FileExistsError):
            pass
        finally:
            aside.unlink(missing_ok=True)
        raise OutputError(f"{self.path.parent} was taken by another writer just now. Try again.")

    def _create(self) -> bool:
        """Put a lock with all its content in place, unless there is one."""
        draft = self.path.with_name(f"{self.path.name}.{self.owner}.new")
        draft.write_text(json.dumps(self._content()))
        try:
            os.link(draft, self.path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def _content(self) -> dict[str, Any]:
        return {"owner": self.owner, "heartbeat": time.time(), **identity()}

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            try:
                self.check()
                write_json(self.path, self._content())
            except LostLockError:
                return
            except OSError as error:
                logger.warning("the heartbeat of %s failed: %s", self.path, error)


def _read(path: Path) -> dict[str, Any] | None:
    """A lock's content; None if it is no lock. Raises OSError where the file cannot be read now."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return None
    return value if isinstance(value, dict) and set(value) >= FIELDS else None


def _owner_of(path: Path) -> str | None:
    """Who holds the lock; None where nobody does, also not a moment later: a take-over that fails puts it back."""
    for pause in (0.05, 0.2, None):
        try:
            found = _read(path)
            return found["owner"] if found else None
        except FileNotFoundError:
            if pause is not None:
                time.sleep(pause)
    return None


def _gone(owner: dict[str, Any]) -> bool:
    dead = is_dead(owner)
    return seconds_since(owner["heartbeat"]) > STALE if dead is None else dead
