"""Runs one command so that nothing of it outlives whoever started this: `python guardian.py COMMAND ARGUMENT...`.

Standard input is a pipe from the starter. When it ends, because the starter closed it or died in whatever way, the
command and all its descendants are ended. Should this process itself be killed, the kernel kills the command
(PR_SET_PDEATHSIG; SGLang does the same for its own processes). A process of its own, because that signal follows the
thread that started a child, not its process.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE = 8.0  # seconds between SIGTERM and SIGKILL

libc = ctypes.CDLL(None, use_errno=True)


def start(command: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Run `command` under a guardian; closing the process's stdin, or the end of this process, ends it.

    Its output is added to `log`.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, __file__, *command],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )


def main(command: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends with the pipe, not with a signal to the process group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # descendants whose parent died stay ours to end
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_prepare_child)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ)
        selector.select()
    returncode = child.poll()
    end_descendants()
    if returncode is None:
        returncode = child.poll()
    return -signal.SIGKILL if returncode is None else returncode


def end_descendants() -> None:
    """SIGTERM to every descendant, SIGKILL to those that are left after GRACE."""
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(descendants, timeout=GRACE)
    for process in [*alive, *psutil.Process().children(recursive=True)]:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=GRACE)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def _prepare_child() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(128 - code if code < 0 else code)
