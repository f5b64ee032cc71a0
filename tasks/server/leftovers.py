"""What dead runs left in a staging directory."""

import json
import os
import shutil
from pathlib import Path

import psutil

from tasks.processes import is_dead, seconds_since, start_of
from tasks.server.launch import OWNER

FORGOTTEN = 3600.0  # seconds after which a dump in an attached server's staging is nobody's


def remove_leftovers(staging: Path) -> list[str]:
    """Remove what dead runs left in a staging directory: servers, their folders, dumps that nobody fetched.

    Returns a name for each, with the process ids where servers had to be ended.
    """
    removed = []
    for folder in staging.glob("server-*"):
        try:
            owner = json.loads((folder / OWNER).read_bytes())
        except (OSError, ValueError):
            continue  # being made at this moment
        if is_dead(owner):
            ended = _end_orphans(folder)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(f"{folder.name} with processes {', '.join(map(str, ended))}" if ended else folder.name)
    for dump in [*staging.glob("drillcore-*"), *staging.glob("attached-*/drillcore-*")]:
        if seconds_since(dump.stat().st_mtime) > FORGOTTEN:
            dump.unlink(missing_ok=True)
            removed.append(dump.name)
    return removed


def _end_orphans(folder: Path) -> list[int]:
    """End the server that still writes into a dead run's folder; returns its process ids.

    The guardian ends it when the run dies; this is for a guardian that died in the same moment.
    """
    ended = []
    for file in folder.glob("ready.*.json"):
        ready = json.loads(file.read_bytes())
        if start_of(ready["pid"]) != ready["started"]:
            continue
        session = os.getsid(ready["pid"])  # a guardian's, with all its server's processes
        if session == os.getsid(0):
            continue
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session:
                    process.kill()
                    ended.append(process.pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
    return ended
