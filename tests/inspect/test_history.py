"""The history of a run, as timeline, report and explanation use it: compared with the scheduler's own books."""

import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, EngineError, RecordError
from engine.events import RunResumed
from engine.inspect import history_cache, history_reader
from engine.inspect.history import FATES, NO_EVENT, RUNNING, History, IdleSpan
from engine.inspect.history_builder import NO_WAITS
from engine.inspect.history_cache import SOURCES, HistoryCache
from engine.inspect.history_reader import read_history
from engine.inspect.timeline import timeline_of
from engine.record import Header, Record, Recorder, Tick, read, replay, snapshots
from engine.record.recorder import MemoryRecorder
from engine.record.replayer import build_scheduler
from engine.record.snapshots import snapshot
from engine.simulation.world import Faults
from engine.states.limits import Limits
from engine.states.machine import Phase
from engine.states.state import State
from tests.core.added_states import GATING, PROVING
from tests.inspect.recorded_worlds import LIMITS, faulty_record, recorded
from tests.oracle import worlds
from tests.oracle.worlds import RunReport

WORLDS = [
    *((worlds.calm, number) for number in (1, 4)),
    *((worlds.preset, number) for number in (2, 11)),
    *((worlds.rough, number) for number in (0, 3, 21)),
    *((worlds.asked, number) for number in (2, 5)),
    *((worlds.cut, number) for number in (12, 17, 34)),
    *((worlds.wild, number) for number in (2, 4, 6, 7)),
]
"""Runs with every fault, request, crash and branch."""


def record_of(family: Any, number: int) -> Record:
    report = RunReport()
    family(number, report)
    recorder = MemoryRecorder(Header(run="world", limits=report.limits.to_plain(), policies=report.policies))
    for tick in report.ticks:
        recorder.write(tick.events, tick.commands)
    recorder.close()
    return read(recorder)


def state_after(record: Record) -> State:
    scheduler = build_scheduler(record.header)
    replay(record, build=lambda header: scheduler)
    return scheduler.state


@pytest.fixture(scope="module")
def faulty() -> History:
    return read_history(faulty_record())


@pytest.mark.parametrize(("family", "number"), WORLDS)
def test_a_history_agrees_with_the_schedulers_books(family: Any, number: int) -> None:
    record = record_of(family, number)
    history, state = read_history(record), state_after(record)
    phases = Counter(state.groups.phase_of(group.state) for group in history.groups)
    assert {phase: phases[phase] for phase in Phase} == {phase: state.groups.ledger.count[phase] for phase in Phase}
    assert sum(history.tokens.values()) == sum(attempt.sampled for attempt in history.attempts)
    assert set(history.tokens) == set(FATES) and min(history.tokens.values()) >= 0
    consumed = {group.group: group.tokens for group in history.groups if group.state == "consumed"}
    assert history.tokens["trained"] == sum(consumed.values())
    assert all(value.start <= value.end for value in history.intervals())
    slices = [one for one in timeline_of(history).slices if one.kind in ("generating", "measuring")]
    tracks = sorted((one.track, one.value.incarnation, one.start, one.end) for one in slices)
    assert all(a[3] <= b[2] for a, b in pairwise(tracks) if a[:2] == b[:2]), "two groups overlap in one slot"
    assert len(history.rows) >= len([step for step in history.trained if step.finished_at >= 0])


def states_at(history: History, at: float) -> dict[tuple[str, int], str]:
    """The state of every group and train step at a time, where it is an attempt, a wait or a phase."""
    running: list[Any] = [("group", one.group, "running", one) for one in history.attempts]
    waits = [("group", one.group, one.state, one) for one in history.waits]
    phases = [("step", one.step, one.name, one) for step in history.steps for one in step.phases]
    found = [((kind, id), state) for kind, id, state, one in running + waits + phases if one.start <= at < one.end]
    assert len(dict(found)) == len(found), f"a group or step is in two states at {at} s: {found}"
    return dict(found)


