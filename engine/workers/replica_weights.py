"""The weight sync of one replica: stages and installs weights, and pauses and resumes the generator for it.

Used by `replica.ReplicaWorker`. It executes orders one at a time, in the order of arrival. Exactly one event answers
each order, except a resume that fails: it breaks the replica. A repeated order changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from engine.commands import Command, InstallWeights, PauseReplica, ResumeReplica, StageWeights
from engine.errors import EngineError, reason_of
from engine.events import Event, ReplicaPaused, SyncFailed, WeightsInstalled, WeightsStaged
from engine.ids import Version
from engine.protocols import Generator, Sleeper
from engine.protocols.user_code import awaited
from engine.storage.weights import Weights
from engine.workers.group_reports import DoneOrders
from engine.workers.measurement import Measurements

# -- sleep -------------------------------------------------------------------------------------------------------------


class GeneratorSleep:
    """The sleep of a generator. One that is not a `protocols.Sleeper` stays paused and keeps its memory."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.asleep = False

    async def begin(self) -> None:
        """Put a paused generator with no running requests to sleep. Raises its exception; then it counts as awake."""
        if not self.asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.sleep)
        self.asleep = True

    async def end(self) -> None:
        """Wake a generator, which stays paused. Raises its exception; then it counts as asleep."""
        if self.asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.wake)
        self.asleep = False


# -- weight sync -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

SyncCommand = StageWeights | PauseReplica | InstallWeights | ResumeReplica
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class ReplicaWeights:
    """Executes the sync orders of one replica.

    `who`: the replica and its incarnation, as events name them. `running()`: tasks of the groups being generated.
    `broken(reason)`: called if the generator cannot be resumed.
    """

    def __init__(
        self,
        *,
        who: dict[str, int],
        generator: Generator,
        weights: Weights,
        measuring: Measurements,
        running: Callable[[], "list[asyncio.Task[None]]"],
        emit: Callable[[Event], None],
        done: DoneOrders,
        broken: Callable[[str], None],
        spawn: Spawn,
    ) -> None:
        self.version: Version = 0
        """The version that the generator samples from."""
        self.pause_mode: str | None = None
        """How the generator is paused; None if it is not."""
        self.last: asyncio.Task[None] | None = None
        """The task of the newest order."""
        self._who = who
        self._generator = generator
        self._weights = weights
        self._measuring = measuring
        self._running = running
        self._emit = emit
        self._done = done
        self._broken = broken
        self._spawn = spawn
        self._sleeping = GeneratorSleep(generator)
        self._attempts: dict[type[Command], int] = {}
        """The newest attempt of each kind of order."""
        self._resumed = 0
        """The attempt of the newest resume that succeeded."""

    def stage(self, command: StageWeights) -> None:
        self._in_order(command, self._stage)

    def pause(self, command: PauseReplica) -> None:
        self._in_order(command, self._pause)

    def install(self, command: InstallWeights) -> None:
        self._in_order(command, self._install)

    def resume(self, command: ResumeReplica) -> None:
        """A repeat resumes nothing. It is answered once the original order has been executed."""
        if not self._in_order(command, self._resume):
            self._spawn(self._repeat(command, self.last))

    def _in_order(self, command: SyncCommand, carry_out: Callable[[Any], Coroutine[Any, Any, None]]) -> bool:
        """Execute an order after all earlier ones have ended. False: it is a repeat and changes nothing."""
        if self._attempts.get(type(command), 0) >= command.attempt:
            return False
        self._attempts[type(command)] = command.attempt
        before = self.last

        async def turn() -> None:
            if before is not None and not before.done():
                await asyncio.wait([before])
            await carry_out(command)

        self.last = self._spawn(turn())
        return True

    async def _stage(self, command: StageWeights) -> None:
        try:
            await awaited(self._generator.stage, command.version, await self._weights.get(command.version))
        except Exception as error:
            self._failed(command, "staging", error)
        else:
            self._emit(WeightsStaged(attempt=command.attempt, version=command.version, **self._who))

    async def _pause(self, command: PauseReplica) -> None:
        self.pause_mode = command.mode
        await self._measuring.wait_for_stopped()
        sleeps = command.mode == "sleep"
        try:
            await awaited(self._generator.pause, "abort" if sleeps else command.mode)
        except Exception as error:
            self._failed(command, "pausing", error)
            return
        if command.mode != "keep":
            running = self._running()
            if running:
                await asyncio.wait(running)
        if sleeps:
            try:
                await self._sleeping.begin()
            except Exception as error:
                self._failed(command, "falling asleep", error)
                return
        self._emit(ReplicaPaused(attempt=command.attempt, **self._who))

    async def _install(self, command: InstallWeights) -> None:
        try:
            if command.version < self.version:
                raise EngineError(f"version {command.version} is older than {self.version}, which is installed")
            await self._sleeping.end()
            if command.version > self.version:
                await awaited(self._generator.install, command.version)
        except Exception as error:
            self._failed(command, "installing", error)
        else:
            self.version = command.version
            self._emit(WeightsInstalled(attempt=command.attempt, version=command.version, **self._who))

    async def _resume(self, command: ResumeReplica) -> None:
        self.pause_mode = None
        try:
            await self._sleeping.end()
            await awaited(self._generator.resume)
        except Exception as error:
            log.exception("replica %d cannot be resumed", self._who["replica"])
            self._broken(f"resuming failed: {reason_of(error)}")
        else:
            self._resumed = command.attempt
            self._done.add(command.number)

    async def _repeat(self, command: ResumeReplica, last: "asyncio.Task[None] | None") -> None:
        if last is not None and not last.done():
            await asyncio.wait([last])
        if self._resumed >= command.attempt:
            self._done.add(command.number)

    def _failed(self, command: StageWeights | PauseReplica | InstallWeights, doing: str, error: Exception) -> None:
        log.warning("%s version %d on replica %d failed", doing, command.version, self._who["replica"], exc_info=error)
        reason = f"{doing} failed: {reason_of(error)}"
        self._emit(SyncFailed(attempt=command.attempt, version=command.version, reason=reason, **self._who))
