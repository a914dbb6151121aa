"""`WorkerLink`: what a worker was ordered and has not answered, without Ray."""

from types import SimpleNamespace
from typing import Any

from engine.actors.heartbeat import Pulse
from engine.actors.wire import unpack_orders
from engine.actors.worker_link import WorkerLink
from engine.actors.workers import _leaves, _state_failed
from engine.commands import Command, DiscardGroups, EnterState
from engine.events import Event


class Sent:
    """Where a link's calls arrive: the orders of each."""

    def __init__(self) -> None:
        self.orders: list[Command] = []
        self.carry_out = SimpleNamespace(remote=self._take)

    def _take(self, sequence: int, packed: bytes) -> None:
        self.orders += [command for command, _ in unpack_orders(packed)]


def test_orders_on_groups_that_are_dropped_are_ended_and_no_longer_waited_for() -> None:
    sent, delivered = Sent(), list[Event]()
    link = WorkerLink(
        what="the states", start=lambda incarnation: sent, restarts=0, answers=_leaves, failure=_state_failed,
        deliver=delivered.append, spawn=_never, source="added", living=None, pulse=Pulse(0.0, 3),
    )  # fmt: skip
    enter = [EnterState(group=group, attempt=1, state="judging", cause=0) for group in (1, 2)]
    for command in enter:
        link.order(command)
    drop, trained = DiscardGroups(groups=(2, 9), cause=0), DiscardGroups(groups=(7,), cause=0)
    link.discard(drop)
    link.discard(trained)
    assert link.flush() == 1
    assert sent.orders == [*enter, drop], "what the worker does not have is none of its business"
    assert link._pending == enter[:1]


def _never(work: Any) -> None:
    raise AssertionError("nothing is to be begun")
