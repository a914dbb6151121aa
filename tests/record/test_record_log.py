"""Segments on disk: what is written is read, a torn end is cut and said, damage before it is refused with its place."""

import errno
import fcntl
import struct
import tracemalloc
from contextlib import closing
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from record_samples import answer, event, fill, frame_offsets, header, positions, written

from engine.errors import EngineError, RecordDamaged, RecordError, RecordHeld
from engine.record import (
    FORMAT_VERSION,
    CodecError,
    MemoryRecorder,
    RecordEnd,
    Recorder,
    Rejected,
    Tick,
    read,
)
from engine.record.codec import pack
from engine.record.frames import SCHEDULE
from engine.record.segment_log import FRAME_BYTES, PREAMBLE_BYTES, Index, frame, load_index, store_index
from tests.killed_writers import leave_open

COUNT = 9


def expect(directory: Path, offset: int, said: str, file: str = "00000000.seg") -> None:
    with pytest.raises(RecordError, match=said) as caught:
        list(read(directory).frames())
    assert caught.value.details["offset"] == offset
    assert caught.value.details["path"] == str(directory / file)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "schedule", header(config={"a": [1, {"b": None}]}, code="1.2"))
    fill(recorder, COUNT)
    recorder.reject((event(COUNT),), "InvariantViolated: a law")
    recorder.write((event(COUNT),), answer(COUNT))
    recorder.close()
    record = read(tmp_path / "schedule")
    assert record.header == header(config={"a": [1, {"b": None}]}, code="1.2")
    for _ in range(2):
        frames = list(record.frames())
        assert [(tick.events, tick.commands) for tick in frames[:COUNT] if isinstance(tick, Tick)] == [
            ((event(n),), answer(n)) for n in range(COUNT)
        ]
        assert frames[COUNT] == Rejected(COUNT, (event(COUNT),), "InvariantViolated: a law")
        assert frames[COUNT + 1].events[0].id == COUNT
    assert record.torn is None


def test_memory_keeps_the_same_bytes(tmp_path: Path) -> None:
    path = written(tmp_path, COUNT)
    memory = MemoryRecorder(header())
    fill(memory, COUNT)
    assert memory.to_bytes() == path.read_bytes()
    assert list(read(memory).events()) == [event(n) for n in range(COUNT)]


def test_frames_are_on_disk_after_a_flush(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, header())
    recorder.write((event(0),), answer(0))
    recorder.flush()
    assert positions(tmp_path) == [0]
    recorder.write((event(1),), answer(1))
    assert positions(tmp_path) == [0]
    recorder.close()
    recorder.close()
    assert positions(tmp_path) == [0, 1]
    with pytest.raises(RecordError, match="the schedule record is closed"):
        recorder.write((event(2),), ())


def test_positions_have_no_gap() -> None:
    recorder = MemoryRecorder(header())
    with pytest.raises(CodecError, match="id 1, but the next position in the record is 0"):
        recorder.write((event(1),), ())
    with pytest.raises(CodecError, match="id 2, but the next position"):
        recorder.reject((event(2),), "no")


def test_a_record_is_never_continued_or_overwritten(tmp_path: Path) -> None:
    before = written(tmp_path, COUNT).read_bytes()
    with pytest.raises(RecordError, match="the directory has a record already"):
        Recorder(tmp_path, header())
    assert (tmp_path / "00000000.seg").read_bytes() == before


def test_a_header_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    for config in ({"a": object()}, {"a": "\ud800"}, {"a": 2**64}):
        with pytest.raises(CodecError):
            Recorder(tmp_path / "schedule", header(config=config))
    assert not (tmp_path / "schedule").exists()


def test_segments_rotate(tmp_path: Path) -> None:
    written(tmp_path, 200, segment_bytes=1000)
    names = sorted(path.name for path in tmp_path.glob("*.seg"))
    assert names == [f"{n:08d}.seg" for n in range(len(names))] and len(names) > 5
    assert all(1000 <= (tmp_path / name).stat().st_size < 1200 for name in names[:-1])
    assert positions(tmp_path) == list(range(200))


def test_a_missing_or_swapped_segment_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 100, segment_bytes=1000)
    first, second, third = (tmp_path / f"0000000{n}.seg" for n in range(3))
    second.rename(tmp_path / "kept")
    with pytest.raises(RecordError, match=r"00000001.seg is missing"):
        read(tmp_path)
    second.write_bytes(third.read_bytes())
    expect(tmp_path, 12, "this is segment 2 of a schedule record, but segment 1 was expected", "00000001.seg")
    first.rename(tmp_path / "gone")
    with pytest.raises(RecordError, match=r"00000000.seg is missing"):
        read(tmp_path)


