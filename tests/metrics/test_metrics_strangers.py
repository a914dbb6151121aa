"""The metrics endpoint among strangers: other hosts' names, and what is repeated of requests."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.metrics.metrics_server import MetricsServer

SECRET = b"hunter2-and-more"


@contextmanager
def serving(**how: Any) -> Iterator[MetricsServer]:
    server = MetricsServer(CollectorRegistry(), describe=lambda: {"step": 3}, **how)
    try:
        yield server
    finally:
        server.close()


def ask(server: MetricsServer, *lines: bytes, path: bytes = b"/status") -> bytes:
    return send(server, b"\r\n".join((b"GET %s HTTP/1.1" % path, b"Connection: close", *lines, b"", b"")))


def send(server: MetricsServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


@pytest.mark.parametrize("path", [b"/status", b"/metrics", b"/"])
def test_a_name_that_leads_here_is_not_a_host_of_the_run(path: bytes) -> None:
    with serving(hosts=["metrics.example"]) as server:
        for host in (b"127.0.0.1:%d" % server.port, b"localhost", b"metrics.example:443"):
            assert ask(server, b"Host: " + host, path=path).startswith(b"HTTP/1.1 200")
        for lines in ([b"Host: evil.example"], [b"Host: localhost", b"Host: evil.example"]):
            answer = ask(server, *lines, path=path)
            assert answer.split()[1] in (b"400", b"421")
            assert b"evil" not in answer and b'"step"' not in answer


def test_a_request_without_a_host_is_refused() -> None:
    with serving() as server:
        assert b'"step"' not in send(server, b"GET /status HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize(
    "request_sent",
    [
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\x00\r\n\r\n" % SECRET,
        b"Authorization: Bearer %s\r\n\r\n" % SECRET,
        b"GET /metrics HTTP/%s\r\n\r\n" % SECRET,
        b"%s /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" % SECRET,
        b"GET /metrics HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % SECRET,
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: %s\r\n\r\n" % (SECRET * 6000),
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Accept: application/openmetrics-text; version=%s\r\n\r\n" % SECRET,
    ],
)
def test_nothing_of_a_request_is_repeated(
    request_sent: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving() as server, caplog.at_level(logging.DEBUG):
        answer = send(server, request_sent)
    assert answer.split()[1][:1] in (b"4", b"5")
    assert SECRET not in answer and SECRET.decode() not in caplog.text + "".join(capfd.readouterr())
