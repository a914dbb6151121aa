"""Environments of `verifiers` on the gateway. The package itself cannot be installed beside the tests': a stand-in with
its interface plays the rollouts, through the real gateway."""

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "gateway"))
from gateway_rig import FixedAnswers, Rig, run
from openai import AsyncOpenAI

from engine.environments.verifiers import agent_of, input_of, rows_of
from engine.errors import DataFailure, EngineError
from engine.trajectory import Prompt, Trajectory

ROW = {"prompt": [{"role": "user", "content": "1+1"}], "example_id": 7, "answer": "2", "info": {"hard": False}, "x": 1}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Sums:
    """The interface of a `ToolEnv`, and one of its rollouts."""

    def __init__(self, error: dict[str, str] | None = None) -> None:
        self.error = error
        self.given: list[Any] = []

    def get_dataset(self, n: int = -1) -> list[dict[str, Any]]:
        return [ROW, ROW][: n if n >= 0 else None]

    def get_eval_dataset(self, n: int = -1) -> list[dict[str, Any]]:
        return [{**ROW, "answer": "3"}]

    async def meet(self) -> None:
        """Called after each answer of the model."""

    def error_formatter(self, error: Exception) -> str:
        return f"Error: {error}"

    async def run_rollout(self, given: Any, client: Any, model: str, sampling: dict[str, Any]) -> dict[str, Any]:
        self.given.append((given, model, sampling))
        messages = list(given["prompt"])
        while True:
            done = await client.connection.chat.completions.create(
                model=model, messages=messages, tools=[ADD], **sampling
            )
            await self.meet()
            message = done.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                try:
                    content = str(sum(json.loads(call.function.arguments)["numbers"]))
                except Exception as error:
                    content = self.error_formatter(error)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        reward = float(message.content == given["answer"])
        return {"reward": reward, "metrics": {"right": reward, "skipped": None}, "error": self.error}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = ModuleType("verifiers.clients")
    clients.OpenAIChatCompletionsClient = lambda connection: SimpleNamespace(connection=connection)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.clients", clients)


def played(environment: Sums, *said: str, samples: int = 1) -> list[Trajectory]:
    function = agent_of(environment, {"max_tokens": 90})

    async def agent(client: AsyncOpenAI, prompt: Prompt) -> Any:
        (row,) = rows_of(environment, 1)
        return await function(str(client.base_url), client.api_key, Prompt(row=3, text="1+1", fields=row))

    async def scenario() -> list[Trajectory]:
        async with Rig(agent, FixedAnswers(*said), max_tokens=90, reward=None) as rig:
            return (await rig.generate(samples=samples)).group.trajectories

    found: list[Trajectory] = run(scenario())
    return found


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call><end>"


def test_a_rollout_has_the_reward_the_metrics_and_the_tool_errors_of_its_environment() -> None:
    environment = Sums()
    (one,) = played(environment, call(numbers="x"), call(numbers=[1, 1]), "2<end>")
    assert (one.reward, one.figures["right"], one.figures["tool_errors"]) == (1.0, 1.0, 1.0)
    assert (one.figures["tool_calls"], one.figures["turns"]) == (2, 3)
    assert "skipped" not in one.figures and not one.continues
    assert environment.given == [(input_of(Prompt(row=3, text="", fields=rows_of(environment, 1)[0])), "model",
                                  {"max_tokens": 90})]  # fmt: skip


class Pairs(Sums):
    """Two rollouts that get their answers together."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = asyncio.Barrier(2)

    async def meet(self) -> None:
        await self.barrier.wait()


def test_the_errors_of_rollouts_at_the_same_time_are_kept_apart() -> None:
    found = played(Pairs(), *[call(numbers="x")] * 2, *["2<end>"] * 2, samples=2)
    assert [one.figures["tool_errors"] for one in found] == [1.0, 1.0]


def test_several_agents_may_play_one_environment() -> None:
    environment = Sums()
    played(environment, call(numbers=[1, 1]), "2<end>")
    (one,) = played(environment, call(numbers="x"), call(numbers=[1, 1]), "2<end>")
    assert one.figures["tool_errors"] == 1.0


@pytest.mark.parametrize(
    ("chain", "kind"), [("ModelError -> KeyError", DataFailure), ("ModelError -> APIConnectionError", EngineError)]
)
def test_an_error_of_the_environment_fails_the_attempt(chain: str, kind: type[EngineError]) -> None:
    environment = Sums({"error_chain_repr": chain, "error_chain_str": "it broke"})
    with pytest.raises(EngineError, match="the environment ended row 3 with an error: it broke") as caught:
        played(environment, "2<end>")
    assert type(caught.value) is kind


def test_a_row_of_the_file_is_the_input_of_a_rollout() -> None:
    (row,) = rows_of(Sums(), 1)
    assert row == {"messages": ROW["prompt"], "example_id": 7, "answer": "2", "info": {"hard": False}}
    assert len(rows_of(Sums())) == 2 and rows_of(Sums(), evaluation=True)[0]["answer"] == "3"
    given = input_of(Prompt(row=0, text="user: 1+1", fields=row))
    assert given == {"prompt": ROW["prompt"], "example_id": 7, "answer": "2", "info": {"hard": False}}
    assert input_of(Prompt(row=4, text="1+1")) == {"prompt": ROW["prompt"], "example_id": 4}
