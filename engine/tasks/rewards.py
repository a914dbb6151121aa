"""Rewards: functions that say how good a response is, built in or the user's own, named as "module:function".

Called where trajectories finish (rollout) and by validation. A reward is a plain function of (prompt, trajectory);
nothing here keeps state, reads the network or runs code taken from a response.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from types import ModuleType
from typing import Any, TypeAlias

from engine.errors import ConfigError, DataFailure, suggestion
from engine.trajectory import Prompt, Trajectory

Reward: TypeAlias = Callable[[Prompt, Trajectory], float]

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def load_reward(spec: str, directory: str | None = None, *, config_field: str = "reward.function") -> Reward:
    """Import a reward, "module:function", from the Python path, then from `directory` (None: the working one)."""
    found = find(spec, directory, config_field)
    _check_signature(found, spec, config_field)
    reward: Reward = found
    return reward


def load_coroutine(
    spec: str, parameters: Sequence[str], directory: str | None, *, config_field: str
) -> Callable[..., Any]:
    """Import a coroutine function, "module:function", that takes so many arguments. Raises: `ConfigError`."""
    found = find(spec, directory, config_field)
    wanted = f"async def {spec.rpartition(':')[2]}({', '.join(parameters)})"
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            config_field, spec, f"is a {type(found).__name__}, not a coroutine function", f"define it as {wanted}"
        )
    try:
        inspect.signature(found).bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            config_field, spec, f"cannot be called with {', '.join(parameters)}: {error}", f"define it as {wanted}"
        ) from error
    return found


def find(spec: str, directory: str | None, config_field: str) -> Any:
    """What "module:attribute" names. Raises: `ConfigError`."""
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(config_field, spec, "is not of the form module:function", "for example my_rewards:score")
    module = _import(module_name, directory or os.getcwd(), spec, config_field)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            hint = suggestion(part, public, f"define it in {getattr(module, '__file__', module_name)}")
            raise ConfigError(config_field, spec, f"module {module_name!r} has no attribute {attribute!r}", hint)
        found = getattr(found, part)
    return found


def _import(name: str, directory: str, spec: str, config_field: str) -> ModuleType:
    if directory not in sys.path:
        sys.path.append(directory)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            law = f"no module named {error.name!r}"
            hint = f"install it, or put {error.name.replace('.', '/')}.py into {directory}"
        else:
            law = f"module {name!r} itself imports {error.name!r}, which is not installed"
            hint = f"install {error.name}"
        raise ConfigError(config_field, spec, law, hint) from error
    except Exception as error:
        law = f"importing module {name!r} failed: {type(error).__name__}: {error}"
        raise ConfigError(config_field, spec, law, f"make `import {name}` work") from error


def _check_signature(found: Any, spec: str, config_field: str) -> None:
    if not callable(found):
        raise ConfigError(config_field, spec, f"is a {type(found).__name__}, which cannot be called", "name a function")
    if inspect.isclass(found):
        raise ConfigError(config_field, spec, "is a class", "name a function (prompt, trajectory) -> float")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(config_field, spec, "is a coroutine function", "name a plain function")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        law = f"cannot be called with (prompt, trajectory): {error}"
        raise ConfigError(config_field, spec, law, "define it as def reward(prompt, trajectory) -> float") from error
    except ValueError:
        return  # A builtin without a signature: the first call will tell.


def answer_of(prompt: Prompt) -> str:
    """The right answer of a row: its field `answer`. Raises `DataFailure` where the row has none."""
    answer = prompt.fields.get("answer")
    if answer is None:
        raise DataFailure(f"row {prompt.row} has no field 'answer'", row=prompt.row)
    return str(answer)


def exact_match(prompt: Prompt, trajectory: Trajectory) -> float:
    """1.0 where the whole response is the answer, but for white space around it."""
    return float(trajectory.text.strip() == answer_of(prompt).strip())


def final_number(prompt: Prompt, trajectory: Trajectory) -> float:
    """1.0 where the last number of the response equals the answer's last number (GSM8K style, `#### 72`)."""
    got, expected = _last_number(trajectory.text), _last_number(answer_of(prompt))
    if expected is None:
        raise DataFailure(f"the answer of row {prompt.row} contains no number", row=prompt.row)
    return float(got is not None and got == expected)


def boxed_answer(prompt: Prompt, trajectory: Trajectory) -> float:
    r"""1.0 where the content of the last `\boxed{...}` of the response is the answer, spaces aside (MATH style)."""
    got, expected = _last_boxed(trajectory.text), answer_of(prompt)
    boxed = _last_boxed(expected)
    wanted = expected if boxed is None else boxed
    return float(got is not None and "".join(got.split()) == "".join(wanted.split()))


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None
