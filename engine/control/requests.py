"""The JSON requests that a running run accepts, and the events that they become. `client.py` creates requests,
`control_server.py` parses them.

Parsing is strict: unknown fields, other types and values out of bounds are refused. A request that breaks a law never
becomes an event.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from engine.errors import ConfigError
from engine.events import DrainRequested, Event, ReplicaLeaves, ReplicasWanted, SettingChanged, StopRequested
from engine.ids import ReplicaId
from engine.policies import PolicySet
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.settings import (
    changed_settings,
    how_to_train_more,
    require_time_for_rewards,
)
from engine.states.limits import Limits

MAX_BODY_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 20
MOST_REPLICAS = 4096
MOST_SETTINGS = 64

Reason = Annotated[str, Field(min_length=1, max_length=500)]


class Asked(BaseModel):
    """One operation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Drain(Asked):
    """Park the groups, save a checkpoint and stop the run, resumably. With `replica`: drain only that replica."""

    operation: Literal["drain"] = "drain"
    reason: Reason
    replica: int | None = Field(None, ge=0, lt=1 << 31)


class Stop(Asked):
    """Stop the run at once, resumably."""

    operation: Literal["stop"] = "stop"
    reason: Reason


class Scale(Asked):
    """Set the number of generating replicas."""

    operation: Literal["scale"] = "scale"
    replicas: int = Field(ge=1, le=MOST_REPLICAS)


class SettingRequest(Asked):
    """One setting of a running run, by its path in the configuration."""

    setting: str = Field(min_length=1, max_length=200)
    value: str = Field(max_length=200)


class Set(Asked):
    """Change settings in this order: all or none."""

    operation: Literal["set"] = "set"
    settings: tuple[SettingRequest, ...] = Field(min_length=1, max_length=MOST_SETTINGS, strict=False)


class Look(Asked):
    """Report what the run does and what it waits for."""

    operation: Literal["state"] = "state"


Operation = Drain | Stop | Scale | Set | Look
_ADAPTER: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="operation")])


def parse(body: bytes) -> Operation:
    """Parse a request body. Raises: ValueError, one line that names the first invalid field, never its value."""
    try:
        return _ADAPTER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise ValueError(f"{where}: {first['msg']}") from None


REPLICAS = "rollout.replicas"
"""Setting that changes the number of replicas at a resume."""


def decide(
    operation: Operation, scheduler: Scheduler, max_replicas: int, reward_timeout_s: float = 0.0
) -> tuple[Event, ...]:
    """The events that carry out an operation. `reward_timeout_s`: time limit of one reward call.

    Raises: `ConfigError` that names the law that the operation breaks, or if the run has ended.
    """
    outcome = scheduler.state.ending.outcome
    if isinstance(operation, Look):
        return ()
    if outcome is not None:
        finished = outcome.outcome == "finished"
        fix = how_to_train_more(scheduler.state) if finished else "resume it with `engine resume`"
        raise ConfigError("RUN", outcome.outcome, f"the run has ended: {outcome.reason}", fix)
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
        limits, policies = changed_settings(limits, policies, setting, value)
        if setting == "timeouts.group_s":
            require_time_for_rewards(limits.timeouts, reward_timeout_s)
    return tuple(SettingChanged(setting=setting, value=value) for setting, value in settings)


def after_resuming(scheduler: Scheduler, settings: Sequence[tuple[str, str]], replicas: int) -> tuple[Event, ...]:
    """The events that follow the `RunResumed` of a run with `replicas` replicas: its settings, then the number of
    replicas that was wanted last, unless `settings` has a new one. Call it before that event. Raises: as `changes`."""
    state = scheduler.state
    wanted = sum(replica.process.wanted for replica in state.replicas.rollouts)
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
    replica = scheduler.state.replicas.by_id.get(id)
    if replica is None or replica.state == "down":
        up = [r.id for r in scheduler.state.replicas.by_id.values() if r.state != "down"]
        law = (
            "does not exist" if replica is None else f"is {replica.condition}: only a replica that is up can be drained"
        )
        raise ConfigError("--replica", id, law, f"use one of {up}")
    return ReplicaLeaves(replica=id, life=replica.life, reason=operation.reason)
