"""An HTTP listener on aiohttp that limits connections, request sizes and the time a request may take to arrive.

Used by the metrics endpoint, the control endpoint and the gateway, each in a separate event loop. It must never repeat
request data in an answer or a log, because headers hold keys. aiohttp repeats data of a malformed request, so this
module answers such requests itself.
"""

import asyncio
import logging
import socket
import traceback
from asyncio import AbstractEventLoop, BaseTransport, Task, TimerHandle
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

# -- accepted hosts ----------------------------------------------------------------------------------------------------


ANYWHERE = ("0.0.0.0", "::")
"""Addresses that mean: listen on all addresses of this machine."""


class Hosts:
    """`bound`: the configured listen address. `named`: more hosts, from the configuration.

    Accepts this machine's loopback names and addresses, `bound` and `named`. A port that listens on all addresses also
    accepts this machine's host name and every IP address. With NAT or container ports, the engine cannot know which
    addresses lead here. A numeric address is safe, because DNS rebinding needs a name.
    """

    def __init__(self, bound: str, named: Sequence[str] = ()) -> None:
        self._everywhere = bound in ANYWHERE
        own = socket.gethostname() if self._everywhere else bound
        self._names = {_plain(name) for name in ("localhost", own, *named)}
        self._addresses = {address for name in (bound, *named) if (address := _address(_plain(name))) is not None}

    def accept(self, header: str) -> bool:
        """Whether to accept the value of a `Host` header, with or without a port."""
        name = _name_of(header)
        address = _address(name)
        if address is None:
            return name != "" and name in self._names
        return self._everywhere or address.is_loopback or address in self._addresses


