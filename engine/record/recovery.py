"""From the record of a run that ended before its time to the event with which it continues.

    recovered = recover(read(directory))
    event = recovered.resume_from_checkpoint(steps=20, replicas=4)    # steps: those of a complete checkpoint

Called to resume a run, and by tests. It replays the events after the newest usable snapshot, or the whole record if
there is none. Every answer must be identical: a scheduler that decides differently cannot continue the run. Before the
snapshot it only checks checksums. It refuses a damaged record.
"""

from collections.abc import Callable, Iterator

from engine.commands import Command
from engine.errors import RecordError
from engine.events import RunInterrupted, RunResumed, stamp
from engine.ids import GroupId, StepId
from engine.policies import PolicySet
from engine.record.frames import Handled, Header
from engine.record.log import Torn
from engine.record.msgpack_values import CodecError
from engine.record.reader import Place, Record
from engine.record.recorder import RecordEnd
from engine.record.replayer import ReplayReport, replay
from engine.record.snapshots import Books, restore
from engine.scheduling.scheduler import Scheduler
from engine.states.checkpoints import Batch, Checkpoints
from engine.states.limits import Limits
from engine.states.state import Observer, State


class Recovered:
    """The scheduler's state after the last event of a record, and which groups had ended after how many train steps."""

    def __init__(
        self,
        record: Record,
        observe: Observer | None = None,
        books: Books | None = None,
        replayed: Callable[[Handled, State], None] | None = None,
    ) -> None:
        """`observe`: the scheduler's observer from now on. `books`: the same observer's counts, restored from the
        snapshot. `replayed`: called with each replayed frame and the state after it.
        Raises: `RecordError`."""
        self._record = record
        self._replayed_for = replayed
        self.passed_over: list[RecordError] = []
        """Why newer snapshots than the one used could not be used."""
        self.began_at: Place | None = None
        """The snapshot that the replay began at; None: the first event."""
        self.at = 0.0
        """Time of the last event, in seconds since the run began."""
        record.require_index()
        self.scheduler, self.began_at = self._begin(observe, books)
        self.verified_bytes = 0 if self.began_at is None else record.verify(self.began_at)
        """Bytes of the segments whose checksums were checked without decoding."""
        self._replay(self.scheduler)
        self._history = _taken_from(self.scheduler)
        self._interruptions = 0
        """Number of events of `interrupt`, which follow those of the record."""

    def _begin(self, observe: Observer | None, books: Books | None) -> tuple[Scheduler, Place | None]:
        """The scheduler of the newest usable snapshot, or else of the header."""
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
        """Number of events in the record."""
        return self.report.events + self._interruptions + (self.began_at.position if self.began_at else 0)

    @property
    def torn(self) -> Torn | None:
        """The incomplete bytes that a crash left after the last whole frame."""
        return None if self._interruptions else self.report.torn

    @property
    def end(self) -> RecordEnd:
        """Where the record continues."""
        return RecordEnd(events=self.events, torn=self.torn)

    def frames(self) -> Iterator[Handled]:
        """Every event of the record with its commands, from the first one. Raises: `RecordError`."""
        return (frame for frame in self._record.frames() if type(frame) is Handled and frame.event.id < self.events)

    def interrupt(self, event: RunInterrupted) -> tuple[Command, ...]:
        """Ask the scheduler whether the run begins again. Returns its commands, which the caller must record with the
        event. It returns none, and nothing is recorded, if the run has finished or already begins again."""
        stamp(event, self.events, self.at)
        answer = self.scheduler.handle(event)
        self._interruptions += bool(answer)
        return answer

    def resume_without_loss(
        self, *, replicas: int, missing: tuple[GroupId, ...] = (), checkpoint: StepId = 0
    ) -> RunResumed:
        """The event that continues from where the record ends: the trainer is there again, from the checkpoint after so
        many steps, and so are the trajectories but for those of the groups that are `missing`."""
        return RunResumed(
            steps=self.scheduler.state.steps_trained, replicas=replicas, consumed=(), released=(), kept=True,
            missing=missing, checkpoint=checkpoint,
        )  # fmt: skip

    def resume_from_checkpoint(self, *, steps: int, replicas: int) -> RunResumed:
        """The event that continues from the weights after `steps` train steps: what ended since then has not."""
        consumed, released = self._since(steps).since(steps)
        return RunResumed(
            steps=steps, replicas=replicas, consumed=tuple(sorted(consumed)), released=tuple(sorted(released))
        )

    def batches(self, steps: int) -> list[Batch]:
        """The batches trained after the first `steps` train steps, in order, in the newest weights lineage."""
        return self._since(steps).batches(steps) if steps < self.scheduler.state.steps_trained else []

    def _since(self, steps: int) -> Checkpoints:
        """Which groups ended after `steps` train steps. Replays the whole record if the snapshot does not say."""
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
    """The scheduler of a record's header. It keeps the full history of ended groups. Raises: `ConfigError`."""
    header = record.header
    scheduler = Scheduler(Limits.from_plain(dict(header.limits)), PolicySet.from_names(header.policies), observe)
    scheduler.state.checkpoints.keep_all()
    return scheduler


def _taken_from(scheduler: Scheduler) -> Checkpoints:
    """Take the history of ended groups from the scheduler, which from now on keeps only what a run needs."""
    return scheduler.state.checkpoints.hand_over(bool(scheduler.limits.checkpoint_every))


def recover(
    record: Record,
    observe: Observer | None = None,
    books: Books | None = None,
    replayed: Callable[[Handled, State], None] | None = None,
) -> Recovered:
    """Recover the scheduler's state at the end of a record. Raises: `RecordError`, also if the replay diverges."""
    return Recovered(record, observe, books, replayed)
