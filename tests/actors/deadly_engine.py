"""Replicas whose engine's process is killed in the middle of generating, once, when prefixes of a group are stored. The
others begin after that, so that it is sure to happen however late the first one is up."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from engine.actors.plan import Rollout
from engine.roles import Generated, GroupWork
from engine.trajectory import TrajectoryGroup

ROUNDS = 5
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
                tell_others = partial(self._marker.with_suffix(".told").write_text, "")
                threading.Thread(target=tell_others, daemon=True).start()

        generated: Generated = await self._generator.generate(replace(work, save=save_and_die))
        return generated


class PatientGenerator:
    """Generates nothing before the engine of the first replica is dead."""

    def __init__(self, generator: Any, marker: Path) -> None:
        self._generator = generator
        self._told = marker.with_suffix(".told")
        self._dead: asyncio.Future[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def generate(self, work: GroupWork) -> Generated:
        if self._dead is None:  # a read of a pipe ends when somebody has written
            self._dead = asyncio.ensure_future(asyncio.to_thread(self._told.read_text))
        await asyncio.shield(self._dead)
        generated: Generated = await self._generator.generate(work)
        return generated


def deadly_rollout(make: Callable[[int], Rollout], directory: Path, replica: int) -> Rollout:
    """`directory / "killed.told"` is a named pipe."""
    rollout = make(replica)
    kind = DeadlyGenerator if replica == 0 else PatientGenerator
    return Rollout(generator=kind(rollout.generator, directory / "killed"), evaluator=rollout.evaluator)
