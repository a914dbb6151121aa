"""What a run waits for: every open order with its owner, its age and the events that end it; waits without an order.

Called by the control endpoint, the live view, the metrics of idle hardware, and for a silent run. It reads the order
book and the state, and must never change them. The cost of a call grows with the number of open orders.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.commands import (
    AbortGroup,
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    InspectStep,
    InstallWeights,
    MeasureRows,
    ParkGroup,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    StageWeights,
    StartGroup,
    StartProcess,
    StopMeasuring,
    StopProcess,
    TrainStep,
    TruncateGroup,
)
from engine.errors import counted
from engine.events import ProcessLost
from engine.ids import NO_VERSION, GroupId
from engine.protocols import SLOTS
from engine.states.causes import limit_text, missing_for_scoring
from engine.states.limits import GENERATED
from engine.states.orders import DATA_SOURCE, DEADLINE, DRAIN, RELATIONS, TIMERS, Order, owner_text
from engine.states.process import ADDED_STATES, TRAINER, FunctionCalls, Process
from engine.states.state import State

GROUPS_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait. `since`: seconds since the run began."""

    by: str
    """Who must act."""
    doing: str
    """What it has been doing: `generating group 41`."""
    since: float
    ends: str
    """The events that end it."""
    detail: str = ""
    """What slows it down, and what to change."""

    def sentence(self, now: float) -> str:
        """`now`: seconds since the run began."""
        several = self.by.startswith("replicas ")
        verb, age = "have" if several else "has", f"{max(0.0, now - self.since):.0f} s"
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.by} {verb} been {self.doing} for {age}{detail} (until {self.ends})"


def waits(state: State) -> list[Wait]:
    """All waits of a run, those that block the next train step first. Empty once the run is over."""
    if state.ending.outcome is not None:
        return []
    orders: dict[tuple[str, Any], list[Order]] = {}
    for order in state.orders.all():
        orders.setdefault(_together(order, state), []).append(order)
    found = sorted((RANK.get(like[0].subject, LAST), like[0].number, _of(like, state)) for like in orders.values())
    return [*(wait for _, _, wait in found), *_unordered(state)]


LAST = 9
RANK = {
    **dict.fromkeys(("train", "score", "inspect", "publish"), 0),
    "sync": 1,
    "start": 1,
    "stop": 1,
    "group": 2,
    "state": 3,
    "rows": 4,
}
"""By subject: orders that block the next train step come first."""


def _together(order: Order, state: State) -> tuple[str, Any]:
    """The key of orders that share a sentence: groups of a replica, those that wait for rewards apart; work of a state,
    rows of a validation, discards of a store."""
    if order.subject in ("group", "state"):
        return order.subject, (order.owner, state.replicas.is_unrewarded(order.id))
    if order.subject in ("discard", "retire"):
        return order.subject, None
    return order.subject, order.id[0] if order.subject == "rows" else order.id


def _of(like: list[Order], state: State) -> Wait:
    """One wait for orders that share a sentence. `like` has at least one, oldest first."""
    oldest = like[0]
    by, detail = owner_text(oldest.owner), _detail(like, state)
    if oldest.subject == "timer":
        by, doing, detail = _timer(oldest.command, state)
        return Wait(by=by, doing=doing, since=oldest.at, ends=_ends(oldest), detail=detail)
    if oldest.subject == "rows":
        replicas = list(dict.fromkeys(order.owner for order in like))
        by = f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"
    doing = WORDS[type(oldest.command)](like, state)
    return Wait(by=by, doing=doing, since=oldest.at, ends=_ends(oldest), detail=detail)


def _ends(order: Order) -> str:
    """The events that close an order, from the table. `ProcessLost` ends every order of a process."""
    names = [event.__name__ for event in RELATIONS[type(order.command)].answers]
    if order.owner not in (TIMERS, DATA_SOURCE) and ProcessLost.__name__ not in names:
        names.append(ProcessLost.__name__)
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


Words = Callable[[list[Order], State], str]


