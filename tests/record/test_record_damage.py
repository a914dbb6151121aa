"""What a record lacks is found out before anything is done with the rest: segments, bytes, first events, the directory
itself."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from record_samples import answer, event, fill, frame_offsets, header, positions, record_run, written

from engine.commands import FinishRun, SaveCheckpoint
from engine.errors import RecordError, RunDamaged
from engine.inspect import open_record, replayed
from engine.record import RecordEnd, Recorder, read, recover, replay
from engine.record.segment_log import (
    FRAME_BYTES,
    INDEX,
    load_index,
    segment_name,
)
from tests.killed_writers import leave_open

EVERY = 25


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The record of a finished run in many segments, with snapshots."""
    record_run(tmp_path / "schedule", seed=5, snapshot_every=EVERY, segment_bytes=1000)
    assert len(segments(tmp_path / "schedule")) > 4
    return tmp_path / "schedule"


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.seg"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def refused(directory: Path, said: str) -> RecordError:
    """Both readers refuse a record; the error."""
    with pytest.raises(RecordError, match=said):
        replay(read(directory))
    with pytest.raises(RecordError, match=said) as caught:
        recover(read(directory))
    return caught.value


# segments that are gone


@pytest.mark.parametrize("gone", [1, 3])
@pytest.mark.parametrize("killed", [False, True])
def test_newest_segments_that_are_missing_are_named(run: Path, gone: int, killed: bool) -> None:
    if killed:
        leave_open(run)
    doomed = segments(run)[-gone:]
    for path in doomed:
        path.unlink()
    error = refused(run, f"{doomed[0]} is missing, but index.json lists it")
    assert error.details["path"] == str(doomed[0])


def test_a_record_without_any_of_its_segments_says_which(run: Path) -> None:
    for path in segments(run):
        path.unlink()
    refused(run, "00000000.seg is missing, but index.json lists it")


def test_who_goes_on_with_less_may_do_without_the_newest_segments(run: Path) -> None:
    *kept, gone = segments(run)
    gone.unlink()
    record = read(run, missing_end=True)
    recovered = recover(record)
    assert recovered.events > 0 and recovered.torn is None
    recorder = Recorder(run, RecordEnd(ticks=recovered.ticks, events=recovered.events))
    recorder.write((event(recovered.events),), answer(recovered.events))
    recorder.close()
    assert segments(run) == [*kept, gone], "the new segment has the place of the one that was lost"
    assert positions(run) == list(range(recovered.events + 1))


def test_an_index_that_is_missing_or_damaged_is_named(run: Path) -> None:
    whole = (run / INDEX).read_text()
    (run / INDEX).unlink()
    with pytest.raises(RunDamaged, match=r"index\.json is missing"):
        recover(read(run))
    with pytest.raises(RunDamaged, match=r"index\.json is missing"):
        open_record(run)
    for damaged in ("", "[]", "{}", whole[:-9], whole.replace('"first": 0', '"first": 7'), "[" * 100_000):
        (run / INDEX).write_text(damaged)
        refused(run, r"index\.json cannot be used")
    said = json.loads(whole)
    (run / INDEX).write_text(json.dumps({**said, "format": 2}))
    refused(run, "format is 2, but this engine reads 1")


def test_the_index_says_how_long_closed_segments_are(run: Path) -> None:
    index = load_index(run)
    assert index is not None and len(index.seals) == len(segments(run))
    for path, seal in zip(segments(run), index.seals, strict=True):
        assert seal == (path.stat().st_size, crc32(path.read_bytes()))
    leave_open(run)
    recovered = recover(read(run))
    recorder = Recorder(run, RecordEnd(ticks=recovered.ticks, events=recovered.events))
    again = load_index(run)
    assert again is not None and again.seals == [*index.seals, None]
    recorder.close()


# bytes that are not what was written


@pytest.mark.parametrize("number", [0, 1, 3])
def test_damage_before_the_newest_snapshot_is_refused_with_file_and_offset(run: Path, number: int) -> None:
    place = next(read(run).snapshots())
    assert number < place.segment
    path = run / segment_name(number)
    at = frame_offsets(path.read_bytes())[-1]
    flip(path, at + FRAME_BYTES + 3)
    error = refused(run, "checksum does not match")
    assert (error.details["path"], error.details["offset"]) == (str(path), at)


def test_a_frame_that_is_cut_out_of_an_older_segment_is_refused(run: Path) -> None:
    path = segments(run)[1]
    at = frame_offsets(path.read_bytes())[-1]
    os.truncate(path, at)
    error = refused(run, "the segment ends here, but it was closed after")
    assert (error.details["path"], error.details["offset"]) == (str(path), at)


