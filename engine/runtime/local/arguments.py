"""Checks the arguments of `run` and `Session` before anything starts.

Called by `run.py` and `session.py`. `RULES` has a row for each argument. This module must never call an argument.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from os import PathLike
from typing import Any

from engine.errors import ConfigError
from engine.protocols import Generator, Prompts, Scorer, Trainer
from engine.record import Header
from engine.record.codec import CodecError
from engine.record.frames import encode_header
from engine.states.limits import Limits
from engine.storage.samples import SamplePolicy
from engine.trajectory import Prompt

Rule = Callable[[str, Any], object]
"""Raises `ConfigError` with the name of the argument if it may not have this value."""

# -- kinds of rules ----------------------------------------------------------------------------------------------------


def _rule(law: str, allows: Callable[[Any], bool], fix: str = "") -> Rule:
    def check(name: str, value: Any) -> None:
        if not allows(value):
            raise ConfigError(name, shown(value), f"must be {law}", fix)

    return check


def shown(value: Any) -> Any:
    """None as users write it, and classes and functions by their names."""
    named = inspect.isclass(value) or inspect.isroutine(value)
    return f"the {'class' if inspect.isclass(value) else 'function'} {value.__qualname__}" if named else value


def _whole(least: int) -> Rule:
    kind = _rule("a whole number", lambda value: type(value) is int, f"use {least}")
    bound = _rule(f"at least {least}", lambda value: value >= least, f"use {least}")
    return lambda name, value: kind(name, value) or bound(name, value)


def _optional(rule: Rule) -> Rule:
    return lambda name, value: value is None or rule(name, value)


def has_methods(protocol: type, *only: str) -> Rule:
    """An object with the methods of a protocol: all, or `only` some."""
    methods = only or [name for name, one in vars(protocol).items() if inspect.isfunction(one) and name[0] != "_"]

    def check(name: str, value: Any) -> None:
        lacking = [method for method in methods if not callable(getattr(value, method, None))]
        if lacking or inspect.isclass(value):
            law = f"must have the methods {', '.join(methods)} of {protocol.__module__}.{protocol.__name__}"
            fix = f"it lacks {', '.join(lacking)}" if lacking else "give an object of the class"
            raise ConfigError(name, shown(value), law, fix)

    return check


def _function(law: str, arguments: int) -> Rule:
    """A function that takes this number of arguments and is no coroutine function."""

    def allows(value: Any) -> bool:
        if not callable(value) or inspect.iscoroutinefunction(value):
            return False
        try:
            inspect.signature(value).bind(*range(arguments))
        except TypeError:
            return False
        except ValueError:
            return True  # a built-in function has no signature
        return True

    return _rule(law, allows)


def _recordable(name: str, value: Any) -> None:
    """Limits whose texts fit into the record."""
    if not isinstance(value, Limits):
        raise ConfigError(name, shown(value), "must be an engine.Limits", "for example Limits(train_batch_size=8, ...)")
    try:
        encode_header(Header(run="", limits=value.to_plain()))
    except CodecError as error:
        raise ConfigError(name, value, str(error)) from None


def _each(rule: Rule) -> Rule:
    """A list whose entries obey a rule."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ConfigError(name, shown(value), "must be a list")
        for index, entry in enumerate(value):
            rule(f"{name}[{index}]", entry)

    return check


def _mapping(key: Rule, entry: Rule) -> Rule:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(name, shown(value), "must be a mapping, for example a dictionary")
        for one, other in value.items():
            key(f"a key of {name}", one)
            entry(f"{name}[{one!r}]", other)

    return check


def _list_or(list_rule: Rule, other: Rule) -> Rule:
    return lambda name, value: (list_rule if isinstance(value, Sequence) else other)(name, value)


def is_text(value: Any) -> bool:
    """Whether a value is a text that fits into the record."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


# -- the arguments -----------------------------------------------------------------------------------------------------


GENERATOR, SCORER = has_methods(Generator), has_methods(Scorer)
TEXT = _rule("a text of valid Unicode", is_text)
DIRECTORY = _rule("a path of valid Unicode", lambda value: isinstance(value, str | PathLike) and is_text(str(value)))
PROMPTS = _each(_rule("a text or an engine.Prompt", lambda value: isinstance(value, str | Prompt)))
PORT = _optional(
    _rule("a port, or None", lambda value: type(value) is int and 0 <= value < 1 << 16, "use 0 for a free port")
)
FLAG = _rule("True or False", lambda value: isinstance(value, bool))

RULES: dict[str, Rule] = {
    "generators": _list_or(
        _each(GENERATOR), _function("a list of generators, or a function that makes one from a number", 1)
    ),
    "trainer": has_methods(Trainer, "train", "weights"),
    "prompts": _list_or(PROMPTS, has_methods(Prompts)),
    "limits": _recordable,
    "samples": _whole(1),
    "slots": _whole(1),
    "prefix_every_tokens": _whole(0),
    "replicas": _whole(1),
    "epochs": _whole(1),
    "policies": _optional(_mapping(TEXT, TEXT)),
    "run_dir": _optional(DIRECTORY),
    "held_out": PROMPTS,
    "make_scorer": _optional(_function("a function that makes the scorer of some tasks", 1)),
    "policy_fields": _each(TEXT),
    "works": _optional(_mapping(TEXT, _rule("a function of a group", callable))),
    "state_timeout_s": _optional(
        _rule(
            "a number of seconds above 0", lambda value: type(value) in (int, float) and value > 0 and isfinite(value)
        )
    ),
    "resume": FLAG,
    "force_from": _optional(TEXT),
    "trajectories": _rule("disk or memory", lambda value: value in ("disk", "memory"), "use disk"),
    "sample_policy": _optional(
        _rule("a SamplePolicy of engine.storage.samples", lambda value: isinstance(value, SamplePolicy))
    ),
    "metrics_port": PORT,
    "control_port": PORT,
    "directory": DIRECTORY,
    "clock": _function("a function without arguments that returns seconds", 0),
    "snapshot_every": _whole(0),
    "steps": _optional(_whole(0)),
    "max_steps": _optional(_whole(1)),
}
"""By the name of the argument."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises: `ConfigError` for the first argument that may not have its value."""
    for name, value in given.items():
        if name in RULES:
            RULES[name](name, value)
