"""Looking into a record: the state at an event, what led to what, and the story of one group."""

import itertools
import re
from pathlib import Path

import pytest

from engine.commands import StartGroup, TrainStep
from engine.errors import ConfigError, EngineError, RecordError
from engine.events import GroupFailed, PromptsDrawn, RunStarted, stamp
from engine.inspect import open_record, recorded_waits, replayed, state_at
from engine.inspect.story import summarize, summary_lines
from engine.policies import PolicySet
from engine.record import Header, Record, Recorder, Tick, read, replay
from engine.scheduling.scheduler import Scheduler
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits, Pool
from tests.core.added_states import CHECKING
from tests.core.scripted import Scripted

LIMITS = Limits(
    train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=8, sync_mode="abort", max_steps=6
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with aborts, resumes and failures."""
    directory = tmp_path_factory.mktemp("run")
    policies = PolicySet.from_names({})
    header = Header(run="r", limits=LIMITS.to_plain(), policies=dict(policies.names))
    recorder = Recorder(directory / "schedule", header)
    faults = Faults(die=0.02, fail_group=0.1, duplicate=0.05)
    World(Setting(limits=LIMITS, seed=2, faults=faults, tick_size=1), policies, recorder).run()
    recorder.close()
    return directory


@pytest.fixture(scope="module")
def ticks(run: Path) -> list[Tick]:
    """Each of one event."""
    return list(open_record(run).ticks())


def at_text(run: Path, n: int, group: int | None = None) -> str:
    return str(state_at(open_record(run), n, group))


def replay_text(run: Path) -> tuple[str, int]:
    report = replayed(run)
    return str(report), int(not report.identical)


def test_replay_text_says_identical(run: Path, ticks: list[Tick]) -> None:
    commands = sum(len(tick.commands) for tick in ticks)
    count = len(ticks)
    assert replay_text(run) == (f"identical: {count} events in {count} ticks, {commands} commands", 0)
    assert replay_text(run / "schedule")[1] == 0


def test_replay_text_of_another_schedule(tmp_path: Path, run: Path, ticks: list[Tick]) -> None:
    recorder = Recorder(tmp_path / "schedule", open_record(run).header)
    other = next(tick.number for tick in ticks if tick.number >= 25 and tick.commands)
    for tick in ticks[: other + 5]:
        recorder.write(tick.events, tick.commands[tick.number == other :])
    recorder.close()
    text, code = replay_text(tmp_path)
    assert code == 1 and f"diverged at tick {other}" in text
    assert "#24" in at_text(tmp_path, 24)
    for n in (other, other + 4):
        with pytest.raises(EngineError, match=f"the state at tick {other} is unknown: diverged at tick {other}"):
            at_text(tmp_path, n)
    assert f"the story ends early: the state at tick {other} is unknown" in at_text(tmp_path, 10, 0)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        replay_text(tmp_path / "none")
    with pytest.raises(RecordError, match="has no schedule record"):
        replay_text(tmp_path)


def test_the_state_is_the_schedulers_own(run: Path, ticks: list[Tick]) -> None:
    for n in (0, 7, len(ticks) // 2, len(ticks) - 1):
        moment = state_at(open_record(run), n)
        assert (moment.events, moment.commands) == (ticks[n].events, ticks[n].commands)
        assert sum(moment.summary["prompts"]["phases"].values()) == moment.summary["prompts"]["drawn"]
    assert moment.summary["outcome"] == "finished: 6 train steps"
    assert moment.summary["steps"]["trained"] == 6


def test_the_text_names_event_commands_and_state(run: Path, ticks: list[Tick]) -> None:
    n = next(t.first for t in ticks if any(isinstance(c, TrainStep) for c in t.commands))
    text = at_text(run, n)
    assert text.startswith(f"t={ticks[n].at:.3f} s  #{n} GroupGenerated(group=")
    assert "step 0: collecting → scoring (form)" in text and "-> TrainStep(step=0, attempt=1" in text
    for heading in ("prompts ", "places ", "steps ", "replica 0: ", "replica 1: ", "versions ", "stale echoes"):
        assert heading in text
    assert re.search(r"12 drawn|\d+ drawn = \d+ waiting \+ \d+ running", text)


@pytest.mark.parametrize("n", [-1, 10_000])
def test_an_event_out_of_range(run: Path, ticks: list[Tick], n: int) -> None:
    with pytest.raises(ConfigError, match=r"--at (is|10000 does not exist).*; use ") as caught:
        at_text(run, n)
    if n > 0:
        assert f"the record has {len(ticks)} events; use a number from 0 to {len(ticks) - 1}" in str(caught.value)


@pytest.mark.parametrize("group", [-1, 10_000])
def test_a_group_out_of_range(run: Path, group: int) -> None:
    with pytest.raises(ConfigError, match=r"--group (is|10000 does not exist).*; use "):
        at_text(run, 3, group)


def test_stories_hold_every_event_and_command_that_names_the_group(run: Path, ticks: list[Tick]) -> None:
    drawn = state_at(open_record(run), len(ticks) - 1).summary["prompts"]["drawn"]
    for group in range(0, drawn, 3):
        story = state_at(open_record(run), 20, group).story
        assert story is not None
        in_story = {event.id for chapter in story.chapters for event, _ in chapter.events}
        named = {t.first for t in ticks if getattr(t.events[0], "group", None) == group}
        ordered = [
            command
            for t in ticks
            for command in t.commands
            if getattr(command, "group", None) == group or group in getattr(command, "groups", ())
        ]
        assert named <= in_story
        assert [command for chapter in story.chapters for command, _ in chapter.commands] == ordered
        assert isinstance(story.chapters[0].events[0][0], PromptsDrawn)
        changes = [change for chapter in story.chapters for change in chapter.changes]
        assert not changes or changes[0].startswith("queued → ")
        for before, after in itertools.pairwise(changes):
            assert before.split(" → ")[1].split(" (")[0] == after.split(" → ")[0]


def test_answers_name_the_order_behind_them(run: Path, ticks: list[Tick]) -> None:
    failed = next(t.events[0] for t in ticks if isinstance(t.events[0], GroupFailed))
    group = failed.group
    moment = state_at(open_record(run), failed.id, group)
    assert moment.story is not None
    for event, note in (noted for chapter in moment.story.chapters for noted in chapter.events):
        if getattr(event, "group", None) == group and "stale echo" not in note:
            name, cause = re.fullmatch(r"  <- (\w+) of #(\d+)", note).groups()
            orders = [c for c in ticks[int(cause)].commands if getattr(c, "group", None) == group]
            assert [type(c).__name__ for c in orders] == [name]
            assert orders[0].attempt == event.attempt
    text = str(moment)
    assert f"story of group {group}" in text and "cause='infrastructure'" in text
    assert "the replica has version" in text and f"---- event {moment.event} is here ----" in text


def test_the_story_of_a_consumed_group_tells_its_batch(run: Path, ticks: list[Tick]) -> None:
    ordered = next(c for t in ticks for c in t.commands if isinstance(c, TrainStep) and c.step == 2)
    lines = at_text(run, len(ticks) - 1, ordered.groups[1]).splitlines()
    batch = next(line for line in lines if "-> " in line and "TrainStep(" in line)
    assert batch.endswith(f"place 1 of 4, staleness {ordered.staleness[1]}")
    trained = next(i for i, line in enumerate(lines) if "StepTrained(step=2" in line)
    assert f"<- TrainStep of #{ordered.cause}" in lines[trained]
    assert lines[trained + 1].strip() == "batched → consumed (consume)"


def test_a_stale_echo_is_shown_as_one(run: Path, ticks: list[Tick]) -> None:
    scheduler, echo = Scheduler(LIMITS), None
    for tick in ticks:
        before = scheduler.state.orders.facts.stale_echoes
        scheduler.tick(tick.events)
        if scheduler.state.orders.facts.stale_echoes > before and hasattr(tick.events[0], "group"):
            echo = tick.events[0]
            break
    assert echo is not None, "the setting has duplicates; another seed is needed"
    line = next(s for s in at_text(run, echo.id, echo.group).splitlines() if f"#{echo.id} " in s and "echo" in s)
    assert line.endswith("(stale echo: changes nothing)")


def test_a_rejected_event_is_shown_with_the_state_before_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Header(run="r", limits=LIMITS.to_plain()))
    scheduler = Scheduler(LIMITS)
    started, drawn = RunStarted(), PromptsDrawn(first=0, count=4, exhausted=False)
    stamp(started, 0, 0.0)
    stamp(drawn, 1, 0.5)
    recorder.write((started,), scheduler.tick((started,)))
    recorder.reject((drawn,), "InvariantViolated: law 1")
    recorder.close()
    moment = state_at(read(tmp_path), 1)
    assert moment.rejected == "InvariantViolated: law 1" and moment.summary["prompts"]["drawn"] == 0
    assert "rejected: InvariantViolated: law 1" in str(moment) and "state before event 1" in str(moment)
    assert "skipped: tick 1" in str(replay(read(tmp_path)))
    with pytest.raises(ConfigError, match="the record has 1 event; "):
        state_at(read(tmp_path), 2)


def test_a_rejected_first_event_is_shown_with_the_state_of_a_new_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Header(run="r", limits=LIMITS.to_plain()))
    started = RunStarted()
    stamp(started, 0, 0.0)
    recorder.reject((started,), "boom")
    recorder.close()
    moment = state_at(read(tmp_path), 0)
    assert moment.rejected == "boom" and moment.events == (started,) and moment.summary["prompts"]["drawn"] == 0


def test_an_empty_record_has_no_event(tmp_path: Path) -> None:
    Recorder(tmp_path, Header(run="r", limits=LIMITS.to_plain())).close()
    record: Record = read(tmp_path)
    assert str(replay(record)) == "identical: 0 events in 0 ticks, 0 commands"
    with pytest.raises(ConfigError, match="has no event yet"):
        state_at(record, 0)
    assert str(recorded_waits(tmp_path)) == "according to the record, which has no events\n  nothing: no order is open"


def test_long_answers_are_cut(tmp_path: Path) -> None:
    limits = Limits(train_batch_size=64, max_staleness_steps=2, max_concurrent_groups=192, max_steps=1)
    recorder = Recorder(tmp_path, Header(run="r", limits=limits.to_plain()))
    World(Setting(limits=limits, slots=192, replicas=1, prompts=64), None, recorder).run()
    recorder.close()
    n = next(t.first for t in read(tmp_path).ticks() if sum(isinstance(c, StartGroup) for c in t.commands) > 40)
    text = str(state_at(read(tmp_path), n))
    assert "… 64 commands in all" in text and len(text.splitlines()) < 120


def test_the_story_of_a_group_names_added_states(tmp_path: Path) -> None:
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, added_states=(CHECKING,))
    policies = PolicySet.from_names({})
    recorder = Recorder(tmp_path / "schedule", Header(run="r", limits=limits.to_plain(), policies=dict(policies.names)))
    world = World(Setting(limits=limits, prompts=8, faults=Faults(fail_state=0.4), seed=2), policies, recorder)
    world.run()
    recorder.close()
    assert replay_text(tmp_path)[1] == 0
    story = "\n".join(at_text(tmp_path, world.driver.events_handled - 1, group) for group in range(8))
    assert "generating → checking (checking)" in story and "checking → generated (generate)" in story
    assert re.search(r"StateFailed.*<- EnterState of #\d+", story)
    assert re.search(r"StateLeft.*<- EnterState of #\d+", story)


def test_the_text_says_who_has_a_pool() -> None:
    pools = (Pool(tasks=("rollout", "train"), replicas=(0,)), Pool(tasks=("ref_logprobs",)))
    scripted = Scripted(
        train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=2, pools=pools, scoring_tasks=("ref_logprobs",)
    )
    assert "pool      rollout + train: rollout" in summary_lines(summarize(scripted.state))
    scripted.finish(0)
    lines = summary_lines(summarize(scripted.state))
    assert "pool      ref_logprobs: ref_logprobs of step 0" in lines
    assert "  step 0: scoring, attempt 1, ref_logprobs running, groups 0" in lines
    assert [(pool.task, pool.step) for pool in scripted.view.pools()] == [("rollout", -1), ("ref_logprobs", 0)]
