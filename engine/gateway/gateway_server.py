"""The HTTP server of the gateway: routes, request bodies, keys and streams.

`actors.gateway_actor` and tests start it. It answers only requests with the key of a running agent, always with
OpenAI's objects, errors included. It must never read a body beyond the size limit.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from aiohttp import web

from engine.control.http_listener import ConnectionBounds, Listener, Refused
from engine.control.listening_address import listen
from engine.errors import DataFailure, describe_error
from engine.gateway.agents import Agents, GatewayParts
from engine.gateway.openai_format import (
    AgentRequest,
    ChatAnswer,
    ChatRequest,
    CompletionRequest,
    RequestError,
    TokenFigures,
    chat_body,
    chat_events,
    parse,
    text_body,
    text_events,
)
from engine.gateway.request_fields import named_function
from engine.gateway.sessions import AgentSession, ContextSpent, SessionOver
from engine.rollout.agents.conversation import Call, CallHistory, chat, ids, key_of, text
from engine.rollout.agents.tool_calls import calls_of, none, structure_of_calls
from engine.trajectory import Prompt, RolloutResult

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

CONNECTIONS = 16_384
"""Maximum number of open connections: agents hold one for each call, and a few between calls."""
HEAD_S = 75.0
"""Seconds that an agent may keep a connection between two calls."""
BODY_S = 120.0
ANY_MODEL = "model"
"""A name that always means the run's model."""


