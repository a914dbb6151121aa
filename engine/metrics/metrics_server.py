"""The HTTP endpoint of a run: `/metrics` for Prometheus, `/status` for `engine top`.

It runs on its own thread and event loop and never delays the scheduler. It answers only requests for known hosts, with
a bounded number of connections and bounded waits.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

from engine.control.http_listener import ConnectionBounds, Hosts, Listener, Refused
from engine.control.listening_address import listen

log = logging.getLogger(__name__)

Describe = Callable[[], dict[str, Any]]
"""Returns the content of `/status` as plain JSON data."""


class MetricsServer:
    """Serves a registry at `url` until `close`. Port 0 chooses any free port; `port` is the chosen one."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        hosts: Sequence[str] = (),
        describe: Describe | None = None,
    ) -> None:
        """`hosts`: additional host names under which requests are accepted. Raises: ConfigError if it cannot listen
        there."""
        self._scrape: Any = make_aiohttp_handler(registry)
        self._describe = describe
        sock = listen(host, port, "metrics")
        self.host = host
        self.port: int = sock.getsockname()[1]
        self._listener = Listener(self._answer, _refusal, ConnectionBounds(), hosts=Hosts(host, hosts))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="metrics", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listener.start(sock), self._loop).result()
        self._closed = False

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Stop serving and free the port. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._listener.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "the metrics are read-only; use GET /metrics or GET /status")
        if request.path == "/status" and self._describe is not None:
            body = json.dumps(self._describe(), allow_nan=False).encode()
            return web.Response(body=body, content_type="application/json")
        scraped: web.Response = await self._scrape(request)
        return scraped


def _refusal(status: int, reason: str) -> web.StreamResponse:
    return web.Response(text=f"{reason}\n", status=status)
