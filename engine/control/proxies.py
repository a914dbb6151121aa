"""Keeps calls to this machine's own servers away from the proxies that the environment names.

Clients such as httpx, urllib and requests send every call to the environment's proxies, except to the hosts in
`NO_PROXY`. A proxy cannot reach a gateway, judge or collector that listens on this machine alone. The processes of a
run call `exempt_own_servers` before any client is made; `gateway.runners` gives the same exemption to programs.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

LOOPBACK = ("localhost", "127.0.0.1", "::1")
NAMES = ("no_proxy", "NO_PROXY")


def exemption(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """The variables that exempt the loopback and `hosts` from the proxies of an environment; none without a proxy."""
    if not any(name.lower().endswith("_proxy") and name not in NAMES for name in environment):
        return {}
    listed = [host.strip() for name in NAMES for host in environment.get(name, "").split(",")]
    exempt = ["*"] if "*" in listed else [*filter(None, listed), *LOOPBACK, *hosts]
    return dict.fromkeys(NAMES, ",".join(dict.fromkeys(exempt)))


def exempt_own_servers(*hosts: str) -> None:
    """Exempt the loopback and `hosts`, with their addresses, for this process and those that it starts."""
    addresses: list[str] = []
    for host in hosts:
        with suppress(OSError, UnicodeError):  # the server that listens there refuses it by its field
            addresses += [str(found[4][0]) for found in socket.getaddrinfo(host, None)]
    os.environ.update(exemption(os.environ, *hosts, *addresses))
