"""From the record of a run that ended before its time to the event with which it continues.

    recovered = recover(read(directory))
    event = recovered.resume_from_checkpoint(steps=20, replicas=4)    # steps: those of a complete checkpoint

Called to resume a run, and by tests. It replays the events after the newest usable snapshot, or the whole record if
there is none. Every answer must be identical: a scheduler that decides differently cannot continue the run. Before the
snapshot it only checks checksums. It refuses a damaged record.
"""

from collections.abc import Callable

from engine.commands import Command
from engine.errors import RecordError
from engine.events import RunInterrupted, RunResumed, stamp
from engine.ids import GroupId, StepId
from engine.record.codec import CodecError
from engine.record.frames import Header, Tick
from engine.record.reader import Place, Record
from engine.record.recorder import RecordEnd
from engine.record.replayer import ReplayReport, build_from_header, build_scheduler, replay
from engine.record.segment_log import Torn
from engine.record.snapshots import restore
from engine.scheduling.scheduler import Scheduler
from engine.states.checkpoints import Checkpoints, TrainedBatch
from engine.states.laws import check_all
from engine.states.machine import Observer
from engine.states.state import State


class Recovered:
    """The scheduler's state after the last event of a record, and which groups had ended after how many train steps."""

    def __init__(
        self,
        record: Record,
        observe: Observer | None = None,
    ) -> None:
        """`observe`: called after each replayed change of a record that is not a group. Raises: `RecordError`."""
        self._record = record
        self.passed_over: list[RecordError] = []
        """Why newer snapshots than the one used could not be used."""
        record.require_index()
        self.scheduler, begin = self._begin()
        self.scheduler.state.observe(observe, groups=False)
        self.began_at = begin
        """The snapshot that the replay began at; None: the first event."""
        if begin is not None:
            record.verify(begin)
        self.at = self.scheduler.state.facts.now
        """Time of the last event, in seconds since the run began."""
        self.report: ReplayReport = replay(
            record, build=lambda _: self.scheduler, watch=self._watch, after=begin, compare_snapshots=False
        )
        self._require_identical(self.report)
        check_all(self.scheduler.state)
        self.ticks = self.report.ticks + (begin.ticks if begin else 0)
        self.events = self.report.events + (begin.position if begin else 0)
        self.torn: Torn | None = self.report.torn
        """The incomplete bytes that a crash left after the last whole frame, until something is recorded."""
        self._history = _taken_from(self.scheduler)

    def _begin(self) -> tuple[Scheduler, Place | None]:
        """The scheduler of the newest usable snapshot, or else of the header."""
        for place in self._record.snapshots():
            try:
                return restore(self._record.snapshot(place).plain), place
            except CodecError as error:
                self.passed_over.append(self._record.error_at(place, str(error)))
        return _first_scheduler(self._record), None

    @property
    def header(self) -> Header:
        return self._record.header

    @property
    def end(self) -> RecordEnd:
        """Where the record continues."""
        return RecordEnd(ticks=self.ticks, events=self.events, torn=self.torn)

    def replay_all(self, watch: Callable[[Tick, State], None]) -> None:
        """Replay the whole record: `watch` gets every tick, from the first one, with the state after it. Raises:
        `RecordError`."""
        scheduler = build_from_header(self._record, build_scheduler)
        self._require_identical(
            replay(
                self._record, self.events - 1, lambda _: scheduler, lambda tick: watch(tick, scheduler.state),
                compare_snapshots=False,
            )
        )  # fmt: skip

    def interrupt(self, event: RunInterrupted) -> tuple[Command, ...]:
        """Ask the scheduler whether the run begins again. Returns its commands, which the caller must record with the
        event. It returns none, and nothing is recorded, if the run has finished or already begins again."""
        stamp(event, self.events, self.at)
        answer = self.scheduler.tick((event,))
        if answer:
            self.ticks, self.events, self.torn = self.ticks + 1, self.events + 1, None
        return answer

    def resume_without_loss(
        self, *, replicas: int, missing: tuple[GroupId, ...] = (), checkpoint: StepId = 0
    ) -> RunResumed:
        """The event that continues from where the record ends: the trainer is there again, from the checkpoint after so
        many steps, and so are the trajectories but for those of the groups that are `missing`."""
        return RunResumed(
            steps=self.scheduler.state.training.steps_trained, replicas=replicas, consumed=(), released=(), kept=True,
            missing=missing, checkpoint=checkpoint,
        )  # fmt: skip

    def resume_from_checkpoint(self, *, steps: int, replicas: int) -> RunResumed:
        """The event that continues from the weights after `steps` train steps: what ended since then has not."""
        consumed, released = self._since(steps).since(steps)
        return RunResumed(
            steps=steps, replicas=replicas, consumed=tuple(sorted(consumed)), released=tuple(sorted(released))
        )

    def batches(self, steps: int) -> list[TrainedBatch]:
        """The batches trained after the first `steps` train steps, in order, in the newest weights lineage."""
        return self._since(steps).batches(steps) if steps < self.scheduler.state.training.steps_trained else []

    def _since(self, steps: int) -> Checkpoints:
        """Which groups ended after `steps` train steps. Replays the whole record if the snapshot does not say."""
        if steps < self._history.floor:
            scheduler = _first_scheduler(self._record)
            replay(self._record, build=lambda _: scheduler, compare_snapshots=False)
            self._history = _taken_from(scheduler)
        return self._history

    def _require_identical(self, report: ReplayReport) -> None:
        if report.divergence is not None:
            reason = f"this engine decides differently, so the run cannot continue; {report.divergence}"
            raise RecordError(self._record.name, 0, reason)

    def _watch(self, frame: Tick) -> None:
        self.at = frame.at


def _first_scheduler(record: Record) -> Scheduler:
    """The scheduler of a record's header. It keeps the full history of ended groups. Raises: `RecordError`."""
    scheduler = build_from_header(record, build_scheduler)
    scheduler.state.checkpoints.keep_all()
    return scheduler


def _taken_from(scheduler: Scheduler) -> Checkpoints:
    """Take the history of ended groups from the scheduler, which from now on keeps only what a run needs."""
    return scheduler.state.checkpoints.hand_over(bool(scheduler.limits.checkpoint_every))


recover = Recovered
"""Recovers the scheduler's state at the end of a record."""
