"""The timeline of a run: tracks, the slices on them, and arrows from cause to effect; made from a `History`.

Its callers write it to files (`timeline_files`), into the report, and as pictures. Slices on one track never overlap.
Must not read records.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, NamedTuple

from engine.ids import NO_VERSION, GroupId
from engine.metrics.history import (
    CheckpointWrite,
    GenerationAttempt,
    History,
    Interval,
    ProcessLife,
    RowsAttempt,
    StepPhase,
    StepRow,
    SyncPhase,
)
from engine.states.process import REPLICA, TRAINER, name_of

BATCHES, TRAINING, CHECKPOINTS, WEIGHTS, PROCESS = "batches", "training", "checkpoints", "weights", "process"
"""Names of tracks that are not slots."""


class Track(NamedTuple):
    """A row of the timeline."""

    process: str
    """Such as `replica 0` or `trainer`."""
    name: str
    """Such as `slot 3`, or one of the names above."""


class Slice(NamedTuple):
    """A time on a track."""

    track: int
    """Its place in `Timeline.tracks`."""
    kind: str
    """`generating`, `measuring`, the name of a phase, `starting`, `up`, `checkpoint` or `validation`."""
    start: float
    end: float
    value: Any
    """The value of the history, or the row of a validation."""


class Arrow(NamedTuple):
    """From a slice to one that began because it ended, by their places in `Timeline.slices`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Tracks, slices and arrows."""

    history: History
    tracks: tuple[Track, ...]
    slices: tuple[Slice, ...]
    """Ordered by start."""
    arrows: tuple[Arrow, ...]
    batches: Mapping[int, StepRow]
    """The step of each phase, by the `id` of the phase."""

    def title(self, slice: Slice) -> str:
        """What a slice is called: `group 12`, `training step 3`, `installing v4`."""
        value = slice.value
        if isinstance(value, GenerationAttempt):
            return f"group {value.group}"
        if isinstance(value, RowsAttempt):
            return f"validation {value.validation}, chunk {value.chunk}"
        if isinstance(value, StepPhase):
            return f"{slice.kind} step {value.step}"
        if isinstance(value, SyncPhase):
            return f"{slice.kind} v{value.version}"
        if isinstance(value, CheckpointWrite):
            return f"checkpoint {value.steps}"
        if isinstance(value, ProcessLife):
            return f"{slice.kind}, life {value.number}"
        return f"validation {value['validation']} of v{value['version']}"

    def details(self, slice: Slice) -> dict[str, Any]:
        """The details of a slice, by name. All values are texts and numbers."""
        value = slice.value
        if isinstance(value, GenerationAttempt):
            return self._of_attempt(value)
        if isinstance(value, StepPhase):
            return self._of_phase(value)
        if isinstance(value, ProcessLife):
            return {"process": name_of(value.kind, value.index), "outcome": value.outcome, "reason": value.reason}
        if isinstance(value, dict):
            names = (
                "validation", "version", "steps", "outcome", "accuracy", "reward_mean", "rows", "measured", "reason"
            )  # fmt: skip
            return {name: value[name] for name in names if value[name] not in (None, "")}
        shown = {name: getattr(value, name) for name in value._fields}
        hidden = ("start", "end", "name")
        return {name: detail for name, detail in shown.items() if name not in hidden and detail != ""}

    def _of_attempt(self, value: GenerationAttempt) -> dict[str, Any]:
        group = self.history.groups[value.group]
        reason = {"reason": value.reason} if value.reason else {}
        details: dict[str, Any] = {
            "group": value.group, "attempt": value.attempt, "resumed": value.resumed, "outcome": value.outcome,
            **reason, "version": value.version, "tokens": value.tokens, "sampled": value.sampled,
            "deadline": group.deadline, "became": group.state, "cause": value.cause, "ended_by": value.ended_by,
        }  # fmt: skip
        if value.oldest_version != NO_VERSION:
            details |= {"oldest_version": value.oldest_version, "newest_version": value.newest_version}
        if value.ordered_by != value.ended_by:
            details["ordered_by"] = value.ordered_by
        if group.staleness >= 0:
            details |= {"step": group.step, "staleness": group.staleness}
        if group.reward_mean is not None:
            details["reward_mean"] = group.reward_mean
        return details

    def _of_phase(self, value: StepPhase) -> dict[str, Any]:
        details = {"step": value.step, "outcome": value.outcome, "cause": value.cause, "ended_by": value.ended_by}
        staleness = self.batches[id(value)].staleness
        if staleness:
            details |= {"groups": len(staleness), "staleness_max": max(staleness)}
            details["staleness_mean"] = sum(staleness) / len(staleness)
        return details


def timeline_of(history: History) -> Timeline:
    """The timeline of a run."""
    placed = sorted(_slices(history), key=itemgetter(2, 3))
    names = {track: number for number, track in enumerate(sorted({one[0] for one in placed}, key=_order))}
    slices = tuple([Slice(names[track], kind, start, end, value) for track, kind, start, end, value in placed])
    batches = {id(phase): step for step in history.steps for phase in step.phases}
    return Timeline(history, tuple(names), slices, tuple(_arrows(history, slices)), batches)


def _order(track: Track) -> tuple[Any, ...]:
    """The trainer, then replicas by number and slot, then the others."""
    process, number = track.process.rsplit(" ", 1) if track.process[-1].isdigit() else (track.process, "0")
    slot = int(track.name.removeprefix("slot ")) if track.name.startswith("slot ") else -1
    return (process != TRAINER, process != REPLICA, process, int(number), track.name == PROCESS, slot < 0, slot, track)


def _slices(history: History) -> Iterator[tuple[Track, str, float, float, Any]]:
    """The track of each slice, and its other fields."""
    slot_track = cache(lambda replica, slot: Track(name_of(REPLICA, replica), f"slot {slot}"))
    for attempt, slot in _seated(history):
        kind = "generating" if isinstance(attempt, GenerationAttempt) else "measuring"
        yield slot_track(attempt.replica, slot), kind, attempt.start, attempt.end, attempt
    for sync in history.syncs:
        yield Track(name_of(REPLICA, sync.replica), WEIGHTS), sync.name, sync.start, sync.end, sync
    for phase in (phase for step in history.steps for phase in step.phases):
        track = Track(TRAINER, BATCHES if phase.name == "collecting" else TRAINING)
        yield track, phase.name, phase.start, phase.end, phase
    for save in history.checkpoints:
        yield Track(TRAINER, CHECKPOINTS), "checkpoint", save.start, save.end, save
    for life in history.lives:
        track, up = Track(name_of(life.kind, life.index), PROCESS), life.end if life.up is None else life.up
        yield track, "starting", life.start, up, life
        if life.up is not None:
            yield track, "up", up, life.end, life
    ends: list[float] = []
    for row in sorted(history.validations, key=lambda row: row["elapsed_s"] - sum(row["seconds"].values())):
        start = row["elapsed_s"] - row["seconds"]["running"]
        place = next((place for place, end in enumerate(ends) if end <= start), len(ends))
        ends[place : place + 1] = [row["elapsed_s"]]
        yield Track("validation", f"validation {place}"), "validation", start, row["elapsed_s"], row


def _seated(history: History) -> Iterator[tuple[GenerationAttempt | RowsAttempt, int]]:
    """Each attempt with its slot: the lowest that was free in this life of its replica. More slots than the replica has
    are in use while ended trajectories make room for the next group."""
    attempts: list[GenerationAttempt | RowsAttempt] = [*history.attempts, *history.chunks]
    lives: dict[tuple[int, int], tuple[list[tuple[float, int]], list[int]]] = defaultdict(lambda: ([], []))
    for attempt in sorted(attempts, key=_by_start):
        busy, free = lives[attempt.replica, attempt.life]
        while busy and busy[0][0] <= attempt.start:
            heappush(free, heappop(busy)[1])
        slot = heappop(free) if free else len(busy)
        heappush(busy, (attempt.end, slot))
        yield attempt, slot


def _by_start(attempt: GenerationAttempt | RowsAttempt) -> tuple[float, int]:
    return attempt.start, attempt.group if isinstance(attempt, GenerationAttempt) else attempt.validation


def _arrows(history: History, slices: tuple[Slice, ...]) -> Iterator[Arrow]:
    """Causes and effects, and every group of a batch to the training of its step."""
    place: dict[int, int] = {}
    for number, slice in enumerate(slices):
        place.setdefault(id(slice.value), number)
    for cause, effect in history.links():
        source, target = place.get(id(cause)), place.get(id(effect))
        if source is not None and target is not None:
            yield Arrow(source, target)
    last = _last_attempts(history)
    for step in history.steps:
        trains = [phase for phase in step.phases if phase.name == "training"]
        for group in step.groups if trains else ():
            attempt = last.get(group)
            if attempt is not None and attempt.end <= trains[0].start:
                yield Arrow(place[id(attempt)], place[id(trains[0])])


def _last_attempts(history: History) -> dict[GroupId, Interval]:
    """The attempt that generated each group."""
    return {attempt.group: attempt for attempt in history.attempts if attempt.outcome == "generated"}
