"""The hosts that a port accepts. This refuses web pages that reach the port under another name (DNS rebinding).

Used by the metrics and control endpoints. In a DNS rebinding attack, a page's host name resolves to this machine, and
the browser sends that name as `Host`. A port therefore accepts known names only.
"""

import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

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
