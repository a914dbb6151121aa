"""From the record of a run that ended before its time to the event with which it goes on.

    recovered = recover(read(directory))
    event = recovered.resumed(steps=20, replicas=4)    # steps: those of a complete checkpoint

Called by whoever resumes a run, and by the tests. The record is replayed and must hold to the bit: a scheduler that
would have decided otherwise cannot go on in its place.
"""

from typing import Any

from engine.errors import RecordError
from engine.events import RunResumed
from engine.ids import GroupId
from engine.policies import PolicySet
from engine.schedule.frames import Handled
from engine.schedule.reader import Record
from engine.schedule.replayer import ReplayReport, replay
from engine.schedule.store import Torn
from engine.scheduler import Scheduler
from engine.states.group import PHASES
from engine.states.limits import Limits
from engine.states.machine import Phase
from engine.states.state import Observer


class Recovered:
    """A scheduler as it was at the last event of a record, and which groups had ended after how many train steps."""

    def __init__(self, record: Record, observe: Observer | None = None) -> None:
        """`observe` is what the scheduler will have for good. Raises: `RecordError`."""
        self._observe = observe
        self._ended: dict[GroupId, tuple[int, Phase]] = {}
        header = record.header
        limits, policies = Limits.from_plain(dict(header.limits)), PolicySet.from_names(header.policies)
        self.scheduler = Scheduler(limits, policies, self._note)
        self.at = 0.0
        """When the last event happened, in seconds since the run began."""
        report = replay(record, build=lambda _: self.scheduler, watch=self._watch)
        if report.divergence is not None:
            raise RecordError(record.name, 0, f"this engine decides otherwise, so it cannot go on; {report.divergence}")
        self.report: ReplayReport = report

    @property
    def events(self) -> int:
        return self.report.events

    @property
    def torn(self) -> Torn | None:
        """What a crash left behind the last whole frame."""
        return self.report.torn

    def kept(self, *, replicas: int, missing: tuple[GroupId, ...] = ()) -> RunResumed:
        """The event that goes on from where the record ends: the trainer is there again, and so are the trajectories
        but for those of the groups that are `missing`."""
        steps = self.scheduler.state.steps_trained
        return RunResumed(steps=steps, replicas=replicas, consumed=(), released=(), kept=True, missing=missing)

    def resumed(self, *, steps: int, replicas: int) -> RunResumed:
        """The event that goes on from the weights after `steps` train steps: what ended since then has not."""
        lost = {id: phase for id, (mark, phase) in self._ended.items() if mark >= steps}
        return RunResumed(
            steps=steps,
            replicas=replicas,
            consumed=tuple(sorted(id for id, phase in lost.items() if phase is Phase.CONSUMED)),
            released=tuple(sorted(id for id, phase in lost.items() if phase is Phase.RELEASED)),
        )

    def _note(self, machine: str, record: Any, source: str, trigger: str) -> None:
        if machine == "group" and PHASES[record.state] in (Phase.CONSUMED, Phase.RELEASED):
            self._ended[record.id] = (self.scheduler.state.steps_trained, PHASES[record.state])
        if self._observe is not None:
            self._observe(machine, record, source, trigger)

    def _watch(self, frame: Handled) -> None:
        self.at = frame.event.at
        if isinstance(frame.event, RunResumed):
            for id in (*frame.event.consumed, *frame.event.released):
                del self._ended[id]


def recover(record: Record, observe: Observer | None = None) -> Recovered:
    """Replay a record to its end. Raises: `RecordError`, also where it does not replay to the bit."""
    return Recovered(record, observe)
