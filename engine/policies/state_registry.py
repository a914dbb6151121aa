"""Registry of added states: states that users add to groups, before generation or after it, and to train steps, before
training or before replicas get the weights.

    policies.add_state(
        machine="group", state="judging", phase="parked", between=("generated", "batched"), policy=Judge, concurrency=4
    )
    policies.add_state(
        machine="group", state="booting", phase="waiting", between=("queued", "generating"), policy=Boot, concurrency=8
    )
    policies.add_state(machine="step", state="vetting", between=("scoring", "training"), policy=Vet)

`add_state` checks a new state against the laws that every state must keep. A run lists the states that it uses in
`scheduler.states`. Used by the config layer and by the scheduler's builder.
"""

import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import ConfigError, choice, describe_error
from engine.policies.protocols import StatePolicy
from engine.policies.registry import API_VERSION, require_api
from engine.states.group import BETWEEN, GROUP, PHASE_AT, group_table
from engine.states.limits import REWARDING, AddedState
from engine.states.machine import Table
from engine.states.step import BETWEEN as BETWEEN_STEPS
from engine.states.step import STEP, step_table

FIELD = "policies.add_state"
NAME = re.compile(r"[a-z][a-z0-9_-]*")
WHY_NOT = {
    "waiting": "a waiting group has no tokens, so law 4 would not count the staleness of this group",
    "parked": "a parked group holds a place, which this group gets only when it starts (law 3)",
    "running": "a running group has a slot, so law 2 would count a slot that this group no longer has",
    "ready": "a train step may take a ready group before the work of this state is finished",
    "batched": "a batched group already belongs to a train step",
    "consumed": "a consumed group has ended",
    "released": "a released group has ended",
}


METHODS = {
    "enters": "def enters(self, view: View, group: GroupView) -> bool",
    "work": "async def work(self, group: TrajectoryGroup) -> TrajectoryGroup",
}
"""The methods of a policy of groups. `work` may be missing."""
STEP_METHODS = {
    "enters": "def enters(self, view: View, step: StepView) -> bool",
    "work": "async def work(self, given: Batch | PublishedWeights) -> str | None",
}
"""The methods of a policy of train steps."""

MEANING = {"waiting": "the group holds no place yet", "parked": "the group keeps its place and has no slot"}
"""What the phases of added states mean."""


_ADDED: dict[str, tuple[AddedState, Any]] = {}
"""The states that were registered, with the class of the policy of each."""


def add_state(
    *, machine: str, state: str, phase: str | None = None, between: tuple[str, str], policy: Any,
    concurrency: int = 1, api: int = API_VERSION,
) -> None:  # fmt: skip
    """Register a state that groups pass through before they are generated, or before a step may take them; or that
    train steps pass through before they are trained, or before replicas get their weights.

    Args: `between` says where. `machine="group"`: `("queued", "generating")`, whose phase is waiting, or
    `("generated", "batched")`, whose phase is parked. `machine="step"`: `("scoring", "training")` or
    `("publishing", "finished")`, without a phase. `policy` is a class that is created without arguments for each run;
    its `enters` says which groups or steps enter the state. `concurrency` is the maximum number of groups in the state
    at once; a run may set another.
    Raises: `ConfigError`, which names the law that the state would break.
    """
    require_api(api, f"state {state!r}")
    if machine not in (GROUP.name, STEP.name):
        law = "must be group or step: only prompt groups and train steps can have added states"
        raise ConfigError(f"{FIELD}.machine", machine, law, "use group or step")
    of_step = machine == STEP.name
    places = BETWEEN_STEPS if of_step else BETWEEN
    place = next((place for place, ends in places.items() if tuple(between) == ends), None)
    if place is None:
        law = "an added state lies before a group's generation, or between its last token and its train step"
        if of_step:
            law = "an added state of train steps lies before the training, or before replicas get the weights"
        raise ConfigError(f"{FIELD}.between", between, law, f"use {' or '.join(map(str, places.values()))}")
    _require_phase(place, phase)
    _require_name(state, step_table(checks=("-",)) if of_step else group_table(before=("-",)))
    _check_policy(policy, STEP_METHODS if of_step else METHODS)
    if of_step and concurrency != 1:
        raise ConfigError(f"{FIELD}.concurrency", concurrency, "must be 1: steps are inspected one by one", "use 1")
    _ADDED[state] = AddedState(name=state, concurrency=concurrency, place=place), policy


