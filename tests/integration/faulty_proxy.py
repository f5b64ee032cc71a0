"""The fault injector of the S3 tests: an HTTP proxy that passes requests on, but for those that a fault is meant for.

It sits between boto3 and a real store, so what is tested is boto3, our code and the store together, with a network that
fails in ways that can be chosen. Each request has a connection of its own.
"""

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

PIECE = 64 << 10  # bytes
ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'


@dataclass
class Request:
    """The head of a request."""

    method: str
    target: str
    """Path and query."""
    headers: dict[str, str]
    raw: list[bytes]

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", 0))


@dataclass
class Fault:
    """What happens to the next `count` requests that match.

    answer: the store never sees it, the client gets `status` and `code`. drop: the connection is closed after `after`
    bytes of the body. hang: nothing is answered. corrupt: a byte of the body is another one. lose: the store does it,
    and the answer is lost. cut: the answer is closed after `after` bytes.
    """

    kind: Literal["answer", "drop", "hang", "corrupt", "lose", "cut"]
    method: str = ".*"
    target: str = ""
    """Regular expression that is searched for in path and query."""
    header: str = ""
    """Name of a header that the request must have, in small letters."""
    count: int = 1
    status: int = 503
    code: str = "SlowDown"
    after: int = 0
    met: int = 0
    """Requests that it has spoiled."""

    def matches(self, request: Request) -> bool:
        return (
            self.met < self.count
            and re.fullmatch(self.method, request.method) is not None
            and re.search(self.target, request.target) is not None
            and (not self.header or self.header in request.headers)
        )


@dataclass
class FaultyProxy:
    """Listens on a port of its own, for the time of its context."""

    upstream: int
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Method and target of each request that was seen."""
    rate: float | None = None
    """Bytes a second of all request bodies together; None: as fast as it goes."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def seen(self, pattern: str) -> int:
        """Requests whose 'METHOD target' has this regular expression in it."""
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def __enter__(self) -> "FaultyProxy":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        self._next_byte = 0.0
        start = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # the connections' ends are seen

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._pass_on(reader, writer)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = _parse(await reader.readuntil(b"\r\n\r\n"))
        self.requests.append(f"{request.method} {request.target}")
        fault = next((fault for fault in self.faults if fault.matches(request)), None)
        if fault:
            fault.met += 1
        if "expect" in request.headers:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault and fault.kind == "hang":
            await asyncio.sleep(3600)
        if fault and fault.kind == "answer":
            async for _ in self._body(reader, request.length):
                pass
            text = b"" if request.method == "HEAD" or fault.status < 300 else ERROR.format(code=fault.code).encode()
            head = f'HTTP/1.1 {fault.status} -\r\ncontent-length: {len(text)}\r\netag: "0"\r\nconnection: close\r\n\r\n'
            writer.write(head.encode() + text)
            await writer.drain()
            return
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self.upstream, limit=1 << 20)
        try:
            store_writer.write(b"\r\n".join(request.raw) + b"\r\nConnection: close\r\n\r\n")
            sent = 0
            async for piece in self._body(reader, request.length):
                if fault and fault.kind == "drop" and sent + len(piece) > fault.after:
                    return
                if fault and fault.kind == "corrupt" and not sent:
                    piece = bytes([piece[0] ^ 1]) + piece[1:]
                store_writer.write(piece)
                await store_writer.drain()
                sent += len(piece)
            left = fault.after if fault and fault.kind == "cut" else None
            while piece := await store_reader.read(PIECE):
                if fault and fault.kind == "lose":
                    continue
                if left is not None and len(piece) >= left:
                    writer.write(piece[:left])
                    await writer.drain()
                    return
                left = None if left is None else left - len(piece)
                writer.write(piece)
                await writer.drain()
        finally:
            store_writer.close()

    async def _body(self, reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
        while length:
            piece = await reader.read(min(PIECE, length))
            if not piece:
                raise ConnectionError("the client hung up")
            length -= len(piece)
            if self.rate:
                now = self._loop.time()
                self._next_byte = max(now, self._next_byte) + len(piece) / self.rate
                await asyncio.sleep(self._next_byte - now)
            yield piece


def _parse(head: bytes) -> Request:
    """Without the lines that concern this connection only."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    method, target, _ = first.decode().split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.decode().partition(":") for line in lines)}
    own = (b"expect:", b"connection:")
    return Request(method, target, headers, [first, *(line for line in lines if not line.lower().startswith(own))])


@contextlib.contextmanager
def spoiling(proxy: FaultyProxy, *faults: Fault) -> Iterator[FaultyProxy]:
    """Faults for the time of the context."""
    proxy.faults[:] = faults
    try:
        yield proxy
    finally:
        proxy.faults.clear()
