"""Who a process is, so that another one can tell later whether it still lives."""

import os
import socket
import time
from pathlib import Path
from typing import Any


def identity() -> dict[str, Any]:
    """This process, and the world in which its pid means something.

    `started` is in clock ticks since the boot: a start by the wall clock would change when that clock is set.
    """
    _, started = _state_and_start(os.getpid())
    return {"host": socket.gethostname(), "world": _world(), "pid": os.getpid(), "started": started}


def is_dead(owner: dict[str, Any]) -> bool | None:
    """Whether the process of an `identity` is gone; None if this process cannot know (another host or container)."""
    if owner["host"] != socket.gethostname() or owner["world"] != _world():
        return None
    try:
        state, started = _state_and_start(owner["pid"])
    except (FileNotFoundError, ProcessLookupError):
        return True
    # A pid is given out again; a zombie has done its last write.
    return started != owner["started"] or state in "ZX"


def start_of(pid: int) -> str | None:
    """When a process started, as the capture plugin writes it down: ticks since the kernel's boot. None: it is dead."""
    try:
        state, started = _state_and_start(pid)
    except OSError:
        return None
    return None if state in "ZX" else str(started)


def seconds_since(moment: float) -> float:
    """Seconds since a time.time() that another process wrote down."""
    return time.time() - moment


def _state_and_start(pid: int) -> tuple[str, int]:
    """Fields 3 and 22 of /proc/PID/stat, see proc_pid_stat(5); field 2, the name, may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _world() -> str:
    """This boot of the kernel and this pid namespace: a container has its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
