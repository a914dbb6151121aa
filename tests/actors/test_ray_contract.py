"""The contract of the process port, kept by Ray's actors. All cases share a cluster, its stores and a stage."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

sys.path.append(str(Path(__file__).resolve().parent.parent / "runtime"))
from process_contract import CASES, Scene, contract_plan, play_case
from test_ray_runs import wait_for_no_actors

from engine.actors.detached_actors import PackedPlan
from engine.actors.ray_processes import RayProcesses
from engine.actors.store_actors import TrajectoryStoreActor, WeightsStoreActor
from engine.actors.transports import transport_of
from engine.record.codec import unpack_events

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]


class RayScene(Scene):
    stacks = "; its stacks are in {file}"
    death = "TrainerActor (process "

    def silence(self, kind: str) -> None:
        os.kill(self.noted(kind)[1][-1], signal.SIGSTOP)

    def kill(self, kind: str) -> None:
        os.kill(self.noted(kind)[1][-1], signal.SIGKILL)

    async def has_ended(self, kind: str, *, but: int = 0) -> bool:
        pids = self.noted(kind)[1]
        ending = [psutil.Process(pid) for pid in pids[: len(pids) - but] if psutil.pid_exists(pid)]
        return (await asyncio.to_thread(psutil.wait_procs, ending, 60.0))[1] == []


class Stage:
    """Stands where the scheduler's actor does: the supervisor is in its process, and workers report to it."""

    def __init__(self, directory: Path) -> None:
        self._me = ray.get_runtime_context().current_actor
        plan = contract_plan(directory)
        packed = PackedPlan.of(plan)
        trajectories = ray.remote(TrajectoryStoreActor).options(num_cpus=0).remote(packed, self._me)
        weights = ray.remote(WeightsStoreActor).options(num_cpus=0).remote(packed, self._me, transport_of(plan))
        self._kept = (trajectories, weights)
        self._scene: Any = None

    async def play(self, name: str, directory: Path) -> None:
        plan = contract_plan(directory)
        self._scene = RayScene(plan, RayProcesses(plan, PackedPlan.of(plan), self._me, *self._kept))
        await play_case(self._scene, name)

    async def report(self, batch: Any) -> list[Any]:
        for event in unpack_events(batch[3]):
            self._scene.deliver(event)
        return []

    async def hand_over(self, steps: int) -> None:
        await self._scene.supervisor.hand_over(steps)

    async def here(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def stage(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}
    options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # to import this file
    made = ray.remote(Stage).options(**options).remote(tmp_path_factory.mktemp("stage"))
    yield made
    ray.kill(made)
    wait_for_no_actors()


@pytest.mark.parametrize("name", CASES)
def test_actors_keep_the_contract(stage: Any, tmp_path: Path, name: str) -> None:
    ray.get(stage.play.remote(name, tmp_path))
