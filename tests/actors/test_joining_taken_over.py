"""Replicas that were ordered and had not joined when the scheduler's process ended, without Ray: the next process waits
for them as the first did. A node that does not come yet is no sign of a process that hangs."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fleets import FleetOfHandles, Lives, nothing, settled
from ray_plans import plan

from engine.actors.lasting import Living
from engine.actors.survived import Survived, survived_of
from engine.actors.wire import Order
from engine.commands import StartGroup, StartReplica, StopReplica
from engine.events import Event, ReplicaJoined, ReplicaLost, ReplicaPaused, ReplicasWanted, RunStarted, stamp
from engine.metrics.transitions import Transitions
from engine.schedule import Header, Recorder
from engine.scheduler import Scheduler

BEGUN = (RunStarted(), ReplicaJoined(replica=0, incarnation=1, slots=6, version=0))
NEW = (*BEGUN, ReplicasWanted(replicas=2))
"""A second replica is wanted."""
BACK = (
    *BEGUN, ReplicaJoined(replica=1, incarnation=1, slots=6, version=0),
    ReplicaLost(replica=1, incarnation=1, returns=False, reason="1 replicas are wanted"), ReplicasWanted(replicas=2),
)  # fmt: skip
"""There was one, it was let go, and is wanted again."""


class Replica:
    """A handle. What is asked of it is counted; it is up once `node` is there."""

    def __init__(self, node: asyncio.Event) -> None:
        self.node = node
        self.asked, self.joined = asyncio.Event(), asyncio.Event()
        self.watched = self.orders = 0
        self.bring_up = SimpleNamespace(remote=self._bring_up)
        self.join = SimpleNamespace(remote=self.joined.set)
        self.alive = SimpleNamespace(remote=self._alive)
        self.carry_out = SimpleNamespace(remote=self._carry_out)
        self.close = SimpleNamespace(remote=nothing)

    async def _bring_up(self) -> None:
        self.asked.set()
        await self.node.wait()

    async def _alive(self) -> str:
        self.watched += 1
        await asyncio.Event().wait()
        return ""

    def _carry_out(self, sequence: int, packed: bytes) -> None:
        self.orders += 1


class Scene:
    """The next process of a scheduler after such a record: replica 0 is up, `life` of replica 1 was begun, 0 for none.
    No replica may be started again after a loss."""

    def __init__(self, run_dir: Path, events: tuple[Event, ...], life: int) -> None:
        made = replace(plan(run_dir, replicas=1), heartbeat_s=0.0, replica_restarts=0)
        self.survived = recorded(run_dir, events)
        self.node, there = asyncio.Event(), asyncio.Event()
        there.set()
        self.first, self.second = Replica(there), Replica(self.node)
        self.events: list[Event] = []
        actors: dict[tuple[str, int], Any] = {("trainer", 1): None, ("rollout-0", 1): self.first}
        if life:
            actors["rollout-1", life] = self.second
        lived = {one.id: one.incarnation for one in self.survived.recovered.scheduler.state.fleet.replicas.values()}
        living = Living(actors=actors, first=100)
        orders = self.survived.recovered.scheduler.state.orders
        self.fleet = FleetOfHandles(
            made, self.events.append, living, lambda replica, life: self.second, orders=orders, lived=lived
        )

    def take_over(self) -> None:
        """As the scheduler actor does it."""
        replicas = self.survived.replicas([0])
        self.fleet.take_up(replicas)
        for order in self.survived.orders:
            if isinstance(order, StartReplica):
                self.fleet.start_replica(order)
            elif isinstance(order, StopReplica):
                self.fleet.stop_replica(order)
        self.fleet.recover(replicas)

    async def expect_up(self, killed: list[Any], started: Lives) -> None:
        """Replica 1 comes up, is watched once like the other, and that cost nothing."""
        await self.second.joined.wait()
        await settled()
        assert (self.first.watched, self.second.watched) == (1, 1)
        assert self.fleet.started == started
        assert self.events == killed == [] and not self.fleet._restarts[1]


def recorded(run_dir: Path, events: tuple[Event, ...]) -> Survived:
    """What a process finds that comes after these events."""
    made = plan(run_dir)
    scheduler = Scheduler(made.limits)
    head = Header(run="one", limits=made.limits.to_plain(), policies={}, code="test")
    recorder = Recorder(run_dir / "schedule", head)
    for number, event in enumerate(events):
        stamp(event, number, float(number))
        recorder.write(event, scheduler.handle(event), scheduler.state_hash)
    recorder.close()
    survived = survived_of(run_dir, Transitions())
    survived.lock.release()
    return survived


def play(scene: Scene, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await story()
        await scene.fleet.close()

    asyncio.run(asyncio.wait_for(whole(), 60.0))


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    ended: list[Any] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    return ended


@pytest.mark.parametrize(("events", "life"), [(NEW, 1), (BACK, 2)], ids=["new", "back"])
def test_one_that_waits_for_a_node_is_not_watched_before_it_is_up(
    tmp_path: Path, events: tuple[Event, ...], life: int, killed: list[Any]
) -> None:
    scene = Scene(tmp_path, events, life)

    async def story() -> None:
        scene.take_over()
        await scene.second.asked.wait()
        await settled()
        assert (scene.first.watched, scene.second.watched) == (1, 0)
        scene.node.set()
        await scene.expect_up(killed, started=[])

    play(scene, story)


@pytest.mark.parametrize(("events", "life"), [(NEW, 1), (BACK, 2)], ids=["new", "back"])
def test_one_that_is_up_and_has_not_been_heard_of_is_given_orders_at_once_and_watched_once(
    tmp_path: Path, events: tuple[Event, ...], life: int, killed: list[Any]
) -> None:
    scene = Scene(tmp_path, events, life)

    async def story() -> None:
        scene.node.set()
        scene.take_over()
        scene.fleet.order_replica(Order(StartGroup(group=1, attempt=1, replica=1, incarnation=life, cause=0)))
        assert scene.fleet.flush() == scene.second.orders == 1
        await scene.expect_up(killed, started=[])

    play(scene, story)


@pytest.mark.parametrize(("events", "begins"), [(NEW, 2), (BACK, 3)], ids=["new", "back"])
def test_one_that_was_never_begun_or_is_gone_is_started_at_no_cost(
    tmp_path: Path, events: tuple[Event, ...], begins: int, killed: list[Any]
) -> None:
    scene = Scene(tmp_path, events, life=0)

    async def story() -> None:
        scene.node.set()
        scene.take_over()
        await scene.expect_up(killed, started=[(1, begins)])

    play(scene, story)


CALLED_OFF = (*NEW, ReplicasWanted(replicas=1))


@pytest.mark.parametrize("life", [0, 1], ids=["not heard of", "heard of"])
def test_one_that_is_not_wanted_any_more_is_ended_on_its_way_and_may_be_wanted_again(
    tmp_path: Path, life: int, killed: list[Any]
) -> None:
    """As it was found it may have said that it is up, to the process before."""
    scene = Scene(tmp_path, NEW, life=1)

    async def story() -> None:
        scene.take_over()
        await scene.second.asked.wait()
        scene.fleet.stop_replica(StopReplica(replica=1, incarnation=life, reason="enough", returns=False, cause=0))
        await settled()
        assert killed == [scene.second] and not scene.second.joined.is_set()
        assert scene.events == [ReplicaLost(replica=1, incarnation=2, returns=False, reason="enough")]
        scene.node.set()
        scene.fleet.start_replica(StartReplica(replica=1, cause=0))
        await scene.second.joined.wait()
        assert scene.fleet.started == [(1, 3)], "the process before may have begun a second life"

    play(scene, story)


def test_one_that_was_not_wanted_any_more_as_the_scheduler_s_process_ended_is_ended_by_the_next(
    tmp_path: Path, killed: list[Any]
) -> None:
    scene = Scene(tmp_path, CALLED_OFF, life=1)

    async def story() -> None:
        scene.take_over()
        await settled()
        assert killed == [scene.second] and scene.fleet.started == []
        assert [(e.replica, e.incarnation, e.returns) for e in scene.events if isinstance(e, ReplicaLost)] == [
            (1, 1, False)
        ]

    play(scene, story)


LET_GO = (
    *BEGUN, ReplicaJoined(replica=1, incarnation=1, slots=6, version=0), ReplicasWanted(replicas=1),
    ReplicaPaused(replica=1, incarnation=1, attempt=1),
)  # fmt: skip
"""There are to be fewer, and one has come to rest."""


@pytest.mark.parametrize("life", [0, 1], ids=["ended", "not ended"])
def test_one_that_was_to_be_stopped_as_the_scheduler_s_process_ended_is_said_to_be_lost(
    tmp_path: Path, life: int, killed: list[Any]
) -> None:
    """Else the order to stop it is open for ever."""
    scene = Scene(tmp_path, LET_GO, life)

    async def story() -> None:
        scene.take_over()
        await settled()
        assert any(isinstance(order, StopReplica) for order in scene.survived.orders)
        assert killed == [scene.second] * life and scene.fleet.started == []
        assert [(e.replica, e.incarnation, e.returns) for e in scene.events if isinstance(e, ReplicaLost)] == [
            (1, 1, False)
        ]

    play(scene, story)
