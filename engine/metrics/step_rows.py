"""One row for each train step: its batch, staleness, time by phase and the trainer's metrics.

`collector.RunMetrics` feeds it; the rows go to `metrics.jsonl` and the live view. A row is complete when its step has
finished and the trainer has reported. A row without a report is written when the next step finishes, or at the end.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from engine.commands import Command, TrainStep
from engine.events import Event, RunResumed
from engine.ids import GroupId, StepId
from engine.states.group import Group
from engine.states.state import State

PHASES = ("collecting", "scoring", "training", "publishing")
TRAINER_SECONDS = "seconds_"
"""Prefix of the trainer's own timings; a row has them under `trainer_seconds`."""

Row = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """A step with a batch whose row is not written yet."""

    fields: Row
    groups: tuple[GroupId, ...] = ()
    staleness: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    entered_at: float = 0.0
    phase: str = "scoring"
    finished: bool = False


class StepRows:
    """Collects rows of open steps; passes finished rows to `emit` in order of steps."""

    def __init__(
        self, emit: Callable[[Row], None], counts: Mapping[str, int] | None = None, recent: int = 32
    ) -> None:  # fmt: skip
        """`counts`: counts as `finished` takes them, which later rows must not include."""
        self.recent: deque[Row] = deque(maxlen=recent)
        """The newest rows, oldest first."""
        self._emit = emit
        self._open: dict[StepId, _Open] = {}
        self._reported: dict[StepId, Row] = {}
        self._collecting_since = 0.0
        self._counts = dict(counts or {})

    def written_to(self, emit: Callable[[Row], None]) -> Self:
        """Write rows to another target from now on."""
        self.recent.clear()
        self._emit = emit
        return self

    def formed(self, step: StepId, groups: list[Group], staleness: tuple[int, ...]) -> None:
        """Note that a batch was ordered to be trained. A repeated order changes nothing.

        `staleness`: of each group. Groups that no longer exist have no other figures.
        """
        entry = self._open.get(step)
        if entry is None or "groups" in entry.fields:
            return
        entry.groups, entry.staleness = tuple(group.id for group in groups), staleness
        rewards = [group.reward_mean for group in groups]
        entry.fields.update(
            groups=len(staleness),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            accuracy=None,
            loss=None,
            staleness_min=min(staleness, default=0),
            staleness_mean=sum(staleness) / max(1, len(staleness)),
            staleness_max=max(staleness, default=0),
            tokens=sum(group.tokens for group in groups),
        )

    def changed(self, step: StepId, state: str, at: float) -> None:
        """A step entered a state of its machine."""
        if state == "collecting":
            self._collecting_since = at
            return
        entry = self._open.get(step)
        if entry is None:
            entry = self._open[step] = _Open({"step": step}, entered_at=at)
            entry.seconds["collecting"] = at - self._collecting_since
        entry.seconds[entry.phase] += at - entry.entered_at
        entry.entered_at = at
        entry.phase = {"finished": "publishing"}.get(state, state)

    def trains(self, step: StepId) -> bool:
        """Whether a step was being trained when it last changed its state."""
        entry = self._open.get(step)
        return entry is not None and entry.phase == "training"

    def batch(self, step: StepId) -> tuple[tuple[GroupId, ...], tuple[int, ...], int]:
        """Groups of an unfinished step, the staleness of each, and their response tokens."""
        entry = self._open.get(step)
        return (entry.groups, entry.staleness, entry.fields.get("tokens", 0)) if entry is not None else ((), (), 0)

    def finished(self, step: StepId, version: int, at: float, counts: Mapping[str, int]) -> None:
        """Note that a step finished. `counts`: groups aborted, resumed, filtered and failed since the run began."""
        entry = self._open.get(step)
        if entry is None:
            return
        for earlier in [id for id, other in self._open.items() if other.finished and id != step]:
            self._write(earlier)
        entry.finished = True
        entry.fields.update(
            version=version, elapsed_s=at, seconds={**entry.seconds, "total": sum(entry.seconds.values())}
        )
        entry.fields.update({name: count - self._counts.get(name, 0) for name, count in counts.items()})
        self._counts = dict(counts)
        if step in self._reported:
            self._write(step)

    def report(self, step: StepId, metrics: Mapping[str, Any]) -> None:
        """Take the trainer's metrics for a step, before or after the step finishes."""
        self._reported[step] = dict(metrics)
        if step in self._open and self._open[step].finished:
            self._write(step)

    def flush(self) -> None:
        """Write the rows of finished steps that the trainer never reported."""
        for step in [id for id, entry in self._open.items() if entry.finished]:
            self._write(step)

    def _write(self, step: StepId) -> None:
        fields = self._open.pop(step).fields
        reported = self._reported.pop(step, {})
        row: Row = {key: fields[key] for key in ("step", "version", "groups") if key in fields} | fields
        own = {name: value for name, value in reported.items() if not name.startswith(TRAINER_SECONDS)}
        row |= {name: value for name, value in own.items() if row.get(name) is None}
        seconds = {name.removeprefix(TRAINER_SECONDS): value for name, value in reported.items() if name not in own}
        if seconds:
            row["trainer_seconds"] = seconds
        self.recent.append(row)
        self._emit(row)


class StepTransitions(Protocol):
    """The part of `collector.Transitions` that rows need."""

    steps: list[tuple[StepId, str]]

    def note_event(self, event: Event) -> None: ...

    def group_counts(self) -> dict[str, int]: ...


class ReplayedRows:
    """Rebuilds rows of the steps that are open at the end of a record, so that a resumed run can write them."""

    def __init__(self, transitions: StepTransitions) -> None:
        self.rows = StepRows(lambda row: None)
        self.transitions = transitions
        self._begun = False

    def watch(self, event: Event, commands: Sequence[Command], state: State) -> None:
        """Call it for every replayed event, in order."""
        if not self._begun:
            self._begin()
        self.transitions.note_event(event)
        for step, entered in self.transitions.steps:
            self.rows.changed(step, entered, event.at)
            if entered == "finished":
                self.rows.finished(step, state.latest_version, event.at, self.transitions.group_counts())
                self.rows.flush()  # an earlier process has written this row
        self.transitions.steps.clear()
        if isinstance(event, RunResumed) and not event.kept:
            self._begin()
        for command in commands:
            if type(command) is TrainStep:
                groups = [state.groups[id] for id in command.groups if id in state.groups]
                self.rows.formed(command.step, groups, command.staleness)

    def _begin(self) -> None:
        self.rows, self._begun = StepRows(lambda row: None, self.transitions.group_counts()), True
