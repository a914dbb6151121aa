"""The history of a run, as timeline, report and explanation use it: compared with the scheduler's own books."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.commands import Command
from engine.errors import ConfigError, EngineError, RecordError
from engine.events import RunResumed
from engine.inspect.history_reader import read_history
from engine.inspect.timeline import timeline_of
from engine.metrics import history_log
from engine.metrics.collector import RunMetrics
from engine.metrics.history import FATES, NO_EVENT, RUNNING, History
from engine.metrics.history_builder import NO_WAITS, HistoryBuilder
from engine.metrics.history_log import FILE, HistoryLog, RecordHistory, stretches_in
from engine.record import Header, Record, RecordEnd, Recorder, Tick, read, recover, replay, snapshots
from engine.record.files import RecordLock
from engine.record.recorder import MemoryRecorder
from engine.record.replayer import build_scheduler
from engine.runtime.driver import Driver
from engine.scheduling.scheduler import Scheduler
from engine.simulation.world import Faults
from engine.states.limits import Limits
from engine.states.machine import Phase
from engine.states.state import State
from tests.core.added_states import GATING, PROVING
from tests.inspect.recorded_worlds import LIMITS, faulty_record, record_of, recorded
from tests.oracle import worlds

WORLDS = [
    *((worlds.calm, number) for number in (1, 4)),
    *((worlds.preset, number) for number in (2, 11)),
    *((worlds.rough, number) for number in (0, 3, 21)),
    *((worlds.asked, number) for number in (2, 5)),
    *((worlds.cut, number) for number in (12, 17, 34)),
    *((worlds.wild, number) for number in (2, 4, 6, 7)),
]
"""Runs with every fault, request, crash and branch."""


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
    tracks = sorted((one.track, one.value.life, one.start, one.end) for one in slices)
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


class Rerun:
    """A run that takes the ticks of a record again and records them, with a snapshot after so many events. Its process
    can be killed between two ticks."""

    def __init__(self, record: Record, run_dir: Path, every: int) -> None:
        self.run_dir, self.every = run_dir, every
        self.alone = MemoryRecorder(record.header)
        """The same record, but with neither snapshots nor a log."""
        self._begin(build_scheduler(record.header), HistoryLog(run_dir), record.header)

    def _begin(self, scheduler: Scheduler, log: HistoryLog, end: Header | RecordEnd, events: int = 0) -> None:
        self.metrics, self.log = RunMetrics(scheduler), log
        self.recorder = Recorder(self.run_dir / "schedule", end)
        log.begin(scheduler, self.metrics, self.recorder)
        self.driver = Driver(scheduler, self, self.recorder, self, self._observe, events, self.every)
        self.driver.most_events = lambda: 1 << 20

    def kill(self) -> None:
        del self.recorder, self.driver, self.log
        recovered = recover(read(self.run_dir / "schedule"))
        log = HistoryLog(self.run_dir, recovered.events)
        self._begin(recovered.scheduler, log, recovered.end, recovered.events)

    def now(self) -> float:
        return self.at

    def execute(self, commands: Sequence[Command]) -> None: ...

    def _observe(self, tick: Tick) -> None:
        self.metrics.observe(tick)
        self.log.take(tick)

    def take(self, tick: Tick) -> None:
        if self.driver.outcome is not None:
            self.kill()  # another process continues a run that has ended
        self.at = tick.at
        self.driver.deliver(*tick.events)
        self.alone.write(tick.events, tick.commands)

    def close(self) -> None:
        self.recorder.close()
        self.log.close()

    def check(self) -> None:
        """Deleting the log changes no answer."""
        assert read_history(self.run_dir) == read_history(read(self.alone))


@pytest.mark.parametrize(("family", "number"), WORLDS)
def test_deleting_the_log_of_a_run_changes_no_answer_at_any_cut(family: Any, number: int, tmp_path: Path) -> None:
    record, dice = record_of(family, number), Random(number)
    ticks = [*record.ticks()]
    run, checked = Rerun(record, tmp_path, every=20), range(0, len(ticks), 1 + len(ticks) // 12)
    for tick in ticks:
        run.take(tick)
        if dice.random() < 0.05:
            run.kill()
        if tick.number in checked:
            run.check()
    run.close()
    run.check()
    assert [*stretches_in(tmp_path / FILE)]


@pytest.fixture
def run(tmp_path: Path) -> Rerun:
    """A run that was killed after its last tick."""
    record = faulty_record()
    made = Rerun(record, tmp_path, every=25)
    for tick in record.ticks():
        made.take(tick)
    made.recorder.close()
    return made


def test_damage_of_a_log_changes_no_answer_and_is_mended(run: Rerun) -> None:
    path = run.run_dir / FILE
    whole = path.read_bytes()
    run.check()
    complete = path.read_bytes()
    assert complete.startswith(whole)
    for cut in range(0, len(whole), 1 + len(whole) // 25):
        path.write_bytes(whole[:cut] if cut % 2 else whole[:cut] + b"?" + whole[cut + 1 :])
        run.check()
        assert path.read_bytes() == complete
    path.unlink()
    path.mkdir()
    run.check()


def test_a_record_that_lost_its_end_counts_no_stretch_behind_it(run: Rerun, tmp_path: Path) -> None:
    half = len([*read(run.alone).ticks()]) // 2
    other = Rerun(read(run.alone), tmp_path / "other", every=25)
    for tick in read(run.alone).ticks():
        if tick.number < half:
            other.take(tick)
    (other.run_dir / FILE).write_bytes((run.run_dir / FILE).read_bytes())
    other.check()
    other.kill()
    assert (other.run_dir / FILE).stat().st_size < (run.run_dir / FILE).stat().st_size
    for tick in read(run.alone).ticks():
        if tick.number >= half:
            other.take(tick)
    other.check()


def test_a_log_is_written_by_a_reader_only_once_the_run_has_ended(run: Rerun) -> None:
    path, schedule = run.run_dir / FILE, run.run_dir / "schedule"
    path.unlink()
    lock = RecordLock(schedule)
    run.check()
    assert not path.exists()
    lock.release()
    run.check()
    assert RecordHistory(read(schedule), path).position == next(read(schedule).snapshots()).position


def test_the_notes_of_rejected_ticks_are_in_what_a_reader_writes(tmp_path: Path) -> None:
    record = faulty_record()
    run = Rerun(record, tmp_path, every=25)
    for tick in record.ticks():
        if tick.number in (40, 90):
            for recorder in (run.recorder, run.alone):
                recorder.reject(tick.events, "a policy raised")
                recorder.flush()
            run.kill()
        run.take(tick)
    run.recorder.close()
    run.check()
    (tmp_path / FILE).unlink()
    for _ in range(2):  # the first one writes the log, and the second reads it
        run.check()


@pytest.mark.parametrize("problem", ["a directory", "too much to replay", "a defect"])
def test_a_log_that_cannot_be_continued_does_not_fail_the_run(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = faulty_record()
    run = Rerun(record, tmp_path, every=25)
    for tick in record.ticks():
        if tick.number == 100:
            if problem == "a directory":
                (tmp_path / FILE).unlink()
                (tmp_path / FILE).mkdir()
            elif problem == "too much to replay":
                (tmp_path / FILE).unlink()
                monkeypatch.setattr(history_log, "MOST_REPLAYED", 20)
            else:
                monkeypatch.delattr(HistoryBuilder, "_begin")
            run.kill()
        run.take(tick)
    run.close()
    monkeypatch.undo()
    assert run.log.is_off and len(caplog.records) == (problem != "too much to replay")
    run.check()


def test_a_snapshot_of_another_engine_is_passed_over(run: Rerun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "declarations", lambda: [["State", "another field"]])
    run.check()


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
    died = {(life.index, life.number): life.end for life in faulty.lives if life.kind == "replica"}
    assert all(attempt.end == died[attempt.replica, attempt.life] for attempt in lost)
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
        return state.facts.now > 300 and any(step.state == "gating" for step in state.training.steps.values())

    history = read_history(recorded(limits, seed=1, state_s=1000.0, until=reached))
    step = history.steps[-1]
    assert (step.phases[-1].name, step.phases[-1].outcome) == ("gating", RUNNING)
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
