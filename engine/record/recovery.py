"""From the record of a run that ended before its time to the event with which it continues.

    recovered = recover(read(directory))
    event = recovered.resumed(steps=20, replicas=4)    # steps: those of a complete checkpoint

Called by whoever resumes a run, and by the tests. What follows the newest snapshot that can be used is replayed, or
the whole record where there is none, and must hold to the bit: a scheduler that would have decided otherwise cannot go
on in its place. Of what lies before the snapshot the checksums are checked: a damaged record is not gone on with.
"""

from collections.abc import Callable

from engine.commands import Command
from engine.errors import RecordError
from engine.events import RunInterrupted, RunResumed, stamp
from engine.ids import GroupId, StepId
from engine.policies import PolicySet
from engine.record.frames import Handled, Header
from engine.record.log import Torn
from engine.record.msgpack_values import CodecError
from engine.record.reader import Place, Record
from engine.record.replayer import ReplayReport, replay
from engine.record.snapshots import Books, restore
from engine.scheduling.scheduler import Scheduler
from engine.states.checkpoints import Batch, Checkpoints
from engine.states.limits import Limits
from engine.states.state import Observer, State


class Recovered:
    """A scheduler as it was at the last event of a record, and what had ended after how many train steps."""

    def __init__(
        self,
        record: Record,
        observe: Observer | None = None,
        books: Books | None = None,
        replayed: Callable[[Handled, State], None] | None = None,
    ) -> None:
        """`observe` is what the scheduler will have for good; `books`, of the same observer, are what it had counted at
        the snapshot. `replayed` sees the frames behind that in order, and the state after each.
        Raises: `RecordError`."""
        self._record = record
        self._replayed_for = replayed
        self.passed_over: list[RecordError] = []
        """Why newer snapshots than that which was begun with could not be used."""
        self.began_at: Place | None = None
        """The snapshot; None: the beginning."""
        self.at = 0.0
        """When the last event happened, in seconds since the run began."""
        record.require_index()
        self.scheduler, self.began_at = self._begin(observe, books)
        self.verified_bytes = 0 if self.began_at is None else record.verify(self.began_at)
        """Of segments whose checksums were checked, and which were not decoded."""
        self._replay(self.scheduler)
        self._history = _taken_from(self.scheduler)
        self._interruptions = 0
        """Events of `interrupt`, which follow those that were read."""

    def _begin(self, observe: Observer | None, books: Books | None) -> tuple[Scheduler, Place | None]:
        """The scheduler of the newest snapshot that can be used, or that of the header."""
        for place in self._record.snapshots():
            found = self._record.snapshot(place)
            try:
                return restore(found.plain, observe, books), place
            except CodecError as error:
                self.passed_over.append(found.error(str(error)))
        return _first_scheduler(self._record, observe), None

    def _replay(self, scheduler: Scheduler) -> None:
        self.at = scheduler.state.now
        report = replay(
            self._record, build=lambda _: scheduler, watch=self._watch, after=self.began_at, compare_snapshots=False
        )
        if report.divergence is not None:
            reason = f"this engine decides differently, so the run cannot continue; {report.divergence}"
            raise RecordError(self._record.name, 0, reason)
        self.report: ReplayReport = report

    @property
    def header(self) -> Header:
        return self._record.header

    @property
    def events(self) -> int:
        """All that the record has."""
        return self.report.events + self._interruptions + (self.began_at.position if self.began_at else 0)

    @property
    def torn(self) -> Torn | None:
        """What a crash left behind the last whole frame."""
        return None if self._interruptions else self.report.torn

    def interrupt(self, event: RunInterrupted) -> tuple[Command, ...]:
        """Ask the scheduler whether the run begins again. Returns its answer, which the caller must record with the
        event. A run that has ended for good, or begins again already, gives none: then nothing is recorded."""
        stamp(event, self.events, self.at)
        answer = self.scheduler.handle(event)
        self._interruptions += bool(answer)
        return answer

    def kept(self, *, replicas: int, missing: tuple[GroupId, ...] = (), checkpoint: StepId = 0) -> RunResumed:
        """The event that continues from where the record ends: the trainer is there again, from the checkpoint after so
        many steps, and so are the trajectories but for those of the groups that are `missing`."""
        return RunResumed(
            steps=self.scheduler.state.steps_trained, replicas=replicas, consumed=(), released=(), kept=True,
            missing=missing, checkpoint=checkpoint,
        )  # fmt: skip

    def resumed(self, *, steps: int, replicas: int) -> RunResumed:
        """The event that continues from the weights after `steps` train steps: what ended since then has not."""
        consumed, released = self._since(steps).since(steps)
        return RunResumed(
            steps=steps, replicas=replicas, consumed=tuple(sorted(consumed)), released=tuple(sorted(released))
        )

    def batches(self, steps: int) -> list[Batch]:
        """What was trained after so many train steps, in order, in the line of weights that the record ends with."""
        return self._since(steps).batches(steps) if steps < self.scheduler.state.steps_trained else []

    def _since(self, steps: int) -> Checkpoints:
        """What has ended, from so many train steps on; where no snapshot says it, the whole record does."""
        if steps < self._history.floor:
            scheduler = _first_scheduler(self._record, None)
            replay(self._record, build=lambda _: scheduler, compare_snapshots=False)
            self._history = _taken_from(scheduler)
        return self._history

    def _watch(self, frame: Handled) -> None:
        self.at = frame.event.at
        if self._replayed_for is not None:
            self._replayed_for(frame, self.scheduler.state)


def _first_scheduler(record: Record, observe: Observer | None) -> Scheduler:
    """The scheduler of a record's header; it keeps whatever ends. Raises: as the header's faults come."""
    header = record.header
    scheduler = Scheduler(Limits.from_plain(dict(header.limits)), PolicySet.from_names(header.policies), observe)
    scheduler.state.checkpoints.keep_all()
    return scheduler


def _taken_from(scheduler: Scheduler) -> Checkpoints:
    """What has ended, as far as the scheduler knows; from now on it keeps no more of it than a run needs."""
    return scheduler.state.checkpoints.hand_over(bool(scheduler.limits.checkpoint_every))


def recover(
    record: Record,
    observe: Observer | None = None,
    books: Books | None = None,
    replayed: Callable[[Handled, State], None] | None = None,
) -> Recovered:
    """Bring a record back to its end. Raises: `RecordError`, also where it does not replay to the bit."""
    return Recovered(record, observe, books, replayed)