def test_older_segments_are_checked_without_an_entry_of_their_own_too(run: Path) -> None:
    """Frame by frame, where nobody has said what the whole file must be."""
    record = read(run)
    place = next(record.snapshots())
    sizes = [path.stat().st_size for path in segments(run)[: place.segment]]
    assert record.verify(place) == sum(sizes)
    (run / INDEX).unlink()
    assert read(run).verify(place) == sum(sizes)


@pytest.mark.parametrize("how", ["a flipped bit", "a flipped length", "no last frame", "half of it", "one more"])
def test_the_end_of_a_finished_record_is_never_taken_for_a_torn_one(run: Path, how: str) -> None:
    path = segments(run)[-1]
    at = frame_offsets(path.read_bytes())[-1]
    if how == "a flipped bit":
        flip(path, path.stat().st_size - 1)
    elif how == "a flipped length":
        flip(path, at + 1)
    elif how == "one more":
        path.write_bytes(path.read_bytes() + path.read_bytes()[at:])
    else:
        os.truncate(path, at if how == "no last frame" else at + 9)
    with pytest.raises(RecordError, match=r"closed|expected tick") as caught:
        replayed(run)
    assert caught.value.details["path"] == str(path)


def test_a_record_is_closed_with_the_event_that_finishes_the_run(tmp_path: Path) -> None:
    """Whatever becomes of its writer after that."""
    recorder = Recorder(tmp_path, header())
    fill(recorder, 3)
    recorder.write((event(3),), (FinishRun(outcome="finished", reason="all", cause=3),))
    recorder.flush()
    recorder.flush()
    (path,) = segments(tmp_path)
    index = load_index(tmp_path)
    assert index is not None and index.seals == [(path.stat().st_size, crc32(path.read_bytes()))]
    with pytest.raises(RecordError, match="the schedule record is closed"):
        recorder.write((event(4),), ())
    recorder.close()


@pytest.mark.parametrize("place", [-1, FRAME_BYTES + 2, 9, 5, 1])
def test_a_whole_frame_at_the_end_is_damaged_and_not_torn(tmp_path: Path, place: int) -> None:
    """Its payload, checksums or length: all its bytes are there."""
    path = written(tmp_path, 9)
    at = frame_offsets(path.read_bytes())[-1]
    flip(path, path.stat().st_size - 1 if place < 0 else at + place)
    with pytest.raises(RecordError, match="checksum does not match") as caught:
        list(read(tmp_path).frames())
    assert caught.value.details["offset"] == at


# a directory that goes while it is written


def test_a_directory_that_is_deleted_is_noticed_at_the_next_event(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run" / "schedule", header())
    fill(recorder, 3)
    shutil.rmtree(tmp_path / "run")
    recorder.write((event(3),), ())
    with pytest.raises(RunDamaged, match=f"{tmp_path}/run/schedule was deleted or moved during the run"):
        recorder.flush()
    with pytest.raises(RunDamaged, match="was deleted or moved"):
        recorder.write((event(4),), ())
    recorder.close()


def order_checkpoint(recorder: Recorder) -> None:
    recorder.write((event(3),), (SaveCheckpoint(steps=1, number=0, cause=3),))


def begin_segment(recorder: Recorder) -> None:
    recorder.log.segment_bytes = 1
    recorder.write((event(3),), ())


@pytest.mark.parametrize("act", [order_checkpoint, begin_segment, lambda recorder: recorder.snapshot([None])])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_moved_directory_is_noticed_at_a_checkpoint_a_snapshot_or_a_segment(
    tmp_path: Path, act: Callable[[Recorder], None], replaced: bool
) -> None:
    recorder = Recorder(tmp_path / "run", header())
    fill(recorder, 3)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if replaced:
        shutil.copytree(tmp_path / "elsewhere", tmp_path / "run")
    with pytest.raises(RunDamaged, match=f"{tmp_path}/run was deleted or moved"):
        act(recorder)
        recorder.flush()


def test_the_record_is_on_the_disk_before_a_checkpoint_is_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave a checkpoint of which the record knows nothing."""
    recorder = Recorder(tmp_path, header())
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    fill(recorder, 3)
    assert not synced
    order_checkpoint(recorder)
    recorder.flush()
    assert synced == [(tmp_path / "00000000.seg").stat().st_size]
    recorder.close()


# what is no file


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "kind"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a directory"), (make_socket, "a socket")]
)
@pytest.mark.parametrize("name", ["00000000.seg", "00000002.seg", INDEX])
def test_what_is_no_regular_file_is_refused_by_name(
    run: Path, make: Callable[[Path], None], kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    (run / name).unlink()
    make(run / name)
    refused(run, f"{run / name} is {kind}, but must be a regular file")


def test_a_link_to_a_segment_is_a_segment(run: Path) -> None:
    first = segments(run)[0]
    first.rename(run / "elsewhere")
    first.symlink_to(run / "elsewhere")
    assert sum(1 for _ in read(run).events()) > EVERY
