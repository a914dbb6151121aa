"""What a simulated run takes from the settings of a run: its limits, policies and sizes.

Used by `what_if` and `tuning`. Made from a configuration, or from the history of a run without one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import Config
from engine.errors import ConfigError
from engine.metrics.history import History
from engine.policies import PolicySet
from engine.policies.registry import DEFAULTS
from engine.scheduling.settings import FIGURES, POLICIES, changed_limits
from engine.states.limits import Limits
from engine.states.process import REPLICA

SIZES = {"rollout.replicas": "replicas", "rollout.slots": "slots", "trainer.ranks": "ranks"}
PLAIN = {
    "scheduler.train_batch_size": "train_batch_size", "scheduler.max_concurrent_groups": "max_concurrent_groups",
    "scheduler.sync_every": "sync_every", "rollout.sync_mode": "sync_mode",
}  # fmt: skip
"""Settings of a run without a configuration that cannot be changed while it is running."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings of a run on which its schedule depends."""

    limits: Limits
    policies: Mapping[str, str]
    replicas: int
    """Without those that only validate."""
    slots: int
    samples: int
    max_tokens: int | None = None
    """Responses are cut there; None: they end as in the workload."""
    ranks: int = 1
    rewards_at_once: int | None = None
    """Calls of reward functions in each replica; None: as in the workload."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration, for the header of the record; empty: there is none."""

    def with_limits(self, **fields: Any) -> "Schedule":
        """Raises: `ConfigError` if these limits break a law."""
        return replace(self, limits=replace(self.limits, **fields))


def configured_schedule(config: Config) -> Schedule:
    """The schedule of a configuration. Raises: `ConfigError` for policies that are not registered."""
    return Schedule(
        limits=config.limits, policies=config.policies().names, replicas=config.rollout.replicas,
        slots=config.rollout.slots, samples=config.scheduler.samples_per_prompt,
        max_tokens=None if config.several_turns else config.rollout.max_tokens,
        ranks=config.trainer.ranks, rewards_at_once=config.reward.concurrency,
        config=config.model_dump(mode="json"),
    )  # fmt: skip


def recorded_schedule(history: History) -> Schedule:
    """The schedule of a run at the end of its record, with all live changes. Raises: `ConfigError` if none of its
    replicas was up."""
    limits, changed = Limits.from_plain(dict(history.limits)), dict[str, str]()
    for _, setting, value in history.settings:
        if setting in FIGURES:
            limits = changed_limits(limits, setting, value)
        elif setting.startswith(POLICIES):
            changed[setting.removeprefix(POLICIES)] = value
    newest = {life.index: life.outcome for life in history.lives if life.kind == REPLICA}
    slots = [
        slots for replica, slots in history.slots.items()
        if newest.get(replica) != "lost" and not limits.validates_only(replica)
    ]  # fmt: skip
    if not slots:
        raise ConfigError("RUN", history.run, "has no replica that was up", "use a run that has trained a few steps")
    config = history.config
    scheduler = config.get("scheduler", {})
    return Schedule(
        limits=limits, policies={**DEFAULTS, **history.policies, **changed}, replicas=len(slots), slots=max(slots),
        samples=scheduler.get("samples_per_prompt") or _samples_of(history),
        ranks=config.get("trainer", {}).get("ranks", 1), config=config,
    )  # fmt: skip


def _samples_of(history: History) -> int:
    """Trajectories of a group: at least those that share its tokens if all have the length of the longest."""
    shares = [attempt.tokens / attempt.longest for attempt in history.attempts if attempt.longest]
    return max(1, round(max(shares, default=1.0) + 0.49))


def changed_schedule(schedule: Schedule, setting: str, value: str) -> Schedule:
    """The schedule of a run without a configuration after a change, named as in one. Raises: `ConfigError`."""
    if setting in FIGURES:
        return replace(schedule, limits=changed_limits(schedule.limits, setting, value))
    if setting.startswith(POLICIES):
        decision = setting.removeprefix(POLICIES)
        return replace(schedule, policies=PolicySet.from_names({**schedule.policies, decision: value}).names)
    if setting in SIZES and value.isdigit() and int(value) > 0:
        size: dict[str, Any] = {SIZES[setting]: int(value)}
        return replace(schedule, **size)
    if setting in PLAIN:
        return schedule.with_limits(**{PLAIN[setting]: int(value) if value.isdigit() else value})
    law = "cannot be changed, because the run was not started from a configuration"
    raise ConfigError(setting, value, law, f"use one of {', '.join([*FIGURES, *SIZES, *PLAIN])}, {POLICIES}*")
