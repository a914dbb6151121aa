"""Own servers are reached directly, whatever proxies the environment names."""

import os
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest
import requests

from engine.control.proxies import NAMES, exempt_own_servers, exemption

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"own")

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("exempt", [{}, {"NO_PROXY": "example.org"}, {"no_proxy": ".a", "NO_PROXY": "b"}])
def test_every_client_reaches_the_loopback_without_the_proxy(
    url: str, exempt: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*VARIABLES, *NAMES):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**dict.fromkeys(VARIABLES, "http://127.0.0.1:9"), **exempt}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    exempt_own_servers("127.0.0.2")
    assert httpx.get(url).text == requests.get(url, timeout=10).text == "own"
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"own"
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] and "127.0.0.2" in os.environ["no_proxy"].split(",")
    listed = set(os.environ["no_proxy"].split(","))
    assert listed >= {host for value in exempt.values() for host in value.split(",")}


def test_an_environment_without_a_proxy_or_with_all_exempt_stays_so() -> None:
    assert exemption({"no_proxy": "a"}, "10.0.0.1") == {}
    assert exemption({"http_proxy": "http://p", "NO_PROXY": "*"}) == {"no_proxy": "*", "NO_PROXY": "*"}
