"""Replay: identical where the scheduler decides the same, and the first difference with both sides where it does
not."""

from pathlib import Path

import pytest
from record_samples import FAULTS, LIMITS, Echo, event, fill, header, record_run

from engine.commands import SetTimer, StartGroup
from engine.errors import InvariantViolated, RecordError
from engine.record import MemoryRecorder, read, replay
from engine.simulation.world import Faults
from engine.states.limits import Limits
from tests.killed_writers import leave_open

COUNT = 9


@pytest.fixture(scope="module")
def echoed() -> MemoryRecorder:
    recorder = MemoryRecorder(header())
    fill(recorder, COUNT)
    return recorder


def test_the_same_answers_are_identical(echoed: MemoryRecorder) -> None:
    report = replay(read(echoed), build=lambda _: Echo())
    assert report.identical and (report.events, report.commands) == (COUNT, 9)
    assert str(report) == "identical: 9 events in 9 ticks, 9 commands"


def test_until_stops_after_its_event(echoed: MemoryRecorder) -> None:
    seen: list[int] = []
    report = replay(read(echoed), until=4, build=lambda _: Echo(), watch=lambda frame: seen.append(frame.first))
    assert report.events == 5 and seen == [0, 1, 2, 3, 4]
    assert replay(read(echoed), until=100, build=lambda _: Echo()).events == COUNT


def test_another_command_is_shown_with_both_sides(echoed: MemoryRecorder) -> None:
    got = (
        StartGroup(group=5, attempt=1, replica=0, life=1, cause=5),
        StartGroup(group=6, attempt=1, replica=1, life=1, cause=5),
    )
    report = replay(read(echoed), build=lambda _: Echo(5, commands=got))
    divergence = report.divergence
    assert divergence is not None and divergence.index == 5 and report.events == 5
    assert divergence.tick.events == (event(5),) and divergence.got == got and len(divergence.tick.commands) == 2
    text = str(report)
    assert "diverged at tick 5, t=0.500 s" in text and "the first 1 commands are identical" in text
    assert "group=6, attempt=1, replica=0" in text and "group=6, attempt=1, replica=1" in text


@pytest.mark.parametrize("error", [InvariantViolated("law 1: a group was lost"), KeyError(3)])
def test_a_scheduler_that_raises_has_diverged(echoed: MemoryRecorder, error: Exception) -> None:
    report = replay(read(echoed), build=lambda _: Echo(2, raised=error))
    assert report.divergence is not None and report.divergence.index == 2
    assert f"got: {type(error).__name__}" in str(report)


def test_a_command_under_a_wrong_cause_has_diverged(echoed: MemoryRecorder) -> None:
    wrong = (StartGroup(group=5, attempt=1, replica=0, life=1, cause=4),)
    report = replay(read(echoed), build=lambda _: Echo(5, commands=wrong))
    assert report.divergence is not None and "cause=4" in str(report)


def test_an_int_where_a_float_belongs_is_the_same_answer() -> None:
    """Limits may be ints; the record gives them back as floats."""
    timer = (SetTimer(timer=1, name="deadline", delay_s=5, cause=0),)
    recorder = MemoryRecorder(header())
    recorder.write((event(0),), timer)
    report = replay(read(recorder), build=lambda _: Echo(0, commands=timer))
    assert report.identical, str(report)


def test_rejected_events_are_skipped_and_reported() -> None:
    recorder = MemoryRecorder(header())
    fill(recorder, 3)
    recorder.reject((event(3),), "InvariantViolated: law 2")
    recorder.write((event(3),), Echo().tick((event(3),)))
    report = replay(read(recorder), build=lambda _: Echo())
    assert report.identical and report.events == 4
    assert [r.reason for r in report.rejected] == ["InvariantViolated: law 2"]
    assert "skipped: tick 3 was rejected at event 3" in str(report)


def test_a_torn_end_is_reported(tmp_path: Path) -> None:
    record_run(tmp_path)
    leave_open(tmp_path)
    path = tmp_path / "00000000.seg"
    path.write_bytes(path.read_bytes()[:-3])
    report = replay(read(tmp_path))
    assert report.identical and report.torn is not None
    assert str(report).startswith("cut: ") and "\nidentical: " in str(report)


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": {}},
        {"limits": {**LIMITS.to_plain(), "unknown": 1}},
        {"limits": {**LIMITS.to_plain(), "train_batch_size": "8"}},
        {"limits": {**LIMITS.to_plain(), "max_concurrent_groups": 1000}},
        {"limits": LIMITS.to_plain(), "policies": {"filter": "nobody-registered-this"}},
    ],
)
def test_a_header_that_builds_no_scheduler_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RecordError, match="at byte 24: cannot build a scheduler from this header"):
        replay(read(MemoryRecorder(header(**changes))))


@pytest.mark.parametrize("sync_mode", ["keep", "abort", "wait"])
@pytest.mark.parametrize("faults", [Faults(), FAULTS], ids=["calm", "faulty"])
def test_a_run_replays_identically(sync_mode: str, faults: Faults) -> None:
    limits = Limits.from_plain({**LIMITS.to_plain(), "sync_mode": sync_mode})
    for seed in range(3):
        recorder = record_run(seed=seed, limits=limits, faults=faults)
        report = replay(read(recorder))
        assert report.identical, str(report)
        assert report.events == recorder.next_event > 60 and report.commands > 60


def test_a_changed_record_diverges() -> None:
    whole = record_run()
    ticks = list(read(whole).ticks())
    changed = next(tick.number for tick in ticks if tick.number >= 20 and tick.commands)
    other = MemoryRecorder(read(whole).header)
    for tick in ticks:
        other.write(tick.events, tick.commands[tick.number == changed :])
    report = replay(read(other))
    assert report.divergence is not None and report.divergence.tick.number == changed
