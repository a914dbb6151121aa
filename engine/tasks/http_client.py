"""The HTTP client of one server: JSON calls and streams of server-sent events, with timeouts.

The HTTP backend (`rollout.openai`) and the reward `tasks.judge` use it. It has one pool of connections, on one event
loop. It never retries: its exceptions tell the caller whether a retry may help.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import aiohttp

from engine.errors import EngineError

CONNECT_TIMEOUT_S = 5.0
LARGEST_EVENT_BYTES = 16 * 2**20
LARGEST_ANSWER_BYTES = 64 * 2**20
SHOWN = 300
"""Maximum number of characters of a server's error message that are repeated."""


class Unavailable(EngineError):
    """The server did not answer, or not completely. A retry may help."""


class RefusedRequest(EngineError):
    """The server refused the request, and a retry would not help. `details["status"]` is the HTTP status."""


class Http:
    """Paths are relative to `url`. `timeout_s` bounds a call, and in a stream each wait for more data."""

    def __init__(self, url: str, key: str | None, *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._key = key
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        further_s: float = 0.0,
        reads: bool = True,
    ) -> Any:
        """The JSON answer; None if it has no body. `further_s`: seconds that are added to `timeout_s`.
        `reads`: whether the answer of a successful call is read; if not, it need not be JSON.

        Raises: `Unavailable`, `RefusedRequest`.
        """
        timeout = aiohttp.ClientTimeout(total=self._timeout_s + further_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._open().request(
                method, self.url + path, json=body, params=query, timeout=timeout
            ) as response:
                await self._check(response, path)
                text = await _bounded(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(path, error) from error
        try:
            return json.loads(text) if reads and text.strip() else None
        except ValueError:
            raise RefusedRequest(f"{self.url}{path} did not answer with JSON", status=200) from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream until its `[DONE]`. Closing the generator early closes the connection, which ends the
        request.

        Raises: `Unavailable`, also if the stream ends early; `RefusedRequest`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._timeout_s)
        done = False
        try:
            async with self._open().post(self.url + path, json=body, timeout=timeout) as response:
                await self._check(response, path)
                async for data in _data_of(response):
                    done = done or data == b"[DONE]"
                    if not done:
                        yield self._event(path, data)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(path, error) from error
        if not done:
            raise Unavailable(f"{self.url}{path} closed the connection during its answer")

    async def __aenter__(self) -> "Http":
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. The next call opens a new pool on its event loop."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The number of connections is not limited here: there is one per running trajectory.
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session

    def _event(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise Unavailable(f"{self.url}{path} streamed data that is not a JSON object: {self._shown(data)}")
        if event.get("error"):
            said: Any = event["error"]
            code = said.get("code") if isinstance(said, dict) else None
            message = said.get("message", said) if isinstance(said, dict) else said
            raise self._complaint(path, code if isinstance(code, int) else 500, str(message))
        return event

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status >= 400:
            raise self._complaint(path, response.status, (await _bounded(response)).decode(errors="replace"))

    def _complaint(self, path: str, status: int, said: str) -> EngineError:
        kind = Unavailable if status >= 500 or status in (408, 425, 429) else RefusedRequest
        said = self.without_key(said)
        return kind(f"{self.url}{path} answered {status}: {_shown(said)}", status=status, said=said)

    def without_key(self, said: str) -> str:
        """Remove the key, because the message is written to the record and some servers repeat the key."""
        return said.replace(self._key, "(the key)") if self._key else said

    def _shown(self, said: bytes) -> str:
        return _shown(self.without_key(said.decode(errors="replace")))

    def _unavailable(self, path: str, error: BaseException) -> Unavailable:
        story = self.without_key(str(error)) or type(error).__name__
        return Unavailable(f"{self.url}{path} cannot be reached or closed the connection: {_shown(story)}")


def problem_of_key(variable: str) -> tuple[str, str] | None:
    """Why an environment variable holds no key for an HTTP header, and what to do; None if it does."""
    key = os.environ.get(variable)
    if not key:
        return "is not set in the environment, or is empty", "set this environment variable to the key"
    if not key.isprintable():
        return (
            "holds a key that contains a control character (such as a line break) or is not valid UTF-8",
            "set this environment variable to the key alone, without a line break",
        )
    return None


async def pause(seconds: float) -> None:
    """Wait before another attempt: a server does not announce that it can answer."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        return


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The body. Raises: `aiohttp.ClientPayloadError` if it is larger than `LARGEST_ANSWER_BYTES`."""
    whole = bytearray()
    async for piece in response.content.iter_any():
        whole += piece
        if len(whole) > LARGEST_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
    return bytes(whole)


async def _data_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The contents of the `data:` lines. Lines are joined here, because aiohttp's line limit is too low for long
    prompts."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LARGEST_EVENT_BYTES:
            raise aiohttp.ClientPayloadError(f"an event of more than {LARGEST_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _shown(said: str) -> str:
    text = " ".join(said.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
