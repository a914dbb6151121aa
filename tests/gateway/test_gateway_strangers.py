"""The gateway among strangers: what is repeated of a malformed request."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from gateway_rig import Rig
from openai import AsyncOpenAI

from engine.trajectory import Prompt

SECRET = b"hunter2-and-more"


async def nobody(client: AsyncOpenAI, prompt: Prompt) -> None:
    """An agent that is never begun."""


async def exchange(port: int, request: bytes) -> bytes:
    """What is answered until the other side closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


def serve(scenario: Callable[[int], Any]) -> Any:
    async def run() -> Any:
        async with Rig(nobody) as rig:
            return await scenario(urlsplit(rig.url).port or 0)

    return asyncio.run(run())


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "request_sent",
    [
        POST + b"Authorization: Bearer " + SECRET + b"\x00\r\n\r\n",
        POST + b"Authorization: " + SECRET + b"\r\n\r\n",
        POST + b"Authorization: Bearer \xff" + SECRET + b"\r\n\r\n",
        POST + b"Authorization: Bearer " + SECRET * 2000 + b"\r\n\r\n",
        POST + b"Expect: " + SECRET + b"\r\n\r\n",
        b"Authorization: Bearer " + SECRET + b"\r\n\r\n",
    ],
)
def test_nothing_of_a_request_is_repeated(
    request_sent: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = serve(lambda port: exchange(port, request_sent))
    assert answer.split()[1] in (b"400", b"401")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"], "it is OpenAI's error object"
    assert SECRET not in answer and SECRET.decode() not in caplog.text + "".join(capfd.readouterr())
