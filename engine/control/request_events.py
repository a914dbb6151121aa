"""Checks an operation and converts it into events. An operation that breaks a law never becomes an event.

The run loop calls it between two events, so the state that is checked is the state that the events meet.
"""

from collections.abc import Sequence

from engine.control.requests import Drain, Look, Operation, Scale, Set, Stop
from engine.errors import ConfigError
from engine.events import DrainRequested, Event, ReplicaLeaves, ReplicasWanted, SettingChanged, StopRequested
from engine.ids import ReplicaId
from engine.policies import PolicySet
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.settings import (
    FIGURES,
    changed_limits,
    changed_policies,
    check_setting,
    require_time_for_rewards,
)
from engine.states.limits import Limits

REPLICAS = "rollout.replicas"
"""Setting that changes the number of replicas at a resume."""


def decide(
    operation: Operation, scheduler: Scheduler, max_replicas: int, reward_timeout_s: float = 0.0
) -> tuple[Event, ...]:
    """The events that carry out an operation. `reward_timeout_s`: time limit of one reward call.

    Raises: `ConfigError` that names the law that the operation breaks, or if the run has ended.
    """
    outcome = scheduler.state.outcome
    if isinstance(operation, Look):
        return ()
    if outcome is not None:
        raise ConfigError(
            "RUN", outcome.outcome, f"the run has ended: {outcome.reason}", "resume it with `engine resume`"
        )
    if isinstance(operation, Stop):
        return (StopRequested(reason=operation.reason),)
    if isinstance(operation, Scale):
        check_replicas(operation.replicas, scheduler.state.limits, max_replicas)
        return (ReplicasWanted(replicas=operation.replicas),)
    if isinstance(operation, Set):
        settings = [(one.setting, one.value) for one in operation.settings]
        return changes(settings, scheduler.state.limits, scheduler.policies, reward_timeout_s)
    if operation.replica is None:
        return (DrainRequested(reason=operation.reason),)
    return (_leave_event(operation, operation.replica, scheduler),)


def changes(
    settings: Sequence[tuple[str, str]], limits: Limits, policies: PolicySet, reward_timeout_s: float = 0.0
) -> tuple[Event, ...]:
    """The events that change settings in this order. Raises: `ConfigError` for the first that breaks a law."""
    for setting, value in settings:
        check_setting(limits, policies, setting, value)
        if setting in FIGURES:
            limits = changed_limits(limits, setting, value)
            if setting == "timeouts.group_s":
                require_time_for_rewards(limits.timeouts, reward_timeout_s)
        else:
            policies = changed_policies(policies, setting, value)
    return tuple(SettingChanged(setting=setting, value=value) for setting, value in settings)


def after_resuming(scheduler: Scheduler, settings: Sequence[tuple[str, str]], replicas: int) -> tuple[Event, ...]:
    """The events that follow the `RunResumed` of a run with `replicas` replicas: its settings, then the number of
    replicas that was wanted last, unless `settings` has a new one. Call it before that event. Raises: as `changes`."""
    state = scheduler.state
    wanted = sum(replica.process.wanted for replica in state.fleet.rollouts())
    changed = changes([one for one in settings if one[0] != REPLICAS], state.limits, scheduler.policies)
    if wanted in (0, replicas) or REPLICAS in dict(settings):
        return changed
    return (*changed, ReplicasWanted(replicas=wanted))


def check_replicas(replicas: int, limits: Limits, maximum: int) -> None:
    """Raises: `ConfigError` if the run cannot have this number of generating replicas."""
    fixed = [id for pool in limits.pools for id in pool.replicas]
    if fixed:
        law = f"cannot change: the pools of this run have fixed replicas {sorted(fixed)}"
        raise ConfigError("replicas", replicas, law, "change `pools` and start a new run")
    own = limits.validators()
    if own and replicas > own.start:
        law = f"must be at most {own.start}: the other replicas are reserved for validation"
        raise ConfigError("replicas", replicas, law, f"use a number from 1 to {own.start}")
    if not 1 <= replicas <= maximum:
        law = f"must be from 1 to {maximum}"
        raise ConfigError("replicas", replicas, law, f"use a number from 1 to {maximum}")


def _leave_event(operation: Drain, id: ReplicaId, scheduler: Scheduler) -> ReplicaLeaves:
    replica = scheduler.state.fleet.replicas.get(id)
    if replica is None or replica.state == "down":
        up = [r.id for r in scheduler.state.fleet.replicas.values() if r.state != "down"]
        law = (
            "does not exist" if replica is None else f"is {replica.condition}: only a replica that is up can be drained"
        )
        raise ConfigError("--replica", id, law, f"use one of {up}")
    return ReplicaLeaves(replica=id, incarnation=replica.incarnation, reason=operation.reason)
