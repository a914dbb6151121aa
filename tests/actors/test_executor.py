"""`RayExecutor`: when orders to the stores are answered, without Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

from fleets import settled

from engine.actors.executor import RayExecutor
from engine.commands import Command, DiscardGroups, RetireWeights
from engine.events import Event, OrderDone


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


class Scene:
    def __init__(self) -> None:
        self.trajectories, self.weights, self.events = Store(), Store(), list[Event]()
        fleet: Any = SimpleNamespace(
            flush=lambda: 0, discard=lambda command: None, order_trainer=None, stop_replica=None, start_replica=None
        )
        self.executor = RayExecutor(
            fleet=fleet, prompts=None, trajectories=self.trajectories, weights=self.weights,  # type: ignore[arg-type]
            deliver=lambda *events: self.events.extend(events), finish=lambda command: None,
        )  # fmt: skip

    def order(self, *commands: Command) -> None:
        self.executor.execute(commands)
        self.executor.flush()


def discard(number: int) -> DiscardGroups:
    return DiscardGroups(groups=(number,), number=number, cause=0)


def test_orders_to_the_stores_are_done_when_their_calls_are_answered_and_told_of_together() -> None:
    async def story() -> None:
        scene = Scene()
        scene.order(discard(3), discard(4), RetireWeights(version=1, number=5, cause=0))
        scene.order(discard(6))
        await settled()
        assert scene.events == [] and scene.executor.calls == 3
        assert [said for said, _ in scene.trajectories.calls] == [[3, 4], [6]]
        scene.trajectories.answer(0)
        scene.weights.answer(0)
        await settled()
        assert scene.events == [OrderDone(orders=(3, 4, 5))]
        scene.trajectories.answer(1)
        await settled()
        assert scene.events[1:] == [OrderDone(orders=(6,))]

    asyncio.run(story())


def test_a_store_that_is_gone_or_full_leaves_its_orders_open() -> None:
    async def story() -> None:
        scene = Scene()
        scene.order(discard(3))
        scene.order(discard(4))
        scene.trajectories.answer(0, RuntimeError("the node is gone"))
        await settled()
        scene.executor.close()
        await settled()
        assert scene.events == []

    asyncio.run(story())