@pytest.mark.parametrize(("family", "number"), WORLDS)
def test_between_two_ticks_a_history_has_the_states_of_the_books(family: Any, number: int) -> None:
    record = record_of(family, number)
    history, scheduler = read_history(record), build_scheduler(record.header)
    state, before = scheduler.state, (0.0, dict[tuple[str, int], str]())

    def watch(tick: Tick) -> None:
        nonlocal before
        at, states = before
        if at < tick.at and not isinstance(tick.events[0], RunResumed):  # nothing is known of the time before a resume
            assert states_at(history, (at + tick.at) / 2) == states
        states = {("step", step.id): step.state for step in state.training.steps.values() if step.state != "waiting"}
        for group in state.groups.live.values():
            running = state.groups.phase_of(group.state) is Phase.RUNNING
            if group.state not in NO_WAITS:
                states["group", group.id] = "running" if running else group.state
        before = tick.at, states

    replay(record, build=lambda header: scheduler, watch=watch)


def with_snapshots(record: Record, directory: Path, every: int = 25, *, ended: bool = False) -> Record:
    """The record with a snapshot after so many ticks. `ended`: with one at its end, as of a run that ended in order."""
    scheduler, recorder = build_scheduler(record.header), Recorder(directory, record.header)

    def write(tick: Tick) -> None:
        recorder.write(tick.events, tick.commands)
        if (tick.number + 1) % every == 0:
            recorder.snapshot(snapshot(scheduler))

    replay(record, build=lambda header: scheduler, watch=write)
    if ended:
        recorder.snapshot(snapshot(scheduler))
    recorder.close()
    return read(directory)


def comparable(history: History) -> History:
    """The history with rounded sums of idle time instead of its spans, which end at each snapshot."""
    causes = {"busy": history.busy_s, **history.idle_s, **history.trainer_s}
    rounded = {name: round(seconds, 6) for name, seconds in causes.items()}
    sums = IdleSpan(0.0, history.end, 0.0, tuple(sorted(one for one in rounded.items() if one[1])), "")
    return replace(history, idle=(sums,))


@pytest.mark.parametrize(("family", "number"), WORLDS)
def test_stretches_of_a_record_give_the_history_of_the_whole(family: Any, number: int, tmp_path: Path) -> None:
    record = with_snapshots(record_of(family, number), tmp_path / "schedule")
    whole = comparable(read_history(record, stretch_events=10**9))
    assert comparable(read_history(record, stretch_events=25)) == whole, "from a replay"
    assert comparable(read_history(record, stretch_events=25)) == whole, "from the cache"


@pytest.fixture
def long(tmp_path: Path) -> Record:
    return with_snapshots(faulty_record(), tmp_path / "schedule")


