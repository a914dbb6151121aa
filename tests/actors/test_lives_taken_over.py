"""A life of a replica that an earlier process of the scheduler began, and that ends before it says that it is up."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray_plans import plan

from engine.actors.fleet import Fleet
from engine.actors.lasting import Living
from engine.actors.process import PackedPlan
from engine.commands import StartReplica
from engine.events import Event, ReplicaLost
from engine.states.orders import OrderBook

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(120)]

ENDED, BEGUN = 1, 2
"""The life that the record shows as over, and the one that follows it."""


@ray.remote(num_cpus=0)
class Dying:
    async def bring_up(self) -> None:
        raise RuntimeError("no memory")


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_loss_of_a_life_that_may_have_joined_is_told_of_that_life(tmp_path: Path, restarts: int) -> None:
    made = replace(plan(tmp_path, replicas=1), replica_restarts=restarts)
    living = Living(actors={("trainer", 1): None, ("rollout-0", BEGUN): Dying.remote()}, first=1)

    async def story() -> Event:
        told: asyncio.Queue[Event] = asyncio.Queue()
        replicas = {0: (ENDED, False, True)}
        given = (PackedPlan.of(made), None, None, None)
        fleet = Fleet(made, given, told.put_nowait, pytest.fail, OrderBook(), lived={0: ENDED}, living=living)
        fleet.take_up(replicas)
        fleet.start_replica(StartReplica(replica=0, cause=0))
        try:
            return await told.get()
        finally:
            await fleet.close()

    lost = asyncio.run(story())
    assert isinstance(lost, ReplicaLost)
    assert (lost.incarnation, lost.returns) == (BEGUN, bool(restarts))
    assert "could not be started again" in lost.reason and "no memory" in lost.reason