def test_segments_of_two_records_do_not_mix(tmp_path: Path) -> None:
    written(tmp_path / "a", 100, segment_bytes=1000)
    written(tmp_path / "b", 100, segment_bytes=900)
    (tmp_path / "a" / "00000001.seg").write_bytes((tmp_path / "b" / "00000001.seg").read_bytes())
    with pytest.raises(RecordError, match=r"found tick \d+ from event \d+, but expected tick \d+ from"):
        positions(tmp_path / "a")


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        read(tmp_path / "none")
    with pytest.raises(RecordError, match="has no schedule record"):
        read(tmp_path)


def test_a_torn_end_is_cut_at_every_byte(tmp_path: Path) -> None:
    path = written(tmp_path, COUNT)
    whole = path.read_bytes()
    last = frame_offsets(whole)[-1]
    for length in range(last, len(whole)):
        path.write_bytes(whole[:length])
        record = read(tmp_path)
        assert [event.id for event in record.events()] == list(range(COUNT - 1))
        if length == last:
            assert record.torn is None
        else:
            assert record.torn is not None and (record.torn.offset, record.torn.bytes) == (last, length - last)
            assert str(path) in str(record.torn)


def test_a_torn_end_may_be_garbled_or_zeros(tmp_path: Path) -> None:
    path = written(tmp_path, COUNT)
    whole = path.read_bytes()
    last = frame_offsets(whole)[-1]
    for damaged in (
        whole[:last] + bytes(len(whole) - last),
        whole[: last + 3] + bytes(4096),
        whole[:-2] + bytes(4096),
        whole[:last] + bytes(1),
    ):
        path.write_bytes(damaged)
        record = read(tmp_path)
        assert [event.id for event in record.events()] == list(range(COUNT - 1))
        assert record.torn is not None and record.torn.offset == last


def test_a_torn_new_segment_is_cut(tmp_path: Path) -> None:
    written(tmp_path, 100, segment_bytes=1000)
    leave_open(tmp_path, listed=False)
    path = max(tmp_path.glob("*.seg"))
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[: PREAMBLE_BYTES - 1], bytes(PREAMBLE_BYTES), bytes(4096)):
        path.write_bytes(damaged)
        record = read(tmp_path)
        read_now = [event.id for event in record.events()]
        assert read_now == list(range(len(read_now))) and 0 < len(read_now) < 100
        assert record.torn is not None and record.torn.bytes == len(damaged)


def test_a_torn_middle_segment_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 100, segment_bytes=1000)
    whole = path.read_bytes()
    last = frame_offsets(whole)[-1]
    path.write_bytes(whole[:-1])
    expect(tmp_path, last, "the file ends within a frame, and segments follow")
    path.write_bytes(whole[: last + 2])
    expect(tmp_path, last, "the file ends within a frame, and segments follow")
    store_index(tmp_path, Index([None]))  # as if the writer had been killed before it listed the next segment
    expect(tmp_path, last, "the file ends within a frame, and segments follow")


def test_a_flipped_bit_of_every_byte_before_the_last_frame_is_refused_at_its_frame(tmp_path: Path) -> None:
    path = written(tmp_path, 4)
    whole = path.read_bytes()
    offsets = frame_offsets(whole)
    for place in range(PREAMBLE_BYTES, offsets[-1]):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(RecordError) as caught:
            list(read(tmp_path).frames())
        assert caught.value.details["offset"] == max(offset for offset in offsets if offset <= place)


def test_every_flipped_bit_of_the_preamble_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    whole = path.read_bytes()
    for place in range(PREAMBLE_BYTES):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        expect(tmp_path, 0, "not a segment" if place < len(SCHEDULE.magic) else "first bytes are damaged")


def test_a_cut_before_the_header_is_no_record(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    whole = path.read_bytes()
    first = frame_offsets(whole)[1]
    for length in range(first):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=r"no header|too short"):
            read(tmp_path)
    path.write_bytes(whole[:first])
    assert positions(tmp_path) == []


NEWER = FORMAT_VERSION + 1


