"""One writer a store: a lock file with owner and heartbeat. No flock, which NFS does not keep."""

import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from tasks.errors import OutputError
from tasks.files import write_json

HEARTBEAT = 15.0  # seconds between two signs of life
STALE = 120.0  # seconds without one after which an owner on another host counts as dead

logger = logging.getLogger(__name__)


class WriterLock:
    """Held while a run writes to a store. `check` raises once the lock is lost, so that nothing more is committed."""

    def __init__(self, path: Path):
        self.path = path
        self.owner = uuid.uuid4().hex
        self.lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)

    def __enter__(self) -> "WriterLock":
        """Take the lock. Raises OutputError naming the owner if another writer is alive."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._create():
            owner = _read(self.path)
            if owner is not None and not _is_dead(owner):
                raise OutputError(
                    f"{self.path.parent} is being written by process {owner['pid']} on {owner['host']} (last sign of "
                    f"life {time.time() - owner['heartbeat']:.0f} s ago). Wait for it, or end it and try again."
                )
            aside = self.path.with_name(f"{self.path.name}.{self.owner}")
            os.rename(self.path, aside)  # of two that find a dead owner, one gets here first; the other fails below
            aside.unlink()
            if not self._create():
                raise OutputError(f"{self.path.parent} was taken by another writer just now. Try again.")
            logger.warning("took over %s from a writer that died", self.path.parent)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._is_ours():
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises OutputError if another writer holds the lock by now."""
        if self.lost or not self._is_ours():
            self.lost = True
            raise OutputError(f"{self.path.parent} was taken over by another writer; this run commits nothing more.")

    def _create(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump(self._content(), file)
        return True

    def _content(self) -> dict[str, Any]:
        process = psutil.Process()
        return {
            "owner": self.owner,
            "host": socket.gethostname(),
            "pid": process.pid,
            "process_started": process.create_time(),
            "heartbeat": time.time(),
        }

    def _is_ours(self) -> bool:
        found = _read(self.path)
        return found is not None and found["owner"] == self.owner

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            try:
                self.check()
                write_json(self.path, self._content())
            except OutputError:
                return
            except OSError as error:
                logger.warning("the heartbeat of %s failed: %s", self.path, error)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
        return value if {"owner", "host", "pid", "process_started", "heartbeat"} <= set(value) else None
    except (OSError, ValueError):
        return None


def _is_dead(owner: dict[str, Any]) -> bool:
    if owner["host"] == socket.gethostname():
        try:
            return abs(psutil.Process(owner["pid"]).create_time() - owner["process_started"]) > 1
        except psutil.NoSuchProcess:
            return True
    return time.time() - owner["heartbeat"] > STALE
