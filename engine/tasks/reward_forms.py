"""The forms of a reward function, and what each may return. The names of its parameters say which form it has.

    (prompt, trajectory)                 one response
    (prompt, trajectories)               all responses of a group
    (prompts, trajectories)              the responses of several groups
    (prompts, completions, **columns)    the same, as TRL calls its reward functions: with lists as keywords

Used by `config.reward_functions`, by `rollout.scoring` and by processes of rewards. Nothing here keeps state.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeAlias, TypeVar

from engine.errors import ConfigError, DataFailure, RewardFailure, choice, counted
from engine.protocols.user_values import figures_in, listed, number_in
from engine.tasks.rewards import check_signature
from engine.trajectory import NoAnswer, Prompt, Scored, Trajectory

Form: TypeAlias = Literal["response", "group", "batch"]
"""What one call gets: a response; all responses of a group; or the responses of several whole groups."""
Unit: TypeAlias = Literal["response", "turn", "token"]
"""What one number judges."""
Value: TypeAlias = float | list[float] | None
"""Of one response: a number; one for each turn or token; or None, where the reward does not apply."""

FORMS: dict[tuple[str, str], Form] = {
    ("prompt", "trajectory"): "response",
    ("prompt", "trajectories"): "group",
    ("prompts", "trajectories"): "batch",
}
"""The form, by the names of the first two parameters. Other names mean the form for one response."""
MESSAGES = "messages"
"""The column of a chat. (`dataset.py` has it too, but imports numpy, which processes of rewards can do without.)"""
TRL = ("prompts", "completions", "completion_ids")
"""Keywords of TRL that are not columns. A function gets those that it names, or all if it takes any keyword."""


@dataclass(frozen=True, slots=True)
class BoundReward:
    """A reward function with its arguments."""

    call: Callable[..., Any]
    """(prompt, trajectory), or (prompts, trajectories) for the forms `group` and `batch`."""
    form: Form
    trl: bool = False


Problem = tuple[str, str, str] | None
"""A wrong argument: its name, the law that it breaks, and what to do."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What a reward function declares about itself."""

    processes: int = 0
    """Number of its processes in each replica, unless the configuration says otherwise."""
    check: Callable[..., Problem | str] | None = field(default=None)
    """A check that gets the arguments before a run starts. It may test what the reward needs, such as a server. It
    returns a problem, or a line for `engine check`."""
    time_limit: str = ""
    """The argument that gets the time limit of a call, in seconds, unless it is set."""


Function = TypeVar("Function", bound=Callable[..., Any])


def declare(
    *, processes: int = 0, check: Callable[..., Problem | str] | None = None, time_limit: str = ""
) -> Callable[[Function], Function]:
    """A decorator with which a reward function declares its processes, a check of its arguments, and the argument that
    gets the time limit of a call."""

    def decorated(function: Function) -> Function:
        function.declared = Declared(processes, check, time_limit)  # type: ignore[attr-defined]
        return function

    return decorated


def declared_by(function: Callable[..., Any]) -> Declared:
    """What a function declares about itself; the defaults if it declares nothing."""
    found = getattr(function, "declared", None)
    return found if isinstance(found, Declared) else Declared()


def bind(function: Any, arguments: Mapping[str, Any], spec: str, config_field: str) -> BoundReward:
    """The function with its form and its arguments. Raises: `ConfigError` if it cannot be called with `arguments`."""
    names = _parameters_of(function)
    if "completions" in names:
        _check_keywords(function, {"completions": None}, arguments, spec, config_field)
        return BoundReward(_TrlCall(function, arguments, names), "batch", trl=True)
    form = FORMS.get((names[0], names[1]), "response") if len(names) > 1 else "response"
    configurable = names[2:] and config_field.startswith("reward.functions.") and not inspect.isclass(function)
    if not arguments and not configurable:
        check_signature(function, spec, config_field)
    else:
        _check_arguments(function, arguments, spec, config_field)
    if form == "group":
        return BoundReward(lambda prompts, trajectories: function(prompts[0], trajectories, **arguments), form)
    if not arguments:
        return BoundReward(function, form)
    return BoundReward(lambda prompt, trajectory: function(prompt, trajectory, **arguments), form)


def check_declared(function: Any, arguments: Mapping[str, Any], config_field: str) -> str:
    """Let the function check its arguments: a line for `engine check`, or an empty one. Raises: `ConfigError`."""
    check = declared_by(function).check
    found = check(**arguments) if check is not None else None
    if isinstance(found, tuple):
        name, law, fix = found
        raise ConfigError(f"{config_field}.{name}", arguments.get(name), law, fix)
    return found or ""


