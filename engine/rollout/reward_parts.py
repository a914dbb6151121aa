"""What a reward consists of: its functions, how each is called, what each may return, and how the values add up.

`config.reward_functions` makes the parts, `scoring.py` calls them. Nothing here keeps state between calls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import DataFailure
from engine.protocols.user_values import number_in
from engine.tasks.reward_forms import Form, Unit, Value, places
from engine.trajectory import NoAnswer, Prompt, Scored, StepReward, Trajectory


def _nothing() -> None:
    """The default of `RewardPart.close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """A reward function, and how to call it. Only one with a name may return None."""

    function: Callable[..., Any]
    """(prompt, trajectory) -> value; for other forms (prompts, trajectories) -> values. It may be `async`. One that
    `limits_itself` always takes lists, and checks its values."""
    name: str = ""
    """Empty where it is the only function."""
    weight: float = 1.0
    form: Form = "response"
    unit: Unit = "response"
    shown: str = ""
    """The function's name in messages; empty: as in its source."""
    judge: str = ""
    """The model that judges, if the function asks one."""
    note: str = ""
    """The line of `engine check` about it."""
    timeout_s: float | None = None
    """Seconds of one call; None: as the caller has them."""
    concurrency: int | None = None
    """Calls at once; None: as the caller has them."""
    setting: str = ""
    """The setting that limits calls at once, in messages."""
    batch_size: int = 64
    """Responses of one call of the form `batch`, unless a single group has more."""
    limits_itself: bool = False
    """Whether `function` ends an overdue call itself, so that no thread hangs."""
    close: Callable[[], None] = field(default=_nothing)

    @property
    def who(self) -> str:
        """Its name in messages, with the function."""
        return f"{self.title} ({self._function})" if self.name else self.title

    @property
    def title(self) -> str:
        """Its shortest name in messages."""
        if self.judge:
            return f"judge {self.name or self.judge}"
        return f"reward {self.name or self._function}"

    @property
    def _function(self) -> str:
        return self.shown or name_of(self.function)


@dataclass(frozen=True, slots=True)
class RewardParts:
    """The reward of a run: the weighted sum of its parts."""

    parts: tuple[RewardPart, ...]

    def close(self) -> None:
        """End what the parts have started. They start it again if they are called again."""
        for part in self.parts:
            part.close()

    def assign(self, prompt: Prompt, rollout: Sequence[Trajectory], values: Sequence[Value]) -> None:
        """Set the reward of a rollout's segments, given the value of each part. Steps are those of the last segment.

        Raises: `DataFailure` if no part applies or the sum is too large.
        """
        last, total = rollout[-1], 0.0
        figures: dict[str, float] = {}
        steps: dict[int, float] = {}
        for part, value in zip(self.parts, values, strict=True):
            if value is None:
                continue
            numbers = value if isinstance(value, list) else [value]
            figures[part.name] = math.fsum(numbers)
            total += part.weight * figures[part.name]
            for position, number in zip(places(part.unit, last), value if isinstance(value, list) else (), strict=True):
                steps[position] = steps.get(position, 0.0) + part.weight * number
        self._require(prompt, figures, total)
        unparsable = any(isinstance(value, NoAnswer) for value in values)
        own = {
            f"{part.name}_{name}" if part.name else name: number
            for part, value in zip(self.parts, values, strict=True) if isinstance(value, Scored)
            for name, number in value.figures.items()
        }  # fmt: skip
        for trajectory in rollout:
            trajectory.unparsable = unparsable
            trajectory.reward = float(total)
            trajectory.reward_parts = {name: number for name, number in figures.items() if name} | own
            trajectory.step_rewards = []
        last.step_rewards = [StepReward(position, steps[position]) for position in sorted(steps)]

    def _require(self, prompt: Prompt, figures: dict[str, float], total: float) -> None:
        where, names = f"prompt row {prompt.row}", ", ".join(part.name for part in self.parts)
        law = ""
        if not figures:
            law = (
                f"no reward applies to a response to {where}: {names} returned None; at least one must return a number"
            )
        elif isinstance(number_in(total), str):
            law = f"the weighted sum of {names} on {where} is {number_in(total)}, not a finite number"
        if law:
            raise DataFailure(law, row=prompt.row)


def name_of(function: Callable[..., Any]) -> str:
    """`module.function`, as in the user's source."""
    module = getattr(function, "__module__", "") or ""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}.{name}" if module else name
