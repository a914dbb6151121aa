"""Replicas that come and go in a run in one process, as its scheduler orders."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from test_local_runs import Counting, Steady, events_of, run

from engine.events import ReplicaJoined, ReplicaLost, ReplicasWanted
from engine.local.executor import LocalExecutor
from engine.roles import GroupWork
from engine.schedule import read, replay
from engine.trajectory import Trajectory

PROMPTS = 120


class Wanting(Steady):
    """Asks for other numbers of replicas after so many groups, over all of its kind."""

    def __init__(self, executors: list[LocalExecutor], wanted: dict[int, int], seen: list[int]) -> None:
        super().__init__()
        self._executors = executors
        self._wanted = wanted
        self._seen = seen

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        self._seen.append(work.group)
        if (replicas := self._wanted.get(len(self._seen))) is not None:
            self._executors[0].deliver(ReplicasWanted(replicas=replicas))
        return await super().sample(work, weights, version)


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[LocalExecutor]:
    """Those that runs of the test make, as they are made."""
    made: list[LocalExecutor] = []

    class Noted(LocalExecutor):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(sys.modules["engine.local.run"], "LocalExecutor", Noted)
    return made


def test_replicas_are_started_let_go_and_started_again(executors: list[LocalExecutor]) -> None:
    trainer, seen = Counting(), list[int]()
    wanted = {8: 3, 40: 1, 80: 2}
    result = run(
        generators=lambda replica: Wanting(executors, wanted, seen),
        replicas=2,
        trainer=trainer,
        prompts=[f"question {n}" for n in range(PROMPTS)],
    )
    assert sorted(trainer.groups) == list(range(PROMPTS)), "each prompt once"
    joined = [(event.replica, event.incarnation) for event in events_of(result, ReplicaJoined)]
    assert joined == [(0, 1), (1, 1), (2, 1), (1, 2)]
    lost = {(event.replica, event.returns) for event in events_of(result, ReplicaLost)}
    assert lost == {(1, False), (2, False)}
    assert replay(read(result.record)).identical


def test_a_run_that_was_given_its_generators_cannot_have_more_and_goes_on(executors: list[LocalExecutor]) -> None:
    trainer, seen = Counting(), list[int]()
    generators = [Wanting(executors, {8: 3}, seen) for _ in range(2)]
    result = run(generators=generators, trainer=trainer)
    assert sorted(trainer.groups) == list(range(30))
    (lost,) = events_of(result, ReplicaLost)
    assert (lost.replica, lost.incarnation, lost.returns) == (2, 0, False)
    assert "can make no other" in lost.reason
