"""A simulated world that is judged: by its books after every tick and at its end, and by every law of the engine."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.commands import ScoreBatch, TrainStep
from engine.ids import GroupId, ReplicaId
from engine.policies import PolicySet
from engine.record.frames import Tick
from engine.record.recorder import RecordWriter
from engine.runtime.local.local_processes import LocalTrajectories
from engine.simulation.world import Finding, Setting, World
from engine.states.laws import check_all
from engine.states.process import REPLICA
from engine.states.state import State
from engine.trajectory import Trajectory, TrajectoryGroup
from tests.judge.run_checks import Judge


class ObservedTrajectories(LocalTrajectories):
    """The trajectory store. It also records its contents for the judge."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: dict[GroupId, list[tuple[int, int]]] = {}
        """(tokens, version) of the longest trajectory of every group, in the order sampled."""
        self.discarded: set[GroupId] = set()

    async def put(self, group: TrajectoryGroup, attempt: int, *, urgent: bool = True) -> None:
        await super().put(group, attempt)
        longest = group.trajectories[-1] if group.trajectories else Trajectory()
        self.spans[group.group] = [(stop - start, version) for start, stop, version in longest.spans]

    async def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        await super().discard(groups, attempt)
        if attempt is None:  # the whole group, not only the leftovers of one attempt
            self.discarded |= {*groups}
            for group in groups:
                self.spans.pop(group, None)


class JudgedWorld(World):
    """Raises: `Finding`, with the seed, as soon as the run breaks a law."""

    def __init__(
        self, setting: Setting, policies: PolicySet | None = None, recorder: RecordWriter | None = None, **others: Any
    ) -> None:
        policies = policies or PolicySet.from_names({})
        store = ObservedTrajectories()
        self.judge = Judge(setting.limits, policies, store)
        super().__init__(setting, policies, recorder, store=store, **others)
        self.scheduler.state.observe(self.judge.changed)

    def _go_on(self, reached: Callable[[State], bool]) -> None:
        was_over = self._loop.is_closed()
        super()._go_on(reached)
        if not was_over and self.driver.outcome is not None:
            try:
                self.judge.close(self.scheduler.state, self.driver.outcome, self.setting.prompts)
            except Finding as finding:
                raise self._finding(str(finding)) from finding

    def _observe(self, tick: Tick) -> None:
        super()._observe(tick)
        self.judge.observe(tick.events, tick.commands)
        pools = self.scheduler.state.pools
        for command in tick.commands:
            if isinstance(command, ScoreBatch | TrainStep):
                task = command.task if isinstance(command, ScoreBatch) else "train"
                self.judge.begin_task(pools.sleepers(pools.of(task)), self._idle, command)
        check_all(self.scheduler.state)

    def _idle(self, replica: ReplicaId) -> bool:
        """Whether a replica does nothing in its pool."""
        generator = self.generators.get(replica)
        process = self.processes.newest.get((REPLICA, replica))
        if generator is None or process is None or process.dead:
            return True
        return generator.frozen or not (generator.groups or generator.measuring)
