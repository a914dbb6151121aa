"""Environments of SkyRL-Gym, with a stand-in of its interface, and of NeMo Gym, on a server with its endpoints."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from engine.config.episodes import _untried
from engine.environments import Environment, StepResult, ToolCall, Turn
from engine.environments import nemo_gym as nemo
from engine.environments.nemo_gym import NemoGym
from engine.environments.skyrl_gym import SkyRLGym
from engine.errors import DataFailure
from engine.trajectory import Prompt

# -- SkyRL-Gym ---------------------------------------------------------------------------------------------------------


class Counting:
    """The interface of a `BaseTextEnv`: count to a number, one answer at a time."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.step_by, self.last, self.turns = env_config["by"], extras["last"], 0
        assert extras["max_turns"] == 5
        self.closed = False

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        return [*prompt, {"role": "user", "content": f"count to {self.last} by {self.step_by}"}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        right = action == str(self.turns * self.step_by)
        done = not right or self.turns * self.step_by >= self.last
        shown = [] if done else [{"role": "user", "content": "next"}]
        return {"observations": shown, "reward": float(right), "done": done, "metadata": {"turns": self.turns}}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns, "said": "nothing"}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def skyrl(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What was registered, by its id."""
    registered: dict[str, str] = {"counting": "counting"}
    package, omega = ModuleType("skyrl_gym"), ModuleType("omegaconf")
    package.envs = SimpleNamespace(registration=SimpleNamespace(registry=registered))  # type: ignore[attr-defined]
    package.register = lambda id, entry_point: registered.update({id: entry_point})  # type: ignore[attr-defined]
    package.make = lambda id, **given: Counting(**given) if id in registered else None  # type: ignore[attr-defined]
    omega.OmegaConf = SimpleNamespace(create=lambda config: config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "skyrl_gym", package)
    monkeypatch.setitem(sys.modules, "omegaconf", omega)
    return registered


def test_an_episode_of_skyrl_gym_adds_up_its_rewards_and_shows_its_metrics(skyrl: dict[str, str]) -> None:
    environment = SkyRLGym("counting", {"by": 2}, max_turns=5)
    begun = environment.reset(Prompt(row=0, text="Go.", fields={"last": 4}), seed=1)
    assert [message["content"] for message in begun] == ["Go.", "count to 4 by 2"]  # type: ignore[union-attr, index]
    first = environment.step(Turn(number=1, text="2"))
    assert first == StepResult(messages=[{"role": "user", "content": "next"}], reward=1.0)
    assert environment.step(Turn(number=2, text="4")) == StepResult(
        messages=[], reward=1.0, done=True, figures={"steps": 2.0}
    )
    environment.close()
    assert environment._environment.closed


def test_a_class_of_skyrl_gym_is_registered_under_its_name(skyrl: dict[str, str]) -> None:
    for _ in range(2):
        SkyRLGym("my_envs:Counting", {"by": 1}, 5).reset(Prompt(row=0, text="", fields={"last": 1}), seed=1)
    assert skyrl == {"counting": "counting", "my_envs.Counting": "my_envs:Counting"}


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(DataFailure, match="pip install skyrl-gym"):
        SkyRLGym("gsm8k").reset(Prompt(row=0, text=""), seed=1)


def test_an_untried_version_of_a_package_is_noted() -> None:
    class Adapter(Environment):
        package, tried = "pytest", "0.4"

    (note,) = _untried(Adapter)
    assert "was tested with pytest 0.4, not with the installed" in note
    Adapter.tried = pytest.__version__
    assert [*_untried(Adapter)] == [*_untried(Environment)] == []


# -- NeMo Gym ----------------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function", "name": "get_weather", "description": "The weather.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
DATA = {
    "responses_create_params": {"input": [{"role": "user", "content": "Oslo?"}], "tools": [WEATHER]},
    "city": "Oslo",
}


class WeatherServer:
    """A resources server: the endpoints that every one has, and a tool. A session is a cookie."""

    def __init__(self) -> None:
        self.asked: dict[str, list[str]] = {}
        self.verified: Any = None

    async def seed(self, request: web.Request) -> web.Response:
        assert (await request.json())["city"] == "Oslo"
        name = str(len(self.asked))
        self.asked[name] = []
        answer = web.json_response({})
        answer.set_cookie("session", name)
        return answer

    async def weather(self, request: web.Request) -> web.Response:
        given = await request.json()
        if "city" not in given:
            return web.Response(status=422, text="city is missing")
        self.asked[request.cookies["session"]].append(given["city"])
        return web.json_response({"weather": "cold"})

    async def verify(self, request: web.Request) -> web.Response:
        self.verified = await request.json()
        right = self.asked[request.cookies["session"]] == [self.verified["city"]]
        return web.json_response({**self.verified, "reward": float(right), "calls": 2, "why": "text"})


def on_server(scenario: Callable[[str, WeatherServer], Any]) -> Any:
    async def whole() -> Any:
        server, app = WeatherServer(), web.Application()
        app.router.add_post("/seed_session", server.seed)
        app.router.add_post("/get_weather", server.weather)
        app.router.add_post("/verify", server.verify)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await scenario(f"http://127.0.0.1:{runner.addresses[0][1]}/", server)
        finally:
            await runner.cleanup()

    return asyncio.run(whole())


def call(number: int, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"c{number}", name="get_weather", arguments=arguments)


def test_an_episode_of_nemo_gym_calls_the_tools_and_is_verified(tmp_path: Path) -> None:
    (tmp_path / "dataset.jsonl").write_text(json.dumps(DATA) + "\n")
    assert nemo.main([str(tmp_path / "dataset.jsonl"), str(tmp_path / "rows.jsonl")]) == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text())

    async def scenario(url: str, server: WeatherServer) -> None:
        environment = NemoGym(url)
        begun = await environment.reset(Prompt(row=0, text="", fields=row), seed=1)
        assert begun == row["messages"] == [{"role": "user", "content": "Oslo?"}]
        (tool,) = environment.tools
        assert tool == {"type": "function", "function": {
            "name": "get_weather", "description": "The weather.", "parameters": WEATHER["parameters"]}}  # fmt: skip
        wrong = await environment.step(Turn(number=1, text="", calls=[call(1)]))
        assert wrong.figures == {"tool_errors": 1.0} and wrong.messages[0]["content"] == "Error: city is missing"  # type: ignore[index]
        read = await environment.step(Turn(number=2, text="Wait.", calls=[call(2, city="Oslo")]))
        assert not read.done and json.loads(read.messages[0]["content"]) == {"weather": "cold"}  # type: ignore[index]
        done = await environment.step(Turn(number=3, text="It is cold."))
        assert (done.reward, done.done, done.figures) == (1.0, True, {"calls": 2.0})
        await environment.close()
        kinds = [item["type"] for item in server.verified["response"]["output"]]
        assert kinds == [*["function_call", "function_call_output"], "message", "function_call",
                         "function_call_output", "message"]  # fmt: skip

    on_server(scenario)


def test_a_row_or_a_server_that_does_not_fit_fails_the_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(url: str, server: WeatherServer) -> None:
        with pytest.raises(DataFailure, match="has no column 'nemo_gym'"):
            await NemoGym(url).reset(Prompt(row=0, text=""), seed=1)
        environment = NemoGym(f"{url}nowhere")
        with pytest.raises(DataFailure, match="nowhere/seed_session answered 404"):
            await environment.reset(Prompt(row=0, text="", fields={"nemo_gym": DATA}), seed=1)
        await environment.close()

    on_server(scenario)
    (tmp_path / "wrong.jsonl").write_text('{"responses_create_params": {"input": [{"type": "reasoning"}]}}')
    assert nemo.main([str(tmp_path / "wrong.jsonl"), str(tmp_path / "rows.jsonl")]) == 2
    assert "no message of text" in capsys.readouterr().err
