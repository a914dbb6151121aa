"""The course of a run: its history as `engine explain` reads it, and the views of it that define modes.

`definitions.py` says in these terms what each mode is.
"""

from functools import cached_property
from pathlib import Path

from engine.commands import ScoreBatch
from engine.events import BatchScored
from engine.ids import GroupId, StepId, Version
from engine.inspect.history_reader import read_history
from engine.metrics.history import GenerationAttempt, History, StepPhase, StepRow
from engine.record import Record, read
from engine.record.recorder import MemoryRecorder


class Course:
    """A run without resumes. Steps are those that were trained."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.history: History = read_history(record)
        self.attempts = self.history.attempts
        self.steps: dict[StepId, StepRow] = {row.step: row for row in sorted(self.history.steps) if row.groups}
        self.begun: dict[GroupId, GenerationAttempt] = {}
        """The first attempt of each group."""
        for attempt in sorted(self.attempts, key=lambda one: (one.start, one.cause, one.group)):
            self.begun.setdefault(attempt.group, attempt)
        self.generated = {one.group: one for one in self.attempts if one.outcome == "generated"}
        """The last attempt of each group that was generated."""
        self.cut = [one for one in self.attempts if one.outcome == "aborted"]
        self.resumed = {one.group for one in self.attempts if one.resumed}
        self.steps_in: dict[Version, int] = {0: 0}
        """Train steps in each version that was published."""
        self.steps_in |= {row.version: step + 1 for step, row in self.steps.items() if row.version >= 0}

    @property
    def batches(self) -> list[tuple[GroupId, ...]]:
        return [row.groups for row in self.steps.values()]

    @property
    def trained(self) -> set[GroupId]:
        return {group for batch in self.batches for group in batch}

    def training(self, step: StepId) -> StepPhase:
        return next(phase for phase in self.steps[step].phases if phase.name == "training")

    @cached_property
    def beside(self) -> dict[StepId, set[GroupId]]:
        """Groups that were generated at any time while a step was trained."""
        phases = {step: self.training(step) for step in self.steps}
        return {
            step: {one.group for one in self.attempts if one.start < phase.end and one.end > phase.start}
            for step, phase in phases.items()
        }

    @cached_property
    def scored(self) -> list[tuple[int, int, StepId, str]]:
        """(ordered by event, done by event, step, task) of each scoring task."""
        found, ordered = [], {}
        for tick in self.record.ticks():
            for event in tick.events:
                if isinstance(event, BatchScored):
                    found.append((ordered[event.step, event.task], event.id, event.step, event.task))
            ordered |= {(c.step, c.task): tick.last for c in tick.commands if isinstance(c, ScoreBatch)}
        return found

    def staleness(self, step: StepId) -> list[int]:
        """Of every group of a step: how many train steps behind it its oldest token was."""
        return [step - self.steps_in[self.generated[group].oldest_version] for group in self.steps[step].groups]

    def every_staleness(self) -> list[int]:
        """Of every group trained on, in the order of the steps."""
        return [stale for step in self.steps for stale in self.staleness(step)]

    @property
    def out_of_order(self) -> int:
        """Groups trained on before one that had started earlier."""
        taken = [(step, self.begun[group].start) for step, row in self.steps.items() for group in row.groups]
        return sum(any(s > step and b < begun for s, b in taken) for step, begun in taken)

    def parked_at(self, moment: float) -> list[GenerationAttempt]:
        """Of every group that was cut short and runs again only later: its newest attempt."""
        newest: dict[GroupId, GenerationAttempt] = {}
        for one in sorted(self.attempts, key=lambda one: one.attempt):
            if one.start <= moment:
                newest[one.group] = one
        return [one for one in newest.values() if one.outcome == "aborted" and one.end <= moment]

    def is_paused(self, replica: int, moment: float) -> bool:
        phases = [sync for sync in self.history.syncs if sync.replica == replica and sync.name != "staging"]
        return any(sync.start <= moment <= sync.end for sync in phases)


def course_of(source: Path | MemoryRecorder) -> Course:
    """Of a run's directory, or of a record in memory."""
    return Course(read(source / "schedule" if isinstance(source, Path) else source))
