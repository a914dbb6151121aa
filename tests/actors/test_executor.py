"""`RunExecutor`: who gets an order, and when orders to the stores are answered, without Ray."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handles import RayOfHandles, Scene, played, settled

from engine.actors.ray_processes import RayStores
from engine.commands import (
    Command,
    DiscardGroups,
    EnterState,
    RetireWeights,
    ScoreBatch,
    StartGroup,
    StartProcess,
    StopProcess,
    TrainStep,
)
from engine.events import Event, OrderDone
from engine.runtime.executor import RunExecutor
from engine.runtime.prompt_sources import listed
from engine.states.limits import Limits, Pool
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER


class Store:
    """Its calls are answered when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, asyncio.Future[None]]] = []
        self.discard = self.retire = SimpleNamespace(remote=self._called)

    def _called(self, said: Any) -> "asyncio.Future[None]":
        self.calls.append((said, asyncio.get_running_loop().create_future()))
        return self.calls[-1][1]

    def answer(self, call: int, error: Exception | None = None) -> None:
        _, answer = self.calls[call]
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)


APART = Limits(
    train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, scoring_tasks=("ref_logprobs",),
    pools=(Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",))),
)  # fmt: skip


class Executor:
    """One that orders what there is in a scene, where one task is scored apart."""

    def __init__(self, scene: Scene) -> None:
        self.trajectories, self.weights, self.events = Store(), Store(), list[Event]()
        self.executor = RunExecutor(
            replace(scene.plan, limits=APART), supervisor=scene.supervisor, prompts=listed(["question 0"]),
            stores=RayStores(self.trajectories, self.weights),
            post=lambda *events: self.events.extend(events), finish=lambda command: None,
        )  # fmt: skip

    def order(self, *commands: Command) -> None:
        self.executor.execute(commands)


def discard(number: int) -> DiscardGroups:
    return DiscardGroups(groups=(number,), number=number, cause=0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, RayOfHandles(monkeypatch))


@played
async def test_store_orders_are_reported_done_together_once_their_calls_are_answered(scene: Scene) -> None:
    made = Executor(scene)
    made.order(discard(3), discard(4), RetireWeights(version=1, number=5, cause=0))
    made.order(discard(6))
    await settled()
    assert made.events == [] and made.executor.calls == 3
    assert [said for said, _ in made.trajectories.calls] == [[3, 4], [6]]
    made.trajectories.answer(0)
    made.weights.answer(0)
    await settled()
    assert made.events == [OrderDone(orders=(3, 4, 5))]
    made.trajectories.answer(1)
    await settled()
    assert made.events[1:] == [OrderDone(orders=(6,))]


@played
async def test_a_store_that_is_gone_or_full_leaves_its_orders_open(scene: Scene) -> None:
    made = Executor(scene)
    made.order(discard(3))
    made.order(discard(4))
    made.trajectories.answer(0, RuntimeError("the node is gone"))
    await settled()
    made.executor.close()
    await settled()
    assert made.events == []


@played
async def test_each_order_goes_to_the_process_that_it_is_for(scene: Scene) -> None:
    """In the order in which they are given: one that starts a process comes before what that is to do."""
    made = Executor(scene)
    own = ScoreBatch(step=0, attempt=1, task="old_logprobs", groups=(0,), cause=0)
    apart = ScoreBatch(step=0, attempt=1, task="ref_logprobs", groups=(0,), cause=0)
    train = TrainStep(step=0, attempt=1, groups=(0,), staleness=(0,), cause=0)
    enter = EnterState(group=0, attempt=1, state="judging", cause=0)
    group = StartGroup(group=0, attempt=1, replica=0, life=1, cause=0)
    kinds = (TRAINER, SCORER, ADDED_STATES, REPLICA)
    starts = [StartProcess(kind=kind, index=0, life=1, cause=0) for kind in kinds]
    made.order(own, *starts, own, apart, train, enter, group, discard(3))
    names = {"trainer/1": [own, train], "scorer-0/1": [apart], "states/1": [enter, discard(3)],
             "rollout-0/1": [group]}  # fmt: skip
    assert {name: handle.orders for name, handle in scene.cluster.handles.items()} == names
    assert made.executor.calls == 5
    made.order(StopProcess(kind=REPLICA, index=0, life=1, reason="enough", cause=0), group)
    assert scene.lost == [("rollout-0", 1, "enough")] and scene.handle("rollout-0/1").orders == [group]
    made.trajectories.answer(0)
