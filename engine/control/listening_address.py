"""The address at which a server of a run listens, for metrics, control or agents.

The command line checks it before a run starts, without loading the server; the server opens it.
"""

import errno
import socket
from collections.abc import Iterable
from contextlib import ExitStack

from engine.errors import ConfigError


def check_addresses(servers: Iterable[tuple[str, str, int]]) -> None:
    """Check that a run can listen at all addresses together, without keeping them. `servers`: the section of each in
    the configuration, its host and its port. Raises: ConfigError."""
    with ExitStack() as opened:
        for section, host, port in servers:
            opened.enter_context(listen(host, port, section))


def listen(host: str, port: int, section: str) -> socket.socket:
    """A socket that listens at an address; port 0: any free port. `section`: of the configuration. Raises:
    ConfigError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()
    except (OSError, OverflowError, UnicodeError) as error:
        sock.close()
        raise _refused(host, port, error, section) from None
    return sock


def _refused(host: str, port: int, error: Exception, section: str) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, socket.gaierror | UnicodeError) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        law, fix = (
            f"is not an address of this machine: {reason}",
            "use 127.0.0.1 for this machine alone, 0.0.0.0 for all",
        )
        return ConfigError(f"{section}.host", host, law, fix)
    return ConfigError(f"{section}.port", port, f"cannot be opened on {host}: {reason}", "use 0 for any free port")