def _generates(like: list[Order], state: State) -> str:
    doing = f"generating {_named([order.id for order in like])}"
    if state.replicas.is_unrewarded(like[0].id):
        slowest = _slowest(_callers(like, state))
        doing = f"waiting for {slowest.name if slowest else 'the rewards'} of {_groups(len(like))}"
    return doing + (", the oldest" if len(like) > 1 else "")


def _works(like: list[Order], state: State) -> str:
    return f"working on {_named([order.id for order in like])}" + (", the oldest" if len(like) > 1 else "")


def _detail(like: list[Order], state: State) -> str:
    """What slows the work of these orders down, or why they were given, as far as it is known."""
    oldest: Any = like[0]
    if oldest.subject in ("stop", "probe"):
        return str(oldest.command.reason)
    if oldest.subject == "start":
        return _room(oldest.command, state)
    slowest = _slowest(_callers(like, state))
    limits = _limits(slowest, state) if slowest else ""
    if oldest.subject == "group" and not slowest:
        replica = state.replicas.by_id[oldest.owner]
        return limit_text(replica) if state.replicas.is_limited(replica) else ""
    if oldest.subject == "state":
        return _state_detail(state.groups.state_queues.by_name[oldest.command.state], slowest, limits)
    if not slowest or state.replicas.is_unrewarded(oldest.id):
        return limits
    if oldest.subject == "rows":
        return f"{slowest.name}: {limits}"
    groups = min(slowest.groups, len(like))  # the report may be 10 s old
    return f"{_groups(groups)} {_wait(groups)} for {slowest.name}: {limits}"


def _state_detail(added: Any, slowest: "Slowest | None", limits: str) -> str:
    found = [f"{slowest.name}, {limits}"] if slowest else []
    if added.waiting:
        queue = f"{_groups(len(added.waiting))} {_wait(len(added.waiting))} for a place, {added.concurrency} at once"
        found.append(queue if slowest else f"{queue}; raise the concurrency of the state")
    return "; ".join(found)


# -- calls of the user's functions -------------------------------------------------------------------------------------


Calls = list[tuple[str, FunctionCalls]]
"""(name, figures) of the functions of some processes that something waits for."""


class Slowest(NamedTuple):
    """The function that most work waits for."""

    name: str
    groups: int
    calls: FunctionCalls
    """Of the process in which most work waits."""
    replicas: int


def agent_groups(process: Process) -> int:
    """Groups and validation rows of a replica that wait for an agent, a rollout or an environment."""
    return sum(calls.groups for calls in process.calls.values() if calls.setting == SLOTS)


def unrewarded_groups(state: State) -> int:
    """Groups whose trajectories have all ended and whose rewards, or whose work in an added state, have not."""
    return state.groups.unrewarded + state.groups.state_queues.groups_at(GENERATED)


def reward_wait(state: State) -> str:
    """`38 groups wait for reward slow: 2 s a call, 4 at once; raise reward.concurrency`: what groups of the run wait
    for whose trajectories have all ended. Empty if there are none."""
    groups = unrewarded_groups(state)
    if not groups:
        return ""
    slowest = _slowest(_calls(_processes(state), of_agents=False))
    busy = [added.name for added in state.groups.state_queues.at[GENERATED] if added.waiting or added.working]
    otherwise = f"state {busy[0]}" if busy and not state.groups.unrewarded else "their rewards"
    text = f"{_groups(groups)} {_wait(groups)} for {slowest.name if slowest else otherwise}"
    return text + (f": {_limits(slowest, state)}" if slowest else "")


def agent_wait(state: State) -> str:
    """`38 groups wait for agent slow: 2 s a call, 76 at once; raise rollout.slots`: what running groups wait for of
    which no rollout samples. Empty if there are none."""
    slowest = _slowest(_calls(_processes(state), of_agents=True))
    if not slowest:
        return ""
    return f"{_groups(slowest.groups)} {_wait(slowest.groups)} for {slowest.name}: {_limits(slowest, state)}"


def _processes(state: State) -> list[Process]:
    return [*(replica.process for replica in list(state.replicas.by_id.values())), *list(state.processes.values())]