def replayed_stretches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stretches that this process replays from now on; no other does."""
    replayed = []
    original = history_reader.replay_stretch
    monkeypatch.setattr(history_reader, "replay_stretch", lambda *a: replayed.append(a[1]) or original(*a))
    monkeypatch.setattr(history_reader, "MAX_PROCESSES", 1)
    return replayed


def test_only_what_is_new_is_replayed(long: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_history(long, 25)
    replayed = replayed_stretches(monkeypatch)
    assert read_history(tmp_path, 25) == before
    assert [stretch.end for stretch in replayed] == [None], "the end of the record may grow"


def test_all_of_a_run_that_ended_in_order_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = with_snapshots(faulty_record(), tmp_path / "schedule", ended=True)
    before, end = read_history(record, 25), next(record.snapshots())
    assert comparable(before) == comparable(read_history(record, 10**9))
    replayed = replayed_stretches(monkeypatch)
    assert read_history(record, 25) == before
    assert [(stretch.begin, stretch.end) for stretch in replayed] == [(end, None)], "without events"


def test_a_short_run_that_ended_in_order_keeps_no_cache(tmp_path: Path) -> None:
    read_history(with_snapshots(faulty_record(), tmp_path / "schedule", 10**9, ended=True))
    assert not (tmp_path / "history-cache").exists()


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"", lambda data: data[:40] + b"?" * 9 + data[49:]]
)
def test_a_damaged_file_of_the_cache_is_written_again(long: Record, damage: Any, tmp_path: Path) -> None:
    before = read_history(long, 25)
    files = {path: path.read_bytes() for path in (tmp_path / "history-cache").iterdir()}
    assert files
    for path, data in files.items():
        path.write_bytes(damage(data))
    assert read_history(long, 25) == before
    assert {path: path.read_bytes() for path in files} == files


def test_a_cache_of_other_source_code_is_replaced_as_one_that_is_missing(
    long: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_history(long, 25)
    monkeypatch.setattr(history_cache, "_sources", lambda: b"other code")
    stretches = history_reader._stretches(long, 25)
    assert not any(map(HistoryCache(long).holds, stretches)), "they are replayed at once"
    assert read_history(long, 25) == before
    assert all(map(HistoryCache(long).holds, stretches[:-1]))


def test_a_cache_of_another_snapshot_at_the_same_place_is_not_used(
    long: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_history(long, 25)
    last = history_reader._stretches(long, 25)[-2]
    original = Record.snapshot_bytes
    monkeypatch.setattr(
        Record, "snapshot_bytes", lambda self, place: original(self, place) + b"?" * (place == last.end)
    )
    replayed = replayed_stretches(monkeypatch)
    read_history(long, 25)
    assert [stretch.end for stretch in replayed] == [last.end, None]


def test_the_cache_depends_on_all_code_that_replays() -> None:
    code = "import sys, engine.inspect.history_reader; print(*(m for m in sys.modules if m.startswith('engine.')))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    known = {name.removesuffix(".py") for name in SOURCES}
    assert {name.split(".")[1] for name in modules} - known == {"version"}


def test_a_cache_that_cannot_be_written_or_read_is_passed_over(long: Record, tmp_path: Path) -> None:
    whole = comparable(read_history(long, 10**9))
    (tmp_path / "history-cache").write_text("a file")
    assert comparable(read_history(long, 25)) == whole


KILLED_WRITER = """
import os, signal, sys, zlib
from engine.inspect.history_reader import cache_history
zlib.compress = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
cache_history(sys.argv[1], 25)
"""


def test_what_a_killed_writer_left_is_removed(long: Record, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], check=False)
    (unfinished,) = (tmp_path / "history-cache").iterdir()
    others = (tmp_path / "history-cache" / "others.1").write_bytes(b"of a process that lives")
    before = read_history(long, 25)
    assert not unfinished.exists() and others
    assert {path.suffix for path in (tmp_path / "history-cache").iterdir()} == {".z", ".1"}
    assert read_history(long, 25) == before


KILLED = """
import os, signal, sys
from engine.inspect import history_reader
reader, original, ended = os.getpid(), history_reader.replay_stretch, []
def killed(record, stretch):
    if os.getpid() != reader and stretch.begin is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    ended.append(stretch)
    return original(record, stretch)
