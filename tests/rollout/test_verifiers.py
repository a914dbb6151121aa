"""Environments of `verifiers` on the gateway. The package itself cannot be installed beside the tests': stand-ins with
its interfaces play the rollouts, through the real gateway. `test_real_environments` uses the package."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "gateway"))
from gateway_rig import FixedAnswers, Rig, run
from openai import AsyncOpenAI

from engine.environments.verifiers import agent_of, input_of, load, main, rows_of
from engine.errors import ConfigError, DataFailure, EngineError
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


def played(environment: Any, *said: str, samples: int = 1, row: dict[str, Any] | None = None) -> list[Trajectory]:
    function = agent_of(environment, {"max_tokens": 90})
    fields = row or rows_of(environment, 1)[0]

    async def agent(client: AsyncOpenAI, prompt: Prompt) -> Any:
        return await function(str(client.base_url), client.api_key, Prompt(row=3, text="1+1", fields=fields))

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


# -- the task sets of 0.4 ----------------------------------------------------------------------------------------------


class TaskEnv:
    """The interface of an `Env` of 0.4, and one of its rollouts."""

    error: Any = None

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.taskset = [
            SimpleNamespace(
                data=SimpleNamespace(system_prompt="Add.", prompt=f"{number}+{number}", name=None, idx=number)
            )
            for number in range(3)
        ]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(self, task: Any, context: Any) -> Any:
        model, client, sampling = context
        async with AsyncOpenAI(base_url=client["base_url"], api_key=os.environ[client["api_key_var"]]) as connection:
            messages: Any = [{"role": "user", "content": task.data.prompt}]
            done = await connection.chat.completions.create(model=model, messages=messages, **sampling)
        reward = float(done.choices[0].message.content == "2")
        agent = SimpleNamespace(trainable=True)
        trace = SimpleNamespace(agent=agent, reward=reward, metrics={"right": reward, "skipped": None}, errors=[])
        errors = [] if self.error is None else [self.error]
        return SimpleNamespace(ok=not errors, errors=errors, traces=[trace])


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The interface of verifiers 0.4."""
    root, v1, loaders, types = (
        ModuleType(name) for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils.loaders", "verifiers.v1.types")
    )
    root.__version__ = "0.4.0"  # type: ignore[attr-defined]
    v1.EvalClientConfig = types.Sampling = dict  # type: ignore[attr-defined]
    v1.ModelContext = lambda *parts: parts  # type: ignore[attr-defined]
    loaders.load_environment, loaders.resolve_env_config = TaskEnv, dict  # type: ignore[attr-defined]
    for module in (root, v1, loaders, types, ModuleType("verifiers.v1.utils")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(TaskEnv, "error", None)
    return root


def test_a_task_of_a_task_set_has_its_reward_and_metrics(tasksets: ModuleType) -> None:
    environment = load("sums", taskset={"split": "train"}, agent={"harness": {"id": "null"}})
    assert environment._config == {"taskset": {"split": "train", "id": "sums"}, "agent": {"harness": {"id": "null"}}}
    rows = rows_of(environment)
    assert [row["task"] for row in rows] == [0, 1, 2] and rows_of(environment, 1) == rows[:1]
    assert rows[1]["messages"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    (one,) = played(load("sums"), "2<end>", row=rows[1])
    assert (one.reward, one.figures["right"], one.figures["turns"]) == (1.0, 1.0, 1)
    assert "skipped" not in one.figures and not [name for name in os.environ if name.startswith("STEP_ENGINE_KEY")]


@pytest.mark.parametrize(("type_", "kind"), [("TaskError", DataFailure), ("ProviderError", EngineError)])
def test_an_error_of_a_task_set_fails_the_attempt(
    tasksets: ModuleType, monkeypatch: pytest.MonkeyPatch, type_: str, kind: type[EngineError]
) -> None:
    monkeypatch.setattr(TaskEnv, "error", SimpleNamespace(type=type_, message="it broke"))
    environment = load("sums")
    with pytest.raises(EngineError, match=f"ended row 3 with an error: {type_}: it broke") as caught:
        played(environment, "2<end>", row=rows_of(environment)[1])
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("row", "words"), [({"x": 1}, "has no number of a task"), ({"task": 9}, "the task set has 3 tasks")]
)
def test_a_row_without_its_task_is_named(tasksets: ModuleType, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataFailure, match=words):
        played(load("sums"), "2<end>", row=row)


def test_other_versions_of_verifiers_are_named(
    tasksets: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["sums", str(tmp_path / "rows.jsonl"), "--evaluation"]) == 2
    assert "has no evaluation set" in capsys.readouterr().err
    assert main(["sums", str(tmp_path / "rows.jsonl")]) == 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3
    tasksets.__version__ = "0.9.0"  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=r"tested with verifiers 0\.4, not 0\.9\.0"):
        load("sums")
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    with pytest.warns(UserWarning), pytest.raises(ConfigError, match=r"install verifiers 0\.1 to 0\.4"):
        load("sums")
