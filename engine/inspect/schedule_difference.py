"""The first tick at which the schedules of two records differ, and why.

Called by `engine compare`. Numbers and times of events are not compared: two runs are never equally fast. If the events
of a tick are the same, the commands can differ only because the schedulers decide differently: other limits, policies,
or another engine version.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from engine.commands import Command
from engine.errors import counted
from engine.events import Event
from engine.inspect.story import worded
from engine.record import Record, Tick

NOT_COMPARED = ("id", "at")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDifference:
    """The first difference of two schedules."""

    tick: int
    at: tuple[float | None, float | None]
    """Time of the tick in each run; None: its record has no such tick."""
    kind: str
    """`event`, `command` or `end`: one of the records ends here."""
    place: int
    """Which of the events or commands of the tick, from 0."""
    field: str
    """The first field with two values; empty if one has another event or command there, or none."""
    texts: tuple[str, str]
    """What each run has there; empty: nothing."""

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": str(self)}

    def __str__(self) -> str:
        times = ["-" if at is None else f"{at:.3f} s" for at in self.at]
        if self.kind == "end":
            which = "first run" if self.at[0] is None else "second run"
            return f"the schedules are the same for {counted(self.tick, 'tick')}; then the record of the {which} ends"
        why = "something else happened" if self.kind == "event" else "the schedulers decided differently"
        field = f", field {self.field}" if self.field else ""
        return (
            f"the schedules differ first at tick {self.tick} (at {times[0]} and {times[1]}): {why}: "
            f"{self.kind} {self.place}{field}"
        )


def schedule_difference(one: Record, other: Record) -> ScheduleDifference | None:
    """The first difference of two schedules; None if they have the same ticks. Raises: `RecordError`."""
    for mine, theirs in zip_longest(one.ticks(), other.ticks()):
        if mine is None or theirs is None:
            return _end(mine, theirs)
        kind, found = "event", _first(mine.events, theirs.events)
        if found is None:
            kind, found = "command", _first(mine.commands, theirs.commands)
        if found is not None:
            place, field, texts = found
            at = (mine.at, theirs.at)
            return ScheduleDifference(tick=mine.number, at=at, kind=kind, place=place, field=field, texts=texts)
    return None


def _end(mine: Tick | None, theirs: Tick | None) -> ScheduleDifference | None:
    there = mine or theirs
    if there is None:
        return None
    texts = (_text(mine.events[0] if mine else None), _text(theirs.events[0] if theirs else None))
    at = (mine.at if mine else None, theirs.at if theirs else None)
    return ScheduleDifference(tick=there.number, at=at, kind="end", place=0, field="", texts=texts)


def _first(
    left: Sequence[Event | Command], right: Sequence[Event | Command]
) -> tuple[int, str, tuple[str, str]] | None:
    """(place, field, texts) of the first difference."""
    for place, (mine, theirs) in enumerate(zip_longest(left, right)):
        if mine is None or theirs is None or type(mine) is not type(theirs):
            return place, "", (_text(mine), _text(theirs))
        for name in mine.__struct_fields__:
            if name not in NOT_COMPARED and getattr(mine, name) != getattr(theirs, name):
                return place, name, (worded(mine), worded(theirs))
    return None


def _text(item: Event | Command | None) -> str:
    return "" if item is None else worded(item)
