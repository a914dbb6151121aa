"""For which hosts a port answers: a page of a browser that was led here under another name (DNS rebinding) is refused.

Used by the metrics and the control endpoint. A page reaches a port of this machine by letting its own name resolve to
it; the browser then sends that name as `Host`. So names are accepted that are known, and no others.
"""

import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

ANYWHERE = ("0.0.0.0", "::")
"""Addresses to listen on that stand for all of this machine's."""


class Hosts:
    """`bound`: the address listened on, as configured. `named`: further hosts, as a setting names them.

    Accepted are this machine's loopback names and addresses, `bound` and `named`. A port that listens everywhere also
    accepts the name of this machine and every IP address: which of them lead here, through NAT or a container's port,
    cannot be known, and a browser that was given an address by number was not led here by a name.
    """

    def __init__(self, bound: str, named: Sequence[str] = ()) -> None:
        self._everywhere = bound in ANYWHERE
        own = socket.gethostname() if self._everywhere else bound
        self._names = {_plain(name) for name in ("localhost", own, *named)}
        self._addresses = {address for name in (bound, *named) if (address := _address(_plain(name))) is not None}

    def accept(self, header: str) -> bool:
        """Whether the value of a `Host` header, with or without a port, is one of them."""
        name = _name_of(header)
        address = _address(name)
        if address is None:
            return name != "" and name in self._names
        return self._everywhere or address.is_loopback or address in self._addresses


def _name_of(header: str) -> str:
    """The host of `host`, `host:port`, `[address]` or `[address]:port`, in small letters; nothing for anything else."""
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
