"""The file `history.log` of a run: what ended in each stretch between two snapshots of its record, so that a question
about the run replays only what follows the newest one.

    log = HistoryLog(run_dir)            # of a run that resumes: catch_up
    log.begin(scheduler, metrics, recorder)
    log.take(tick)                       # once per tick, after the metrics
    log.close()

The loop of a run writes it. `inspect.history_reader` reads it, and writes what it lacks once the run has ended. It is
an index of the record: a stretch names the snapshot at its end, and counts only while the record has that snapshot.
Deleting the file changes no answer. It must never fail a run.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from zlib import crc32

from msgspec import DecodeError, Raw, Struct
from msgspec.msgpack import Decoder, Encoder

from engine.errors import EngineError, RunDamaged, reason_of
from engine.ids import EventId
from engine.metrics.collector import HasState, RunMetrics
from engine.metrics.history import Intervals
from engine.metrics.history_builder import HistoryBuilder, OpenValues
from engine.record import Record, Rejected, Tick, read, replay
from engine.record.codec import CodecError
from engine.record.files import is_locked, open_private, open_regular, replace_whole, require_regular
from engine.record.reader import Place
from engine.record.recorder import RecordWriter, SnapshotMark
from engine.record.replayer import build_from_header, build_scheduler
from engine.record.segment_log import FRAME_BYTES, frame, frame_head
from engine.record.snapshots import restore

log = logging.getLogger(__name__)

FILE = "history.log"
MAGIC = b"history2"
"""The first bytes. Change the number with the fields or the meaning of `Intervals` or `OpenValues`."""
MOST_REPLAYED = 50_000
"""Maximum number of events that a run replays for its log before it resumes: a few seconds. If the log lacks more, the
run writes none, and readers replay them."""


class Stretch(Struct):
    """What ended between two snapshots, and what had begun at the second one."""

    end: SnapshotMark
    ended: Raw
    open: Raw


_encode = Encoder().encode
_stretch, _ended, _open = Decoder(Stretch).decode, Decoder(Intervals).decode, Decoder(OpenValues).decode


def stretch_of(builder: HistoryBuilder, end: SnapshotMark) -> Stretch:
    """Takes from a builder what has ended."""
    ended, builder.ended = builder.ended, Intervals()
    return Stretch(end, Raw(_encode(ended)), Raw(_encode(builder.open)))


def frames_of(stretches: Iterable[Stretch]) -> bytes:
    return b"".join(frame(_encode(one)) for one in stretches)


# -- reading -----------------------------------------------------------------------------------------------------------


def stretches_in(path: Path) -> Iterator[tuple[Stretch, int]]:
    """The stretches in a file, up to the first that is torn, damaged or of another format, and where each ends."""
    with suppress(OSError, RunDamaged, DecodeError), open_regular(path) as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        while len(head := file.read(FRAME_BYTES)) == FRAME_BYTES:
            data = file.read(int.from_bytes(head[:4], "little"))
            if head != frame_head(data):
                return
            yield _stretch(data), file.tell()


class RecordHistory:
    """The history of a record: from the file up to the newest snapshot that both have, then from a replay."""

    def __init__(self, record: Record, path: Path | None) -> None:
        """`path`: None if the record is in memory. Raises: `RecordError`."""
        self.stretches: list[Stretch] = []
        self.builder: HistoryBuilder
        """With what ended after the last stretch, and what is open. Set by `replay`."""
        self.behind = 0
        """Where the stretches of the file that count end in it; 0: it has none."""
        self._record = record
        self._place: Place | None = None
        self._newer: dict[int, SnapshotMark] = {}
        """The snapshots behind the last of these stretches, by number of ticks."""
        written = [] if path is None else [*stretches_in(path)]
        ends = {stretch.end: number for number, (stretch, _) in enumerate(written, 1)}
        for place in record.snapshots():
            mark = SnapshotMark(place.ticks, place.position, crc32(record.snapshot_bytes(place)))
            if mark in ends:  # of those behind it, the record has lost the end
                self.stretches = [stretch for stretch, _ in written[: ends[mark]]]
                self.behind, self._place = written[ends[mark] - 1][1], place
                break
            self._newer[mark.ticks] = mark
        self.known = len(self.stretches)
        """Number of stretches that the file has."""

    @property
    def position(self) -> EventId:
        """Number of events that need no replay."""
        return 0 if self._place is None else self._place.position

    def replay(self) -> None:
        """Replay the rest of the record in this process. Raises: `RecordError`, `EngineError` if this engine decides
        differently from the record; `CodecError` if it cannot begin at the snapshot."""
        record, place = self._record, self._place
        if place is None:
            scheduler = build_from_header(record, build_scheduler)
        else:
            scheduler = restore(record.snapshot(place).plain)
        metrics = RunMetrics(scheduler)
        open = _open(self.stretches[-1].open) if self.stretches else OpenValues()
        builder = self.builder = HistoryBuilder(scheduler, metrics, open)

        def end_stretch() -> None:
            mark = self._newer.pop(open.ticks, None)
            if mark is not None:
                self.stretches.append(stretch_of(builder, mark))

        def watch(tick: Tick) -> None:
            end_stretch()
            metrics.observe(tick)
            builder.take(tick)

        def skip(one: Rejected) -> None:
            end_stretch()  # a reader that begins at its end reads the rejected tick
            open.notes += (f"tick {one.number} was rejected: {one.reason}",)

        report = replay(record, build=lambda _: scheduler, watch=watch, after=place, compare_snapshots=False, skip=skip)
        if report.divergence is not None:
            raise EngineError(f"the record cannot be shown: {report.divergence}")
        end_stretch()

    def intervals(self) -> Intervals:
        """Everything that has ended."""
        whole = Intervals()
        for stretch in self.stretches:
            whole.extend(_ended(stretch.ended))
        whole.extend(self.builder.ended)
        return whole


def replayed_history(record: Record, path: Path | None) -> RecordHistory:
    """The history of a record up to its end. Raises: `RecordError`; `EngineError` if this engine decides differently
    from the record."""
    history = RecordHistory(record, path)
    try:
        history.replay()
    except CodecError:  # an engine with other fields wrote the snapshot
        history = RecordHistory(record, None)
        history.replay()
    return history


def keep(history: RecordHistory, path: Path) -> None:
    """Write what a file lacks, unless a run writes the record now, or the file cannot be written."""
    with suppress(OSError, EngineError):
        if len(history.stretches) > history.known and is_locked(path.parent / "schedule") is False:
            with replace_whole(path) as file:
                file.write(MAGIC + frames_of(history.stretches))


# -- writing -----------------------------------------------------------------------------------------------------------


class HistoryLog:
    """Writes the file of a run. It logs a failure once and then writes nothing more: readers replay what is missing."""

    def __init__(self, run_dir: Path | None, events: EventId = 0) -> None:
        """`run_dir`: None: the run keeps no files, and its log nothing. `events`: their number in the record of a run
        that continues; the log then reads what its file lacks of them."""
        self.path = (run_dir or Path()) / FILE
        self.is_off = run_dir is None
        self._builder: HistoryBuilder | None = None
        self._earlier: RecordHistory | None = None
        self._file: FileIO | None = None
        if events and not self.is_off:
            try:
                self._catch_up(events)
            except Exception as error:  # here and below: neither a defect nor a full disk may fail the run
                self._give_up(error)

    def _catch_up(self, events: EventId) -> None:
        earlier = RecordHistory(read(self.path.parent / "schedule", missing_end=True), self.path)
        self.is_off = events - earlier.position > MOST_REPLAYED
        if not self.is_off:
            earlier.replay()
            self._earlier = earlier

    def begin(self, scheduler: HasState, metrics: RunMetrics, recorder: RecordWriter) -> None:
        """Watch the scheduler from now on. Cuts the file to the end of the record."""
        self._recorder, self._newest = recorder, recorder.newest_snapshot
        earlier, self._earlier = self._earlier, None
        if self.is_off:
            return
        try:
            if earlier is None:
                self._builder = HistoryBuilder(scheduler, metrics)
            else:
                self._builder = HistoryBuilder(scheduler, metrics, earlier.builder.open, earlier.builder.ended)
                self._cut(earlier.behind, earlier.stretches[earlier.known :])
        except Exception as error:
            self._give_up(error)

    def take(self, tick: Tick) -> None:
        """Take a tick of the run. The snapshots before it are recorded."""
        if self.is_off or self._builder is None:
            return
        try:
            if self._recorder.newest_snapshot is not self._newest:
                self._end_stretch(self._builder)
            self._builder.take(tick)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what ended before the record's last snapshot, and close the file."""
        if not self.is_off and self._builder is not None and self._recorder.newest_snapshot is not self._newest:
            try:
                self._end_stretch(self._builder)
            except Exception as error:
                self._give_up(error)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_stretch(self, builder: HistoryBuilder) -> None:
        """The record has a new snapshot: write what ended before it."""
        self._newest = self._recorder.newest_snapshot
        if self._newest is not None and self._newest.ticks == builder.open.ticks:
            self._append([stretch_of(builder, self._newest)])

    def _cut(self, behind: int, more: Sequence[Stretch]) -> None:
        if self.path.exists():
            require_regular(self.path)
            os.truncate(self.path, behind)
        self._append(more)

    def _append(self, stretches: Sequence[Stretch]) -> None:
        if self._file is None:
            self._file = open_private(self.path, "ab")
        data = memoryview((b"" if self._file.tell() else MAGIC) + frames_of(stretches))
        while data:
            data = data[self._file.write(data) :]

    def _give_up(self, error: Exception) -> None:
        self.is_off = True
        words = "the next command that reads the run takes longer, because its history is not kept from now on"
        log.warning("%s: %s: %s", self.path, words, reason_of(error))
