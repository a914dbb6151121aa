"""The causal story of one prompt group: event → command → event, with times, versions and state changes; and the state
of a run as plain values and as text.

`moment` calls it for each tick of a replay. An event belongs to the story if it names the group, changed its state,
caused a command that names it, or concerns the replica that it runs on or the step that trains it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.commands import Command, ResumeGroup, ScoreBatch, StartGroup, TrainStep
from engine.errors import counted
from engine.events import (
    BatchScored,
    Event,
    InspectionFailed,
    OrderProgressed,
    ProcessLost,
    PromptsDrawn,
    ReplicaPaused,
    StepFailed,
    StepInspected,
    StepTrained,
    SyncFailed,
    WeightsInstalled,
)
from engine.ids import EventId, GroupId, ReplicaId, StepId
from engine.record import Tick
from engine.states.machine import Phase
from engine.states.process import REPLICA
from engine.states.state import State

# -- events and commands -----------------------------------------------------------------------------------------------


SHOWN = 8
"""Maximum number of entries shown of a list."""


def worded(item: Event | Command, without: tuple[str, ...] = ()) -> str:
    """`StartGroup(group=3, attempt=1, ...)`, without id, time and cause. Long tuples are cut."""
    left_out = (*(("id", "at") if isinstance(item, Event) else ("cause",)), *without)
    parts = [f"{name}={_value(getattr(item, name))}" for name in item.__struct_fields__ if name not in left_out]
    return f"{type(item).__name__}({', '.join(parts)})"


def stamped(event: Event) -> str:
    """`t=1.234 s  #57 PromptsDrawn(...)`."""
    return f"t={event.at:.3f} s  #{event.id} {worded(event)}"


def few(things: Iterable[Any]) -> str:
    """The first entries of a list, and its length."""
    listed = [str(thing) for thing in things]
    if not listed:
        return "none"
    more = f", … {len(listed)} in all" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({few(value) if value else ''})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


# -- the state ---------------------------------------------------------------------------------------------------------


def summarize(state: State) -> dict[str, Any]:
    """The state as plain values, which later events do not change."""
    ending = state.ending
    training = state.training
    groups = state.groups
    newest = training.latest_version
    return {
        "prompts": {
            "drawn": groups.ledger.drawn,
            "phases": {phase.name.lower(): groups.ledger.count[phase] for phase in Phase},
            "asked": state.asked,
            "exhausted": groups.facts.exhausted,
        },
        "places": {"held": state.held, "all": state.places(newest), "version": newest},
        "concurrent": {"running": groups.ledger.running, "most": state.limits.max_concurrent_groups},
        "deadlines": [
            {"step": deadline, "started": started, "ready": ready}
            for deadline, started, ready in groups.deadlines.cumulative()
        ],
        "steps": {
            "batched": training.steps_batched,
            "trained": training.steps_trained,
            "live": [
                {
                    "step": s.id, "state": s.state, "attempt": s.attempt, "groups": list(s.groups),
                    "scoring": state.scoring(s),
                }
                for s in training.steps.values()
            ],
        },
        "pools": [
            {
                "tasks": list(state.pools.settings[lease.id].tasks), "task": lease.task, "step": lease.step,
                "wanted": lease.wanted,
            }
            for lease in (state.pools.leases if state.limits.pools else ())
        ],
        "replicas": [
            {
                "replica": r.id, "state": r.condition, "life": r.process.life, "version": r.version,
                "next": r.next_version, "staging": state.is_staging(r), "slots": r.slots,
                "occupied": state.replicas.occupied(r), "groups": list(state.replicas.running(r)),
                "chunks": state.replicas.measuring(r), "validator": r.validator, "waits": r.process.no_room,
            }
            for r in state.replicas.by_id.values()
        ],
        "processes": [
            {"process": p.id, "state": p.state, "life": p.life, "deaths": p.deaths, "waits": p.no_room}
            for p in state.processes.values()
        ],
        "versions": [
            {"version": id, "state": version.state, "steps": training.steps_in[id]}
            for id, version in training.versions.items()
        ],
        "validations": [
            {
                "validation": v.id, "state": v.state, "version": v.version, "rows": v.rows, "measured": v.measured,
                "waiting": len(state.validations.waiting[v.id]), "out": state.validations.out_of(v),
                "replicas": list(v.replicas),
            }
            for v in state.validations.live.values()
        ],
        "publishing": state.publishing,
        "checkpoint_pending": state.checkpoint_pending,
        "stale_echoes": state.orders.facts.stale_echoes,
        "outcome": None if ending.outcome is None else f"{ending.outcome.outcome}: {ending.outcome.reason}",
    }  # fmt: skip


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The text of a summary."""
    prompts, places, concurrent, steps = summary["prompts"], summary["places"], summary["concurrent"], summary["steps"]
    counted = " + ".join(f"{count} {phase}" for phase, count in prompts["phases"].items())
    source = "the data source is exhausted" if prompts["exhausted"] else f"{prompts['asked']} requested"
    lines = [
        f"prompts   {prompts['drawn']} drawn = {counted}; {source}",
        f"places    {places['held']} of {places['all']} held at version {places['version']}; "
        f"{concurrent['running']} of {concurrent['most']} groups running",
    ]
    if summary["deadlines"]:
        deadlines = [f"by step {d['step']}: {d['started']} ({d['ready']} ready)" for d in summary["deadlines"]]
        lines.append(f"deadlines {'; '.join(deadlines)}")
    lines.append(f"steps     {steps['batched']} batched, {steps['trained']} trained")
    for step in steps["live"]:
        batch = f", groups {few(step['groups'])}" if step["groups"] else ""
        scoring = "".join(f", {task} running" for task in step["scoring"])
        lines.append(f"  step {step['step']}: {step['state']}, attempt {step['attempt']}{scoring}{batch}")
    for pool in summary["pools"]:
        of = f" of step {pool['step']}" if pool["step"] >= 0 else ""
        wanted = ", wanted by the trainer" if pool["wanted"] else ""
        lines.append(f"pool      {' + '.join(pool['tasks'])}: {pool['task'] or 'free'}{of}{wanted}")
    if summary["processes"]:
        lines.append("processes " + "; ".join(_process(p) for p in summary["processes"]))
    lines.append("replicas" if summary["replicas"] else "replicas  none has joined")
    for r in summary["replicas"]:
        coming = "" if r["next"] is None else f", {'staging' if r['staging'] else 'staged'} {r['next']}"
        lines.append(
            f"  replica {r['replica']}: {r['state']}, life {r['life']}, version {r['version']}{coming}; "
            f"{r['occupied']} of {r['slots']} slots: {few(r['groups'])}{_validating(r)}{_room(r)}"
        )
    publishing = "; one is being published" if summary["publishing"] else ""
    lines.append(f"versions  {_versions(summary['versions'])}{publishing}")
    for v in summary["validations"]:
        chunks = f"{v['out']} chunks running, {v['waiting']} waiting; holds replicas {few(v['replicas'])}"
        rows = f"version {v['version']}, {v['measured']} of {v['rows']} rows"
        lines.append(f"  validation {v['validation']}: {v['state']}, {rows}; {chunks}")
    checkpoint = "a checkpoint is being written; " if summary["checkpoint_pending"] else ""
    lines.append(f"other     {checkpoint}{summary['stale_echoes']} stale echoes")
    if summary["outcome"] is not None:
        lines.append(f"outcome   {summary['outcome']}")
    return lines


