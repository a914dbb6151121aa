"""The routes that pause, resume and abort on a server: vLLM's and SGLang's.

`rollout.openai.openai_backend` and its probe use them. A pause must have taken effect when `pause` returns.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from engine.tasks.http_client import Http


class Controls(Protocol):
    """Of one server. Each raises: `Unavailable`, `RefusedRequest`."""

    async def pause(self, mode: str, *, clear: bool) -> None:
        """Freeze running requests (`keep`) or end them. `clear`: frozen ones compute their KV cache again."""

    async def resume(self) -> None: ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests by the server's names of them. Each stream ends with its last tokens. Ended ones are ignored."""


class VllmControls:
    """vLLM's, in its development mode."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def pause(self, mode: str, *, clear: bool) -> None:
        query = {"mode": mode, "clear_cache": "true" if clear else "false"}
        await self._http.call("POST", "/pause", query=query)
        await self._http.call("GET", "/is_paused")  # its answer arrives after the last tokens

    async def resume(self) -> None:
        await self._http.call("POST", "/resume")

    async def abort(self, ids: Sequence[str]) -> None:
        await self._http.call("POST", "/abort_requests", {"request_ids": list(ids)})


class SglangControls:
    """SGLang's."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def pause(self, mode: str, *, clear: bool) -> None:
        """Always `retract`: frozen requests wait without a KV cache and compute it again, and they can be aborted.
        `in_place` keeps the result of the forward pass in flight until the server continues, and then reports the
        weights installed meanwhile for tokens that the old ones sampled."""
        await self._http.call("POST", "/pause_generation", {"mode": "retract"})
        await self._http.call("GET", "/server_info")  # the scheduler answers, and has obeyed before

    async def resume(self) -> None:
        await self._http.call("POST", "/continue_generation", {})

    async def abort(self, ids: Sequence[str]) -> None:
        await asyncio.gather(*(self._http.call("POST", "/abort_request", {"rid": id}, reads=False) for id in ids))
