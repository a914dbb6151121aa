"""A record as it is read: its header, then its frames in order, with what a crash left of its end reported.

    record = read("runs/latest/schedule")
    for frame in record.frames(): ...
    print(record.torn)

Called by `replayer`, by `engine.inspect` and by tests. Nothing is trusted: whatever the bytes say, the answer is a
frame or a `RecordError` that names the file and the byte.
"""

from collections.abc import Iterator
from pathlib import Path

from engine.errors import RecordError
from engine.ids import EventId
from engine.schedule.frames import Handled, Header, Rejected, decode_frame, decode_header
from engine.schedule.packing import CodecError
from engine.schedule.recorder import MemoryRecorder
from engine.schedule.store import Payload, Segment, Torn, payloads, segments_of


class Record:
    """A record that can be read, any number of times."""

    def __init__(self, name: str, segments: list[Segment]) -> None:
        self.name = name
        self.torn: Torn | None = None
        """The torn end, known once `frames` has come to it."""
        self._segments = segments
        first = next(payloads(segments, self._report_torn), None)
        if first is None:
            torn_at = self.torn.offset if self.torn else 0
            raise RecordError(segments[0].name, torn_at, "no header: the run ended before its record began")
        self._header_at = first.path, first.offset
        try:
            self.header: Header = decode_header(first.data)
        except CodecError as error:
            raise self.header_error(str(error)) from None

    def frames(self, answers: bool = True) -> Iterator[Handled | Rejected]:
        """Every event of the record, in order; without `answers`, commands are neither decoded nor checked.

        Raises: `RecordError`.
        """
        source = payloads(self._segments, self._report_torn)
        next(source)
        position = 0
        for payload in source:
            frame = _decode(payload, answers)
            if frame.event.id != position:
                raise RecordError(
                    payload.path, payload.offset, f"event {frame.event.id} stands where {position} belongs"
                )
            if type(frame) is Handled:
                position += 1
            yield frame

    def header_error(self, reason: str) -> RecordError:
        """What is wrong with what the header says, with its place."""
        return RecordError(*self._header_at, reason)

    def handled(self, position: EventId) -> Handled:
        """The event at a position that the record has, its commands included. Raises: `RecordError`."""
        return next(frame for frame in self.frames() if type(frame) is Handled and frame.event.id == position)

    def _report_torn(self, torn: Torn) -> None:
        self.torn = torn


def read(source: str | Path | MemoryRecorder) -> Record:
    """Open a record: the directory of its segments, or a recorder in memory. Raises: `RecordError`."""
    if isinstance(source, MemoryRecorder):
        return Record("(memory)", source.segments())
    return Record(str(source), segments_of(Path(source)))


def _decode(payload: Payload, answers: bool) -> Handled | Rejected:
    try:
        return decode_frame(payload.data, answers)
    except CodecError as error:
        raise RecordError(payload.path, payload.offset, str(error)) from None
