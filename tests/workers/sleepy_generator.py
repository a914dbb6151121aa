"""A generator that sleeps, for runs whose replicas and trainer share a pool, and what the record must say of them."""

from typing import Any

from token_generator import TokenGenerator

from engine.commands import PauseReplica, ResumeReplica
from engine.events import StepTrained, SyncFailed
from engine.protocols import Generated, GroupWork
from engine.record import read


class Sleepy(TokenGenerator):
    """Refuses to sample while it sleeps."""

    asleep = False
    naps = 0

    async def sleep(self) -> None:
        assert not self._running, "groups run"
        self.asleep = True
        self.naps += 1

    async def wake(self) -> None:
        self.asleep = False

    async def resume(self) -> None:
        assert not self.asleep, "resumed asleep"
        await super().resume()

    async def install(self, version: int) -> None:
        assert not self.asleep, "installed asleep"
        await super().install(version)

    async def generate(self, work: GroupWork) -> Generated:
        assert not self.asleep, "asked to generate while asleep"
        return await super().generate(work)


def check_asleep_at_each_step(record: Any, steps: int) -> None:
    """From the record: whoever was sent to sleep, and not resumed since, as each step was trained."""
    asleep: set[int] = set()
    trained = 0
    for tick in read(record).ticks():
        for event in tick.events:
            assert not isinstance(event, SyncFailed), event.reason
            if isinstance(event, StepTrained):
                assert asleep == {0, 1}, f"step {event.step} was trained while somebody was awake"
                trained += 1
        for command in tick.commands:
            if isinstance(command, PauseReplica) and command.mode == "sleep":
                asleep.add(command.replica)
            if isinstance(command, ResumeReplica):
                asleep.discard(command.replica)
    assert trained == steps
