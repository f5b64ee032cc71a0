"""Ports: is one free, who has it, give me any."""

import socket

import psutil

from tasks.errors import SetupError


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_port(host: str, port: int, field: str) -> None:
    """Raises SetupError naming the process that holds the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return
        except OSError as error:
            reason = error.strerror
    raise SetupError(f"Port {port} on {host} cannot be used: {_holder(port) or reason}. End it, or change {field}.")


def _holder(port: int) -> str | None:
    for connection in psutil.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "a process of another user listens on it"
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "unknown command"
            return f"process {connection.pid} listens on it ({command[:120]})"
    return None