def _callers(like: Sequence[Order], state: State) -> Calls:
    """The calls that orders wait for which share a sentence: a group that samples waits for agents only, one whose
    trajectories have ended for rewards only, validation rows for both."""
    oldest: Any = like[0]
    if oldest.subject == "state":
        return _calls([one for one in [state.processes.get(ADDED_STATES)] if one is not None], of_agents=False)
    if oldest.subject not in ("group", "rows"):
        return []
    replicas = list(dict.fromkeys(order.owner for order in like))
    processes = [state.replicas.by_id[id].process for id in replicas if isinstance(id, int)]
    agents = _calls(processes, of_agents=True)
    rewards = _calls(processes, of_agents=False)
    if oldest.subject == "rows":
        return [*agents, *rewards]
    return rewards if state.replicas.is_unrewarded(oldest.id) else agents


def _calls(processes: Sequence[Process], *, of_agents: bool) -> Calls:
    return [
        (name, calls)
        for process in processes
        for name, calls in list(process.calls.items())
        if calls.groups and (calls.setting == SLOTS) == of_agents
    ]


def _slowest(measured: Calls) -> Slowest | None:
    """The function that most work waits for; None if none waits."""
    if not measured:
        return None
    name, worst = max(measured, key=lambda one: _work_s(one[1]))
    same = [calls for other, calls in measured if other == name]
    return Slowest(name, sum(calls.groups for calls in same), worst, len(same))


def _limits(slowest: Slowest, state: State) -> str:
    """How long its calls take, and what to change if a setting limits them."""
    calls = slowest.calls
    least, where = "" if calls.ended else "over ", " on each replica" if slowest.replicas > 1 else ""
    setting = calls.setting if calls.queued else ""
    if calls.setting == SLOTS:
        setting = _limit_of_groups(state)
    raised = f"; raise {setting}" if setting else ""
    return f"{least}{calls.call_s:.2g} s a call, {calls.at_once} at once{where}{raised}"


def _limit_of_groups(state: State) -> str:
    """The setting that keeps more groups from running at once; empty if that is none."""
    if state.groups.ledger.running >= state.limits.max_concurrent_groups:
        return "scheduler.max_concurrent_groups"
    slow = state.replicas.slow(state.limits.straggler_factor)
    _, free = state.replicas.room_beside(slow)
    return "" if free > 0 else SLOTS


def _work_s(calls: FunctionCalls) -> float:
    """About how long it takes until no call waits any more."""
    return calls.call_s * (1 + calls.queued / calls.at_once)


# -- what each order means ---------------------------------------------------------------------------------------------


def _trains(like: list[Order], state: State) -> str:
    return f"training {_batch(like[0].command)}"


def _scores(like: list[Order], state: State) -> str:
    command: Any = like[0].command
    return f"computing {command.task} of {_batch(command)}"


def _batch(command: Any) -> str:
    again = f", attempt {command.attempt}" if command.attempt > 1 else ""
    return f"step {command.step} on {_groups(len(command.groups))}{again}"


def inspected(command: Any) -> str:
    """What an `InspectStep` inspects."""
    if command.version != NO_VERSION:
        return f"weights version {command.version}"
    return f"the batch of {_batch(command)}"


def _pauses(like: list[Order], state: State) -> str:
    command: Any = like[0].command
    if command.mode == "sleep":
        return "going to sleep to free its pool for the trainer"
    if state.replicas.by_id[command.replica].state == "draining":
        return "parking its groups before it leaves"
    return f"pausing to install version {command.version}"


def _measures(like: list[Order], state: State) -> str:
    validation = state.validations.live[like[0].id[0]]
    left = sum(chunk.count for chunk in validation.chunks if not chunk.done)
    return f"measuring {counted(left, 'validation row')} under version {validation.version}"


def _forgets(like: list[Order], state: State) -> str:
    return f"forgetting {_groups(sum(len(getattr(order.command, 'groups', ())) for order in like))}"


def _timer(command: Any, state: State) -> tuple[str, str, str]:
    """(who, what it has been doing, what then happens) while a timer runs."""
    if command.name == DEADLINE:
        return f"step {state.training.steps_batched}", "waiting for stragglers", "then the deadline policy acts"
    if command.name == DRAIN:
        return "the run", "draining", f"it stops as it is once that exceeds {state.limits.drain_s:g} s"
    return "the run", "waiting for a replica", f"none is left; it ends after {state.limits.give_up_s:g} s without one"


