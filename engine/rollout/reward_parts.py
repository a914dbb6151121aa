"""What a reward consists of: its functions, how each is called, what each may return, and how the values add up.

`config.reward_functions` makes the parts, `scoring.py` calls them. Nothing here keeps state between calls.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeAlias

from engine.errors import DataFailure
from engine.trajectory import NoAnswer, Prompt, Scored, StepReward, Trajectory

Form: TypeAlias = Literal["response", "group", "batch"]
"""What one call gets: a response; all responses of a group; or the responses of several whole groups."""
Unit: TypeAlias = Literal["response", "turn", "token"]
"""What one number judges."""
Value: TypeAlias = float | list[float] | None
"""Of one response: a number; one for each turn or token; or None, where the reward does not apply."""


def _nothing() -> None:
    """The default of `RewardPart.close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """A reward function, and how to call it. Only one with a name may return None."""

    function: Callable[..., Any]
    """(prompt, trajectory) -> value; for other forms (prompts, trajectories) -> values. It may be `async`."""
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
        elif not math.isfinite(total):
            law = f"the weighted sum of {names} on {where} is {total}, not a finite number"
        if law:
            raise DataFailure(law, row=prompt.row)


def places(unit: Unit, trajectory: Trajectory) -> list[int]:
    """The response tokens at which the numbers of a value belong: every token, or the last of each turn. A turn is a
    run of tokens that the policy sampled."""
    if unit == "token":
        return list(range(len(trajectory.token_ids)))
    if unit == "response":
        return []
    ends, position = [], 0
    for sampled, run in groupby(trajectory.loss_mask):
        position += sum(1 for _ in run)
        if sampled:
            ends.append(position - 1)
    return ends


def value_in(part: RewardPart, value: Any, trajectory: Trajectory) -> Value | str:
    """A value of a part as plain numbers; for one that it must not return, what it returned and what it should."""
    if value is None and part.name:
        return None
    if part.unit == "response":
        number = number_in(value)
        if isinstance(value, NoAnswer | Scored) and isinstance(number, float):
            return value
        law = "neither a finite number nor None" if part.name else "not a finite number"
        return f"{number} WHERE, {law}" if isinstance(number, str) else number
    wanted = f"one finite number for each {part.unit}" + (", or None" if part.name else "")
    try:
        numbers = [number_in(one) for one in value]
    except TypeError:
        return f"{value!r:.80} of type {type(value).__name__} WHERE, not {wanted}"
    odd = next((number for number in numbers if isinstance(number, str)), None)
    if odd is not None:
        return f"a list with {odd} WHERE, not {wanted}"
    count = len(places(part.unit, trajectory))
    if len(numbers) != count:
        return f"{len(numbers)} numbers WHERE, not {wanted} of the response, which has {count}"
    return [number for number in numbers if isinstance(number, float)]


def number_in(value: Any) -> float | str:
    """A finite number as a float; for any other value, its description."""
    if value is None:
        return "None"
    try:
        if math.isfinite(value):
            return float(value)
    except Exception:  # whatever the value's own conversion raises
        with contextlib.suppress(Exception):
            return f"{value!r:.80} of type {type(value).__name__}"
        return f"a {type(value).__name__}"
    return str(float(value))


def name_of(function: Callable[..., Any]) -> str:
    """`module.function`, as in the user's source."""
    module = getattr(function, "__module__", "") or ""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}.{name}" if module else name
