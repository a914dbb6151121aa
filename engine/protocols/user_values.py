"""The numbers that user code returns: rewards, their figures, the results of rollouts and the figures of trajectories.

Called where user code returns, and nowhere else: numbers become plain floats, and for what is no number the problem is
named. A problem is a text in which `WHERE` stands for what was judged. It must never raise because of a value.
"""

import math
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.errors import DataFailure
from engine.trajectory import RolloutResult, RolloutReturn

LONGEST_NAME = 200
"""Maximum length of the name of a figure or a metric, in characters."""
MOST_FIGURES = 100
"""Maximum number of figures that one call may return."""
MOST_OF_ALL = 10_000
"""Maximum number of figures of a trajectory, and of metrics of a train step."""
LARGEST = 1e300
"""Sums of larger numbers may be infinite."""


def number_in(value: Any) -> float | str:
    """A finite number as a float; for any other value, its description."""
    if value is None:
        return "None"
    try:
        if math.isfinite(value):
            number = float(value)
            return number if abs(number) <= LARGEST else f"{number} (beyond {LARGEST:g})"
    except Exception:  # whatever the value's own conversion raises
        with suppress(Exception):
            return f"{value!r:.80} of type {type(value).__name__}"
        return f"a {type(value).__name__}"
    return str(float(value))


def listed(values: Iterable[Any]) -> list[Any]:
    """Values in their order. Raises: `TypeError` for a mapping, whose items are names, a set, which has no order, and
    what is no collection."""
    if isinstance(values, Mapping | Set):
        raise TypeError(f"a {type(values).__name__} has no order of values")
    return list(values)


def name_problem(name: Any) -> str:
    """What is wrong with the name of a figure or a metric; empty if nothing is."""
    if not isinstance(name, str):
        return f"a {type(name).__name__}; a name must be a str"
    if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        return f"which must have 1 to {LONGEST_NAME} printable characters"
    return ""


def shown_name(name: Any) -> str:
    try:
        return f"{name!r:.80}"
    except Exception:
        return f"an object of type {type(name).__name__}"


def figures_in(figures: Any, most: int = MOST_FIGURES) -> dict[str, float] | str:
    """Figures by name as plain floats, or the problem."""
    if not isinstance(figures, Mapping):
        return f"figures as a {type(figures).__name__} WHERE, not as a mapping of names to numbers"
    if len(figures) > most:
        return f"{len(figures)} figures WHERE, more than {most}"
    found: dict[str, float] = {}
    for name, value in figures.items():
        problem, number = name_problem(name), number_in(value)
        if problem:
            return f"a figure named {shown_name(name)} WHERE, {problem}"
        if isinstance(number, str):
            return f"the figure {name!r} as {number} WHERE, not a finite number"
        found[str(name)] = number
    return found


class ResultFailure(DataFailure):
    """A rollout or an agent returned what is no result. The message names its function and the prompt row."""


def checked_result(returned: RolloutReturn, who: str, row: int) -> RolloutResult:
    """What a rollout or an agent returned, with plain numbers. Raises: `ResultFailure`."""
    found = result_in(returned)
    if isinstance(found, str):
        raise ResultFailure(f"{who} returned {found.replace('WHERE', f'on prompt row {row}')}", row=row)
    return found


def result_in(returned: RolloutReturn) -> RolloutResult | str:
    """A result with plain numbers, or the problem."""
    result = returned if isinstance(returned, RolloutResult) else RolloutResult(reward=returned)
    for name in ("finish_reason", "shown_prompt"):
        if not isinstance(getattr(result, name), str):
            return f"{name} as a {type(getattr(result, name)).__name__} WHERE, not as a text"
    figures = figures_in(result.figures)
    if isinstance(figures, str):
        return figures
    try:
        given = [result.reward, *listed(result.turn_rewards)]
    except TypeError:
        return f"turn_rewards as a {type(result.turn_rewards).__name__} WHERE, not as a list"
    rewards = [None if one is None else number_in(one) for one in given]
    odd = next((one for one in rewards if isinstance(one, str)), None)
    if odd is not None:
        return f"the reward {odd} WHERE, not a finite number"
    plain: dict[str, Any] = {"reward": rewards[0], "turn_rewards": rewards[1:]}
    return replace(result, figures=figures, **plain)
