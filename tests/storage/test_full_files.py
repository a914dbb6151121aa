"""What each of a run's files says when its disk is full, and that what it took before is whole."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs
from small_disk import SmallDisk, small_disk

from engine.errors import StorageFull
from engine.events import StepFailed
from engine.metrics.journal import Journal, cut_rows
from engine.record import Header, RecordEnd, Recorder, read
from engine.states.limits import Limits
from engine.storage.durable_trajectories import DurableStore, StorePolicy

HEADER = Header(run="r", limits=Limits(train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=2).to_plain())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 64) as made:
        yield made


def until_full(write: Callable[[int], object]) -> tuple[int, StorageFull]:
    """Write until nothing more is taken: how often it was, and what was said."""
    for number in range(1000):
        try:
            write(number)
        except StorageFull as full:
            return number, full
    raise AssertionError("the disk is never full")


def test_a_store_keeps_what_it_acknowledged(disk: SmallDisk) -> None:
    directory = disk.place / "trajectories"
    store = DurableStore(directory, StorePolicy(segment_bytes=8 << 10))

    def put(number: int) -> None:
        store.put(number, 1, bytes(1000))
        store.flush()

    taken, full = until_full(put)
    assert 20 < taken < 64 and str(directory) in str(full) and "No space left on device" in str(full)
    with pytest.raises(StorageFull):
        put(2000)
    assert store.get([0]) == [bytes(1000)], "what is there can be read"
    store.close()
    disk.grow(128)
    again = DurableStore(directory, fresh=False)
    assert sorted(again.attempts) == list(range(taken))
    again.put(taken, 1, b"more")
    again.close()


def test_a_record_says_so_and_goes_on_where_it_was(disk: SmallDisk) -> None:
    directory = disk.place / "schedule"
    recorder = Recorder(directory, HEADER)

    def write(number: int) -> None:
        event = StepFailed(step=0, attempt=1, reason="x" * 1000)
        structs.force_setattr(event, "id", number)
        recorder.write((event,), ())
        recorder.flush()

    taken, full = until_full(write)
    assert str(directory) in str(full) and "free space, then resume the run" in str(full)
    disk.grow(128)
    record = read(directory)
    assert len(list(record.frames())) == taken
    recorder = Recorder(directory, RecordEnd(ticks=taken, events=taken, torn=record.torn))
    write(taken)
    recorder.close()


def test_rows_of_what_the_record_does_not_know_to_have_ended_are_cut(tmp_path: Path) -> None:
    """A row is written before the record has what it is of: killed in between, it would be there twice."""
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    for row in ({"step": 0}, {"validation": 0, "steps": 0}, {"step": 1}, {"validation": 1, "steps": 1}, {"step": 2}):
        journal.write(row)
    journal.close()
    assert cut_rows(path, 2, unfinished={1}, validations={0}) == [{"step": 0}, {"validation": 0, "steps": 0}]


def test_rows_say_so_and_only_whole_ones_stay(disk: SmallDisk) -> None:
    path = disk.place / "metrics.jsonl"
    journal = Journal(path)
    taken, full = until_full(lambda step: journal.write({"step": step, "text": "x" * 1000}))
    journal.close()
    assert str(path) in str(full)
    with pytest.raises(StorageFull):
        cut_rows(path, taken)
    disk.grow(256)
    assert [row["step"] for row in cut_rows(path, taken, unfinished={3})] == [
        step for step in range(taken) if step != 3
    ]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == taken - 1
