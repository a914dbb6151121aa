"""The control endpoint: one route, bearer tokens, bounded bodies, on aiohttp.

Served in the scheduler actor's loop. It knows neither Ray nor the scheduler: `carry_out` takes an operation and says
what was decided. Nobody without the token learns anything, and no answer or log line holds it.
"""

import hmac
import logging
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web

from engine.control.place import ControlPlace
from engine.control.requests import MAX_BODY_BYTES, Operation, parse
from engine.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

ANYWHERE = ("0.0.0.0", "::")

CarryOut = Callable[[Operation], dict[str, Any]]
"""What was decided, as JSON has it. Raises: `ConfigError` for the law that the operation breaks."""


class ControlServer:
    """Takes operations at `POST /control` from whoever has the token, from `start` to `close`."""

    def __init__(self, token: str, carry_out: CarryOut) -> None:
        self._token = token
        self._carry_out = carry_out
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post("/control", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> ControlPlace:
        """Listen. Raises: `ConfigError`, where the address cannot be listened on."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                "control.port", port, f"cannot listen on {host}: {reason}", "0 takes any free port"
            ) from None
        address = self._runner.addresses[0]
        name = socket.gethostname() if host in ANYWHERE else f"[{host}]" if ":" in host else host
        return ControlPlace(f"http://{name}:{address[1]}", self._token)

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        try:
            asked = parse(await request.read())
        except ValueError as error:
            return _refusal(400, str(error))
        try:
            return web.json_response(self._carry_out(asked))
        except ConfigError as error:
            return _refusal(409, str(error))
        except EngineError as error:
            return _refusal(500, f"{type(error).__name__}: {error}")

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Before anything of a request is looked at: its token."""
        if not self._holds_token(request):
            return _refusal(401, "the token is not that of this run")
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        except web.HTTPException as error:
            return _refusal(error.status, f"{error.reason}: it is POST /control")

    def _holds_token(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token.encode())
        return same and scheme.lower() == "bearer"


def _refusal(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
