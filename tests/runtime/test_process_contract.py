"""The contract of the process port, kept in one process and on a virtual clock."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from process_contract import CASES, Scene, contract_plan, play_case

from engine.runtime.local.local_processes import LocalProcesses, LocalTrajectories, LocalWeights
from engine.simulation.run_settings import Setting
from engine.simulation.simulated_models import Dice
from engine.simulation.virtual_processes import VirtualProcesses
from engine.workers.clock import VirtualLoop


class LocalScene(Scene):
    stop_waits_for_load = True
    may_die = False
    may_be_silent = False

    def __init__(self, directory: Path) -> None:
        plan, stores = contract_plan(directory), (LocalTrajectories(), LocalWeights())
        super().__init__(plan, LocalProcesses(plan, *stores, self.deliver, lambda *_: None, lambda replica: True))


class VirtualScene(Scene):
    """The user's code runs on the virtual loop, which it must not block. Each start takes 10 s."""

    def __init__(self, directory: Path) -> None:
        plan, stores = contract_plan(directory), (LocalTrajectories(), LocalWeights())
        dice = Dice(Setting(limits=plan.limits))
        super().__init__(plan, VirtualProcesses(plan, *stores, dice, self.deliver, lambda *_: None, lambda: True))

    async def hold(self, act: Callable[[], object]) -> Callable[[], None]:
        act()
        await asyncio.sleep(1.0)
        return lambda: None

    async def hang(self) -> Callable[[], None]:
        self.silence("trainer")
        return lambda: None

    def silence(self, kind: str) -> None:
        self.processes.newest[kind, 0].hung = True

    def kill(self, kind: str) -> None:
        self.processes.newest[kind, 0].die()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("scene", "loop"), [(LocalScene, None), (VirtualScene, VirtualLoop)], ids=["local", "virtual"])
def test_processes_keep_the_contract(
    tmp_path: Path, scene: Callable[[Path], Scene], loop: type[VirtualLoop] | None, name: str
) -> None:
    async def play() -> None:
        await play_case(scene(tmp_path), name)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(play())
