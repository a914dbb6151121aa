"""Real servers for the HTTP backend's tests: vLLM in a process of its own, and a small one that misbehaves as asked."""

import asyncio
import contextlib
import json
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web
from backends import CONTEXT, WIDE, build
from forked_engines import Forked, forked_engines, serve
from gate import Gate, gated
from transformers import PreTrainedModel
from vllm_arguments import ONE_PROCESS

from engine.tasks.arithmetic import ALPHABET
from engine.tasks.tokenizer import save_character_tokenizer

KEY = "a-key"
NAME = "tiny"
STEPS = 4
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def model(seed: int = 0) -> PreTrainedModel:
    return build("qwen2", seed, **WIDE)


class VllmServer:
    """`vllm serve` on any free port, with the model of `directory` and every route there is.

    It, and what it starts, ends with the test process. Its requests stop where its gate says.
    """

    def __init__(self, directory: Path, key: str, lora_rank: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / f"{port}.log"
        self.gate = Gate(directory / f"{port}.gate")
        self.gate.open()
        held = gated(directory / f"{port}.gate")
        arguments = ["--model", str(directory)]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME, "--api-key", key]
        arguments += ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"]
        arguments += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        arguments += ["--distributed-executor-backend", ONE_PROCESS, "--scheduler-cls", held["scheduler_cls"]]
        arguments += ["--additional-config", json.dumps(held["additional_config"])]
        arguments += [
            "--enable-scale-out",
            "--worker-extension-cls",
            "engine.rollout.vllm.worker_extension.WeightsExtension",
        ]
        environment = QUIET | ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if lora_rank else {})
        if lora_rank:
            arguments += ["--enable-lora", "--max-lora-rank", str(lora_rank)]
        with forked_engines():
            self.process = Forked(target=serve, args=(arguments, environment, self._log))
            self.process.start()

    def until_up(self) -> None:
        gone = threading.Event()
        threading.Thread(target=lambda: (wait([self.process.sentinel]), gone.set()), daemon=True).start()
        while not _answers(self.url):
            assert not gone.wait(0.5), self._log.read_text()[-3000:]

    def tokens_sampled(self) -> int:
        """In its life, as its own metrics say."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def vllm_servers(directory: Path, *, count: int = 1, key: str = KEY, lora_rank: int = 0) -> Iterator[list[VllmServer]]:
    """Servers of a small model, which is put into `directory`; up when this yields. `lora_rank`: they take adapters of
    at most that rank."""
    model().save_pretrained(directory)
    save_character_tokenizer(directory, ALPHABET)
    servers: list[VllmServer] = []
    try:
        for _ in range(count):
            servers.append(VllmServer(directory, key, lora_rank))
        for server in servers:
            server.until_up()
        yield servers
    finally:
        for server in servers:
            server.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def run_config(tmp_path: Path, model: Path, urls: Sequence[str], **rollout: Any) -> dict[str, Any]:
    """Of a run of `STEPS` steps. Two groups of two trajectories at a time on each server."""
    rows = [json.dumps({"prompt": f"{number}-7="}) for number in range(100, 140)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    return {
        "run": {"dir": str(tmp_path / "runs"), "max_steps": STEPS},
        "model": {"path": str(model)},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "reward": {"function": "engine.tasks.arithmetic:reward"},
        "scheduler": {
            "train_batch_size": 2, "samples_per_prompt": 2, "max_staleness_steps": 2,
            "max_concurrent_groups": 2 * len(urls), "policies": {"filter": "none"},
        },
        "rollout": {
            "backend": "openai", "urls": list(urls), "slots": 2, "max_tokens": 60,
            "weights_dir": str(tmp_path / "weights"), **rollout,
        },
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
        "metrics": {"port": 0},
    }  # fmt: skip


class ThreadServer:
    """Serves the routes of a subclass on a thread of its own."""

    def __init__(self) -> None:
        self.url = ""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def add_routes(self, app: web.Application) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin(), self.loop).result()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Be gone: connections break off, the port answers no more."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    async def _begin(self) -> None:
        app = web.Application(client_max_size=2**26)
        self.add_routes(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"


class SmallServer(ThreadServer):
    """Speaks `/v1/completions`: token i of a response to a prompt of n tokens is (n + i) % 32, its log-prob -0.5.

    `faults` are taken one for each streamed request, then it behaves: a status, or after 3 tokens `drop`, `abort`,
    `silent` (nothing more, ever) or `garbage`.
    """

    def __init__(self, **lacks: bool) -> None:
        super().__init__()
        self.lacks = lacks
        self.faults: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.refuses_installs = 0
        self.asked = threading.Event()
        """Set by each streamed request."""
        self.stops_at = -1
        """Every response stops for good before this token."""
        self._never = asyncio.Event()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_post("/collective_rpc", self._install)
        if "tokens" in self.lacks:
            app.router.add_post("/tokenize", self._tokenize)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": NAME}]})

    async def _openapi(self, request: web.Request) -> web.Response:
        if self.lacks.get("silent"):
            await self._never.wait()
        if self.lacks.get("broken"):
            return web.json_response({}, status=500)
        paths: dict[str, Any] = {} if self.lacks.get("installs") else {"/collective_rpc": {}}
        return web.json_response({"paths": paths})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [1, 2, 3]})

    async def _install(self, request: web.Request) -> web.Response:
        self.calls.append(await request.json())
        self.refuses_installs -= 1
        return web.json_response({"results": ["broken" if self.refuses_installs >= 0 else ""]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            apart = 1.0 if self.lacks.get("processed") else 1.0 / body["temperature"]
            top = None if self.lacks.get("logprobs") else {"top_logprobs": [{"a": -0.1, "b": -0.1 - apart}]}
            return web.json_response({"choices": [{"text": "a", "logprobs": top}]})
        self.bodies.append(body)
        self.asked.set()
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.json_response(
                {"error": {"message": "maximum context length" if fault == 400 else "no"}}, status=fault
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(body["max_tokens"]):
            if fault is not None and i == 3:
                if fault == "abort":
                    await self._send(response, {"text": "", "finish_reason": "abort"})
                    await response.write(b"data: [DONE]\n\n")
                elif fault == "silent":
                    await self._never.wait()
                elif fault == "garbage":
                    await response.write(b"data: {no\n\n")
                elif request.transport is not None:
                    request.transport.abort()
                return response
            if i == self.stops_at:
                await self._never.wait()
            last = i + 1 == body["max_tokens"]
            choice = {"text": "x", "finish_reason": "length" if last else None}
            if not self.lacks.get("token_ids"):
                choice["token_ids"] = [(len(body["prompt"]) + i) % 32]
            if not self.lacks.get("logprobs"):
                choice["logprobs"] = {"token_logprobs": [-0.5]}
            await self._send(response, choice)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, choice: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


class Hiding(ThreadServer):
    """Stands before a server and hides its routes of `hidden`, so that what is left is a server that never had them.

    A client that goes away is a connection closed to the server, too.
    """

    def __init__(self, url: str, *hidden: str) -> None:
        super().__init__()
        self._behind, self._hidden = url, hidden
        self.asked: list[str] = []
        self._open: list[web.Request] = []

    def break_off(self) -> None:
        """Every connection."""
        for request in list(self._open):
            if request.transport is not None:
                self.loop.call_soon_threadsafe(request.transport.abort)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        app.cleanup_ctx.append(self._client)

    async def _client(self, app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as self._session:
            yield

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path in self._hidden:
            return web.json_response({"detail": "Not Found"}, status=404)
        kept = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with self._session.request(
            request.method, self._behind + request.path_qs, data=await request.read(), headers=kept
        ) as answer:
            if request.path == "/openapi.json":
                described = await answer.json()
                for path in self._hidden:
                    described["paths"].pop(path)
                return web.json_response(described)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            self._open.append(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response