def _require_phase(place: str, phase: str | None) -> None:
    """Raises: `ConfigError` unless this is the phase of states in a place; train steps have none."""
    if place not in PHASE_AT:
        if phase is not None:
            raise ConfigError(f"{FIELD}.phase", phase, "train steps have no phases", "leave it out")
        return
    wanted = PHASE_AT[place].name.lower()
    if phase != wanted:
        law = "a state of groups has a phase" if phase is None else WHY_NOT.get(phase, "is not a phase")
        raise ConfigError(f"{FIELD}.phase", phase, law, f"use {wanted}: {MEANING[wanted]}")


def _require_name(state: Any, table: Table) -> None:
    """Raises: `ConfigError` unless a new state of a machine may have this name."""
    triggers = {transition.trigger for transition in table.transitions}
    if not isinstance(state, str) or not NAME.fullmatch(state):
        law = "must be a word of lower-case letters, digits, - and _"
        raise ConfigError(f"{FIELD}.state", state, law, "for example judging")
    if state in table.states or state in triggers or state in _ADDED:
        law = f"is already a state or trigger of {table.name}s"
        raise ConfigError(f"{FIELD}.state", state, law, "use another name")


def _check_policy(policy: Any, methods: Mapping[str, str]) -> None:
    """Raises: `ConfigError` with the expected definition of a method that is missing or cannot be called."""
    where = f"{FIELD}.policy"
    required = ("enters",) if methods is METHODS else ("enters", "work")
    for name in required:
        if not isinstance(policy, type) or not callable(getattr(policy, name, None)):
            raise ConfigError(where, policy, f"must be a class with a method {name}()", f"define {methods[name]}")
    for name, definition in methods.items():
        method = getattr(policy, name, None)
        if method is None:
            continue  # a state without work
        values = ["self", "view", "subject"] if name == "enters" else ["self", "subject"]
        if isinstance(inspect.getattr_static(policy, name), staticmethod | classmethod):
            del values[0]
        try:
            inspect.signature(method).bind(*values)
        except TypeError as error:
            law = f"its {name}() cannot be called as the engine does: {error}"
            raise ConfigError(where, policy.__name__, law, f"define {definition}") from error
        if name == "work" and not inspect.iscoroutinefunction(method):
            raise ConfigError(where, policy.__name__, "its work() is not a coroutine function", f"define {definition}")


def state_names() -> list[str]:
    """Every state that a run may name."""
    return sorted(name for name in _ADDED if name != REWARDING)


def registered() -> list[type]:
    """The class of every state's policy."""
    return [policy for _, policy in _ADDED.values()]


def forget(classes: Collection[type]) -> None:
    """Remove the states of these classes, because the import of their module failed."""
    for name in [name for name, (_, policy) in _ADDED.items() if policy in classes]:
        del _ADDED[name]


def added_states(names: tuple[str, ...]) -> tuple[AddedState, ...]:
    """The named states, with the concurrency given to `add_state`. Raises: `ConfigError` for a state that is not
    registered, and for the built-in state, which only a pool adds."""
    if REWARDING in names:
        law = "is added by a pool with the task reward alone"
        raise ConfigError("scheduler.states", REWARDING, law, "remove it, or add such a pool")
    return tuple(_find(name)[0] for name in names)


def build_state(name: str) -> StatePolicy:
    """A new policy of a state, for one run. Raises: `ConfigError` for a state that is not registered, and for a policy
    whose class cannot be called without arguments."""
    _, cls = _find(name)
    try:
        policy: StatePolicy = cls()
    except Exception as error:
        law = f"its policy {cls.__name__} cannot be made without arguments: {describe_error(error)}"
        raise ConfigError("scheduler.states", name, law) from error
    return policy


def work_of(name: str) -> Any:
    """The method `async def work(group)` of a new instance of a state's policy; None if the policy has none.

    Raises: `ConfigError` for a state that is not registered.
    """
    return getattr(build_state(name), "work", None)


def _find(name: str) -> tuple[AddedState, Any]:
    found = _ADDED.get(name)
    if found is None:
        known = state_names()
        listed = "" if known else "name the module that adds it in run.extensions"
        raise ConfigError("scheduler.states", name, "is not a registered state", choice(name, known, listed))
    return found


class Rewarding:
    """Every group enters: its reward is computed after its last token."""

    def enters(self, view: Any, group: Any) -> bool:
        return True


add_state(
    machine="group", state=REWARDING, phase="parked", between=("generated", "batched"), policy=Rewarding,
    concurrency=1,
)  # fmt: skip
