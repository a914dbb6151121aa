"""Replicas that come and go in a run in one process, as its scheduler orders."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from test_local_runs import Counting, Steady, events_of, run

from engine.commands import Command, StartProcess, StopProcess
from engine.events import ProcessLost, ProcessUp, ReplicasWanted
from engine.protocols import GroupWork
from engine.record import read, replay
from engine.runtime.run_parts import RunParts
from engine.trajectory import Trajectory

PROMPTS = 120


class Wanting(Steady):
    """Asks for other numbers of replicas after so many groups, over all of its kind."""

    def __init__(self, runs: list[RunParts], wanted: dict[int, int], seen: list[int]) -> None:
        super().__init__()
        self._runs = runs
        self._wanted = wanted
        self._seen = seen

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        self._seen.append(work.group)
        if (replicas := self._wanted.get(len(self._seen))) is not None:
            self._runs[0].driver.deliver(ReplicasWanted(replicas=replicas))
        return await super().sample(work, weights, version)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RunParts]:
    """Those that runs of the test make, as they are made. They get each order about a life twice."""
    made: list[RunParts] = []

    class Noted(RunParts):
        def connect(self, *given: Any) -> None:
            super().connect(*given)
            made.append(self)
            execute = self.executor.execute

            def twice(commands: Sequence[Command]) -> None:
                execute([*commands, *(one for one in commands if isinstance(one, StartProcess | StopProcess))])

            monkeypatch.setattr(self.executor, "execute", twice)

    monkeypatch.setattr(sys.modules["engine.runtime.local.run"], "RunParts", Noted)
    return made


def test_replicas_are_started_let_go_and_started_again(runs: list[RunParts]) -> None:
    trainer, seen, made = Counting(), list[int](), list[int]()

    def make(replica: int) -> Wanting:
        made.append(replica)
        return Wanting(runs, wanted, seen)

    wanted = {8: 3, 40: 1, 80: 2}
    result = run(
        generators=make,
        replicas=2,
        trainer=trainer,
        prompts=[f"question {n}" for n in range(PROMPTS)],
    )
    assert sorted(trainer.groups) == list(range(PROMPTS)), "each prompt once"
    joined = [(event.index, event.life) for event in events_of(result, ProcessUp)]
    assert joined == [(0, 1), (1, 1), (2, 1), (1, 2)]
    assert sorted(made) == sorted(replica for replica, _ in joined), "one generator for each life"
    lost = [(event.index, event.life, event.final) for event in events_of(result, ProcessLost)]
    assert sorted(lost) == [(1, 1, False), (2, 1, False)]
    assert replay(read(result.record)).identical


def test_a_run_that_was_given_its_generators_cannot_have_more_and_goes_on(runs: list[RunParts]) -> None:
    trainer, seen = Counting(), list[int]()
    generators = [Wanting(runs, {8: 3}, seen) for _ in range(2)]
    result = run(generators=generators, trainer=trainer)
    assert sorted(trainer.groups) == list(range(30))
    (lost,) = events_of(result, ProcessLost)
    assert (lost.index, lost.life, lost.final) == (2, 1, True)
    assert "no generator is left" in lost.reason


class Closing(Wanting):
    async def close(self) -> None:
        await asyncio.Event().wait()


def test_a_replica_that_never_closes_is_lost_and_the_run_ends(
    runs: list[RunParts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["engine.runtime.local.local_processes"], "CLOSE_S", 0.0)
    trainer, seen = Counting(), list[int]()
    result = run(generators=[Closing(runs, {8: 1}, seen) for _ in range(2)], trainer=trainer)
    (lost,) = events_of(result, ProcessLost)
    assert (lost.index, lost.life) == (1, 1)
    assert (result.outcome, sorted(trainer.groups)) == ("finished", list(range(30)))
