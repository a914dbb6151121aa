"""Replicas whose engine's process is killed in the middle of generating, once, when prefixes of a group are stored."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from engine.actors.plan import Rollout
from engine.roles import Generated, GroupWork
from engine.trajectory import TrajectoryGroup

ROUNDS = 3
"""The last of these saves of one group kills: the first of them is in the store by then, and known to be."""


class DeadlyGenerator:
    """Passes every call on. Its replica's first life ends with the engine's process."""

    def __init__(self, generator: Any, marker: Path) -> None:
        self._generator = generator
        self._marker = marker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def generate(self, work: GroupWork) -> Generated:
        save, saves = work.save, 0

        def save_and_die(group: TrajectoryGroup) -> None:
            nonlocal saves
            saves += 1
            if save is not None:
                save(group)
            if saves == ROUNDS and not self._marker.exists():
                self._marker.write_text(str(work.group))
                (engine,) = (p for p in psutil.Process().children(recursive=True) if "EngineCore" in p.name())
                os.kill(engine.pid, signal.SIGKILL)

        generated: Generated = await self._generator.generate(replace(work, save=save_and_die))
        return generated


def deadly_rollout(make: Callable[[int], Rollout], directory: Path, replica: int) -> Rollout:
    rollout = make(replica)
    if replica != 0:
        return rollout
    return Rollout(generator=DeadlyGenerator(rollout.generator, directory / "killed"), evaluator=rollout.evaluator)
