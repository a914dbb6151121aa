"""Plays environments of the package `verifiers` as agents: the class `Environment` of versions 0.1 to 0.3, and the task
sets of 0.4 (`verifiers_tasksets.py`).

    # my_agent.py
    from engine.environments.verifiers import agent_of, load
    run = agent_of(load("my-environment"))

    # config.yaml
    data: {path: rows.jsonl}           # python -m engine.environments.verifiers my-environment rows.jsonl
    agent: {function: my_agent:run}

The environment calls the run's model through the gateway, which captures its tokens, and its rubric gives the reward.
`verifiers` is not a dependency of the engine: this module imports it only when it is used.
"""

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from engine.environments.verifiers_tasksets import TasksetEnvironment
from engine.errors import ConfigError, DataFailure, EngineError
from engine.trajectory import Prompt, RolloutResult

Agent = Callable[[str, str, Prompt], Coroutine[Any, Any, RolloutResult]]

COLUMNS = ("example_id", "task", "answer", "info")
"""Columns of a row, in addition to its prompt, that a rollout of an environment needs."""
CONNECTION_ERRORS = ("APIConnectionError", "APITimeoutError", "InternalServerError")


class _NoSignals:
    """Replaces the module `signal` where no handler may be set."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        return signal.getsignal(number)


def load(name: str, **arguments: Any) -> Any:
    """What `verifiers.load_environment` returns; with version 0.4, the task set `name`, and `arguments` are other
    fields of its `EnvConfig`. It sets no signal handlers: these would replace the engine's, and Python allows them only
    on the main thread, where agents are not imported.

    Raises: `ModuleNotFoundError` if verifiers or the environment is not installed; `ConfigError` for a version with
    neither of the two interfaces.
    """
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        if not verifiers.__version__.startswith("0.4."):
            warnings.warn(f"the adapter was tested with verifiers 0.4, not {verifiers.__version__}", stacklevel=2)
        try:
            return TasksetEnvironment(name, arguments)
        except ImportError as error:
            if not (error.name or "").startswith("verifiers"):
                raise
            law = f"has neither load_environment nor the task sets of 0.4: {error}"
            raise ConfigError("verifiers", verifiers.__version__, law, "install verifiers 0.1 to 0.4") from error
    from verifiers.envs import environment as module

    module.signal = _NoSignals()
    try:
        return verifiers.load_environment(name, **arguments)
    finally:
        module.signal = signal


def agent_of(environment: Any, sampling: dict[str, Any] | None = None) -> Agent:
    """An agent for `agent.function` that plays one rollout of an environment and returns the reward of its rubric, with
    its metrics as figures, and `tool_errors` if the environment formats those of its tools (`ToolEnv`).

    `sampling`: fields of its chat requests. The run's temperature, top-p and seed apply (docs/AGENTS.md).
    The agent raises `DataFailure` if the environment reports an error, and `EngineError` if the gateway is unreachable.
    """
    if isinstance(environment, TasksetEnvironment):

        async def play(base_url: str, api_key: str, prompt: Prompt) -> RolloutResult:
            return await environment.run(base_url, api_key, prompt, sampling or {})

        return play
    tool_errors = _counted_errors(environment)

    async def run(base_url: str, api_key: str, prompt: Prompt) -> RolloutResult:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        errors: list[BaseException] = []
        tool_errors.set(errors)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as connection:
            output = await environment.run_rollout(
                input_of(prompt), OpenAIChatCompletionsClient(connection), "model", dict(sampling or {})
            )
        error = output.get("error")
        if error is not None:
            story = f"the environment ended row {prompt.row} with an error: {error['error_chain_str']}"
            if any(name in error["error_chain_repr"] for name in CONNECTION_ERRORS):
                raise EngineError(story, row=prompt.row)
            raise DataFailure(story, row=prompt.row)
        figures = {name: float(value) for name, value in (output.get("metrics") or {}).items() if value is not None}
        if callable(getattr(environment, "error_formatter", None)):
            figures["tool_errors"] = float(len(errors))
        return RolloutResult(reward=float(output["reward"]), figures=figures)

    return run


def _counted_errors(environment: Any) -> ContextVar[list[BaseException]]:
    """Where the errors of tools in the rollout of a task are collected, as the environment formats them."""
    collected: ContextVar[list[BaseException]] = ContextVar("tool_errors")
    formatted = getattr(environment, "error_formatter", None)
    if callable(formatted):

        def counted(error: BaseException) -> Any:
            errors = collected.get(None)
            if errors is not None:  # else the error is from another agent's rollout of this environment
                errors.append(error)
            return formatted(error)

        environment.error_formatter = counted
    return collected


def input_of(prompt: Prompt) -> dict[str, Any]:
    """What a rollout of an environment begins with: the messages and columns of a row."""
    messages = prompt.fields.get("messages") or [{"role": "user", "content": prompt.text}]
    given = {name: prompt.fields[name] for name in COLUMNS if prompt.fields.get(name) is not None}
    return {"example_id": prompt.row, **given, "prompt": list(messages)}


def rows_of(environment: Any, count: int = -1, *, evaluation: bool = False) -> list[dict[str, Any]]:
    """Rows for `data.path`: the prompts of an environment's data set. `count`: number of rows; -1: all. `evaluation`:
    use its evaluation set, for `data.validation_path`. Raises: `ConfigError` for that of a task set, which has none."""
    if isinstance(environment, TasksetEnvironment):
        if evaluation:
            law = "a task set of verifiers 0.4 has no evaluation set"
            raise ConfigError("--evaluation", True, law, "name its split in --arguments, as the task set calls it")
        return environment.rows(count)
    data = environment.get_eval_dataset(n=count) if evaluation else environment.get_dataset(n=count)
    return [{"messages": row["prompt"]} | {name: row[name] for name in COLUMNS if name in row} for row in data]


def main(arguments: list[str]) -> int:
    """Write the prompts of an environment to a JSONL file."""
    parser = argparse.ArgumentParser(prog="python -m engine.environments.verifiers", description=main.__doc__)
    parser.add_argument("name", help="name for verifiers.load_environment")
    parser.add_argument("file", help="JSONL file to write")
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON object: arguments of load")
    parser.add_argument("--count", type=int, default=-1, help="number of prompts; -1: all")
    parser.add_argument("--evaluation", action="store_true", help="prompts of the evaluation set")
    chosen = parser.parse_args(arguments)
    try:
        environment = load(chosen.name, **chosen.arguments)
    except ModuleNotFoundError as error:
        print(f"engine: {error}; pip install 'verifiers<0.5' and the environment", file=sys.stderr)
        return 2
    try:
        rows = rows_of(environment, chosen.count, evaluation=chosen.evaluation)
    except ConfigError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    with open(chosen.file, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    print(f"{chosen.file}: {len(rows)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
