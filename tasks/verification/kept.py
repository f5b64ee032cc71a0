"""What a verification has read so far, so that one that was killed goes on where it was: a line of JSON a shard.

A line counts while shard and record are the same (files: size, times, inode; objects: size, time, ETag), for KEPT
seconds, until a verification passes: the one after that reads everything again, since time damages files without
touching their dates.
"""

import json
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from tasks.files import sha256_of_json
from tasks.storage import Location, side_folder
from tasks.storage.s3path import ObjectFacts
from tasks.store.layout import Store
from tasks.store.record import Record, record_path
from tasks.verification.findings import Problem
from tasks.verification.shards import FIGURES, Checked, Figures

VERSION = 2  # of the checks: lines of other ones do not count
KEPT = 3 * 86400.0  # seconds
FILE = "verified.jsonl"  # in the store's logs


class KeptChecks:
    """The lines of an unfinished verification, to look up and to add to. A context manager; for one thread."""

    def __init__(self, store: Store, context: dict[str, str], fresh: bool):
        """context: what the checks depend on beside the files. fresh: forget what is there."""
        self.path = _file(store)
        self.store = store
        self.context = sha256_of_json({"version": VERSION, **context})
        self.found: dict[str, int] = {}
        """Where the line of each identity begins."""
        self.fresh = fresh
        self.file: BinaryIO

    def __enter__(self) -> "KeptChecks":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.fresh:
            forget(self.store)
        self.file = self.path.open("ab+")
        self._read()
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def _read(self) -> None:
        self.file.seek(0)
        while True:
            at = self.file.tell()
            line = self.file.readline()
            if not line:
                return
            try:
                value = json.loads(line)
                if value["context"] == self.context and 0 <= time.time() - value["at"] <= KEPT:
                    self.found[value["identity"]] = at
            except (ValueError, KeyError, TypeError):
                if not line.endswith(b"\n"):  # half a line, of a verification that was killed
                    self.file.write(b"\n")

    def get(self, record: Record) -> Checked | None:
        """What an earlier, unfinished verification found in this shard."""
        at = self.found.get(self._identity(record))
        if at is None:
            return None
        self.file.seek(at)
        value = json.loads(self.file.readline())
        figures = Figures(**{name: np.array(value["figures"][name], dtype) for name, dtype in FIGURES.items()})
        return Checked(value["record"], value["bytes"], [Problem(**line) for line in value["problems"]], figures)

    def add(self, record: Record, checked: Checked) -> None:
        """Keep what was found; what has a problem is read again next time."""
        if checked.problems:
            return
        line = vars(checked) | {"figures": vars(checked.figures), "context": self.context, "at": time.time()}
        text = orjson.dumps(line | {"identity": self._identity(record)}, option=orjson.OPT_SERIALIZE_NUMPY)
        self.file.write(text + b"\n")
        self.file.flush()

    def _identity(self, record: Record) -> str:
        files = [record_path(self.store, record.batch, record.part)]
        if record.file is not None:
            files.append(self.store.shards / record.file)
        return json.dumps([[path.name, *_facts(path)] for path in files])


def forget(store: Store) -> None:
    """A verification passed: the next one reads everything."""
    _file(store).unlink(missing_ok=True)


def _file(store: Store) -> Path:
    """In the store's logs, or on this machine where the store lies in a bucket: it is added to all the time."""
    return store.logs / FILE if isinstance(store.logs, Path) else side_folder(store.root) / FILE


def _facts(path: Location) -> list[Any]:
    try:
        facts = path.stat()
    except OSError:
        return []
    if isinstance(facts, ObjectFacts):
        return [facts.st_size, facts.st_mtime, facts.etag]
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