@pytest.mark.parametrize(
    ("magic", "version", "offset", "said"),
    [
        (SCHEDULE.magic, NEWER, 8, f"format version is {NEWER}, but at most {FORMAT_VERSION} is known"),
        *((magic, 3, 0, "unreleased development format 3") for magic in SCHEDULE.development_magics),
    ],
)
def test_a_segment_of_another_format_is_refused(
    tmp_path: Path, magic: bytes, version: int, offset: int, said: str
) -> None:
    path = written(tmp_path, 1)
    head = magic + struct.pack("<III", version, 0, 0)
    path.write_bytes(head + struct.pack("<I", crc32(head)) + path.read_bytes()[PREAMBLE_BYTES:])
    expect(tmp_path, offset, said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flags": ["x-ray"]}, "unknown logic flag 'x-ray'"),
        ({"flags": [3]}, "Expected `str`, got `int`"),
        ({"policies": {"filter": 3}}, "Expected `str`, got `int`"),
        ({"limits": []}, "Expected `object`, got `array`"),
        ({"run": None}, "Expected `str`"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    path = written(tmp_path, 2)
    whole = path.read_bytes()
    start, after = frame_offsets(whole)[:2]
    path.write_bytes(whole[:start] + frame(pack(replace(header(), **changes))) + whole[after:])
    expect(tmp_path, PREAMBLE_BYTES, said)


def test_a_whole_frame_with_wrong_contents_is_refused_at_its_offset(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    second = frame_offsets(whole)[2]
    for payload in (
        b"\x93\x01\x02\x03",
        b"\xc0",
        b"\x90",
        whole[PREAMBLE_BYTES + FRAME_BYTES : frame_offsets(whole)[1]],
    ):
        path.write_bytes(whole[:second] + frame(payload))
        expect(tmp_path, second, ".")
    path.write_bytes(whole + whole[second:])
    expect(tmp_path, len(whole), "found tick 1 from event 1, but expected tick 3 from")


def test_a_length_that_is_too_large_is_torn_or_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    head = struct.pack("<II", 2**32 - 1, 0)
    tracemalloc.start()
    try:
        path.write_bytes(whole + head + struct.pack("<I", crc32(head)) + b"\x97\x01")
        record = read(tmp_path)
        assert len(list(record.frames())) == 3 and record.torn is not None and record.torn.offset == len(whole)
        path.write_bytes(whole + head + b"\x97\x01\x02\x03")
        expect(tmp_path, len(whole), "checksum does not match")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_failed_write_ends_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, header())
    recorder.write((event(0),), ())

    class Broken:
        def write(self, data: memoryview) -> int:
            raise OSError(5, "Input/output error")

        def close(self) -> None: ...

    recorder.log._file.close()  # type: ignore[union-attr]
    monkeypatch.setattr(recorder.log, "_file", Broken())
    with pytest.raises(RecordError, match="cannot be written: Input/output error"):
        recorder.flush()
    with pytest.raises(RecordError, match="cannot be written: Input/output error"):
        recorder.write((event(1),), ())
    recorder.close()


@given(data=st.data())
def test_damaged_records_never_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    path = written(directory, 5)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=12))
    path.write_bytes(damaged)
    try:
        list(read(directory).frames())
    except EngineError as error:
        assert type(error) in (RecordError, RecordDamaged)


# epochs


def epochs(directory: Path) -> list[tuple[int, int]]:
    """(number, epoch) of each segment."""
    heads = (path.read_bytes()[:20] for path in sorted(directory.glob("*.seg")))
    return [struct.unpack_from("<8sIII", head)[2:] for head in heads]


def test_every_recorder_has_an_epoch_of_its_own_which_all_its_segments_say(tmp_path: Path) -> None:
    with closing(Recorder(tmp_path, header(), segment_bytes=100)) as first:
        for position in range(9):
            first.write((event(position),), answer(position))
            first.flush()
    assert first.epoch == 0 and len(epochs(tmp_path)) > 2
    second = Recorder(tmp_path, RecordEnd(ticks=9, events=9))
    second.close()
    third = Recorder(tmp_path, RecordEnd(ticks=9, events=9))
    third.close()
    begun = second.epoch
    assert third.epoch == begun + 1
    assert epochs(tmp_path) == [*((number, 0) for number in range(begun)), (begun, begun), (begun + 1, begun + 1)]
    assert positions(tmp_path) == list(range(9))


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("full", [False, True], ids=["appends", "begins a segment"])
def test_where_there_are_no_locks_nothing_is_written_behind_a_higher_epoch(
    tmp_path: Path, no_locks: None, full: bool
) -> None:
    old = Recorder(tmp_path, header(), segment_bytes=1 if full else 1 << 20)
    old.write((event(0),), answer(0))
    old.flush()
    new = Recorder(tmp_path, RecordEnd(ticks=1, events=1))
    assert new.epoch > old.epoch
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RecordHeld, match=f"a process of a higher epoch than {old.epoch} writes this schedule record"):
        old.write((event(1),), answer(1))
        old.flush()
    old.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    new.write((event(1),), answer(1))
    new.close()
    assert positions(tmp_path) == [0, 1]


def test_where_there_are_no_locks_an_old_writer_does_not_replace_the_index(tmp_path: Path, no_locks: None) -> None:
    old = Recorder(tmp_path, header())
    new = Recorder(tmp_path, RecordEnd(ticks=0, events=0))
    with pytest.raises(RecordHeld, match="a process of a higher epoch than 0"):
        old.close()
    new.close()
    index = load_index(tmp_path)
    assert index is not None and len(index.seals) == 2
