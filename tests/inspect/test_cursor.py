"""The cursor of the debugger moves as a plain replay of the record does, forward and backward."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.commands import StartGroup
from engine.errors import ConfigError, EngineError
from engine.inspect import open_record
from engine.inspect.breakpoints import TickContents, parse_breakpoint
from engine.inspect.cursor import Blocks, Change, Cursor
from engine.inspect.story import summarize
from engine.policies import PolicySet
from engine.record import Header, Record, Recorder, Tick, replay
from engine.record.replayer import build_scheduler
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits

LIMITS = Limits(
    train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=8, sync_mode="abort", max_steps=4
)  # fmt: skip


def record_world(directory: Path, snapshot_every: int, tick_size: int) -> Path:
    policies = PolicySet.from_names({})
    recorder = Recorder(
        directory / "schedule", Header(run="r", limits=LIMITS.to_plain(), policies=dict(policies.names))
    )
    setting = Setting(limits=LIMITS, seed=2, faults=Faults(die=0.02, fail_group=0.1), tick_size=tick_size)
    World(setting, policies, recorder, snapshot_every=snapshot_every).run()
    recorder.close()
    return directory


@dataclass(repr=False)
class Replayed:
    """Each tick of a plain replay."""

    ticks: list[Tick]
    summaries: list[dict[str, Any]]
    changes: list[tuple[Change, ...]]

    @staticmethod
    def of(record: Record) -> "Replayed":
        pending: list[Change] = []

        def observe(machine: str, changed: Any, source: str, trigger: str) -> None:
            pending.append(Change(machine, changed.id, source, trigger, changed.state))

        scheduler = build_scheduler(record.header, observe)
        pending.clear()
        found = Replayed([], [], [])

        def watch(tick: Tick) -> None:
            found.ticks.append(tick)
            found.summaries.append(summarize(scheduler.state))
            found.changes.append(tuple(pending))
            pending.clear()

        assert replay(record, build=lambda _: scheduler, watch=watch).identical
        return found

    def matches(self, text: str) -> list[int]:
        found, wanted = [], parse_breakpoint(text)
        for tick, changes in zip(self.ticks, self.changes, strict=True):
            contents = TickContents.none()
            contents.add(tick, [change.target for change in changes])
            found += [tick.number] if wanted.holds(contents) else []
        return found


@pytest.fixture(scope="module", params=[(0, 1), (50, 0)], ids=["no snapshots", "snapshots"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Replayed]:
    directory = record_world(tmp_path_factory.mktemp("run"), *request.param)
    return directory, Replayed.of(open_record(directory))


def require_same(cursor: Cursor, plain: Replayed, tick: int) -> None:
    assert cursor.tick.number == tick and cursor.tick.events == plain.ticks[tick].events
    assert cursor.tick.commands == plain.ticks[tick].commands
    assert cursor.tick_changes == plain.changes[tick]
    assert summarize(cursor.state) == plain.summaries[tick]


BREAKPOINTS = ("group=7", "group>=20", "state=aborted", "staleness>=2", "command=TrainStep", "event=ProcessLost",
               "replica=1", "step=3", "version=2", "state=starting", "staleness>9")  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from(BREAKPOINTS), st.booleans()), min_size=1, max_size=4
    ),
    block_events=st.sampled_from([5, 64, 4096]),
    most=st.sampled_from([0, 3, 256]),
)
def test_every_move_shows_what_a_plain_replay_shows(
    runs: tuple[Path, Replayed], moves: list[tuple[int, str, bool]], block_events: int, most: int
) -> None:
    directory, plain = runs
    cursor = Cursor(lambda: open_record(directory), Blocks(block_events, most))
    assert len(cursor) == len(plain.ticks)
    for number, text, forward in moves:
        tick = number % len(cursor)
        cursor.seek(tick)
        require_same(cursor, plain, tick)
        matches = plain.matches(text)
        beyond = [one for one in matches if (one > tick if forward else one < tick)]
        wanted = (beyond[0] if forward else beyond[-1]) if beyond else tick
        found = cursor.twin().find(parse_breakpoint(text), tick + 1 if forward else tick - 1, forward=forward)
        assert found == (wanted if beyond else None)
        cursor.seek(wanted)
        require_same(cursor, plain, wanted)


def test_a_moment_is_found_by_event_and_time(runs: tuple[Path, Replayed]) -> None:
    directory, plain = runs
    cursor = Cursor(lambda: open_record(directory))
    last = plain.ticks[-1]
    for tick in (plain.ticks[0], plain.ticks[len(plain.ticks) // 2], last):
        cursor.seek_event(tick.last)
        require_same(cursor, plain, tick.number)
        cursor.seek_time(tick.at)
        assert cursor.tick.at == tick.at and (tick is last or plain.ticks[cursor.tick.number + 1].at > tick.at)
    for move in (
        lambda: cursor.seek_event(last.last + 1), lambda: cursor.seek_event(-1), lambda: cursor.seek(len(cursor)),
        lambda: cursor.seek(-1), lambda: cursor.seek_time(last.at + 1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"does not exist|must not be negative|is not in the run"):
            move()


def test_changes_between_two_moments_name_figures_and_groups(runs: tuple[Path, Replayed]) -> None:
    directory, plain = runs
    cursor = Cursor(lambda: open_record(directory))
    cursor.seek(5)
    assert cursor.changes(9, 9) == []
    found = cursor.changes(0, len(cursor) - 1)
    assert cursor.tick.number == 5
    trained = plain.summaries[-1]["steps"]["trained"]
    assert f"steps trained: 0 → {trained}" in found and any(line.startswith("outcome: none → ") for line in found)
    started, change = next(
        (tick, one)
        for tick, changes in enumerate(plain.changes)
        for one in changes
        if (one.machine, one.trigger) == ("group", "start")
    )
    assert f"group {change.id}: queued → generating" in cursor.changes(started - 1, started)


def test_a_growing_record_is_followed(tmp_path: Path, runs: tuple[Path, Replayed]) -> None:
    directory, plain = runs
    recorder = Recorder(tmp_path / "schedule", open_record(directory).header)
    half = len(plain.ticks) // 2
    for tick in plain.ticks[:half]:
        recorder.write(tick.events, tick.commands)
    recorder.flush()
    cursor = Cursor(lambda: open_record(tmp_path), Blocks(16))
    cursor.seek(half - 1)
    end = parse_breakpoint("command=FinishRun")
    assert cursor.grow() == 0 and cursor.twin().find(end, half - 1) is None
    for tick in plain.ticks[half:]:
        recorder.write(tick.events, tick.commands)
    recorder.flush()
    assert cursor.grow() == len(plain.ticks) - half
    assert cursor.twin().find(end, half) == len(plain.ticks) - 1
    cursor.seek(len(plain.ticks) - 1)
    require_same(cursor, plain, len(plain.ticks) - 1)
    recorder.close()


def test_the_state_after_a_diverging_decision_is_unknown(
    runs: tuple[Path, Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, plain = runs
    cursor = Cursor(lambda: open_record(directory))
    monkeypatch.setattr("engine.scheduling.groups._admit_groups", lambda *given: None)
    first = next(tick.number for tick in plain.ticks if any(type(one) is StartGroup for one in tick.commands))
    with pytest.raises(EngineError, match=f"the state at tick {first} is unknown"):
        cursor.seek(first)
    cursor.seek(first - 1)
    assert cursor.tick.number == first - 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("group", "must be NAME=VALUE; for example group=17"),
        ("grup=3", "has an unknown name: grup; use one of group"),
        ("group=x", "must have a whole number as group"),
        ("state=abortd", "did you mean state=aborted"),
        ("command=Start", "names a command that does not exist"),
        ("event>=GroupFailed", "must be event=VALUE"),
    ],
)
def test_a_breakpoint_that_cannot_hold_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_breakpoint(text)
