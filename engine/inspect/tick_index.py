"""Where each tick and snapshot of a record is: by number, by event and by time.

Called by `cursor`. It reads the first bytes of every frame once, so that any tick can be read without those before it.
A record that grows is read on from its last frame.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from engine.ids import EventId
from engine.record import Record
from engine.record.frames import Rejected
from engine.record.reader import Place

Progress = Callable[[int], None]
"""Called with the number of ticks that were read."""
REPORTED_EVERY = 1 << 14


class TickIndex:
    """The ticks of a record, by their numbers: from `begin` up to, without, its length."""

    def __init__(self) -> None:
        self.begin = 0
        """The number of the record's first tick: 0, unless it lacks those before."""
        self.snapshots: list[Place] = []
        self.rejected: dict[int, Rejected] = {}
        """By the number of the tick that it would have been."""
        self._first: array[int] = array("q")
        """First event of each tick."""
        self._at: array[float] = array("d")
        self._segment: array[int] = array("l")
        self._end: array[int] = array("q")
        self._read_to = (0, 0)
        """Segment, and the offset behind its last frame that was read; 0: its first frame."""

    def __len__(self) -> int:
        """The number behind that of the last tick."""
        return self.begin + len(self._first)

    def read(self, record: Record, progress: Progress = lambda ticks: None) -> int:
        """Add the frames that are not in the index yet. Returns the number of new ticks. Raises: `RecordError`."""
        self.begin = 0 if record.begin is None else record.begin.ticks
        before = len(self)
        for found in record.headings(*self._read_to):
            place, at, rejected = found.place, found.at, found.rejected
            self._read_to = (place.segment, place.behind)
            if rejected is not None:
                self.rejected[place.ticks] = rejected
            elif at is None:
                self.snapshots.append(place)
            else:
                self._first.append(place.position)
                self._at.append(at)
                self._segment.append(place.segment)
                self._end.append(place.behind)
                if len(self) % REPORTED_EVERY == 0:
                    progress(len(self))
        return len(self) - before

    def first_event(self, tick: int) -> EventId:
        return self._first[tick - self.begin]

    def at(self, tick: int) -> float:
        """Seconds since the run began."""
        return self._at[tick - self.begin]

    def tick_of_event(self, event: EventId) -> int:
        """The tick with an event; the last tick for a later event."""
        return self.begin + bisect_right(self._first, event) - 1

    def tick_from(self, event: EventId) -> int:
        """The first tick that begins with this event or a later one; the number of ticks if there is none."""
        return self.begin + bisect_left(self._first, event)

    def tick_at(self, seconds: float) -> int:
        """The last tick at or before a time; the first tick if there is none."""
        return self.begin + max(0, bisect_right(self._at, seconds) - 1)

    def place_before(self, tick: int) -> Place | None:
        """Where a tick can be read: behind the one before it. None: at the beginning of the record."""
        before = tick - self.begin - 1
        if before < 0:
            return None
        return Place(self._segment[before], 0, self._end[before], tick, self._first[before + 1])

    def snapshot_before(self, tick: int) -> Place | None:
        """The newest snapshot of the state before a tick or an earlier one; None if there is none."""
        found = bisect_right(self.snapshots, tick, key=lambda place: place.ticks) - 1
        return self.snapshots[found] if found >= 0 else None