history_reader.replay_stretch = killed
os.sched_getaffinity = lambda _: range(4)
history_reader.read_history(sys.argv[1], 25)
print(len(ended))
"""


def test_stretches_of_a_process_that_was_killed_are_replayed_by_the_reader(long: Record, tmp_path: Path) -> None:
    stretches = history_reader._stretches(long, 25)
    code = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(code, capture_output=True, text=True, check=True)
    assert ended.stderr == "" and len(stretches) - 1 <= int(ended.stdout) <= len(stretches)


def test_a_snapshot_of_another_engine_is_passed_over(long: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_history(long, 10**9)
    monkeypatch.setattr(snapshots, "declarations", lambda: [["State", "another field"]])
    assert comparable(read_history(long, 25)) == comparable(whole)


def test_a_record_in_memory_keeps_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read_history(faulty_record(), 25)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "limits",
    [LIMITS, Limits(train_batch_size=8, max_staleness_steps=0, max_concurrent_groups=8, max_steps=4)],
    ids=["asynchronous", "synchronous"],
)
def test_busy_and_idle_add_up_to_slots_and_time(limits: Limits) -> None:
    history = read_history(recorded(limits, seed=5, faults=Faults(die=0.02)))
    slot_s = sum(
        history.slots[life.index] * (life.end - life.up)
        for life in history.lives
        if life.kind == "replica" and life.up is not None
    )
    assert history.busy_s + sum(history.idle_s.values()) == pytest.approx(slot_s)
    assert sum(history.trainer_s.values()) == pytest.approx(history.end)
    assert all(before.end == after.start for before, after in pairwise(history.idle))
    assert len(history.idle) < 0.75 * history.ticks, "ticks with the same causes of idle time are one span"


def test_attempts_say_how_they_ended(faulty: History) -> None:
    ends = faulty.ends()
    assert ends["generated", ""] and ends["aborted", "sync"] and ends["failed", ""] and ends["lost", ""]
    lost = [attempt for attempt in faulty.attempts if attempt.outcome == "lost"]
    died = {(life.index, life.incarnation): life.end for life in faulty.lives if life.kind == "replica"}
    assert all(attempt.end == died[attempt.replica, attempt.incarnation] for attempt in lost)
    tries = defaultdict(list)
    for attempt in faulty.attempts:
        tries[attempt.group].append(attempt.start)
    assert all(len(starts) == faulty.groups[group].attempts for group, starts in tries.items())


def test_an_abort_names_the_event_that_ordered_it(faulty: History) -> None:
    staged = {sync.ended_by: sync for sync in faulty.syncs if sync.name == "staging" and sync.outcome == "done"}
    aborts = [attempt for attempt in faulty.attempts if attempt.reason == "sync"]
    assert aborts and all(staged[attempt.ordered_by].replica == attempt.replica for attempt in aborts)


def test_links_lead_from_a_cause_to_its_effect(faulty: History) -> None:
    links = list(faulty.links())
    assert all(cause.end <= effect.start for cause, effect in links)
    kinds = {(type(cause).__name__, type(effect).__name__) for cause, effect in links}
    assert kinds >= {
        ("GenerationAttempt", "GenerationAttempt"), ("GenerationAttempt", "StepPhase"), ("StepPhase", "SyncPhase"),
        ("GenerationAttempt", "GroupWait"),
    }  # fmt: skip


def test_steps_have_their_phases_and_batches(faulty: History) -> None:
    assert [step.step for step in faulty.trained] == list(range(6))
    for step in faulty.trained:
        phases = [phase.name for phase in step.phases]
        assert phases[0] == "collecting" and phases[-1] == "publishing" and "training" in phases
        assert all(a.end == b.start for a, b in pairwise(step.phases))
        assert [faulty.groups[group].step for group in step.groups] == [step.step] * len(step.groups)
        assert len(step.staleness) == len(step.groups) and max(step.staleness) <= LIMITS.max_staleness_steps
    waits = [wait for wait in faulty.waits if wait.outcome == "batched"]
    assert {wait.group for wait in waits} == {group for step in faulty.trained for group in step.groups}


def test_a_running_run_is_read_to_its_present_end() -> None:
    history = read_history(recorded(seed=1, steps=3))
    assert history.outcome == RUNNING
    running = [attempt for attempt in history.attempts if attempt.outcome == RUNNING]
    assert running and all(a.end == history.end and a.ended_by == NO_EVENT for a in running)
    assert [row["step"] for row in history.rows] == [0, 1, 2] and history.trained[3].phases[-1].outcome == RUNNING


def test_a_step_whose_batch_is_inspected_has_its_groups() -> None:
    limits = replace(LIMITS, added_states=(GATING, PROVING))

    def reached(state: State) -> bool:
        return state.now > 300 and any(step.state == "gating" for step in state.training.steps.values())

    history = read_history(recorded(limits, seed=1, state_s=1000.0, until=reached))
    step = history.steps[-1]
    assert (step.phases[-1].name, step.phases[-1].outcome) == ("gating", RUNNING)
    assert (history.idle[-1].trainer, history.idle[-1].end) == ("inspecting", history.end)
    assert len(step.groups) == len(step.staleness) == LIMITS.train_batch_size


def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        read_history(tmp_path / "none")
    (tmp_path / "schedule").mkdir()
    with pytest.raises(RecordError, match="has no schedule record"):
        read_history(tmp_path)
    (tmp_path / "schedule" / "00000000.seg").write_bytes(b"a photograph")
    with pytest.raises(RecordError, match=r"00000000\.seg"):
        read_history(tmp_path)


def test_a_record_of_other_decisions_is_refused(tmp_path: Path) -> None:
    record = recorded(seed=1)
    other = next(tick.number for tick in record.ticks() if tick.number > 9 and tick.commands)
    recorder = Recorder(tmp_path / "schedule", record.header)
    for tick in record.ticks():
        recorder.write(tick.events, tick.commands[tick.number == other :])
    recorder.close()
    with pytest.raises(EngineError, match="the record cannot be shown: diverged at tick"):
        read_history(tmp_path)
