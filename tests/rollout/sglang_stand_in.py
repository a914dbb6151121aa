"""A stand-in for an SGLang server in deterministic mode, made from its page "SGLang for RL" and the source of 0.5.23.

It has the routes that the engine uses and does what the engine's promises depend on: pauses that retract, aborts of all
ids that begin alike, spans counted when the version changes. A token is a function of weights, seed and position.
"""

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from gate import OPEN
from http_servers import ThreadServer
from safetensors.numpy import load_file

VOCABULARY = 32
FIELDS = {"rid", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "stream", "extra_key"}
SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "sampling_seed", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "stream_interval", "frequency_penalty", "presence_penalty",
}  # fmt: skip


def token_of(weights: str, seed: int, position: int) -> int:
    return hashlib.blake2b(f"{weights} {seed} {position}".encode()).digest()[0] % VOCABULARY


@dataclass(eq=False)
class Running:
    prompt: int
    params: dict[str, Any]
    output: list[int] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(version before a change, tokens at the change)."""
    reason: str | None = None
    turn: int = -1
    most: int = 0


class SglangStandIn(ThreadServer):
    """It is its own gate: see `gate.Gate`. A test sets its attributes."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context, self.version, self.weights, self.model = context, "default", "", "the-model"
        self.lacks: tuple[str, ...] = ()
        self.settings: dict[str, Any] = {}
        self.reports_versions, self.processed, self.incremental, self.refuses_updates = True, True, False, False
        self.end_token = -1
        self.labels: list[str] = []
        """Of all versions that it loaded."""
        self.seeds: list[int] = []
        self.running: dict[str, Running] = {}
        self._turn, self._quota = 0, OPEN
        self._paused = False
        self._change = asyncio.Event()

    def add_routes(self, app: web.Application) -> None:
        self._routes = {
            "/generate": self._generate, "/pause_generation": self._pause, "/continue_generation": self._continue,
            "/abort_request": self._abort, "/update_weights_from_disk": self._update, "/v1/models": self._models,
            "/model_info": self._info, "/server_info": self._info, "/health": self._info,
            "/openapi.json": self._openapi,
        }  # fmt: skip
        for path, handler in self._routes.items():
            app.router.add_route("*", path, handler)

    def hold(self, tokens: int) -> None:
        self._turn, self._quota = self._turn + 1, tokens
        self.loop.call_soon_threadsafe(self._changed)

    def open(self) -> None:
        self.hold(OPEN)

    def _changed(self) -> None:
        """Wake everything that waits for a change."""
        before, self._change = self._change, asyncio.Event()
        before.set()

    def _advance(self, one: Running) -> bool:
        """Sample a token, unless a pause or the gate forbids it. Returns whether it did."""
        if one.turn != self._turn:
            one.turn, one.most = self._turn, len(one.output) + self._quota
        if self._paused or len(one.output) >= one.most:
            return False
        seed = one.params["sampling_seed"] if one.params["temperature"] > 0 else 0
        token = token_of(self.weights, seed, one.prompt + len(one.output))
        one.output.append(token)
        if not one.params["ignore_eos"] and token in (*one.params["stop_token_ids"], self.end_token):
            one.reason = "stop"
        elif len(one.output) == one.params["max_new_tokens"]:
            one.reason = "length"
        return True

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params, ids = body["sampling_params"], body["input_ids"]
        if unknown := {*body} - FIELDS or {*params} - SAMPLING:
            return web.json_response({"error": f"unknown fields {unknown}"}, status=400)
        if not body.get("stream"):
            apart = 1.0 / params["temperature"] if self.processed else 1.0
            return web.json_response(
                {"meta_info": {"output_top_logprobs": [[[-0.1, 1, None], [-0.1 - apart, 2, None]]]}}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if len(ids) + params["max_new_tokens"] > self.context:
            await self._send(response, {"error": {"message": "exceeds the maximum context length", "code": 400}})
        else:
            one = self.running[body["rid"]] = Running(len(ids), params)
            self.seeds.append(params["sampling_seed"])
            try:
                await self._stream(response, one)
            finally:
                del self.running[body["rid"]]
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream(self, response: web.StreamResponse, one: Running) -> None:
        sent = 0
        while True:
            if one.reason is None and not self._advance(one):
                await self._change.wait()
                continue
            output = one.output[sent:] if self.incremental else one.output
            rows = [[-0.5, token, None] for token in output]
            if self.incremental and one.reason == "abort":  # SGLang repeats these, if the request waits
                output, rows = one.output[-1:], [[-0.5, token, None] for token in one.output]
            reason, sent = one.reason and {"type": one.reason}, len(one.output)
            meta = {"finish_reason": reason, "completion_tokens": sent, "output_token_logprobs": rows}
            if reason and self.reports_versions:
                meta["weight_versions"] = self._spans(one)
            await self._send(response, {"output_ids": output, "meta_info": meta})
            if reason:
                return

    def _spans(self, one: Running) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*one.changes, (self.version, len(one.output))]:
            start = spans[-1]["end"] if spans else 0
            if not spans or end > start:
                spans.append({"version": version, "start": start, "end": end})
        return spans

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "retract", "in_place labels the token in flight with the next version"
        self._paused = True
        return web.json_response({})

    async def _continue(self, request: web.Request) -> web.Response:
        self._paused = False
        self._changed()
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        for one in [one for name, one in self.running.items() if name.startswith(rid)]:
            one.reason = "abort"
        self._changed()
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if self.refuses_updates or not self._paused or not files:
            return web.json_response({"success": False, "message": "broken"}, status=400)
        tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
        self.weights = hashlib.blake2b(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest()
        for one in self.running.values():
            if one.output:
                one.changes.append((self.version, len(one.output)))
        self.version, self.model = body["weight_version"], body["model_path"]
        self.labels.append(self.version)
        return web.json_response({"success": True, "message": ""})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.context}]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, **self.settings})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in self._routes if path not in self.lacks}})
