"""`WorkerLink`: what a worker was ordered and has not answered, and how often it may die, without Ray."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from engine.actors.heartbeat import Pulse
from engine.actors.trainer_link import answers, failure_of
from engine.actors.wire import unpack_orders
from engine.actors.worker_link import WorkerLink
from engine.actors.workers import _leaves, _state_failed
from engine.commands import Command, DiscardGroups, EnterState, ScoreBatch
from engine.events import BatchScored, Event, StateFailed, StateLeft, StepFailed


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


RESTARTS = 2

SCORE = ScoreBatch(step=4, attempt=1, task="old_logprobs", groups=(1,), cause=0)
ENTER = EnterState(group=1, attempt=1, state="judging", cause=0)
LEFT = StateLeft(group=1, attempt=1, state="judging", live=1, reward_mean=0.0, reward_spread=0.0)
UNDONE = StateFailed(group=1, attempt=1, state="judging", cause="infrastructure", reason="no memory")


def lives_of(
    command: Command, answer: Event, answers: Callable[[Event, Command], bool], failure: Callable[[Any, str], Event],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, list[Event]]:  # fmt: skip
    """Of a worker that answers one order in each of its lives and then dies with it in hand: how many lives it had
    after more deaths than it has restarts, and what was delivered."""
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    begun, delivered = list[int](), list[Event]()

    def start(incarnation: int) -> Sent:
        begun.append(incarnation)
        return Sent()

    link = WorkerLink(
        what="the worker", start=start, restarts=RESTARTS, answers=answers, failure=failure,
        deliver=delivered.append, spawn=lambda work: work.close(), source="worker", living=None, pulse=Pulse(0.0, 3),
    )  # fmt: skip
    for _ in range(2 * RESTARTS + 1):
        link.order(command)
        link.answered(answer)
        link.order(command)
        asyncio.run(link._replace("out of memory"))
    return len(begun), delivered


@pytest.mark.parametrize(
    ("command", "answer", "answers", "failure"),
    [
        (SCORE, BatchScored(step=4, attempt=1, task="old_logprobs"), answers, failure_of),
        (ENTER, LEFT, _leaves, _state_failed),
    ],
    ids=["scored", "left"],
)
def test_a_worker_that_did_something_since_may_die_as_often_again(
    command: Command, answer: Event, answers: Any, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, delivered = lives_of(command, answer, answers, failure, monkeypatch)
    assert lives == 1 + 2 * RESTARTS + 1
    assert not any("it died too often" in getattr(event, "reason", "") for event in delivered)


@pytest.mark.parametrize(
    ("command", "answer", "answers", "failure"),
    [
        (SCORE, StepFailed(step=4, attempt=1, reason="no memory"), answers, failure_of),
        (SCORE, BatchScored(step=3, attempt=1, task="old_logprobs"), answers, failure_of),
        (ENTER, UNDONE, _leaves, _state_failed),
    ],
    ids=["not scored", "an echo", "not left"],
)
def test_one_that_only_failed_or_told_old_news_in_between_may_not(
    command: Command, answer: Event, answers: Any, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, delivered = lives_of(command, answer, answers, failure, monkeypatch)
    assert lives == 1 + RESTARTS
    assert "it died too often" in getattr(delivered[-1], "reason", "")


def _never(work: Any) -> None:
    raise AssertionError("nothing is to be begun")
