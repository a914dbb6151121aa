"""A small simulated run without chance: every duration is that of its setting, and every length is chosen by the test.

    world = steady_world(steps=4).until(lambda state: state.training.steps_trained == 2)
    read_status(world.metrics)

The engine's parts and its metrics are the real ones. The user's roles are those of `engine.simulation`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

from engine.ids import GroupId, StepId
from engine.metrics.collector import RunMetrics, TakesRows
from engine.protocols import Batch, Trainer
from engine.record.frames import Tick
from engine.record.recorder import RecordWriter
from engine.simulation.simulated_models import Dice, SimTrainer
from engine.simulation.world import Setting, World
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.states.state import State
from engine.states.timeouts import Timeouts

FOREVER = 10**6
"""Seconds, or tokens of one second each, that no test waits for."""
GROUP_TOKENS = 2
"""Tokens of a group whose two trajectories have one token each."""

_open: list["SteadyWorld"] = []


class SteadyDice(Dice):
    """Durations are not varied. Lengths are `lengths(group)`, or random."""

    def __init__(self, setting: Setting, lengths: Callable[[GroupId], int] | None = None) -> None:
        super().__init__(setting)
        self._lengths = lengths

    def vary(self, seconds: float) -> float:
        return seconds

    def length(self, group: GroupId) -> int:
        return super().length(group) if self._lengths is None else self._lengths(group)


class RisingRewards(SteadyDice):
    """Later groups have higher rewards, by 1/16 each."""

    def reward(self, group: GroupId, index: int) -> float:
        return (group + index) / 16


class ReportingTrainer(SimTrainer):
    """Reports a loss, how its time was spent, and a figure that is not finite."""

    async def train(self, batch: Batch) -> dict[str, float]:
        figures = await super().train(batch)
        return {**figures, "loss": 0.5 / (batch.step + 1), "seconds_pack": 0.1, "ess": float("nan")}


class SteadyWorld(World):
    """A world with `metrics`, whose trainer reports figures. A group's longest trajectory has `lengths(group)` tokens,
    of which each takes `token_s`; with one token, both of its trajectories end at once."""

    def __init__(
        self,
        limits: Limits,
        *,
        lengths: Callable[[GroupId], int] = lambda group: 1,
        reports: bool = True,
        journal: TakesRows | None = None,
        recorder: RecordWriter | None = None,
        snapshot_every: int = 0,
        **setting: Any,
    ) -> None:
        """`reports`: whether the trainer's reports arrive. `setting`: fields of `Setting`."""
        durations = {"latency_s": 0.0, "train_s": 0.5, "sync_s": 0.25, "state_s": 1.0, "measure_s": 0.5, "start_s": 0.0}
        sizes = {"replicas": 2, "slots": 2, "prompts": 10_000, "tick_size": 1}
        made = Setting(limits=limits, **{**durations, **sizes, **setting})
        self._reports = reports
        dice = RisingRewards(made, lengths)
        super().__init__(made, None, recorder, snapshot_every=snapshot_every, dice=dice)
        self.metrics = RunMetrics(self.scheduler, journal)
        _open.append(self)

    def until(self, reached: Callable[[State], bool]) -> Self:
        """Run until `reached(state)` holds after an event."""
        assert self.run_until(reached), "the run ended first"
        return self

    def to_the_end(self, look: Callable[[], object] = lambda: None) -> Self:
        """Run to the end, and call `look` after every event."""

        def reached(state: State) -> bool:
            look()
            return False

        self.run_until(reached)
        return self

    def _trainer(self) -> Trainer:
        return ReportingTrainer(self.dice, self._count_busy)

    def _report(self, step: StepId, metrics: Mapping[str, Any]) -> None:
        if self._reports:
            self.metrics.report(step, metrics)

    def _observe(self, tick: Tick) -> None:
        super()._observe(tick)
        self.metrics.observe(tick)


def steady_world(
    batch: int = 2,
    stale: int = 1,
    workers: int = 4,
    steps: int | None = 4,
    mode: str = "keep",
    validation: ValidationLimits | None = None,
    pools: tuple[Pool, ...] = (),
    **others: Any,
) -> SteadyWorld:
    """A small run without time limits; `others` are arguments of `SteadyWorld`."""
    limits = Limits(
        train_batch_size=batch, max_staleness_steps=stale, max_concurrent_groups=workers, max_steps=steps,
        sync_mode=mode, validation=validation, pools=pools, timeouts=Timeouts.every(None),
    )  # fmt: skip
    return SteadyWorld(limits, **others)


def close_worlds() -> None:
    """Close every world that a test left where it stopped."""
    while _open:
        _open.pop().close()