def _process(process: dict[str, Any]) -> str:
    ended = f", ended {counted(process['deaths'], 'time')} without progress" if process["deaths"] else ""
    return f"{process['process']} {process['state']}, life {process['life']}{ended}{_room(process)}"


def _room(process: dict[str, Any]) -> str:
    return f", waits for room: {process['waits']}" if process["waits"] else ""


def _validating(replica: dict[str, Any]) -> str:
    only = ", only validates" if replica["validator"] else ""
    return f"{only}, {replica['chunks']} slots measure" if replica["chunks"] else only


def _versions(versions: list[dict[str, Any]]) -> str:
    return ", ".join(f"{v['version']} {v['state']} ({v['steps']} steps)" for v in versions) or "none"


ABOUT_ITS_REPLICA = (ReplicaPaused, WeightsInstalled, SyncFailed)
ABOUT_ITS_STEP = (BatchScored, StepTrained, StepFailed, StepInspected, InspectionFailed)


def order_behind(event: Event, state: State) -> str:
    """The order that an event of the newest tick answers or reports on, from the order book."""
    matched = state.orders.matched.get(event.id)
    if matched is None:
        return "  (stale echo: changes nothing)"
    return f"  <- {type(matched[-1].command).__name__} of #{matched[-1].command.cause}" if matched else ""


