"""Rewards: functions that say how good a response is, built in or the user's own, named as "module:function".

Called where trajectories finish (rollout) and by validation. A reward is a function of (prompt, trajectory), plain or
`async`; nothing here keeps state, reads the network or runs code taken from a response.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import ConfigError, DataFailure
from engine.protocols.named_code import NO_LOCAL, Local, find
from engine.tasks.extraction import choices_of, last_boxed, last_choice, last_number
from engine.trajectory import NoAnswer, Prompt, Trajectory


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def column_of(prompt: Prompt, column: str) -> Any:
    """A column of a row. Raises: `DataFailure` if the row lacks it."""
    value = prompt.fields.get(column)
    if value is None:
        raise DataFailure(f"row {prompt.row} has no field {column!r}", row=prompt.row)
    return value


def load_coroutine(
    spec: str, parameters: Sequence[str], directory: str | None, *, config_field: str, local: Local = NO_LOCAL
) -> Callable[..., Any]:
    """Import a coroutine function, "module:function", that takes these parameters. Raises: `ConfigError`."""
    found = find(spec, directory, config_field, local)
    wanted = f"async def {spec.rpartition(':')[2]}({', '.join(parameters)})"
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            config_field, spec, f"is of type {type(found).__name__}, not a coroutine function", f"define it as {wanted}"
        )
    try:
        inspect.signature(found).bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            config_field, spec, f"cannot be called with {', '.join(parameters)}: {error}", f"define it as {wanted}"
        ) from error
    return found


def check_signature(found: Any, spec: str, config_field: str) -> None:
    """Raises: `ConfigError` for what cannot be called with (prompt, trajectory)."""
    if not callable(found):
        raise ConfigError(
            config_field, spec, f"is of type {type(found).__name__}, which cannot be called", "name a function"
        )
    if inspect.isclass(found):
        raise ConfigError(config_field, spec, "is a class", "name a function (prompt, trajectory) -> float")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        law = f"cannot be called with (prompt, trajectory): {error}"
        raise ConfigError(config_field, spec, law, "define it as def reward(prompt, trajectory) -> float") from error
    except ValueError:
        return  # A builtin without a signature: the first call shows whether it fits.


def answer_of(prompt: Prompt) -> str:
    """The right answer of a row: its field `answer`. Raises `DataFailure` if the row has none."""
    return str(column_of(prompt, "answer"))


def exact_match(prompt: Prompt, trajectory: Trajectory) -> float:
    """1.0 if the whole response equals the answer, ignoring white space around it."""
    return float(trajectory.text.strip() == answer_of(prompt).strip())


def final_number(prompt: Prompt, trajectory: Trajectory) -> float:
    """1.0 if the last number of the response equals the answer's last number (GSM8K style, `#### 72`)."""
    got, expected = last_number(trajectory.text), last_number(answer_of(prompt))
    if expected is None:
        raise DataFailure(f"the answer of row {prompt.row} contains no number", row=prompt.row)
    return NoAnswer() if got is None else float(got == expected)


def boxed_answer(prompt: Prompt, trajectory: Trajectory) -> float:
    r"""1.0 if the content of the last `\boxed{...}` or `\fbox{...}` of the response equals the answer, ignoring spaces
    (MATH style)."""
    got, expected = last_boxed(trajectory.text), answer_of(prompt)
    boxed = last_boxed(expected)
    wanted = expected if boxed is None else boxed
    return NoAnswer() if got is None else float("".join(got.split()) == "".join(wanted.split()))


def multiple_choice(prompt: Prompt, trajectory: Trajectory) -> float:
    """1.0 if the last letter of a choice in the response, such as `(B)` or `B.`, is the answer's. The article `A` and
    the pronoun `I` are ignored. The row's column `choices` or `options`, if it has one, says how many there are."""
    choices = choices_of(prompt)
    got, expected = last_choice(trajectory.text, choices), last_choice(answer_of(prompt), choices)
    if expected is None:
        law = f"the answer of row {prompt.row} contains no letter of a choice on its own"
        raise DataFailure(law + (f"; the row has {choices} choices" if choices else ""), row=prompt.row)
    return NoAnswer() if got is None else float(got == expected)
