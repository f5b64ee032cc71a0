"""Who a process is, so that another one can tell later whether it still lives."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil


def identity() -> dict[str, Any]:
    """This process, and the world in which its pid means something."""
    process = psutil.Process()
    return {"host": socket.gethostname(), "world": _world(), "pid": process.pid, "started": process.create_time()}


def is_dead(owner: dict[str, Any]) -> bool | None:
    """Whether the process of an `identity` is gone; None if this process cannot know (another host or container)."""
    if owner["host"] != socket.gethostname() or owner["world"] != _world():
        return None
    try:
        process = psutil.Process(owner["pid"])
        # A pid is given out again; a zombie has done its last write.
        return abs(process.create_time() - owner["started"]) > 1 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_of(pid: int) -> str | None:
    """When a process started, as the capture plugin writes it down: ticks since the kernel's boot. None: it is dead."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = facts.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def seconds_since(moment: float) -> float:
    """Seconds since a time.time() that another process wrote down."""
    return time.time() - moment


def _world() -> str:
    """This boot of the kernel and this pid namespace: a container has its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
