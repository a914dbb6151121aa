"""A worker that a test opens, with the stores and the plan that it is made from, and what it reports."""

import asyncio
from collections.abc import Mapping
from typing import Any, Self

from engine.events import Event
from engine.protocols import Generator
from engine.runtime.local import SimpleGenerator, SimpleTrainer
from engine.runtime.local.local_processes import LocalTrajectories, LocalWeights
from engine.runtime.prompt_sources import listed
from engine.states.limits import Limits
from engine.states.timeouts import Timeouts
from engine.storage.samples import SamplePolicy
from engine.storage.trajectories import Trajectories
from engine.trajectory import TrajectoryGroup
from engine.workers.plan import Plan, Rollout
from engine.workers.worker import Peers, Worker

AT_ONCE = Timeouts.every(1e-6)
"""Limits so short that progress is reported at once."""


def plan_of(
    generator: Generator | None = None, trainer: Any = None, limits: Mapping[str, Any] = {}, **changes: Any
) -> Plan:
    """A plan of groups of two, of which a worker keeps no samples."""
    used = generator or SimpleGenerator()
    bounds = {"train_batch_size": 2, "max_staleness_steps": 0, "max_concurrent_groups": 2, **limits}
    given: dict[str, Any] = {
        "limits": Limits(**bounds),
        "samples": 2,
        "prefix_every_tokens": 0,
        "make_rollout": lambda replica: Rollout(generator=used, evaluator=used),
        "make_trainer": lambda: trainer or SimpleTrainer(),
        "make_prompts": lambda: listed(["?"]),
        "sample_policy": SamplePolicy(per_step=0, validation=0),
        **changes,
    }
    return Plan(**given)


class Distant(LocalTrajectories):
    """A put that has begun goes on even if its caller is canceled, as in another process. It waits for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def put(self, group: TrajectoryGroup, attempt: int, *, urgent: bool = True) -> None:
        await asyncio.shield(asyncio.ensure_future(self._put(group, attempt)))

    async def _put(self, group: TrajectoryGroup, attempt: int) -> None:
        await self.gate.wait()
        await super().put(group, attempt)


class Bench:
    """A worker of any kind. `trajectories`: the store, if it is not its own."""

    def __init__(self, kind: type[Worker], plan: Plan, trajectories: Trajectories | None = None, life: int = 1) -> None:
        self.events: list[Event] = []
        self.figures: list[tuple[int, Mapping[str, Any]]] = []
        """The trainer's metrics of each step."""
        self.trajectories: Any = LocalTrajectories() if trajectories is None else trajectories
        self.weights = LocalWeights()
        self._news = asyncio.Event()
        peers = Peers(
            trajectories=self.trajectories, weights=self.weights, emit=self.take, report=self.note,
            ask_trainer=self.ask_trainer,
        )  # fmt: skip
        self.worker: Any = kind(plan, 0, life, peers)

    async def open(self) -> Self:
        await self.worker.open()
        return self

    def take(self, event: Event) -> None:
        """Take a report of the worker."""
        self.events.append(event)
        self._news.set()

    def note(self, step: int, figures: Mapping[str, Any]) -> None:
        self.figures.append((step, figures))

    async def ask_trainer(self, steps: int) -> None:
        raise AssertionError(f"nobody needs the weights after {steps} steps")

    async def news(self) -> Event:
        """The next event."""
        self._news.clear()
        await asyncio.wait_for(self._news.wait(), 60)
        return self.events[-1]

    async def until(self, count: int) -> list[Event]:
        """Wait until so many events have been reported."""
        while len(self.events) < count:
            await self.news()
        return self.events

    async def settle(self) -> None:
        """Let everything run that can run now."""
        for _ in range(20):
            await asyncio.sleep(0)
