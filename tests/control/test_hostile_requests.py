"""The control endpoint among strangers: malformed headers, other hosts' names, requests that never end."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from control_rig import Rig

from engine.control.control_server import ControlServer
from engine.control.http_listener import ConnectionBounds
from engine.control.requests import Look

SECRET = "hunter2-and-more"
PATIENCE_S = 30.0


def send(port: int, request: bytes) -> bytes:
    """What is answered until the other side closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


def port_of(rig: Rig) -> int:
    return int(rig.place.url.rpartition(":")[2])


def head(*lines: bytes) -> bytes:
    return b"\r\n".join((b"POST /control HTTP/1.1", *lines, b"", b""))


HOST = b"Host: 127.0.0.1"
CLOSE = b"Connection: close"
TOKEN = SECRET.encode()
MALFORMED: dict[str, bytes] = {
    "a zero byte": head(HOST, b"Authorization: Bearer " + TOKEN + b"\x00en"),
    "a line end": head(HOST, b"Authorization: Bearer " + TOKEN + b"\nen"),
    "no Latin": head(HOST, CLOSE, b"Authorization: Bearer \xff\xfe" + TOKEN),
    "too long": head(HOST, b"Authorization: Bearer " + TOKEN * 2000),
    "no scheme": head(HOST, CLOSE, b"Authorization: " + TOKEN),
    "no colon": head(HOST, b"Authorization Bearer " + TOKEN),
    "no name": head(HOST, b": Bearer " + TOKEN),
    "no request line": b"Authorization: Bearer " + TOKEN + b"\r\n\r\n",
    "a folded line": head(HOST, b"Authorization: Bearer", b" " + TOKEN),
    "too many": head(HOST, *(b"X-%d: " % number + TOKEN for number in range(300))),
    "a length": head(HOST, b"Content-Length: " + TOKEN),
    "an encoding": head(HOST, b"Transfer-Encoding: " + TOKEN),
    "an expectation": head(HOST, CLOSE, b"Expect: " + TOKEN),
    "another host": head(CLOSE, b"Host: " + TOKEN),
    "a method": TOKEN + b" /control HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_nothing_of_a_request_is_repeated(
    rig: Rig, case: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = send(port_of(rig), MALFORMED[case])
    assert answer.split()[1] in (b"400", b"401", b"421"), "it is refused"
    assert json.loads(answer.partition(b"\r\n\r\n")[2]).keys() == {"error"}
    written = "".join(capfd.readouterr())
    for said in (answer.decode("latin-1"), caplog.text, written):
        assert SECRET not in said and "Traceback" not in said
    assert rig.events == []


def test_a_body_that_is_malformed_is_refused_without_a_word_of_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    token = b"Authorization: Bearer " + rig.place.token.encode()
    for coding, body in ((b"Transfer-Encoding: chunked", b"x" + TOKEN), (b"Content-Encoding: gzip", TOKEN)):
        length = b"X-None: 1" if b"chunked" in coding else b"Content-Length: %d" % len(body)
        with caplog.at_level(logging.DEBUG):
            answer = send(port_of(rig), head(HOST, CLOSE, token, coding, length) + body + b"\r\n\r\n")
        assert answer.split()[1] == b"400"
        assert SECRET not in answer.decode() + caplog.text and rig.place.token not in answer.decode() + caplog.text


def test_an_operation_that_breaks_the_engine_is_logged_without_its_message(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.break_with = RuntimeError(SECRET)  # type: ignore[assignment]
    answer = ask(rig, "127.0.0.1")
    assert answer.status_code == 500 and SECRET not in answer.text
    assert "RuntimeError" in caplog.text and "carry_out" in caplog.text and SECRET not in caplog.text


def ask(rig: Rig, host: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {rig.place.token}", "Host": host}
    return httpx.post(
        f"{rig.place.url}/control",
        content=Look().model_dump_json(),
        headers=headers,
        timeout=PATIENCE_S,
        trust_env=False,
    )


def test_a_name_that_leads_here_is_not_a_host_of_the_run(rig: Rig) -> None:
    for host in ("127.0.0.1", "localhost:1234", "[::1]:80"):
        assert ask(rig, host).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.7"):
        answer = ask(rig, host)
        assert answer.status_code == 421 and "evil" not in answer.text and "control.hosts" in answer.json()["error"]


# -- bounds ------------------------------------------------------------------------------------------------------------

Scenario = Callable[[int], Any]


def serve(scenario: Scenario, **bounds: Any) -> Any:
    """What a scenario finds at the port of a server with these bounds."""

    async def run() -> Any:
        server = ControlServer("token", lambda asked: {"done": "looked"}, ConnectionBounds(**bounds))
        place = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.wait_for(scenario(int(place.url.rpartition(":")[2])), PATIENCE_S)
        finally:
            await server.close()

    return asyncio.run(run())


LOOK = Look().model_dump_json().encode()
WHOLE = head(HOST, b"Authorization: Bearer token", b"Content-Length: %d" % len(LOOK)) + LOOK
HALF = {
    "nothing": b"",
    "half a line": b"POST /con",
    "half the headers": head(HOST)[:-2],
    "half a body": WHOLE[:-3],
    "half a second request": WHOLE + head(HOST)[:-2],
}


@pytest.mark.parametrize("case", HALF)
def test_a_request_that_never_ends_is_given_up(case: str) -> None:
    async def half(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF[case])
        answer = await reader.read()
        writer.close()
        return answer

    answer = serve(half, head_s=0.1, body_s=0.1)
    assert (b" 408 " in answer) == (case == "half a body")
    assert (b" 200 " in answer) == (case == "half a second request")


def test_those_who_wait_give_way_to_those_who_ask() -> None:
    async def flood(port: int) -> tuple[list[bytes], bytes]:
        begun = []
        for _ in range(12):
            begun.append(await asyncio.open_connection("127.0.0.1", port))
            begun[-1][1].write(head(HOST)[:-2])
            await begun[-1][1].drain()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE)
        answer = await reader.readuntil(b"}")
        ended = [await reader.read() for reader, _ in begun[:9]]
        for _, open_writer in (*begun, (reader, writer)):
            open_writer.close()
        return ended, answer

    ended, answer = serve(flood, connections=4, head_s=3600.0)
    assert ended == [b""] * 9, "the oldest were closed"
    assert b" 200 " in answer
