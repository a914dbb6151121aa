"""Plays environments of `verifiers` 0.4: a task set, a harness that talks to the model, and the rewards of its tasks.

Called by `verifiers.py`, which also plays the environments of earlier versions. Each rollout has its own environment
object, harness and servers, which end with it. The harness calls the run's model through the gateway.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from threading import Lock
from typing import Any

from engine.errors import DataFailure, EngineError
from engine.trajectory import Prompt, RolloutResult

TASK = "task"
"""The column with the number of the task in its task set."""
MODEL_ERRORS = ("ProviderError", "InterceptionError", "TunnelError")
"""Types of errors that are no fault of the task."""


class TasksetEnvironment:
    """The environment of a task set. `settings`: further fields of verifiers' `EnvConfig`, such as `agent`."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        taskset = {**settings.get("taskset", {}), "id": name}
        self._config = resolve_env_config({**settings, "taskset": taskset})
        self._load = load_environment
        self._tasks: list[Any] = []
        self._left: Iterator[Any] = iter(load_environment(self._config).taskset)
        self._lock = Lock()

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Rows for `data.path`. `count`: number of tasks; -1: all."""
        self._read(count if count >= 0 else None)
        tasks = self._tasks[: count if count >= 0 else None]
        return [{"messages": _messages(task.data), TASK: number} for number, task in enumerate(tasks)]

    async def run(self, base_url: str, api_key: str, prompt: Prompt, sampling: Mapping[str, Any]) -> RolloutResult:
        """One rollout. Raises: `DataFailure` if the environment reports an error, `EngineError` if the model cannot be
        reached."""
        from verifiers.v1 import EvalClientConfig, ModelContext
        from verifiers.v1.types import Sampling

        task = self._task(prompt)
        variable = f"STEP_ENGINE_KEY_{abs(hash(api_key))}"  # verifiers reads keys from the environment only
        os.environ[variable] = api_key
        try:
            environment = self._load(self._config)
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            async with environment.serving():
                context = ModelContext("model", client, Sampling(**sampling))
                episode = await environment.run_episode(task, context)
        finally:
            del os.environ[variable]
        return _result(episode, prompt)

    def _task(self, prompt: Prompt) -> Any:
        number = prompt.fields.get(TASK)
        if not isinstance(number, int) or number < 0:
            law = f"row {prompt.row} has no number of a task in its column {TASK!r}"
            raise DataFailure(f"{law}: write the rows with engine.environments.verifiers", row=prompt.row)
        self._read(number + 1)
        if number >= len(self._tasks):
            raise DataFailure(f"the task set has {len(self._tasks)} tasks, but row {prompt.row} names task {number}")
        return self._tasks[number]

    def _read(self, count: int | None) -> None:
        """Have at least so many tasks, if there are as many; None: all."""
        with self._lock:
            missing = None if count is None else max(0, count - len(self._tasks))
            self._tasks += islice(self._left, missing)


def _messages(data: Any) -> list[dict[str, Any]]:
    """The messages of a task that a person would read: its prompt, or its name if a user of the environment begins."""
    begun = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*begun, {"role": "user", "content": data.prompt}]
    given = [message.model_dump(exclude_none=True) for message in data.prompt or ()]
    given = [{"role": each["role"], "content": _text(each.get("content"))} for each in given]
    return [*begun, *given] or [{"role": "user", "content": data.description or data.name or f"task {data.idx}"}]


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part.get("text") or "" for part in parts)


def _result(episode: Any, prompt: Prompt) -> RolloutResult:
    """The sum of the rewards of the trained agents, and the metrics of all, added up by name."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        last = errors[-1] if errors else None
        said = "without an error" if last is None else f"with an error: {last.type}: {last.message}"
        story = f"the environment ended row {prompt.row} {said}"
        if last is not None and last.type in MODEL_ERRORS:
            raise EngineError(story, row=prompt.row)
        raise DataFailure(story, row=prompt.row)
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    figures: dict[str, float] = {}
    for trace in episode.traces:
        for name, value in trace.metrics.items():
            if value is not None:
                figures[name] = figures.get(name, 0.0) + float(value)
    return RolloutResult(reward=float(sum(trace.reward for trace in trained)), figures=figures)
