"""The settings that can be changed while a run is running, and their allowed values.

Called by `scheduler.py` for a `SettingChanged`, and earlier by the control endpoint, so that a value that breaks a law
never becomes an event. Names are paths of the configuration.

B and k cannot be changed, because formed batches and published versions depend on them.
"""

from dataclasses import replace
from typing import Any

from engine.errors import ConfigError
from engine.policies.registry import DEFAULTS, PolicySet
from engine.states.limits import BOUNDS, Limits
from engine.states.state import State
from engine.states.timeouts import CUT, KINDS, Timeouts

POLICIES = "scheduler.policies."
MAX_STEPS = "run.max_steps"


def how_to_train_more(state: State, setting: str = MAX_STEPS) -> str:
    """What to do for more train steps than a finished run has."""
    if state.no_more_prompts:
        return "its prompts are used up; to train more steps, begin a run with its exported weights and more prompts"
    return f"to train more steps, resume it with a larger {setting}"


FIGURES = {
    **{bound.path: name for name, bound in BOUNDS.items() if bound.live},
    **{f"timeouts.{name}_s": f"timeouts.{name}_s" for name in (*KINDS, "floor", CUT, "max")},
}
"""Path → the field of `Limits` or of its `timeouts`."""
NO_VALUE = ("null", "none")


def _figure(text: str, *, whole: bool = False) -> Any:
    """A figure as users write it. A text that is no number is left to the law of its field."""
    try:
        return None if text in NO_VALUE else int(text) if whole else float(text)
    except ValueError:
        return text


def live_settings() -> list[str]:
    """The paths of everything that may be set while a run is running. Not `concurrency`: replicas measure their KV
    cache from their start, or never."""
    return [*FIGURES, *(f"{POLICIES}{decision}" for decision in DEFAULTS if decision != "concurrency")]


def changed_limits(limits: Limits, setting: str, value: str) -> Limits:
    """The limits with one of `FIGURES` changed. Raises: `ConfigError` for an invalid value, with the law."""
    name = FIGURES[setting]
    if name in BOUNDS:
        return replace(limits, **{name: _figure(value, whole=BOUNDS[name].whole)})
    name = name.removeprefix("timeouts.")
    off = value == "off" and name.removesuffix("_s") in KINDS
    changed: dict[str, Any] = {name: None if off else _figure(value)}
    return replace(limits, timeouts=replace(limits.timeouts, **changed))


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


def changed_settings(limits: Limits, policies: PolicySet, setting: str, value: str) -> tuple[Limits, PolicySet]:
    """Both with one setting changed. Raises: `ConfigError` for one that cannot be changed, or an invalid value."""
    if setting in FIGURES:
        return changed_limits(limits, setting, value), policies
    if setting.startswith(POLICIES) and setting != f"{POLICIES}concurrency":
        return limits, changed_policies(policies, setting, value)
    law = "cannot be changed while the run is running"
    raise ConfigError(setting, value, law, f"use one of {', '.join(live_settings())}")
