"""What a run waits for: every open order with its owner, its age and the events that end it; waits without an order.

Called by the control endpoint, for a silent run, and for a run that is stuck. It reads the order book and the state,
and must never change them. The cost of a call grows with the number of open orders.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.commands import (
    AbortGroup,
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    InstallWeights,
    MeasureRows,
    ParkGroup,
    PauseReplica,
    ProbeProcess,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StageWeights,
    StartGroup,
    StartProcess,
    StopMeasuring,
    StopProcess,
    TrainStep,
    TruncateGroup,
)
from engine.events import ProcessLost
from engine.ids import GroupId
from engine.states.orders import DATA_SOURCE, RELATIONS, TIMERS, Order, Owner
from engine.states.process import ADDED_STATES, SCORER, TRAINER
from engine.states.state import State

Since = Mapping[tuple[str, int], float]
"""When a record entered its current state, by (machine, id), if known: seconds since the run began."""
GROUPS_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait. `since`: seconds since the run began; None if unknown."""

    what: str
    by: str
    """Who must act."""
    since: float | None
    ends: str
    """The events that end it."""

    def sentence(self, now: float) -> str:
        """`now`: seconds since the run began."""
        age = "" if self.since is None else f" for {max(0.0, now - self.since):.0f} s"
        return f"{self.by}: {self.what}{age} (until {self.ends})"


def waits(state: State, since: Since | None = None) -> list[Wait]:
    """All waits of a run, those that block the next train step first. Empty once the run is over."""
    if state.outcome is not None:
        return []
    orders: dict[tuple[str, Any], list[Order]] = {}
    for order in state.orders.all():
        if order.subject != "timer" or order.id != state.limit_timer:  # no process waits for that
            orders.setdefault(_together(order), []).append(order)
    found = sorted((RANK.get(like[0].subject, LAST), like[0].number, _of(like, state)) for like in orders.values())
    return [*(wait for _, _, wait in found), *_unordered(state, since or {})]


def described(order: Order, state: State) -> Wait:
    """The wait for one open order."""
    return _of([order], state)


LAST = 9
RANK = {"train": 0, "score": 0, "publish": 0, "sync": 1, "start": 1, "stop": 1, "group": 2, "stage": 3, "rows": 4}
"""By subject: orders that block the next train step come first."""


def held_up(state: State) -> str:
    """Who waits for what in a stuck run, where nothing in flight can end a wait."""
    step, size, ledger = state.steps_batched, state.limits.train_batch_size, state.ledger
    there = f"{ledger.ready} of {size} {_are(ledger.ready)} ready"
    told = [f"step {step} waits for {_groups(max(0, size - ledger.ready))}, {there}"]
    if ledger.ready >= size:
        there = f"{_groups(ledger.ready)} that {_are(ledger.ready)} ready"
        told = [f"step {step} waits for the batching policy to take {size} of {there}"]
    if step in state.steps and (needs := state.deadlines.needs(step, size)):
        due = sum(count for _, count in needs)
        told[0] += f", and {due} that {_are(due)} due by step {needs[-1][0]} {_are(due)} not"
    free = sum(replica.free_slots for replica in state.fleet.open())
    if state.waiting:
        room = f"{state.capacity} may be and {are(free, 'slot')} free"
        told.append(f"{_groups(len(state.waiting))} {_wait(len(state.waiting))} to be started, where {room}")
    if parked := [group for group in state.groups.values() if group.state == "aborted"]:
        oldest = min(group.resumes_from for group in parked)
        newest = max((replica.version for replica in state.fleet.open()), default=None)
        there = "none has a free slot" if newest is None else f"the newest with a free slot has {newest}"
        who = f"{_groups(len(parked))} {_wait(len(parked))}"
        told.append(f"{who} for a replica with version {oldest} or newer, {there}")
    if not state.waiting and not parked:
        told.append("no group waits to be started" + (", the prompts are used up" if state.exhausted else ""))
    return "; ".join(told)


def _together(order: Order) -> tuple[str, Any]:
    """The key of orders that share a sentence: groups of a replica, work of a state, rows of a validation, discards
    of a store."""
    if order.subject in ("group", "stage"):
        return order.subject, order.owner
    if order.subject in ("discard", "retire"):
        return order.subject, None
    return order.subject, order.id[0] if order.subject == "rows" else order.id


def _of(like: list[Order], state: State) -> Wait:
    """One wait for orders that share a sentence. `like` has at least one, oldest first."""
    oldest = like[0]
    by = _whose(oldest.owner)
    if oldest.subject == "timer":
        by = f"timer {oldest.id}"
    elif oldest.subject == "rows":
        replicas = list(dict.fromkeys(order.owner for order in like))
        by = f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"
    return Wait(what=WORDS[type(oldest.command)](like, state), by=by, since=oldest.at, ends=_ends(oldest))


def _whose(owner: Owner) -> str:
    """The owner of an order as the subject of a sentence."""
    if isinstance(owner, int):
        return f"replica {owner}"
    if owner.startswith(f"{SCORER} "):
        return owner
    return f"the process of the {owner}" if owner == ADDED_STATES else f"the {owner}"


def _ends(order: Order) -> str:
    """The events that close an order, from the table. `ProcessLost` ends every order of a process."""
    names = [event.__name__ for event in RELATIONS[type(order.command)].answers]
    if order.owner not in (TIMERS, DATA_SOURCE) and ProcessLost.__name__ not in names:
        names.append(ProcessLost.__name__)
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


Words = Callable[[list[Order], State], str]


def _generates(like: list[Order], state: State) -> str:
    return f"generates {_named([order.id for order in like])}" + (", the oldest" if len(like) > 1 else "")


def _trains(like: list[Order], state: State) -> str:
    return f"trains {_batch(like[0].command)}"


