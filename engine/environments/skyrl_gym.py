"""Plays environments of SkyRL-Gym: the classes that `skyrl_gym.make` makes, for texts in and texts out.

    environment:
      class_name: engine.environments.skyrl_gym:SkyRLGym
      arguments: {env_class: gsm8k_multi_turn}

Needs the package skyrl-gym, which is imported when an episode begins. An environment gets the columns of the row as
its `extras`, as SkyRL passes them.
"""

from collections.abc import Mapping
from typing import Any

from engine.environments.protocol import Environment, Messages, StepResult, Turn
from engine.errors import DataFailure
from engine.trajectory import Prompt


class SkyRLGym(Environment):
    """One episode of the environment that is registered as `env_class`, or of a class `module:Class`, which is
    registered under this name. `config`: its `env_config`. `max_turns` is its own limit; `environment.max_turns` should
    not be lower, since an episode that ends there has no reward of its last turn.

    The environment reads the model's whole answer. What it would make of an answer (`postprocessed_action`) is not
    used: sampled tokens stay as they are.
    """

    package, tried = "skyrl-gym", "0.4"

    def __init__(self, env_class: str, config: Mapping[str, Any] | None = None, max_turns: int = 16) -> None:
        self._env_class = env_class
        self._config = config or {}
        self._max_turns = max_turns
        self._environment: Any = None

    def reset(self, prompt: Prompt, seed: int) -> Messages:
        """The messages with which the environment begins."""
        try:
            import skyrl_gym
            from omegaconf import OmegaConf
        except ModuleNotFoundError as error:
            raise DataFailure(f"{error}; install the package: pip install skyrl-gym", row=prompt.row) from error

        name = self._env_class
        if ":" in name:
            name = name.replace(":", ".")
            if name not in skyrl_gym.envs.registration.registry:
                skyrl_gym.register(id=name, entry_point=self._env_class)
        extras = {**prompt.fields, "max_turns": self._max_turns}
        self._environment = skyrl_gym.make(name, env_config=OmegaConf.create(dict(self._config)), extras=extras)
        begun = list(prompt.fields.get("messages") or [{"role": "user", "content": prompt.text}])
        messages, _ = self._environment.init(begun)
        return [dict(message) for message in messages]

    def step(self, turn: Turn) -> StepResult:
        """Give it the answer. The metrics of the episode become figures when it is done."""
        found = self._environment.step(turn.text)
        done = bool(found["done"])
        return StepResult(
            messages=[dict(message) for message in found["observations"] or ()],
            reward=float(found["reward"]), done=done, figures=self._figures() if done else {},
        )  # fmt: skip

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _figures(self) -> dict[str, float]:
        found = self._environment.get_metrics() or {}
        return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
