"""The settings that can be changed while a run is running, and their allowed values.

Called by `scheduler.py` for a `SettingChanged`, and earlier by the control endpoint, so that a value that breaks a law
never becomes an event. Names are paths of the configuration.

B and k cannot be changed, because formed batches and published versions depend on them.
"""

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

from engine.errors import ConfigError
from engine.policies.registry import DEFAULTS, PolicySet
from engine.states.limits import Limits
from engine.states.state import State
from engine.states.timeouts import AUTO, KINDS, Limit, Timeouts

POLICIES = "scheduler.policies."
MAX_STEPS = "run.max_steps"


def how_to_train_more(state: State, setting: str = MAX_STEPS) -> str:
    """What to do for more train steps than a finished run has."""
    if state.no_more_prompts:
        return "its prompts are used up; to train more steps, begin a run with its exported weights and more prompts"
    return f"to train more steps, resume it with a larger {setting}"


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _above_0(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError(text)
    return value


def _optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text in ("null", "none") else read(text)


def _limit(text: str) -> Limit:
    if text in ("off", AUTO):
        return None if text == "off" else AUTO
    value: float | None = _optional(_above_0)(text)
    return value


FIGURES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    MAX_STEPS: ("max_steps", _optional(int), "a whole number of train steps, or null"),
    "scheduler.max_staleness_steps": ("max_staleness_steps", int, "a whole number of train steps"),
    "scheduler.max_concurrent_groups": ("max_concurrent_groups", int, "a whole number of groups"),
    "scheduler.deadline_timeout_s": ("deadline_timeout_s", _number, "a number of seconds"),
    "scheduler.max_drops": ("max_drops", int, "a whole number"),
    "scheduler.max_filtered_in_a_row": ("max_filtered_in_a_row", int, "a whole number of groups"),
    "reward.max_failure_share": ("max_failure_share", _optional(_number), "a number from 0 to 1, or null"),
    "scheduler.infrastructure_attempts": ("infrastructure_attempts", int, "a whole number"),
    "scheduler.data_attempts": ("data_attempts", int, "a whole number"),
    "rollout.straggler_factor": ("straggler_factor", _optional(_above_0), "a number above 1, or null"),
    "durability.drain_s": ("drain_s", _optional(_above_0), "a number of seconds above 0, or null"),
    "rollout.give_up_s": ("give_up_s", _number, "a number of seconds"),
    **{
        f"timeouts.{kind}_s": (f"timeouts.{kind}_s", _limit, "a number of seconds above 0, or auto, or off")
        for kind in KINDS
    },
    "timeouts.floor_s": ("timeouts.floor_s", _number, "a number of seconds above 0"),
    "timeouts.cut_s": ("timeouts.cut_s", _number, "a number of seconds above 0"),
    "timeouts.max_s": ("timeouts.max_s", _optional(_above_0), "a number of seconds above 0, or null"),
    "trainer.keep_checkpoints": ("keep_checkpoints", int, "a whole number of checkpoints"),
    "trainer.keep_checkpoints_every": ("keep_checkpoints_every", int, "a whole number of train steps"),
}
"""Path → the field of `Limits` or of its `timeouts`, a parser for its text, and a description of allowed values."""


def live_settings() -> list[str]:
    """The paths of everything that may be set while a run is running. Not `concurrency`: replicas measure their KV
    cache from their start, or never."""
    return [*FIGURES, *(f"{POLICIES}{decision}" for decision in DEFAULTS if decision != "concurrency")]


def changed_limits(limits: Limits, setting: str, value: str) -> Limits:
    """The limits with one of `FIGURES` changed. Raises: `ConfigError` for an invalid value, with the law."""
    field, read, kind = FIGURES[setting]
    try:
        figure = read(value)
    except ValueError:
        raise ConfigError(setting, value, f"must be {kind}") from None
    if field.startswith("timeouts."):
        return replace(limits, timeouts=replace(limits.timeouts, **{field.removeprefix("timeouts."): figure}))
    return replace(limits, **{field: figure})


def require_time_for_rewards(timeouts: Timeouts, reward_timeout_s: float) -> None:
    """Raises: `ConfigError` unless an attempt may take longer than one reward call."""
    limit_s = timeouts.group_s
    if isinstance(limit_s, int | float) and limit_s <= reward_timeout_s:
        law = f"must be longer than reward.timeout_s = {reward_timeout_s:g}"
        raise ConfigError("timeouts.group_s", limit_s, law, f"use more than {reward_timeout_s:g}")


def changed_policies(policies: PolicySet, setting: str, value: str) -> PolicySet:
    """The policies with one replaced; the others are the same objects. Raises: `ConfigError` for an unknown name."""
    decision = setting.removeprefix(POLICIES)
    fresh = PolicySet.from_names({decision: value})
    names = {**policies.names, decision: value}  # in their order, which a snapshot compares
    return replace(policies, names=names, **{decision: getattr(fresh, decision)})


def check_setting(limits: Limits, policies: PolicySet, setting: str, value: str) -> None:
    """Raises: `ConfigError` for a setting that cannot be changed, or an invalid value."""
    if setting in FIGURES:
        changed_limits(limits, setting, value)
    elif setting.startswith(POLICIES) and setting != f"{POLICIES}concurrency":
        changed_policies(policies, setting, value)
    else:
        law = "cannot be changed while the run is running"
        raise ConfigError(setting, value, law, f"use one of {', '.join(live_settings())}")