def _scores(like: list[Order], state: State) -> str:
    command: Any = like[0].command
    return f"does {command.task} of {_batch(command)}"


def _batch(command: Any) -> str:
    again = f", attempt {command.attempt}" if command.attempt > 1 else ""
    return f"step {command.step} on {_groups(len(command.groups))}{again}"


def _pauses(like: list[Order], state: State) -> str:
    command: Any = like[0].command
    if command.mode == "sleep":
        return "goes to sleep to free its pool for the trainer"
    if state.fleet.replicas[command.replica].state == "draining":
        return "parks its groups before it leaves"
    return f"stops sampling to install version {command.version}"


def _measures(like: list[Order], state: State) -> str:
    run = state.validations.runs[like[0].id[0]]
    left = sum(chunk.count for chunk in run.chunks if not chunk.done)
    return f"measure {counted(left, 'held-out row')} under version {run.version}"


def _forgets(like: list[Order], state: State) -> str:
    return f"forgets {_groups(sum(len(getattr(order.command, 'groups', ())) for order in like))}"


def _fires(like: list[Order], state: State) -> str:
    timer, step = like[0].id, state.steps[state.steps_batched]
    if timer == step.timer:
        return f"step {step.id} waits for stragglers, then the deadline policy acts"
    if timer == state.limit_timer:
        return "acts on the first order that exceeds its time limit"
    if timer == state.fill_timer:
        return "starts the groups that one event could not"
    if timer == state.drain_timer:
        return f"stops the run as it is once the drain exceeds {state.limits.drain_s:g} s"
    return f"no replica is left; the run ends after {state.limits.give_up_s:g} s without one"


def _starts(like: list[Order], state: State) -> str:
    return start_text(like[0].command, state)


def start_text(command: Any, state: State) -> str:
    """What a process that starts by this `StartProcess` does, where it begins, and what it waits for."""
    text = "restarts" if command.incarnation > 1 else "starts"
    if command.kind == TRAINER:
        text += f" from {_beginning(command)}"
    process = state.find_process(command.kind, command.index)
    return f"{text}, once the cluster has room: {process.room}" if process is not None and process.room else text


def _beginning(command: Any) -> str:
    """Which weights a trainer begins with, and the steps that it trains again."""
    if command.version >= 0:
        weights = f"published version {command.version}"
    elif command.steps:
        weights = f"the checkpoint after {counted(command.steps, 'train step')}"
    else:
        weights = "the initial weights"
    return weights + (f" and trains {counted(len(command.redo), 'step')} again" if command.redo else "")


def _says(words: str) -> Words:
    """A sentence filled from the fields of the oldest order."""
    return lambda like, state: words.format(order=like[0].command)


WORDS: dict[type[Command], Words] = {
    DrawPrompts: lambda like, state: f"draws {counted(state.asked, 'prompt')}",
    StartGroup: _generates,
    ResumeGroup: _generates,
    ParkGroup: _says("parks group {order.group}"),
    TruncateGroup: _says("finishes group {order.group} with the tokens it has"),
    AbortGroup: _says("stops generating group {order.group}"),
    DiscardGroups: _forgets,
    StageWeights: _says("fetches version {order.version} while it generates"),
    PauseReplica: _pauses,
    InstallWeights: _says("installs version {order.version}"),
    ResumeReplica: _says("resumes sampling"),
    StartProcess: _starts,
    StopProcess: _says("is stopped: {order.reason}"),
    ProbeProcess: _says("says what it waits for: {order.reason}"),
    RetireWeights: lambda like, state: f"drops {counted(len(like), 'version')}",
    ScoreBatch: _scores,
    TrainStep: _trains,
    PublishWeights: _says("publishes version {order.version}"),
    SaveCheckpoint: lambda like, state: f"writes the checkpoint after {counted(like[0].id, 'train step')}",
    DeleteCheckpoint: lambda like, state: f"deletes the checkpoint after {counted(like[0].id, 'train step')}",
    SetTimer: _fires,
    MeasureRows: _measures,
    StopMeasuring: _says("stops measuring"),
    EnterState: lambda like, state: f"works on {_named([order.id for order in like])}",
}
"""What the owner of an order does, for every class of orders."""


def _unordered(state: State, since: Since) -> Iterator[Wait]:
    """Waits that have no order."""
    for step in state.formed_steps:
        if step.state == "scoring" and not state.scoring(step):
            batch = f"step {step.id} on {_groups(len(step.groups))}"
            what = f"{batch} waits for its pool, or for replicas to take the newest weights"
            ends = "ReplicaPaused, WeightsInstalled or BatchScored"
            yield Wait(what=what, by="the scheduler", since=since.get(("step", step.id)), ends=ends)
    run = state.validations.served
    if run is not None and not run.out:
        left = sum(chunk.count for chunk in run.chunks if not chunk.done)
        entered = since.get(("validation", run.id), run.started_at if run.started_at >= 0 else run.queued_at)
        what = f"{counted(left, 'held-out row')} {_wait(left)} for a replica with version {run.version}"
        ends = "WeightsInstalled, GroupGenerated or ProcessUp"
        yield Wait(what=what, by="the validation", since=entered, ends=ends)


def _named(groups: list[GroupId]) -> str:
    named = ", ".join(str(id) for id in groups[:GROUPS_NAMED])
    more = len(groups) - GROUPS_NAMED
    return f"group{'s' * (len(groups) > 1)} {named}" + (f" and {more} more" if more > 0 else "")


def counted(count: int, what: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {what}{'s' * (count != 1)}"


def are(count: int, what: str) -> str:
    """`1 group is`, `2 groups are`."""
    return f"{counted(count, what)} {_are(count)}"


def _groups(count: int) -> str:
    return counted(count, "group")


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"
