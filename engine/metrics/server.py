"""The HTTP endpoint of a run: `/metrics` for Prometheus, `/status` for `engine top`.

Runs on threads of its own and never waits for or slows the scheduler. It serves what it is given and knows nothing of
what is in it.
"""

import errno
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from engine.errors import ConfigError

log = logging.getLogger(__name__)

Describe = Callable[[], dict[str, Any]]
"""What `/status` answers, as JSON has it."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = 30

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def check_address(host: str, port: int) -> None:
    """Whether a run could listen there now; nothing does afterwards. Raises: ConfigError."""
    kind = _IPv6Server if ":" in host else _Server
    try:
        kind((host, port), _Quiet).server_close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _refused(host, port, error) from None


def _refused(host: str, port: int, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, socket.gaierror | UnicodeError) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        law, holds = f"cannot be listened on: {reason}", "127.0.0.1 is for this machine alone, 0.0.0.0 for all"
        return ConfigError("metrics.host", host, law, holds)
    return ConfigError("metrics.port", port, f"cannot listen on {host}: {reason}", "0 takes any free port")


class MetricsServer:
    """Serves a registry at `url` until `close`. Port 0 takes any free one; `port` is the one taken."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        describe: Describe | None = None,
    ) -> None:
        """Raises: ConfigError, when the address cannot be listened on."""
        app = _application(registry, describe)
        kind = _IPv6Server if ":" in host else _Server
        try:
            self._server = make_server(host, port, app, server_class=kind, handler_class=_Quiet)
        except (OSError, OverflowError, UnicodeError) as error:
            raise _refused(host, port, error) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.host = host
        self.port: int = self._server.server_port
        self._closed = False

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Stop serving and free the port. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _application(registry: CollectorRegistry, describe: Describe | None) -> Any:
    metrics: Any = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/status" or describe is None:
            return list(metrics(environ, start_response))
        body = json.dumps(describe(), allow_nan=False).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return answer
