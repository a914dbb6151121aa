"""What can happen next in a run, as its order book says: every event that may answer an open order, and every loss.

The state of the run alone says what may follow: nothing takes time, and no process is simulated. Used by `small_run`.
Must not change the state.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine import commands as c
from engine import events as e
from engine.ids import GroupId
from engine.states.limits import QUEUED
from engine.states.orders import Order, works_in_order
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER
from engine.states.state import State
from engine.trajectory import Prompt
from engine.workers.group_reports import describe_prompt

CUTS = ("abort", "sleep")
"""Modes of a pause that abort the running groups."""


class Answer(NamedTuple):
    """An event that may come next."""

    event: e.Event
    order: int = -1
    """The number of the order that it answers; -1: none."""
    fault: bool = False
    straggler: GroupId = -1
    """The group that it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompts:
    """The prompts of a run, and what policies see of groups besides figures."""

    prompts: int = 64
    slots: int = 4
    """Of each replica."""
    described: tuple[str, ...] | None = None
    """Columns that policies see; None: they see only figures."""
    rows: Sequence[Prompt] = ()
    """Rows that the prompts have in turn; empty: rows without columns."""
    rewards: tuple[str, ...] = ()
    """Names of the rewards of a group."""

    def described_prompt(self, group: GroupId) -> dict[str, Any]:
        row = self.rows[group % len(self.rows)] if self.rows else Prompt(row=group, text="")
        return describe_prompt(row, self.described or ())

    def described_group(self, group: GroupId) -> str:
        if self.described is None:
            return ""
        rewards = dict.fromkeys(self.rewards, 0.5)
        return json.dumps({**self.described_prompt(group), "lengths": [1 + group * 7 % 5], "rewards": rewards})


def answers(state: State, source: GivenPrompts) -> Iterator[Answer]:
    """Every event that may come next, oldest order first; then losses of processes."""
    for order in state.orders.all():
        process = state.process_of(order.owner) if order.subject not in ("start", "stop") else None
        if process is not None and process.state != "up":
            continue
        if works_in_order(order.owner) and state.orders.first(order.owner) is not order:
            continue
        yield from ANSWERS.get(order.subject, _done)(state, order, source)
    replicas = [replica.process for replica in state.replicas.by_id.values()]
    for process in (*state.processes.values(), *replicas):
        if process.state == "up" and process.kind in (REPLICA, TRAINER, SCORER, ADDED_STATES):
            yield Answer(e.ProcessLost(**process.address(), reason="fault"), fault=True)


