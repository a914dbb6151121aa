"""A run in which the caller chooses every event, of those that `order_answers` allows. Every law is checked after every
tick, and the record is kept in memory.

Used by `any_order`.
"""

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.commands import Command, FinishRun
from engine.events import DrainRequested, Event, RunStarted, SettingChanged, TimerFired
from engine.policies import PolicySet
from engine.record.codec import pack, unpack
from engine.record.frames import Header, Tick
from engine.record.reader import read
from engine.record.recorder import MemoryRecorder, Recorder
from engine.record.recovery import recover
from engine.record.replayer import replay
from engine.record.snapshots import first_difference, restore, snapshot
from engine.runtime.driver import Driver
from engine.scheduling.scheduler import Scheduler
from engine.simulation.order_answers import Answer, GivenPrompts, answers
from engine.states.laws import check_all, require
from engine.states.limits import Limits
from engine.states.state import State

NO_CONFIG: Mapping[str, Any] = MappingProxyType({})
AT_REST = "it is to rest"
PATIENCE = 5000
"""Maximum number of events until a run ends."""


class SmallRun:
    """A run with `replicas` replicas. Every `together` events are one tick, unless some need their own."""

    def __init__(
        self, limits: Limits, policies: PolicySet, source: GivenPrompts, *, replicas: int = 1, together: int = 1,
        config: Mapping[str, Any] = NO_CONFIG,
    ) -> None:  # fmt: skip
        """`config`: for the header of the record."""
        self.limits, self.source = limits, source
        self.replicas = max(replicas, limits.validators().stop)
        self.together = together
        self.stragglers: Collection[int] = ()
        """Groups that `advance` ends only if nothing else can happen."""
        self.time = 0.0
        self.past: list[Event] = []
        """Events that may arrive again."""
        self.twin: Scheduler | None = None
        """Restored from a snapshot of the scheduler. It must decide as the scheduler does."""
        self.failure: Exception | None = None
        """What failed first. Nothing else of the run counts then."""
        self._arriving: list[Answer] = []
        self.scheduler = Scheduler(limits, policies)
        self.header = Header(
            run="simulated", limits=limits.to_plain(), policies=dict(policies.names), config={**config}
        )
        self.recorder = MemoryRecorder(self.header)
        self.driver = Driver(self.scheduler, self, self.recorder, self, self._observe)
        self.deliver(RunStarted(replicas=self.replicas))

    @property
    def state(self) -> State:
        return self.scheduler.state

    def now(self) -> float:
        return self.time

    def execute(self, commands: Sequence[Command]) -> None:
        """Do nothing: an order is answered once the caller chooses so."""

    def _observe(self, tick: Tick) -> None:
        check_all(self.state)
        if self.twin is not None:
            same = self.twin.tick(tick.events) == tick.commands
            require(same, "law 8: a restored scheduler decides differently", events=tick.events)
            self._require_same_state(self.twin)

    def _require_same_state(self, other: Scheduler) -> None:
        differs = first_difference(self.scheduler, _plain(other))
        require(not differs, "law 8: a restored scheduler has another state", differs=differs)

    # what can happen

    def possible(self, *, faults: bool = False) -> list[Answer]:
        """What may come next, without faults or only faults."""
        arriving = {answer.order for answer in self._arriving}
        return [
            answer for answer in answers(self.state, self.source)
            if answer.fault == faults and (answer.order < 0 or answer.order not in arriving)
        ]  # fmt: skip

    def take(self, answer: Answer) -> None:
        """This comes next."""
        if isinstance(answer.event, TimerFired):
            order: Any = self.state.orders.by_number[answer.order]
            self.time = max(self.time, order.at + order.command.delay_s)
        self._arriving.append(answer)
        if len(self._arriving) >= self.together:
            self.arrive()

    def arrive(self) -> bool:
        """Whatever is on its way arrives. False where that is nothing."""
        arriving, self._arriving = self._arriving, []
        self.deliver(*(answer.event for answer in arriving))
        return bool(arriving)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Context manager: note the first failure."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise

    def deliver(self, *events: Event) -> None:
        self.time += 1.0
        self.past += [copy(event) for event in events if not isinstance(event, SettingChanged)]
        with self._noting():
            self.driver.deliver(*events)

    def restore_twin(self) -> None:
        """From now on, a scheduler that was restored from a snapshot handles every tick, too."""
        self.arrive()
        with self._noting():
            self.twin = restore(_plain(self.scheduler))
            self._require_same_state(self.twin)

    def crash(self, *, kept: bool) -> None:
        """Every process ends, and the run is resumed from its record. `kept`: the trajectory store is left as well."""
        self.twin = None
        self._arriving.clear()
        with self._noting():
            recovered = recover(read(self.recorder))
        self.scheduler = recovered.scheduler
        self.driver = Driver(self.scheduler, self, self.recorder, self, self._observe, recovered.events)
        steps = max(self.state.checkpoints.steps, default=0)
        if kept:
            self.deliver(recovered.resume_without_loss(replicas=self.replicas))
        else:
            self.deliver(recovered.resume_from_checkpoint(steps=steps, replicas=self.replicas))
        self.past.clear()  # no process is left that could repeat anything

    def drain(self) -> None:
        self.deliver(DrainRequested(reason=AT_REST))

    # the end

    def advance(self) -> None:
        """The oldest thing happens that can. Raises: `InvariantViolated` if that is nothing."""
        found = self.possible()
        timers = [answer for answer in found if isinstance(answer.event, TimerFired)]
        late = [answer for answer in found if answer.straggler in self.stragglers]
        others = [answer for answer in found if answer not in timers and answer not in late]
        for answer in (*others, *late):
            self.take(answer)
            return
        if self.arrive():
            return
        if not timers:
            require(False, "law 7: nothing can happen any more", groups=self.state.groups.ledger.count)
        self.take(timers[0])

    def complete(self) -> FinishRun:
        """Let everything happen that can, fairly and without faults, until the run ends; then replay its record.

        Raises: `InvariantViolated` if it does not end, or the replay differs; the failure of a run that has failed."""
        if self.failure is not None:
            raise self.failure
        for _ in range(PATIENCE):
            if self.driver.outcome is not None and self.driver.outcome.reason != AT_REST:
                break
            if self.driver.outcome is None:
                self.advance()
            else:
                self.crash(kept=True)
        else:
            require(False, "law 7: the run does not end", groups=self.state.groups.ledger.count)
        report = replay(read(self.recorder))
        require(report.divergence is None, "law 8: a replay decides differently", differs=report.divergence)
        assert self.driver.outcome is not None
        return self.driver.outcome

    def write(self) -> Path:
        """Write the record as a run that `engine debug` opens. Returns its new directory."""
        directory = Path(tempfile.mkdtemp(prefix="engine-check-"))
        recorder = Recorder(directory / "schedule", self.header)
        for frame in self.recorder.frames:
            recorder.append(frame)
        recorder.close()
        return directory


def _plain(scheduler: Scheduler) -> list[Any]:
    return [unpack(pack(part)) for part in snapshot(scheduler)]