@dataclass(frozen=True, slots=True)
class Chapter:
    """The events of a tick that matter to the group, and their effects on it."""

    events: tuple[tuple[Event, str], ...]
    """Each with a note: the order that it answers or reports on and the event that caused that; or that it is a stale
    echo, which answers an order that is no longer open and changes nothing."""
    changes: tuple[str, ...]
    """Changes of the group's state."""
    commands: tuple[tuple[Command, str], ...]
    """Commands that name the group, each with a note."""

    def lines(self, group: GroupId) -> list[str]:
        lines = [f"{stamped(event)}{note}" for event, note in self.events]
        lines += [f"      {change}" for change in self.changes]
        for command, note in self.commands:
            without = tuple(name for name in ("groups", "staleness") if hasattr(command, name))
            words = worded(command, without=("group", *without))
            lines.append(f"      -> #{command.cause} {words}{f': {note}' if note else ''}")
        return lines


class Story:
    """Collects the chapters of one group while a record is replayed."""

    def __init__(self, group: GroupId) -> None:
        self.group = group
        self.chapters: list[Chapter] = []
        self._replica: ReplicaId | None = None
        """The replica that it runs on."""
        self._step: StepId | None = None
        """The step that has it in its batch."""

    def add(self, tick: Tick, changes: list[str], state: State) -> None:
        """Add the next tick. `state`: the state after it. `changes`: state changes of this group."""
        commands = tuple((c, self._note(c, state)) for c in tick.commands if self._named_by(c))
        causes = {command.cause for command, _ in commands}
        events = [e for e in tick.events if e.id in causes or self._named_in(e, state) or self._touched_by(e)]
        if changes and not events:
            events = [tick.events[-1]]
        if events:
            noted = tuple((event, order_behind(event, state)) for event in events)
            self.chapters.append(Chapter(noted, tuple(changes), commands))
        self._follow(tick.commands)
        if self.group not in state.groups.live:
            self._replica = None

    def lines(self, mark: EventId | None = None) -> Iterator[str]:
        """The text, with a marker line after event `mark`."""
        marked = mark is None
        for chapter in self.chapters:
            if not marked and mark is not None and chapter.events[0][0].id > mark:
                yield f"  ---- event {mark} is here ----"
                marked = True
            yield from chapter.lines(self.group)
        if not marked:
            yield f"  ---- event {mark} is here ----"

    def _named_in(self, event: Event, state: State) -> bool:
        if isinstance(event, PromptsDrawn):
            return event.first <= self.group < event.first + event.count
        if isinstance(event, OrderProgressed):
            matched = state.orders.matched.get(event.id, ())
            return any(getattr(order.command, "group", None) == self.group for order in matched)
        return bool(getattr(event, "group", None) == self.group)

    def _touched_by(self, event: Event) -> bool:
        if isinstance(event, ProcessLost):
            return event.kind == REPLICA and event.index == self._replica
        if isinstance(event, ABOUT_ITS_REPLICA):
            return event.replica == self._replica
        return isinstance(event, ABOUT_ITS_STEP) and event.step == self._step

    def _named_by(self, command: Command) -> bool:
        return bool(getattr(command, "group", None) == self.group) or self.group in getattr(command, "groups", ())

    def _follow(self, commands: tuple[Command, ...]) -> None:
        """Update the group's replica and step."""
        for command in filter(self._named_by, commands):
            if isinstance(command, (StartGroup, ResumeGroup)):
                self._replica = command.replica
            elif isinstance(command, (ScoreBatch, TrainStep)):
                self._replica, self._step = None, command.step

    def _note(self, command: Command, state: State) -> str:
        """The note of a command: version and deadline for generating, position and staleness in a batch."""
        if isinstance(command, (StartGroup, ResumeGroup)):
            replica = state.replicas.by_id.get(command.replica)
            at = f"the replica has version {replica.version}" if replica else ""
            group = state.groups.live.get(self.group)
            return f"{at}, deadline step {group.deadline}" if group else at
        groups: tuple[Any, ...] = getattr(command, "groups", ())
        if isinstance(command, TrainStep):
            place = groups.index(self.group)
            return f"place {place} of {len(groups)}, staleness {command.staleness[place]}"
        return f"with {len(groups) - 1} others" if len(groups) > 1 else ""