def _done(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    yield Answer(e.OrderDone(orders=(order.number,)), order.number)


def _draw(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    first = state.groups.ledger.drawn
    for count in dict.fromkeys((min(command.count, source.prompts - first), min(1, source.prompts - first))):
        known = ""
        if source.described is not None and state.limits.states_at(QUEUED):
            known = json.dumps([source.described_prompt(group) for group in range(first, first + count)])
        last = first + count >= source.prompts
        drawn = e.PromptsDrawn(first=first, count=count, exhausted=last, number=command.number, described=known)
        yield Answer(drawn, order.number)
    if state.ending.failed_draws + 1 < state.limits.infrastructure_attempts:
        yield Answer(e.DrawFailed(number=command.number, reason="fault"), order.number, fault=True)


def _group(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    """It samples its first new token at once, and the last one with the present weights."""
    command: Any = order.command
    group, replica = state.groups.live[command.group], state.replicas.by_id[command.replica]
    if replica.state in ("installing", "asleep") or state.orders.find("resume", replica.id) is not None:
        return
    who = {"group": group.id, "attempt": command.attempt, "replica": replica.id, "life": command.life}
    oldest = min(group.oldest_version if group.tokens else group.admitted_version, replica.version)
    versions = {"tokens": group.tokens or 1, "oldest_version": oldest, "newest_version": replica.version}
    sync: Any = getattr(state.orders.find("sync", replica.id), "command", None)
    cut = isinstance(sync, c.PauseReplica) and sync.mode in CUTS
    if cut or state.orders.find("park", group.id) is not None:
        yield Answer(e.GroupAborted(**who, **versions, unfinished=1), order.number)
    generated = e.GroupGenerated(
        **who, **versions, trainable=2, reward_mean=0.5, reward_spread=1.0, described=source.described_group(group.id)
    )  # fmt: skip
    yield Answer(generated, order.number, straggler=group.id)
    for cause in ("infrastructure", "data"):
        yield Answer(e.GroupFailed(**who, cause=cause, reason="fault"), order.number, fault=True)


def _sync(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    who = {"replica": command.replica, "life": command.life, "attempt": command.attempt}
    if isinstance(command, c.StageWeights):
        yield Answer(e.WeightsStaged(**who, version=command.version), order.number)
    elif isinstance(command, c.InstallWeights):
        yield Answer(e.WeightsInstalled(**who, version=command.version), order.number)
    elif command.mode == "keep" or not state.orders.of(command.replica, "group"):
        yield Answer(e.ReplicaPaused(**who), order.number)
    yield Answer(e.SyncFailed(**who, version=command.version, reason="fault"), order.number, fault=True)


def _start(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    process = {"kind": command.kind, "index": command.index, "life": command.life}
    slots = source.slots if command.kind == REPLICA else 0
    yield Answer(e.ProcessUp(**process, slots=slots), order.number)
    yield Answer(e.ProcessLost(**process, reason="fault"), order.number, fault=True)


def _stop(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    process = {"kind": command.kind, "index": command.index, "life": command.life}
    yield Answer(e.ProcessLost(**process, reason=command.reason), order.number)


def _score(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    step = {"step": command.step, "attempt": command.attempt}
    yield Answer(e.BatchScored(**step, task=command.task), order.number)
    yield Answer(e.StepFailed(**step, reason="fault"), order.number, fault=True)


def _train(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    step = {"step": command.step, "attempt": command.attempt}
    yield Answer(e.StepTrained(**step, updates=1), order.number)
    yield Answer(e.StepFailed(**step, reason="fault"), order.number, fault=True)


def _publish(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    version = {"version": command.version, "attempt": command.attempt}
    yield Answer(e.WeightsPublished(**version), order.number)
    yield Answer(e.PublishFailed(**version, reason="fault"), order.number, fault=True)


def _checkpoint(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    yield Answer(e.CheckpointSaved(steps=command.steps), order.number)
    yield Answer(e.CheckpointFailed(steps=command.steps, reason="fault"), order.number, fault=True)


def _timer(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    yield Answer(e.TimerFired(timer=command.timer), order.number)


def _rows(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    chunk = {
        "validation": command.validation, "chunk": command.chunk, "attempt": command.attempt,
        "replica": command.replica, "life": command.life,
    }  # fmt: skip
    count = command.count
    measured = e.RowsMeasured(**chunk, version=command.version, measured=count, right=count, reward=float(count))
    yield Answer(measured, order.number)
    yield Answer(e.RowsFailed(**chunk, reason="fault"), order.number, fault=True)


def _state(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    who: dict[str, Any] = {"group": command.group, "attempt": command.attempt, "state": command.state}
    known = source.described_group(command.group)
    if known and command.state in state.limits.states_at(QUEUED):
        known = json.dumps(source.described_prompt(command.group))
    yield Answer(
        e.StateLeft(**who, trainable=2, reward_mean=0.5, reward_spread=1.0, described=known), order.number,
        straggler=command.group,
    )  # fmt: skip
    for cause in ("infrastructure", "data"):
        yield Answer(e.StateFailed(**who, cause=cause, reason="fault"), order.number, fault=True)


def _inspect(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    command: Any = order.command
    subject: dict[str, Any] = {
        "step": command.step, "attempt": command.attempt, "state": command.state, "version": command.version
    }  # fmt: skip
    yield Answer(e.StepInspected(**subject), order.number)
    yield Answer(e.InspectionFailed(**subject, reason="fault"), order.number, fault=True)


def _with_its_group(state: State, order: Order, source: GivenPrompts) -> Iterator[Answer]:
    """A group that is cut short: what ends its attempt answers."""
    return iter(())


ANSWERS: Mapping[str, Callable[[State, Order, GivenPrompts], Iterator[Answer]]] = {
    "draw": _draw, "group": _group, "truncate": _with_its_group, "park": _with_its_group, "sync": _sync,
    "start": _start, "stop": _stop, "score": _score, "train": _train, "publish": _publish, "checkpoint": _checkpoint,
    "timer": _timer, "rows": _rows, "state": _state, "inspect": _inspect,
}  # fmt: skip
"""By the subject of the order. `OrderDone` answers all others."""
