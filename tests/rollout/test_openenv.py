"""Episodes on OpenEnv servers: with a stand-in for the package's client, and on a real server where it is installed."""

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.environments import StepResult, ToolCall, Turn
from engine.environments.openenv import OpenEnv
from engine.errors import DataFailure
from engine.trajectory import Prompt

TOOL = {"name": "guess", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}
PROMPT = Prompt(row=3, text="Guess my number.", fields={"most": 9})


class Guessing:
    """The rules of a small game. The secret number depends on the seed."""

    def reset(self, seed: int, most: int) -> dict[str, Any]:
        self.secret = seed % most
        return {"hint": f"from 0 to {most}"}

    def step(self, number: Any) -> tuple[dict[str, Any], float, bool]:
        right = number == self.secret
        return {"hint": "right" if right else "higher" if number < self.secret else "lower"}, float(right), right


class StandIn:
    """`GenericEnvClient` with the game behind it. A server refuses wrong fields in these words."""

    def __init__(self, base_url: str) -> None:
        self.game = Guessing()
        self.is_open = False

    async def connect(self) -> None:
        self.is_open = True

    async def reset(self, **given: Any) -> SimpleNamespace:
        assert self.is_open
        return SimpleNamespace(observation={**self.game.reset(**given), "metadata": {}}, reward=None, done=False)

    async def step(self, action: dict[str, Any]) -> SimpleNamespace:
        if not str(action.get("number")).isdigit():
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        observation, reward, done = self.game.step(int(action["number"]))
        return SimpleNamespace(observation={**observation, "metadata": {}}, reward=reward, done=done)

    async def close(self) -> None:
        self.is_open = False


def serve() -> tuple[str, Any]:
    """A real server in a thread: its address, and what ends it."""
    import uvicorn
    from openenv.core import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        number: int

    class Hint(Observation):
        hint: str = ""

    class Served(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.game = Guessing()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
            return Hint(**self.game.reset(seed or 0, more["most"]))

        def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
            observation, reward, done = self.game.step(action.number)
            return Hint(**observation, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Served, Guess, Hint, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    begun = threading.Event()
    startup = server.startup

    async def started(*given: Any, **more: Any) -> None:
        await startup(*given, **more)
        begun.set()

    server.startup = started  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert begun.wait(60)
    port = server.servers[0].sockets[0].getsockname()[1]

    def end() -> None:
        server.should_exit = True
        thread.join()

    return f"http://127.0.0.1:{port}", end


SERVERS = ["stand-in", "server"] if importlib.util.find_spec("openenv") else ["stand-in"]
"""A real server takes part where openenv is installed. It is no dependency of the tests: it brings 30 packages."""


@pytest.fixture(params=SERVERS)
def url(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "server":
        address, end = serve()
        yield address
        end()
    else:
        core = ModuleType("openenv.core")
        core.GenericEnvClient = StandIn  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
        monkeypatch.setitem(sys.modules, "openenv.core", core)
        yield "http://127.0.0.1:9"


def turn(number: int, *calls: dict[str, Any], text: str = "") -> Turn:
    made = tuple(ToolCall(id=f"c{n}", name="guess", arguments=given) for n, given in enumerate(calls))
    return Turn(number=number, text=text, calls=made)


def test_each_call_of_the_tool_is_an_action(url: str) -> None:
    async def episode() -> list[Any]:
        environment = OpenEnv(url, tool=TOOL, observation_field="hint", reset_fields=["most"])
        seen: list[Any] = [await environment.reset(PROMPT, seed=2**40 + 5)]
        secret = (2**40 + 5) % 2**31 % 9  # of the seed that the server gets
        try:
            for number, calls in enumerate([[secret - 1, secret + 1], ["x"], [secret, secret]], 1):
                seen.append(await environment.step(turn(number, *({"number": value} for value in calls))))
        finally:
            await environment.close()
        return seen

    messages, first, wrong, last = asyncio.run(episode())
    asked = {"role": "user", "content": "Guess my number."}
    assert messages == [asked, {"role": "user", "content": "from 0 to 9"}]
    assert [message["content"] for message in first.messages] == ["higher", "lower"]
    assert (first.reward, first.done) == (0.0, False)
    assert "VALIDATION_ERROR" in wrong.messages[0]["content"]
    assert (wrong.reward, wrong.done, wrong.figures) == (None, False, {"tool_errors": 1})
    answer = {"role": "tool", "tool_call_id": "c0", "name": "guess", "content": "right"}
    assert last == StepResult(messages=[answer], reward=1.0, done=True, figures={"tool_errors": 0})


def test_without_a_tool_the_whole_answer_is_the_action(url: str) -> None:
    async def episode() -> list[Any]:
        environment = OpenEnv(url, action_field="number", reset_fields=["most"])
        seen: list[Any] = [await environment.reset(PROMPT, seed=0)]
        try:
            seen.append(await environment.step(turn(1, text="0")))
        finally:
            await environment.close()
        return seen

    _, done = asyncio.run(episode())
    assert (done.messages, done.reward, done.done) == ('{"hint": "right"}', 1.0, True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(DataFailure, match="install the package: pip install openenv"):
        asyncio.run(OpenEnv("http://127.0.0.1:9").reset(PROMPT, 1))
