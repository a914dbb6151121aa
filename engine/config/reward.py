"""The section `reward`: one reward function, or several with names and weights.

Used by `schema.py`. Imports no user code: `reward_functions.py` does.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from engine.config.limit_fields import limit_field
from engine.errors import ConfigError, choice
from engine.section import NAMED, Section

OTHER_FIGURES = ("mean", "std", "histograms")
"""Names that a function cannot have, because the metrics `reward_mean` and so on have other meanings."""


class NamedReward(Section):
    """One of several reward functions."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$",
        max_length=40,
        description="Name of the function in metrics (`reward_NAME`) and samples.",
    )
    function: str = Field(pattern=NAMED, description="Reward function, as module:function.")
    weight: float = Field(
        1.0, ge=-1e9, le=1e9, description="Weight of the function in the reward, which is a weighted sum; not 0."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Keyword arguments of every call of the function."
    )
    unit: Literal["response", "turn", "token"] = Field(
        "response", description="What one number of the function judges: response, turn or token."
    )
    timeout_s: float | None = Field(
        None, gt=0, le=86_400, description="Time limit of one call, in seconds; null: reward.timeout_s."
    )
    processes: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Separate processes in each replica; 0: threads; null: 0, or as many as the function declares.",
    )
    memory_mb: int | None = Field(
        None, ge=64, le=1 << 20, description="Memory limit of each of the function's processes, in MiB; null: no limit."
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Maximum concurrent calls in each replica; null: the number of processes, or reward.concurrency.",
    )
    batch_size: int = Field(
        64,
        ge=1,
        le=65_536,
        description="Maximum number of responses in one call of a function that takes several groups.",
    )


class RewardSection(Section):
    """How a response is judged. Not needed with `model.make`."""

    function: str | None = Field(None, pattern=NAMED, description="Reward function, as module:function.")
    functions: list[NamedReward] = Field(
        [], max_length=64, description="Several reward functions instead of one: the reward is their weighted sum."
    )
    correct: str | list[str] | None = Field(
        None,
        description="Name of the function that says whether a response is right: its value is at least 1. With several "
        "names, all functions that apply must say so. null: the only function, else the weighted sum.",
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Maximum concurrent calls of each function in each replica; null: 4, or as many as its processes.",
    )
    timeout_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Time limit of one call of a reward function, in seconds; after that, it fails.",
    )
    max_failure_share: float | None = limit_field("max_failure_share", 0.5)

    @property
    def longest_s(self) -> float:
        """The longest time limit of a call, in seconds."""
        return max([self.timeout_s, *(part.timeout_s for part in self.functions if part.timeout_s is not None)])

    @property
    def assigned(self) -> bool:
        """Whether a function is set."""
        return self.function is not None or bool(self.functions)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of several functions."""
        return tuple(part.name for part in self.functions)

    @property
    def correct_names(self) -> tuple[str, ...]:
        """The names of the functions that say whether a response is right; empty: the reward says it."""
        if self.correct is None:
            return self.names if len(self.names) == 1 else ()
        return (self.correct,) if isinstance(self.correct, str) else tuple(self.correct)

    @property
    def specs(self) -> dict[str, str]:
        """Every function, as module:function, by its field."""
        if self.function is not None:
            return {"reward.function": self.function}
        return {f"reward.functions.{index}.function": part.function for index, part in enumerate(self.functions)}


def refuse_rewards(reward: RewardSection) -> None:
    """Raises: `ConfigError` for both one function and several, a repeated name, or a weight of 0."""
    if reward.function is not None and reward.functions:
        law = "cannot be set together with reward.functions"
        raise ConfigError("reward.function", reward.function, law, "move it into the list, or remove the list")
    names = list(reward.names)
    for name in reward.correct_names:
        if name not in names:
            law = "is not the name of one of reward.functions"
            fix = choice(name, names, "" if names else "remove it")
            raise ConfigError("reward.correct", reward.correct, law, fix)
    for index, part in enumerate(reward.functions):
        field = f"reward.functions.{index}"
        _refuse_name(f"{field}.name", part.name, names[:index])
        if part.weight == 0:
            law = "must not be 0: the function would be called without an effect"
            raise ConfigError(f"{field}.weight", part.weight, law, "use another weight, or remove the function")
        if part.memory_mb is not None and part.processes == 0:
            law = "limits the processes of the function, but it has none"
            raise ConfigError(f"{field}.memory_mb", part.memory_mb, law, f"set {field}.processes to 1 or more")
        if part.processes and part.concurrency is not None:
            law = f"cannot be set beside {field}.processes, which is the number of calls at once"
            raise ConfigError(f"{field}.concurrency", part.concurrency, law, "remove it")


def _refuse_name(field: str, name: str, earlier: Sequence[str]) -> None:
    if name in earlier:
        raise ConfigError(field, name, "must be unique: an earlier function has this name", "use another name")
    if name in OTHER_FIGURES:
        law = f"must not be one of {', '.join(OTHER_FIGURES)}: reward_{name} is a metric with another meaning"
        raise ConfigError(field, name, law, "use another name")
