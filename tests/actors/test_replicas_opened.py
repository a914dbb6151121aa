"""Replicas of a run that begins before all of them are up, without Ray: one that fails by then, or later."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fleets import FleetOfHandles, nothing, settled
from ray.exceptions import RayError
from ray_plans import plan

from engine.actors.lasting import Living
from engine.events import Event, ReplicaLost
from engine.ids import Incarnation, ReplicaId

ROOM, LATE = 2, 2
"""Replicas that the cluster has room for when the run begins; the one that comes after them."""


class Replica:
    """A handle: up when `opens` is set, or then known to have failed. Whoever asks again is told the same."""

    def __init__(self, opens: asyncio.Event, joined: Callable[[], None], fails: str = "") -> None:
        self.opens = opens
        self.fails = fails
        self.bring_up = SimpleNamespace(remote=self._bring_up)
        self.join = SimpleNamespace(remote=joined)
        self.alive = SimpleNamespace(remote=asyncio.Event().wait)
        self.close = SimpleNamespace(remote=nothing)

    async def _bring_up(self) -> None:
        await self.opens.wait()
        if self.fails:
            raise RayError(self.fails)


class Opening:
    """A fleet of three replicas in which the last one's first life fails: while the run waits for its trainer
    (`early`), or when it has begun. `restarts`: of each."""

    def __init__(self, run_dir: Path, restarts: int, early: bool) -> None:
        made = replace(plan(run_dir, replicas=3), rollout_gpus=1.0, replica_restarts=restarts, heartbeat_s=0.0)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.joined: asyncio.Queue[tuple[ReplicaId, Incarnation]] = asyncio.Queue()
        self.up, self.failed = asyncio.Event(), asyncio.Event()
        self.up.set()
        self.early = early
        alive = SimpleNamespace(remote=asyncio.Event().wait)
        trainer = SimpleNamespace(bring_up=SimpleNamespace(remote=self._bring_up_trainer), alive=alive)
        living = Living(actors={("trainer", 1): trainer}, first=1)
        self.fleet = FleetOfHandles(made, self.events.put_nowait, living, self._make)

    async def _bring_up_trainer(self, restore: Any) -> dict[int, int]:
        if self.early:
            await settled()
            self.failed.set()
            await settled()
        return {}

    def _make(self, replica: ReplicaId, life: Incarnation) -> Replica:
        fails = (replica, life) == (LATE, 1)
        return Replica(
            self.failed if fails else self.up,
            lambda: self.joined.put_nowait((replica, life)),
            "the model's files are not here" if fails else "",
        )


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": float(ROOM)}}])
    monkeypatch.setattr(ray, "kill", lambda actor: None)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("early", [True, False], ids=["before the run begins", "after it began"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_replica_that_fails_after_enough_are_up_is_started_again(tmp_path: Path, restarts: int, early: bool) -> None:
    complaints: list[dict[str, Any]] = []

    async def story() -> tuple[list[tuple[ReplicaId, Incarnation]], list[Event]]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        scene = Opening(tmp_path, restarts, early)
        await scene.fleet.open()
        scene.failed.set()
        scene.fleet.join()
        joined = [await scene.joined.get() for _ in range(ROOM + restarts)]
        lost = [] if restarts else [await scene.events.get()]
        await scene.fleet.close()
        return joined, lost

    joined, lost = asyncio.run(asyncio.wait_for(story(), 60.0))
    assert joined == [(0, 1), (1, 1), *([(LATE, 2)] * restarts)]
    for event in lost:
        assert isinstance(event, ReplicaLost) and (event.replica, event.incarnation, event.returns) == (LATE, 1, False)
        assert "the model's files are not here" in event.reason
    gc.collect()
    assert complaints == [], "asyncio says of no failure that nobody heard of it"