def _name_of(header: str) -> str:
    """The host of `host`, `host:port`, `[address]` or `[address]:port`, in lower case; empty for anything else."""
    text = header.strip()
    if text.startswith("["):
        name, closed, port = text[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") else port and "?"
        name = name if closed and _address(name) is not None else ""
    else:
        name, _, port = text.partition(":")
    return _plain(name) if not port or (port.isascii() and port.isdigit()) else ""


def _plain(name: str) -> str:
    return name.strip().removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


# -- connections -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

CLOSING_S = 1.0
"""Time for running requests to end when the listener closes, and for a refused client to read its answer."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Answers a request. Raises: `Refused`."""
Refuse = Callable[[int, str], web.StreamResponse]
"""Makes the answer to a refused request from its status and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """The limits of one listener."""

    connections: int = 64
    """Maximum open connections. A new one above it replaces the oldest idle one; if none is idle, it is closed."""
    head_s: float = 10.0
    """From the connection to the end of the first request's headers; from an answer to the next request's headers."""
    body_s: float = 30.0
    """From the end of the headers to the end of the body. The client must read an answer within `head_s` + `body_s`."""
    body_bytes: int = 1 << 16


class Refused(Exception):
    """Refuses a request. `reason` must repeat no request data."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class Listener:
    """Answers requests with `handle`, from `start` to `close`. `hosts`: accepted hosts; None accepts any host.
    `cancels`: cancel a handler when its client disconnects."""

    def __init__(
        self,
        handle: Handle,
        refuse: Refuse,
        bounds: ConnectionBounds,
        *,
        hosts: Hosts | None = None,
        cancels: bool = False,
    ) -> None:
        self.bounds = bounds
        self.refuse = refuse
        self.waiting: dict[_Connection, None] = {}
        """Idle connections, oldest first."""
        self._open = 0
        self._handle = handle
        self._hosts = hosts
        self._cancels = cancels
        self._listening: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> tuple[Any, ...]:
        """Answer on a socket that listens (`listening_address.listen`). Returns its address."""
        loop = asyncio.get_running_loop()
        self._server = web.Server(self._answer, request_factory=self._make_request, handler_cancellation=self._cancels)

        def connect() -> _Connection:
            return _Connection(self, self._server, loop)

        self._listening = await loop.create_server(connect, sock=sock)
        address: tuple[Any, ...] = self._listening.sockets[0].getsockname()
        return address

    async def close(self) -> None:
        """Stop listening and close every connection. A second call does nothing."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()
            self._server.pre_shutdown()
            await self._server.shutdown(CLOSING_S)

    async def body(self, request: web.BaseRequest) -> bytes:
        """The whole body of a request. Raises: `Refused` if it is too large, too slow or malformed."""
        try:
            async with asyncio.timeout(self.bounds.body_s):
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await request.writer.write(CONTINUE)
                    request.writer.output_size = 0
                return await request.read()
        except TimeoutError:
            raise Refused(408, f"the body took longer than {self.bounds.body_s:g} s to arrive") from None
        except web.HTTPRequestEntityTooLarge:
            raise Refused(413, f"the body is larger than {self.bounds.body_bytes} bytes") from None
        except (web.RequestPayloadError, HttpProcessingError, ValueError):
            raise Refused(400, "the body is not well-formed") from None

    def admit(self, connection: "_Connection") -> bool:
        """Whether to accept another connection. At the limit, this closes the oldest idle one."""
        if self._open >= self.bounds.connections:
            if not self.waiting:
                return False
            next(iter(self.waiting)).end()
        self._open += 1
        self.waiting[connection] = None
        return True

    def leave(self, connection: "_Connection") -> None:
        """Remove an admitted connection that has closed."""
        self.waiting.pop(connection, None)
        self._open -= 1

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: Task[None],
    ) -> web.BaseRequest:
        loop, most = asyncio.get_running_loop(), self.bounds.body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.begin()
        try:
            given = request.headers.getall("Host", ())
            if self._hosts is not None and not (len(given) == 1 and self._hosts.accept(given[0])):
                raise Refused(421, "the Host of the request is not accepted; add it to metrics.hosts or control.hosts")
            return await self._handle(request)
        except Refused as error:
            answer = self.refuse(error.status, error.reason)
            if not request.content.is_eof():
                answer.force_close()
            return answer
        finally:
            connection.rest()


class _Connection(web.RequestHandler):
    """aiohttp's handler of one connection. It adds a time limit for the first request and never logs request data."""

    def __init__(self, listener: Listener, server: web.Server, loop: AbstractEventLoop) -> None:
        self._listener = listener
        self._admitted = False
        self._timer: TimerHandle | None = None
        patience = listener.bounds.head_s
        silent: dict[str, Any] = {"access_log": None}
        super().__init__(server, loop=loop, keepalive_timeout=patience, lingering_time=CLOSING_S, **silent)

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._admitted = self._listener.admit(self)
        if not self._admitted:
            self.end()
            return
        self._end_in(self._listener.bounds.head_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._admitted:
            self._admitted = False
            self._listener.leave(self)
        self._forget_timer()
        super().connection_lost(exc)

    def begin(self) -> None:
        """The headers of a request have arrived."""
        self._forget_timer()
        self._listener.waiting.pop(self, None)

    def rest(self) -> None:
        """The answer is ready. The client must read it; then another request may come."""
        if self._admitted:
            self._listener.waiting[self] = None
            self._end_in(self._listener.bounds.head_s + self._listener.bounds.body_s)

    def end(self) -> None:
        """Close the connection immediately."""
        if self._admitted:
            self._admitted = False
            self._listener.leave(self)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that aiohttp could not read or whose handler failed. It repeats no request data."""
        self.begin()
        if status < 500:
            log.info("a request that is not well-formed was refused (%s)", type(exc).__name__)
        else:
            self.log_exception("a request could not be answered", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: no other can be sent")
        reason = "the request is not well-formed HTTP" if status < 500 else "the request could not be answered"
        answer = self._listener.refuse(status, reason)
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log the stack and the type of an exception, but not its message: that may repeat request data."""
        error = kw.get("exc_info")
        frames = traceback.format_tb(error.__traceback__) if isinstance(error, BaseException) else []
        log.error("%s: %s\n%s", args[0] if args else "failed", type(error).__name__, "".join(frames))

    def log_debug(self, *args: Any, **kw: Any) -> None:
        """Log nothing: aiohttp's message would repeat request data."""

    def _end_in(self, seconds: float) -> None:
        self._forget_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
