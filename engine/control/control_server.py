"""The control endpoint: one route, bearer tokens, known hosts, and bounded bodies, connections and waits.

It runs on the event loop of the run, and calls `carry_out` for each operation. It answers requests without
the token only with an error. No answer and no log line contains the token or any other header.
"""

import hmac
import socket
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from engine.control.address_file import ControlPlace
from engine.control.http_listener import ANYWHERE, ConnectionBounds, Hosts, Listener, Refused
from engine.control.listening_address import listen
from engine.control.requests import MAX_BODY_BYTES, Operation, parse
from engine.errors import ConfigError, EngineError

BOUNDS = ConnectionBounds(body_bytes=MAX_BODY_BYTES)
CarryOut = Callable[[Operation], dict[str, Any]]
"""Carries out an operation and returns its result as JSON data. Raises: `ConfigError` for a broken law."""


class ControlServer:
    """Accepts operations with the token at `POST /control`, from `start` to `close`."""

    def __init__(self, token: str, carry_out: CarryOut, bounds: ConnectionBounds = BOUNDS) -> None:
        self._token = token
        self._carry_out = carry_out
        self._bounds = bounds
        self._listener: Listener | None = None

    async def start(self, host: str, port: int, hosts: Sequence[str] = ()) -> ControlPlace:
        """Listen. `hosts`: additional host names under which requests are accepted. Raises: `ConfigError` if it cannot
        listen at the address."""
        self._listener = Listener(self._take, _refusal, self._bounds, hosts=Hosts(host, hosts))
        address = await self._listener.start(listen(host, port, "control"))
        name = socket.gethostname() if host in ANYWHERE else f"[{host}]" if ":" in host else host
        return ControlPlace(f"http://{name}:{address[1]}", self._token)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    async def _take(self, request: web.BaseRequest) -> web.StreamResponse:
        """Check the token first, then everything else."""
        assert self._listener is not None
        if not self._holds_token(request):
            raise Refused(401, "the token does not belong to this run")
        if (request.method, request.path) != ("POST", "/control"):
            known = request.path == "/control"
            raise (
                Refused(405, f"use POST /control, not {request.method}")
                if known
                else Refused(404, f"unknown path {request.path}; use POST /control")
            )
        try:
            operation = parse(await self._listener.body(request))
        except ValueError as error:
            raise Refused(400, str(error)) from None
        try:
            return web.json_response(self._carry_out(operation))
        except ConfigError as error:
            raise Refused(409, str(error)) from None
        except EngineError as error:
            raise Refused(500, f"{type(error).__name__}: {error}") from None

    def _holds_token(self, request: web.BaseRequest) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token.encode())
        return same and scheme.lower() == "bearer"


def _refusal(status: int, reason: str) -> web.StreamResponse:
    return web.json_response({"error": reason}, status=status)