class GatewayServer:
    """Runs the agents of a run, and serves them."""

    def __init__(self, parts: GatewayParts) -> None:
        self.runner = parts.runner
        self.agents = Agents(parts.bounds, self._launch)
        self.url = ""
        """The base URL for agents."""
        self._chat = parts.chat
        self._model = parts.model
        self._parser = parts.parser
        self._answered = count(1)
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat_completions),
            "/v1/completions": ("POST", self._completions),
        }
        most = min(CONNECTIONS, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        bounds = ConnectionBounds(connections=most, head_s=HEAD_S, body_s=BODY_S, body_bytes=parts.max_body_bytes)
        self._listener = Listener(self._speak_openai, _refusal, bounds, cancels=True)

    async def start(self, host: str, port: int) -> None:
        """Start listening. Raises: ConfigError if it cannot listen there."""
        address = await self._listener.start(listen(host, port, "agent"))
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"http://{shown}:{address[1]}/v1"

    async def close(self) -> None:
        """End every agent and stop listening."""
        await self.agents.close()
        await self._listener.close()
        self.runner.close()

    async def _launch(self, key: str, prompt: Prompt) -> RolloutResult:
        return await self.runner.run(self.url, key, prompt)

    # routes

    async def _models(self, request: web.BaseRequest) -> web.Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "step-engine"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat_completions(self, request: web.BaseRequest) -> web.StreamResponse:
        session = self._session(request)
        said, asked = await asyncio.to_thread(self._read_chat, await self._listener.body(request))
        answer = await self._answer(session, asked, said, said.tools if said.offers_tools else None)
        return await self._send(request, said, chat_body(answer), chat_events(answer, said.usage_in_stream))

    def _read_chat(self, body: bytes) -> tuple[ChatRequest, CallHistory]:
        said = parse(ChatRequest, body)
        self._check_model(said)
        return said, chat(said.plain_messages, said.tools if said.offers_tools else None, self._chat)

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        session = self._session(request)
        said = await asyncio.to_thread(parse, CompletionRequest, await self._listener.body(request))
        self._check_model(said)
        if isinstance(said.prompt, str):
            asked = text(said.prompt, self._chat.encode, self._chat.fewest_tokens)
        else:
            asked = ids(said.prompt, self._chat.encode)
        answer = await self._answer(session, asked, said, None)
        return await self._send(request, said, text_body(answer), text_events(answer, said.usage_in_stream))

    # inside

    async def _answer(
        self,
        session: AgentSession,
        asked: CallHistory,
        said: ChatRequest | CompletionRequest,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> ChatAnswer:
        top = said.figures or 0
        if top > session.group.bounds.top_logprobs:
            law = f"top_logprobs is {top}, but must be 0: the rollout server returns only the sampled tokens"
            raise RequestError(400, law, code="unsupported_value", param="top_logprobs")
        structure = self._structure(session, said, tools)
        call = await session.begin(asked)
        await session.sample(call, said.limit, top, structure)
        try:
            answer, shown, hidden = await asyncio.to_thread(self._read_answer, call, said, tools)
            session.refuse_closed()
        except BaseException:
            session.drop(call)
            raise
        session.conversation.add_figure("tool_calls", len(answer.tool_calls))
        session.conversation.commit(call, shown=shown, hidden=hidden, key=key_of(answer.message))
        return answer

    def _structure(
        self, session: AgentSession, said: ChatRequest | CompletionRequest, tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """See `SamplingParams.structure`. Raises: `RequestError` 400 for a forced call that cannot be honored."""
        forced = session.group.bounds.forced_calls
        if not isinstance(said, ChatRequest) or not said.forces_call or forced == "as_auto":
            return ""
        found = structure_of_calls(self._parser, tools or (), named_function(said.tool_choice))
        if found and forced == "constrain":
            return found
        law = (
            f"tool_choice is {said.tool_choice!r:.80}, but must be auto or none: a call can be forced only with "
            "rollout.backend vllm and agent.tool_parser hermes or json; agent.tool_choice: as_auto treats it as auto"
        )
        raise RequestError(400, law, code="unsupported_value", param="tool_choice")

    def _read_answer(
        self, call: Call, said: ChatRequest | CompletionRequest, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[ChatAnswer, str, str]:
        """The answer to a call, the text of its tokens, and the hidden text behind it. Runs in another thread."""
        shown, hidden = self._chat.end(call, said.stops)
        try:
            left, calls = calls_of(self._parser if tools else none, shown, tools or ())
        except Exception as error:
            raise RequestError(500, f"agent.tool_parser raised {describe_error(error)}") from error
        answer = ChatAnswer(
            id=f"call-{next(self._answered)}",
            created=int(time.time()),
            model=self._model,
            text=left,
            finish_reason=call.finish_reason,
            prompt_tokens=len(call.prompt_ids),
            completion_tokens=len(call.token_ids),
            tool_calls=calls,
            logprobs=None if said.figures is None else self._figures(call),
        )
        return answer, shown, hidden

    def _figures(self, call: Call) -> list[TokenFigures]:
        """The text and log-prob of each token and, if requested, of the likeliest tokens at its place."""

        def named(likeliest: Sequence[tuple[int, float]]) -> list[tuple[str, float]]:
            return [(self._chat.full([id]), value) for id, value in likeliest]

        tops = call.top or [[] for _ in call.token_ids]
        tokens = zip(call.token_ids, call.logprobs, tops, strict=True)
        return [TokenFigures(self._chat.full([token]), value, named(top)) for token, value, top in tokens]

    def _check_model(self, said: AgentRequest) -> None:
        """Raises: `RequestError` 404 for a name that is not that of the model."""
        if said.model is not None and said.model not in (self._model, ANY_MODEL):
            law = f"the model {said.model!r:.80} does not exist; this run serves {self._model!r}"
            known = "" if self._model == ANY_MODEL else f", also under the name {ANY_MODEL!r}"
            raise RequestError(404, law + known, code="model_not_found", param="model")

    async def _send(
        self, request: web.BaseRequest, said: AgentRequest, body: dict[str, Any], events: Iterator[bytes]
    ) -> web.StreamResponse:
        if not said.stream:
            return web.json_response(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response

    def _session(self, request: web.BaseRequest) -> AgentSession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self.agents.session(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise RequestError(401, "the key does not belong to a running agent", code="invalid_api_key")
        return session

    def _route(self, request: web.BaseRequest) -> Handler:
        method, handler = self._routes.get(request.path, ("", None))
        if handler is None:
            raise RequestError(404, f"unknown path; use one of {', '.join(self._routes)}")
        if request.method != method:
            raise RequestError(405, f"{request.path} accepts only {method}")
        return handler

    async def _speak_openai(self, request: web.BaseRequest) -> web.StreamResponse:
        """Turn every failure into OpenAI's error object."""
        try:
            return await self._route(request)(request)
        except RequestError as error:
            failure = error
        except Refused as error:
            failure = _failure(error.status, error.reason)
        except ContextSpent as error:
            failure = RequestError(400, str(error), code="context_length_exceeded", param="messages")
        except DataFailure as error:
            failure = RequestError(400, str(error))
        except SessionOver:
            failure = RequestError(401, "the agent's session has ended", code="invalid_api_key")
        except Exception as error:
            log.exception("a call failed in the gateway")
            failure = RequestError(500, f"the gateway failed: {type(error).__name__}: {error}")
        return web.json_response(failure.body, status=failure.status)


def _failure(status: int, reason: str) -> RequestError:
    return RequestError(status, reason, code="request_too_large") if status == 413 else RequestError(status, reason)


def _refusal(status: int, reason: str) -> web.StreamResponse:
    return web.json_response(_failure(status, reason).body, status=status)
