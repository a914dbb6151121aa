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
from engine.events import ReplicaPaused, SyncFailed, WeightsInstalled, WeightsStaged
from engine.ids import Version
from engine.protocols import Generator, Sleeper
from engine.protocols.user_code import awaited
from engine.workers.measurement import Measurements
from engine.workers.worker import Worker

log = logging.getLogger(__name__)

SyncCommand = StageWeights | PauseReplica | InstallWeights | ResumeReplica


class ReplicaWeights:
    """Executes the sync orders of one replica. `running()`: tasks of the groups being generated."""

    def __init__(
        self,
        worker: Worker,
        generator: Generator,
        measuring: Measurements,
        running: Callable[[], "list[asyncio.Task[None]]"],
    ) -> None:
        self.version: Version = 0
        """The version that the generator samples from."""
        self.pause_mode: str | None = None
        """How the generator is paused; None if it is not."""
        self.last: asyncio.Task[None] | None = None
        """The task of the newest order."""
        self._worker = worker
        self._who = {"replica": worker.index, "life": worker.life}
        self._generator = generator
        self._measuring = measuring
        self._running = running
        self._asleep = False
        self._attempts: dict[type[Command], int] = {}
        """The newest attempt of each kind of order."""
        self._resumed = 0
        """The attempt of the newest resume that succeeded."""

        self._handlers: dict[type[Command], Callable[[Any], Coroutine[Any, Any, None]]] = {
            StageWeights: self._stage,
            PauseReplica: self._pause,
            InstallWeights: self._install,
            ResumeReplica: self._resume,
        }

    def carry_out(self, command: SyncCommand) -> None:
        """Execute an order after all earlier ones have ended. A repeat resumes nothing, but is answered."""
        if self._attempts.get(type(command), 0) < command.attempt:
            self._attempts[type(command)] = command.attempt
            self.last = self._worker.spawn(self._after(self.last, self._handlers[type(command)], command))
        elif isinstance(command, ResumeReplica):
            self._worker.spawn(self._after(self.last, self._repeat, command))

    async def _after(
        self,
        before: "asyncio.Task[None] | None",
        carry_out: Callable[[Any], Coroutine[Any, Any, None]],
        command: SyncCommand,
    ) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        await carry_out(command)

    async def _stage(self, command: StageWeights) -> None:
        try:
            await awaited(self._generator.stage, command.version, await self._worker.peers.weights.get(command.version))
        except Exception as error:
            self._failed(command, "staging", error)
        else:
            self._worker.peers.emit(WeightsStaged(attempt=command.attempt, version=command.version, **self._who))

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
                await self._sleep()
            except Exception as error:
                self._failed(command, "falling asleep", error)
                return
        self._worker.peers.emit(ReplicaPaused(attempt=command.attempt, **self._who))

    async def _install(self, command: InstallWeights) -> None:
        try:
            if command.version < self.version:
                raise EngineError(f"version {command.version} is older than {self.version}, which is installed")
            await self._wake()
            if command.version > self.version:
                await awaited(self._generator.install, command.version)
        except Exception as error:
            self._failed(command, "installing", error)
        else:
            self.version = command.version
            self._worker.peers.emit(WeightsInstalled(attempt=command.attempt, version=command.version, **self._who))

    async def _resume(self, command: ResumeReplica) -> None:
        self.pause_mode = None
        try:
            await self._wake()
            await awaited(self._generator.resume)
        except Exception as error:
            log.exception("replica %d cannot be resumed", self._who["replica"])
            self._worker.break_down(f"resuming failed: {reason_of(error)}")
        else:
            self._resumed = command.attempt
            self._worker.reports.done(command.number)

    async def _sleep(self) -> None:
        """Put a paused generator with no running requests to sleep. One that is not a `protocols.Sleeper` stays paused
        and keeps its memory. Raises its exception; then it counts as awake."""
        if not self._asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.sleep)
        self._asleep = True

    async def _wake(self) -> None:
        """Wake a generator, which stays paused. Raises its exception; then it counts as asleep."""
        if self._asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.wake)
        self._asleep = False

    async def _repeat(self, command: ResumeReplica) -> None:
        if self._resumed >= command.attempt:
            self._worker.reports.done(command.number)

    def _failed(self, command: StageWeights | PauseReplica | InstallWeights, doing: str, error: Exception) -> None:
        log.warning("%s version %d on replica %d failed", doing, command.version, self._who["replica"], exc_info=error)
        reason = f"{doing} failed: {reason_of(error)}"
        self._worker.peers.emit(
            SyncFailed(attempt=command.attempt, version=command.version, reason=reason, **self._who)
        )