def _starts(like: list[Order], state: State) -> str:
    command: Any = like[0].command
    text = "restarting" if command.life > 1 else "starting"
    return f"{text} from {_beginning(command)}" if command.kind == TRAINER else text


def _room(command: Any, state: State) -> str:
    """Why a process that is to start does not yet; empty if it does."""
    process = state.find_process(command.kind, command.index)
    return f"the cluster has no room for it: {process.no_room}" if process is not None and process.no_room else ""


def start_text(order: Order, state: State) -> str:
    """What the process of a `StartProcess` is doing, where it begins, and what it waits for."""
    return ": ".join(filter(None, (_starts([order], state), _room(order.command, state))))


def _beginning(command: Any) -> str:
    """Which weights a trainer begins with, and the steps that it trains again."""
    if command.version >= 0:
        weights = f"published version {command.version}"
    elif command.steps:
        weights = f"the checkpoint after {counted(command.steps, 'train step')}"
    else:
        weights = "the initial weights"
    return weights + (f" and training {counted(len(command.redo), 'step')} again" if command.redo else "")


def _says(words: str) -> Words:
    """A sentence filled from the fields of the oldest order."""
    return lambda like, state: words.format(order=like[0].command)


WORDS: dict[type[Command], Words] = {
    DrawPrompts: lambda like, state: f"drawing {counted(state.asked, 'prompt')}",
    StartGroup: _generates,
    ResumeGroup: _generates,
    ParkGroup: _says("parking group {order.group}"),
    TruncateGroup: _says("finishing group {order.group} with the tokens it has"),
    AbortGroup: _says("stopping group {order.group}"),
    DiscardGroups: _forgets,
    StageWeights: _says("fetching version {order.version} while it generates"),
    PauseReplica: _pauses,
    InstallWeights: _says("installing version {order.version}"),
    ResumeReplica: _says("resuming sampling"),
    StartProcess: _starts,
    StopProcess: _says("stopping"),
    RetireWeights: lambda like, state: f"dropping {counted(len(like), 'version')}",
    ScoreBatch: _scores,
    TrainStep: _trains,
    PublishWeights: _says("publishing version {order.version}"),
    SaveCheckpoint: lambda like, state: f"writing the checkpoint after {counted(like[0].id, 'train step')}",
    DeleteCheckpoint: lambda like, state: f"deleting the checkpoint after {counted(like[0].id, 'train step')}",
    MeasureRows: _measures,
    StopMeasuring: _says("stopping its measurements"),
    EnterState: _works,
    InspectStep: lambda like, state: f"inspecting {inspected(like[0].command)}",
}
"""For each class of orders but timers, what its owner is doing."""


def _unordered(state: State) -> Iterator[Wait]:
    """Waits that have no order."""
    for step in state.training.formed_steps:
        if step.state == "scoring" and not state.scoring(step):
            by = f"step {step.id} on {_groups(len(step.groups))}"
            doing = f"waiting for {missing_for_scoring(state)}"
            ends = "ReplicaPaused, ProcessUp, WeightsInstalled or BatchScored"
            yield Wait(by=by, doing=doing, since=step.entered_at, ends=ends)
    validation = state.validations.served
    if validation is not None and not state.validations.out_of(validation):
        left = sum(chunk.count for chunk in validation.chunks if not chunk.done)
        entered = validation.started_at if validation.started_at >= 0 else validation.queued_at
        doing = f"waiting for a replica with version {validation.version}"
        detail = f"{counted(left, 'validation row')} {'is' if left == 1 else 'are'} not measured"
        ends = "WeightsInstalled, GroupGenerated or ProcessUp"
        yield Wait(by="the validation", doing=doing, since=entered, ends=ends, detail=detail)


def _named(groups: list[GroupId]) -> str:
    named = ", ".join(str(id) for id in groups[:GROUPS_NAMED])
    more = len(groups) - GROUPS_NAMED
    return f"group{'s' * (len(groups) > 1)} {named}" + (f" and {more} more" if more > 0 else "")


def _groups(count: int) -> str:
    return counted(count, "group")


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"