def _parameters_of(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _check_arguments(function: Any, arguments: Mapping[str, Any], spec: str, config_field: str) -> None:
    try:
        inspect.signature(function).bind(None, None, **arguments)
    except TypeError as error:
        known = _parameters_of(function)[2:]
        field = config_field.removesuffix(".function") + ".arguments"
        unknown = next((name for name in arguments if name not in known), "")
        fix = choice(unknown, known, f"{spec} takes {', '.join(known) or 'no arguments'}")
        raise ConfigError(field, dict(arguments), f"cannot be passed to {spec}: {error}", fix) from error


def _check_keywords(
    function: Any, given: Mapping[str, Any], arguments: Mapping[str, Any], spec: str, config_field: str
) -> None:
    try:
        inspect.signature(function).bind_partial(**given, **arguments)
    except TypeError as error:
        law = f"cannot be called with completions and its arguments as keywords: {error}"
        raise ConfigError(config_field, spec, law, "define it as def reward(prompts, completions, **kwargs)") from error


class _TrlCall:
    """Calls a function as TRL does."""

    def __init__(self, function: Any, arguments: Mapping[str, Any], names: Sequence[str]) -> None:
        self._function = function
        self._arguments = arguments
        self._names = names
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._required = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_KEYWORD,)
        ]
        self.__module__, self.__qualname__ = function.__module__, getattr(function, "__qualname__", "reward")

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Any:
        chats = [prompt.fields.get(MESSAGES) for prompt in prompts]
        given: dict[str, list[Any]] = {
            "prompts": [chat or prompt.text for chat, prompt in zip(chats, prompts, strict=True)],
            "completions": [
                [{"role": "assistant", "content": trajectory.text}] if chat else trajectory.text
                for chat, trajectory in zip(chats, trajectories, strict=True)
            ],
            "completion_ids": [list(trajectory.token_ids) for trajectory in trajectories],
        }
        for name in dict.fromkeys(name for prompt in prompts for name in prompt.fields):
            if name not in (*TRL, MESSAGES) and name not in self._arguments:
                given[name] = [prompt.fields.get(name) for prompt in prompts]
        missing = [name for name in self._required if name not in given and name not in self._arguments]
        if missing:
            row = prompts[0].row
            law = f"row {row} has no column {missing[0]!r}, which the reward requires"
            raise DataFailure(law, row=row)
        keywords = given if self._takes_all else {name: given[name] for name in given if name in self._names}
        return self._function(**keywords, **self._arguments)


# -- what a function returns -------------------------------------------------------------------------------------------


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


def checked_values(
    found: Any, form: Form, unit: Unit, optional: bool, trajectories: Sequence[Trajectory]
) -> list[Value | str]:
    """The values that a call returned, as plain numbers: for each response its value, or the problem (`user_values`) of
    what it is. `optional`: a value may be None.

    Raises: `RewardFailure` for another number of values than of responses.
    """
    try:
        values = [found] if form == "response" else listed(found)
    except TypeError:
        raise RewardFailure(f"returned a {type(found).__name__}, not a list with a value for each response") from None
    if len(values) != len(trajectories):
        given = counted(len(values), "value")
        raise RewardFailure(f"returned {given} for {counted(len(trajectories), 'response')}")
    return [_value_in(unit, optional, one, trajectory) for one, trajectory in zip(values, trajectories, strict=True)]


def _value_in(unit: Unit, optional: bool, value: Any, trajectory: Trajectory) -> Value | str:
    if value is None and optional:
        return None
    if unit == "response":
        number = number_in(value)
        figures = figures_in(value.figures) if isinstance(value, Scored) else {}
        if isinstance(number, str):
            return f"{number} WHERE, {'neither a finite number nor None' if optional else 'not a finite number'}"
        if isinstance(figures, str):
            return figures
        return NoAnswer(number) if isinstance(value, NoAnswer) else Scored(number, figures) if figures else number
    wanted = f"one finite number for each {unit}" + (", or None" if optional else "")
    try:
        numbers = [number_in(one) for one in listed(value)]
    except TypeError:
        return f"{value!r:.80} of type {type(value).__name__} WHERE, not {wanted}"
    odd = next((number for number in numbers if isinstance(number, str)), None)
    if odd is not None:
        return f"a list with {odd} WHERE, not {wanted}"
    count = len(places(unit, trajectory))
    if len(numbers) != count:
        return f"{len(numbers)} numbers WHERE, not {wanted} of the response, which has {count}"
    return [number for number in numbers if isinstance(number, float)]
