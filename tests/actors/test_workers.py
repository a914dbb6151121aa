"""`WorkerLink`: what follows when a worker dies with orders in hand, and how often it may, without Ray."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from engine.actors.heartbeat import Pulse
from engine.actors.trainer_link import failure_of
from engine.actors.wire import unpack_orders
from engine.actors.worker_link import WorkerLink
from engine.actors.workers import _owned, _state_failed
from engine.commands import Command, DiscardGroups, EnterState, ScoreBatch
from engine.events import BatchScored, Event, StateFailed, StateLeft, StepFailed
from engine.states.orders import OrderBook, stage_owner

RESTARTS = 2
SCORED_APART = ("old_logprobs", "ref_logprobs")
OWNERS = [stage_owner("judging"), *(f"scorer of {task}" for task in SCORED_APART)]


class Sent:
    """Where a link's calls arrive: the orders of each."""

    def __init__(self) -> None:
        self.orders: list[Command] = []
        self.carry_out = SimpleNamespace(remote=self._take)

    def _take(self, sequence: int, packed: bytes) -> None:
        self.orders += [command for command, _ in unpack_orders(packed)]


class Scene:
    """A worker with the order book that it is ordered from; what it and its link say goes to the book."""

    def __init__(self, failure: Callable[[Any, str], Event], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "kill", lambda actor: None)
        self.orders = OrderBook(SCORED_APART)
        self.lives: list[Sent] = []
        self.delivered: list[Event] = []
        self.link = WorkerLink(
            what="the worker", start=self._start, restarts=RESTARTS, failure=failure,
            owned=partial(_owned, self.orders, OWNERS), deliver=self.deliver, spawn=lambda work: work.close(),
            source="worker", living=None, pulse=Pulse(0.0, 3),
        )  # fmt: skip

    def _start(self, incarnation: int) -> Sent:
        self.lives.append(Sent())
        return self.lives[-1]

    def order(self, command: Command) -> None:
        self.orders.add(command, at=0.0)
        self.link.order(command)

    def deliver(self, event: Event) -> None:
        """As the scheduler's process does it."""
        self.delivered.append(event)
        if self.orders.match(event):
            for _ in self.orders.matched:
                self.link.answered(event)

    def die(self) -> None:
        asyncio.run(self.link._replace("out of memory"))


SCORE = ScoreBatch(step=4, attempt=1, task="old_logprobs", groups=(1,), cause=0)
ENTER = EnterState(group=1, attempt=1, state="judging", cause=0)
LEFT = StateLeft(group=1, attempt=1, state="judging", live=1, reward_mean=0.0, reward_spread=0.0)
UNDONE = StateFailed(group=1, attempt=1, state="judging", cause="infrastructure", reason="no memory")


def test_groups_that_are_dropped_are_told_of_with_what_else_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(_state_failed, monkeypatch)
    scene.order(ENTER)
    drop = DiscardGroups(groups=(1, 9), number=7, cause=0)
    scene.orders.withdraw("stage", 1)
    scene.link.discard(drop)
    assert scene.link.flush() == 1
    assert scene.lives[0].orders == [ENTER, drop]
    scene.die()
    assert scene.delivered == [], "nobody waits for what was dropped"


def test_a_dead_worker_s_orders_fail_once_each_and_those_of_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step ends both of its scoring tasks: the second is not open any more."""
    scene = Scene(failure_of, monkeypatch)
    for task in SCORED_APART:
        scene.order(ScoreBatch(step=4, attempt=1, task=task, groups=(1,), cause=0))
    scene.order(ScoreBatch(step=5, attempt=1, task="old_logprobs", groups=(2,), cause=0))
    scene.orders.add(ScoreBatch(step=4, attempt=1, task="values", groups=(1,), cause=0), at=0.0)
    scene.die()
    assert [(type(event), event.step) for event in scene.delivered] == [(StepFailed, 4), (StepFailed, 5)]  # type: ignore[attr-defined]
    assert len(scene.orders) == 0, "a failed step ends the trainer's tasks, too"


def lives_of(
    command: Command, answer: Event, failure: Callable[[Any, str], Event], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[Event]]:
    """Of a worker that answers one order in each of its lives and then dies with it in hand: how many lives it had
    after more deaths than it has restarts, and what was delivered."""
    scene = Scene(failure, monkeypatch)
    for _ in range(2 * RESTARTS + 1):
        scene.order(command)
        scene.deliver(answer)
        scene.order(command)
        scene.die()
    return len(scene.lives), scene.delivered


@pytest.mark.parametrize(
    ("command", "answer", "failure"),
    [(SCORE, BatchScored(step=4, attempt=1, task="old_logprobs"), failure_of), (ENTER, LEFT, _state_failed)],
    ids=["scored", "left"],
)
def test_a_worker_that_did_something_since_may_die_as_often_again(
    command: Command, answer: Event, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, delivered = lives_of(command, answer, failure, monkeypatch)
    assert lives == 1 + 2 * RESTARTS + 1
    assert not any("it died too often" in getattr(event, "reason", "") for event in delivered)


@pytest.mark.parametrize(
    ("command", "answer", "failure"),
    [
        (SCORE, StepFailed(step=4, attempt=1, reason="no memory"), failure_of),
        (SCORE, BatchScored(step=3, attempt=1, task="old_logprobs"), failure_of),
        (ENTER, UNDONE, _state_failed),
    ],
    ids=["not scored", "an echo", "not left"],
)
def test_one_that_only_failed_or_told_old_news_in_between_may_not(
    command: Command, answer: Event, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, delivered = lives_of(command, answer, failure, monkeypatch)
    assert lives == 1 + RESTARTS
    assert "it died too often" in getattr(delivered[-1], "reason", "")
