"""Plays an episode with the real package of an adapter: `python real_environments.py skyrl_gym|verifiers`.

`test_real_environments` runs it in an environment of its own, which has the package, but neither Ray nor torch nor
pytest.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.environments import Turn
from engine.trajectory import Prompt

TASKSET = """
import verifiers.v1 as vf


class SumTask(vf.Task):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.branches[0].nodes[-1].message.content == "2")

    @vf.metric
    async def turns(self, trace) -> float:
        return 1.0


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for number in range(3):
            yield SumTask(vf.TaskData(prompt=f"{number}+{number}", system_prompt="Add."), self.config.task)


__all__ = ["Sums"]
"""
HARNESS = '''
import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class OneCall(vf.Harness[vf.HarnessConfig]):
    """Asks the model once, from this process."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        answer.raise_for_status()
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OneCall"]
'''


@contextmanager
def model_server(asked: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """A chat endpoint that always answers 2. Yields its base URL; notes (key, request)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers["Authorization"], body))
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "2"}}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            made = {"id": "1", "object": "chat.completion", "created": 1, "model": "model", "choices": [choice]}
            data = json.dumps({**made, "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()


def verifiers() -> None:
    Path("engine_sums.py").write_text(TASKSET)
    Path("engine_one_call.py").write_text(HARNESS)
    sys.path.insert(0, ".")
    from engine.environments.verifiers import agent_of, load, rows_of

    environment = load("engine_sums", agent={"harness": {"id": "engine_one_call"}, "runtime": {"type": "subprocess"}})
    rows = rows_of(environment, 2)
    assert rows[1] == {
        "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}], "task": 1,
    }, rows  # fmt: skip
    asked: list[tuple[str, dict[str, Any]]] = []
    with model_server(asked) as url:
        found = asyncio.run(agent_of(environment)(url, "a-key", Prompt(row=5, text="", fields=rows[1])))
    assert found.reward == 2.0, found
    assert found.figures["turns"] == 1.0, found
    ((key, request),) = asked
    assert key == "Bearer a-key" and request["messages"] == rows[1]["messages"], asked


def skyrl_gym() -> None:
    from engine.environments.skyrl_gym import SkyRLGym

    environment = SkyRLGym("gsm8k_multi_turn", max_turns=3)
    row = {"reward_spec": {"ground_truth": "72"}, "messages": [{"role": "user", "content": "How many?"}]}
    assert environment.reset(Prompt(row=0, text="", fields=row), seed=1) == row["messages"]
    first = environment.step(Turn(number=1, text="perhaps #### 70"))
    assert not first.done and first.messages and 0 < (first.reward or 0) < 1, first
    last = environment.step(Turn(number=2, text="so #### 72"))
    assert last.done and last.reward == 1.0 and last.figures == {"steps": 2.0}, last
    environment.close()


if __name__ == "__main__":
    {"verifiers": verifiers, "skyrl_gym": skyrl_gym}[sys.argv[1]]()
    print("played")
