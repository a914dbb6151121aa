"""The Prometheus endpoint: a small HTTP server on a thread of its own, on localhost unless told otherwise.

Started by whoever hosts the scheduler. It serves one registry and knows nothing of what is in it.
"""

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from engine.errors import ConfigError


class MetricsServer:
    """Serves a registry at `url` until `close`. Port 0 takes any free one; `port` is the one taken."""

    def __init__(self, registry: CollectorRegistry, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises: ConfigError, when the address cannot be listened on."""
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                "metrics.port", port, f"cannot listen on {host}: {reason}", "0 takes any free port"
            ) from None
        self.host = host
        self.port: int = self._server.server_port
        self._closed = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
