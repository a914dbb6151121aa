"""Which `Host` headers a port answers for."""

import socket

import pytest

from engine.control.http_listener import Hosts

LOOPBACK = [
    "localhost",
    "LOCALHOST.",
    "localhost:80",
    "127.0.0.1",
    "127.0.0.2:9",
    "[::1]",
    "[::1]:80",
    "[::ffff:127.0.0.1]",
]
NOBODY = ["", ":80", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "a@localhost", "localhost:x"]
NOBODY += ["[evil]", "[::1", "[::1]x", "::1", "127.0.0.1,localhost", "localhost/x", "0x7f.1"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "10.0.0.7", "node7", "0.0.0.0", "::"])
def test_loopback_is_always_accepted_and_a_strangers_name_never(bound: str) -> None:
    hosts = Hosts(bound)
    assert [host for host in LOOPBACK if not hosts.accept(host)] == []
    assert [host for host in NOBODY if hosts.accept(host)] == []


def test_the_address_that_is_listened_on_is_accepted() -> None:
    assert Hosts("10.0.0.7").accept("10.0.0.7:9090") and not Hosts("10.0.0.7").accept("10.0.0.8")
    assert Hosts("Node7").accept("node7:9090") and not Hosts("node7").accept("node8")
    assert Hosts("fd00::7").accept("[fd00:0::7]:9090") and not Hosts("fd00::7").accept("[fd00::8]")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_a_port_that_listens_everywhere_accepts_addresses_and_its_machines_name(bound: str) -> None:
    hosts = Hosts(bound)
    assert all(map(hosts.accept, ["10.0.0.7:9090", "[fd00::7]", f"{socket.gethostname()}:9090"]))
    assert not hosts.accept("metrics.example")


def test_a_setting_names_further_hosts() -> None:
    hosts = Hosts("127.0.0.1", ["Metrics.example", "10.0.0.9", "[fd00::9]"])
    assert all(map(hosts.accept, ["metrics.example:443", "10.0.0.9", "[fd00::9]:80"]))
    assert not hosts.accept("other.example")
