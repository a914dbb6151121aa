"""The ledger accepts the records of lawful runs, and finds each law that a forged record breaks: a check that cannot
fail is none. A forgery changes one event or command, as a wrong scheduler would."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from engine.commands import (
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    EnterState,
    InspectStep,
    ParkGroup,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    RetireWeights,
    SaveCheckpoint,
    StageWeights,
    StartGroup,
    StartProcess,
    StopProcess,
    TrainStep,
    TruncateGroup,
)
from engine.events import (
    CheckpointFailed,
    CheckpointSaved,
    DrainRequested,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderOverdue,
    OrderProgressed,
    ProcessLost,
    ProcessUp,
    PromptsDrawn,
    PublishFailed,
    RunResumed,
    RunStarted,
    StateFailed,
    StepTrained,
    TimerFired,
    WeightsInstalled,
    WeightsPublished,
    stamp,
)
from engine.policies import PolicySet
from engine.record.frames import Header
from engine.record.reader import read
from engine.record.recorder import MemoryRecorder
from engine.simulation.world import Faults, Finding, Setting
from engine.states.limits import Limits
from engine.states.timeouts import Timeouts
from tests.core.added_states import CHECKING, GATING
from tests.judge.judged_world import JudgedWorld
from tests.judge.run_ledger import RunLedger

Frame = tuple[Event, tuple[Command, ...]]
Forge = Callable[[list[Frame]], list[Frame]]

FAULTS = Faults(die=0.02, die_trainer=0.1, fail_start=0.3, fail_group=0.03, fail_data=0.06, fail_sync=0.1,
                fail_trainer=0.1)  # fmt: skip
LIMITS = Limits(
    train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=6, max_steps=10, sync_mode="abort",
    infrastructure_attempts=8, data_attempts=1, checkpoint_every=1, trainer_restarts=9, replica_restarts=9,
    timeouts=Timeouts.every(None),
)  # fmt: skip
RUNS: dict[str, tuple[Limits, int]] = {
    "rough": (LIMITS, 36),
    "kept": (dataclasses.replace(LIMITS, keeps_batches=True, checkpoint_every=3, sync_every=2), 0),
    "synced": (dataclasses.replace(LIMITS, train_after_sync=True, keeps_batches=True), 2),
    "drained": (dataclasses.replace(LIMITS, checkpoint_every=8), 0),
}
"""Limits and seeds of runs in which something of everything happens."""


@cache
def frames_of(name: str) -> list[Frame]:
    limits, seed = RUNS[name]
    recorder = MemoryRecorder(Header(run=name, limits=limits.to_plain()))
    setting = Setting(
        limits=limits, replicas=3, slots=2, prompts=200, seed=seed, prefix_every_tokens=5, faults=FAULTS, tick_size=1
    )
    world = JudgedWorld(setting, recorder=recorder)
    if name == "drained":
        assert world.run_until(lambda state: state.training.steps_trained == 3)
        world.tell(DrainRequested(reason="enough"))
    assert world.run().outcome == ("stopped" if name == "drained" else "finished")
    return [(*tick.events, tick.commands) for tick in read(recorder).ticks()]  # ticks of one event


def batches_of(name: str) -> list[tuple[int, ...]]:
    commands = [command for _, commands in frames_of(name) for command in commands]
    return [command.groups for command in commands if isinstance(command, TrainStep)]


def judge(limits: Limits, frames: list[Frame], **policies: str) -> RunLedger:
    ledger = RunLedger(limits, {**PolicySet.from_names({}).names, **policies})
    for event, commands in frames:
        ledger.observe((event,), commands)
    return ledger


def without(kind: type, meant: Callable[[Any], bool] = lambda found: True, number: int = 0) -> Forge:
    """Leave out an event, with what followed from it, or a command."""
    return with_another(kind, lambda found: None, meant, number)


def with_another(
    kind: type, change: Callable[[Any], Any], meant: Callable[[Any], bool] = lambda found: True, number: int = 0
) -> Forge:
    """Change the event or command of a kind with this number, of those that are meant."""

    def forge(frames: list[Frame]) -> list[Frame]:
        forged, left = [], number

        def forge_one(found: Any) -> Any:
            nonlocal left
            if not isinstance(found, kind) or not meant(found):
                return found
            left -= 1
            return change(found) if left == -1 else found

        for event, commands in frames:
            changed = [forge_one(command) for command in commands]
            now = forge_one(event)
            if now is not None:
                forged.append((now, tuple(command for command in changed if command is not None)))
        assert left < 0, f"no such {kind.__name__}"
        return forged

    return forge


def then(kind: type, command: Callable[[Any], Command], meant: Callable[[Any], bool] = lambda found: True) -> Forge:
    """Add a command behind the first event or command of a kind."""

    def forge(frames: list[Frame]) -> list[Frame]:
        for at, (event, commands) in enumerate(frames):
            found = next((one for one in (event, *commands) if isinstance(one, kind) and meant(one)), None)
            if found is not None:
                return [*frames[:at], (event, (*commands, command(found))), *frames[at + 1 :]]
        raise AssertionError(f"no such {kind.__name__}")

    return forge


def late_start(order: StartProcess) -> bool:
    return order.delay_s > 0


def of_trainer(order: StartProcess) -> bool:
    return order.kind == "trainer"


def repeats(order: StartProcess) -> bool:
    return len(order.redo) > 0


def staler(order: TrainStep) -> TrainStep:
    return replace(order, staleness=tuple(number + 1 for number in order.staleness))


def older(event: GroupGenerated) -> GroupGenerated:
    return replace(event, oldest_version=event.oldest_version - 1)


FORGERIES: dict[str, tuple[str, Forge, str]] = {
    "a group is staler than the order says": ("rough", with_another(TrainStep, staler), "stale, and 1 by the order"),
    "the newest token counts": (
        "rough", with_another(GroupGenerated, older, lambda event: event.oldest_version > 0), "stale, and"
    ),
    "a batch has a group twice": (
        "rough", with_another(TrainStep, lambda order: replace(order, groups=order.groups[:1] * 2)), "takes 2 groups"
    ),
    "a batch changes": (
        "rough", with_another(TrainStep, lambda order: replace(order, groups=order.groups[::-1]),
                              lambda order: order.attempt > 1), "had the batch",
    ),
    "a staged version is retired": (
        "rough", then(StageWeights, lambda order: RetireWeights(version=order.version - 1, number=0, cause=0),
                      lambda order: order.version > 1), "is retired that is not in the store",
    ),
    "the newest version is retired": (
        "rough", then(WeightsPublished, lambda event: RetireWeights(version=event.version, number=0, cause=0)),
        "the newest version is retired",
    ),
    "a version is never retired": ("rough", without(RetireWeights), "are never retired"),
    "a lost publication counts as done": (
        "rough", with_another(WeightsPublished, lambda event: PublishFailed(version=1, attempt=1, reason="")),
        "is staged that is not in the store",
    ),
    "a step is trained while weights are published": (
        "synced", without(WeightsPublished, number=7), "is trained while weights are published",
    ),
    "a step is not published": ("rough", without(PublishWeights), "step 1 is not published"),
    "the last step is not published": (
        "kept", without(PublishWeights, lambda order: order.steps == 10), "step 10 is not published"
    ),
    "a trainer begins one step late": (
        "kept", with_another(StartProcess, lambda order: replace(order, redo=order.redo[1:]), repeats), "must repeat",
    ),
    "a trainer begins at an old checkpoint": (
        "rough", with_another(StartProcess, lambda order: replace(order, steps=order.steps - 1),
                              lambda order: of_trainer(order) and order.steps > 1), "the newest checkpoint is after",
    ),
    "a trainer forgets its updates": (
        "rough", with_another(StartProcess, lambda order: replace(order, updates=order.updates + 1), of_trainer),
        "its weights contain",
    ),
    "a start does not wait": (
        "rough", with_another(StartProcess, lambda order: replace(order, delay_s=0.0), late_start), "starts failed",
    ),
    "a start waits no longer than before": (
        "rough", with_another(StartProcess, lambda order: replace(order, delay_s=1.0), lambda o: o.delay_s == 4.0),
        "the next one waits 2 s",
    ),
    "every pause aborts": (
        "rough", with_another(PauseReplica, lambda order: replace(order, mode="wait")), "cut short for no reason"
    ),
    "a batch leaks": ("rough", without(DiscardGroups, lambda order: len(order.groups) > 1), "never discarded"),
    "a kept batch leaks": ("kept", without(DiscardGroups, lambda order: len(order.groups) > 1), "never discarded"),
    "a kept batch is discarded early": (
        "kept", then(StepTrained, lambda event: DiscardGroups(groups=batches_of("kept")[0], number=0, cause=0)),
        "before a checkpoint contains it",
    ),
    "a group that was given up starts": (
        "rough", then(StartGroup, lambda order: DiscardGroups(groups=(order.group,), number=0, cause=0)),
        "starts that has ended",
    ),
    "a checkpoint leaks": ("rough", without(DeleteCheckpoint), "are never deleted"),
    "the newest checkpoint is deleted": (
        "rough", with_another(DeleteCheckpoint, lambda order: replace(order, steps=order.steps + 2)), "must be kept",
    ),
    "a step is not saved": ("rough", without(SaveCheckpoint), "step 1 is not saved"),
    "a step is trained before a replica is synced": (
        "synced", without(WeightsInstalled), "before replica",
    ),
    "a drain ends without a checkpoint": (
        "drained", lambda frames: without(SaveCheckpoint)(
            with_another(CheckpointSaved, lambda event: replace(TIMER, id=event.id, at=event.at))(frames)
        ), "without a checkpoint",
    ),
    "a drain ends after its checkpoint failed": (
        "drained", with_another(CheckpointSaved, lambda event: replace(
            CheckpointFailed(steps=event.steps, reason="full"), id=event.id, at=event.at
        )), "without a checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_record_of_a_lawful_run_breaks_no_law(name: str) -> None:
    books = judge(RUNS[name][0], frames_of(name)).books
    assert books.over and (books.trained == LIMITS.max_steps or name == "drained")


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_record_is_found_to_break_its_law(forgery: str) -> None:
    name, forge, law = FORGERIES[forgery]
    with pytest.raises(Finding, match=law):
        judge(RUNS[name][0], forge(frames_of(name)))


# -- laws about single groups, in runs written by hand -----------------------------------------------------------------

GROUP: dict[str, Any] = {"group": 0, "attempt": 1, "replica": 0, "life": 1}
RESUMED: dict[str, Any] = {"group": 0, "attempt": 2, "replica": 1, "life": 1}
TOKENS = {"tokens": 5, "oldest_version": 0, "newest_version": 0}
START = StartGroup(**GROUP, number=7, cause=0)
MOVE = ParkGroup(**GROUP, cause=0)
OVERDUE = ParkGroup(**GROUP, reason="it took too long", cause=0)
FAILED = GroupFailed(**GROUP, cause="data", reason="fault")
GIVE_UP = DiscardGroups(groups=(0,), number=0, cause=0)
TIMER = TimerFired(timer=0)


def by_hand(*frames: tuple[float, Event, tuple[Command, ...]], **figures: Any) -> RunLedger:
    """Two replicas are up and prompts are drawn. Then, after so many seconds each, something happens."""
    limits = dataclasses.replace(LIMITS, **{"straggler_factor": 2.0, "timeouts": Timeouts.every(60.0), **figures})
    ups = [ProcessUp(kind="replica", index=index, life=1, slots=4) for index in range(2)]
    begun: list[Event] = [RunStarted(replicas=2), *ups, PromptsDrawn(first=0, count=9, exhausted=False)]
    all_frames: list[tuple[float, Event, tuple[Command, ...]]] = [(0.0, event, ()) for event in begun]
    now, made = 0.0, []
    for at, (delay_s, event, commands) in enumerate([*all_frames, *frames]):
        event, now = replace(event), now + delay_s
        stamp(event, at, now)
        made.append((event, commands))
    return judge(limits, made, deadline="drop")


def test_a_group_starts_on_a_replica_that_is_up_in_the_tick_that_orders_its_life() -> None:
    """A launch brought it up; the tick that heard so also took the request for it."""
    up = ProcessUp(kind="replica", index=2, life=1, slots=4)
    life = StartProcess(kind="replica", index=2, life=1, cause=0)
    there = replace(START, replica=2)
    by_hand((0.0, up, (life, there)))
    with pytest.raises(Finding, match="a group starts on a replica that cannot run it"):
        by_hand((0.0, TIMER, (life, there)))


def test_a_group_is_moved_once() -> None:
    start = (1.0, TIMER, (START,))
    move = (1.0, TIMER, (MOVE,))
    resume = (1.0, GroupAborted(**GROUP, **TOKENS), (ResumeGroup(**RESUMED, truncate=False, cause=0),))
    by_hand(start, move, resume)
    with pytest.raises(Finding, match="a group is moved again"):
        by_hand(start, move, resume, (1.0, TIMER, (ParkGroup(**RESUMED, cause=0),)))
    with pytest.raises(Finding, match="a group is moved again"):
        by_hand(start, move, straggler_factor=None)


def test_a_group_is_cut_short_after_its_time_limit_of_work() -> None:
    pause = PauseReplica(replica=0, life=1, attempt=1, version=1, mode="abort", cause=0)
    start = (0.0, TIMER, (START,))
    by_hand(start, (60.0, TIMER, (OVERDUE,)))
    by_hand(start, (20.0, TIMER, (OVERDUE,)), timeouts=Timeouts.every(60.0, max_s=20.0))
    with pytest.raises(Finding, match="a group is cut short after 59 s"):
        by_hand(start, (59.0, TIMER, (OVERDUE,)))
    with pytest.raises(Finding, match="a group is cut short after 20 s"):
        by_hand(start, (20.0, TIMER, (pause,)), (60.0, TIMER, (OVERDUE,)))
    with pytest.raises(Finding, match="a group is cut short after 30 s"):
        by_hand(start, (50.0, OrderProgressed(order=7), ()), (30.0, TIMER, (OVERDUE,)))
    with pytest.raises(Finding, match="a group is cut short"):
        by_hand(start, (1e5, TIMER, (OVERDUE,)), timeouts=Timeouts.every(None))


def test_a_trainer_counts_as_overdue_only_after_its_time_limit_since_it_progressed() -> None:
    train = TrainStep(step=0, attempt=1, groups=(0,), staleness=(0,), number=8, cause=0)
    generated = GroupGenerated(**GROUP, **TOKENS, trainable=2, reward_mean=0.5, reward_spread=1.0)
    begin = [(0.0, TIMER, (START,)), (1.0, generated, (train,))]
    overdue = OrderOverdue(order=8, took_s=60.0, limit_s=60.0, setting="timeouts.train_s", chain=("trainer",))
    stop = StopProcess(kind="trainer", index=0, life=1, reason="it took too long", hung=True, cause=7)
    late, progress = (30.0, overdue, (stop,)), (30.0, OrderProgressed(order=8), ())
    by_hand(*begin, (30.0, TIMER, ()), late)
    by_hand(*begin, progress, late, timeouts=Timeouts.every(60.0, max_s=60.0))
    by_hand(*begin, (30.0, OrderProgressed(order=9), ()), late)
    with pytest.raises(Finding, match="an order counts as overdue after 30 s"):
        by_hand(*begin, progress, late)
    with pytest.raises(Finding, match="an order counts as overdue after 60 s"):
        by_hand(*begin, (30.0, TIMER, ()), late, timeouts=Timeouts.every(60.0, train_s=None))


def test_the_deadline_policy_acts_only_on_groups_that_had_their_whole_timeout() -> None:
    for act in (TruncateGroup(**GROUP, cause=0), GIVE_UP):
        by_hand((0.0, TIMER, (START,)), (60.0, TIMER, (act,)))
        with pytest.raises(Finding, match=r"before its time|for no reason"):
            by_hand((0.0, TIMER, (START,)), (59.0, TIMER, (act,)))


def test_a_group_is_given_up_only_after_an_attempt_failed() -> None:
    start = (0.0, TIMER, (START,))
    lost = ProcessLost(kind="replica", index=0, life=1, reason="fault")
    aborted = GroupAborted(**GROUP, **TOKENS)
    overdue = (60.0, TIMER, (OVERDUE,))
    for frames in ([(1.0, FAILED, (GIVE_UP,))], [(1.0, lost, (GIVE_UP,))], [overdue, (1.0, aborted, (GIVE_UP,))]):
        by_hand(start, *frames)
    with pytest.raises(Finding, match="is given up for no reason"):
        by_hand(start, (1.0, PromptsDrawn(first=9, count=1, exhausted=False), (GIVE_UP,)))


def test_work_of_an_added_state_that_failed_or_is_ordered_again_has_failed() -> None:
    work = EnterState(group=0, attempt=2, state="checking", cause=0)
    failed = StateFailed(group=0, attempt=2, state="checking", cause="data", reason="fault")
    lost = ProcessLost(kind="added states", index=0, life=1, reason="fault")
    for event, commands in ((failed, (GIVE_UP,)), (lost, (GIVE_UP,)), (TIMER, (replace(work, attempt=3), GIVE_UP))):
        frames = [(0.0, TIMER, (START,)), (1.0, generated(0), (work,)), (1.0, event, commands)]
        by_hand(*frames, added_states=(CHECKING,))


def test_a_new_group_starts_only_while_the_staleness_bound_leaves_a_place() -> None:
    starts = [replace(START, group=group) for group in range(7)]
    by_hand((0.0, TIMER, tuple(starts[:6])))
    with pytest.raises(Finding, match="more than 6 groups run"):
        by_hand((0.0, TIMER, tuple(starts)))
    done = GroupGenerated(**GROUP, **TOKENS, trainable=2, reward_mean=0.5, reward_spread=1.0)
    for places in (4, 6):
        ahead = {"max_staleness_steps": places // 2 - 1, "max_concurrent_groups": places}
        by_hand((0.0, TIMER, tuple(starts[:places])), (1.0, done, ()), **ahead)
        with pytest.raises(Finding, match=f"{places} of {places} places are held"):
            by_hand((0.0, TIMER, tuple(starts[:places])), (1.0, done, (starts[places],)), **ahead)


INSPECT = InspectStep(step=0, attempt=1, state="gating", version=-1, groups=(0, 1), staleness=(0, 0), cause=0)


def generated(group: int) -> GroupGenerated:
    return GroupGenerated(**{**GROUP, "group": group}, **TOKENS, trainable=2, reward_mean=0.5, reward_spread=1.0)


def test_a_batch_is_inspected_whatever_weights_a_replica_has_that_leaves() -> None:
    resumed = RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True)
    publish, leave = PublishWeights(version=1, attempt=1, steps=0, number=8, cause=0), {"attempt": 1, "version": 0}
    current, old = (
        ProcessUp(kind="replica", index=index, life=2, slots=4, version=version) for index, version in ((0, 1), (1, 0))
    )
    begun = [
        (0.0, TIMER, (START, replace(START, group=1))), (1.0, generated(0), ()), (1.0, generated(1), ()),
        (1.0, resumed, (publish,)), (1.0, WeightsPublished(version=1, attempt=1), ()), (1.0, current, ()),
    ]  # fmt: skip
    pause = PauseReplica(replica=1, life=2, mode="abort", **leave, cause=0)
    figures = {"added_states": (GATING,), "train_after_sync": True}
    by_hand(*begun, (1.0, old, (pause, INSPECT)), **figures)
    with pytest.raises(Finding, match="a step is trained before replica 1 has the newest weights"):
        by_hand(
            *begun[:3], (1.0, replace(resumed, replicas=2), (publish,)), *begun[4:], (1.0, old, (INSPECT,)), **figures
        )


def test_what_a_replica_reports_behind_the_event_that_stopped_it_is_stale() -> None:
    overdue = OrderOverdue(order=5, took_s=60.0, limit_s=60.0, setting="timeouts.cut_s")
    stop = StopProcess(kind="replica", index=0, life=1, reason="hung", hung=True)
    again = StartGroup(**RESUMED, number=9, cause=0)
    for events, starts in (((overdue, generated(0)), True), ((generated(0), overdue), False)):
        ledger = by_hand((0.0, TIMER, (START,)))
        for at, event in enumerate(events, start=5):
            stamp(event, at, 1.0)
        ledger.observe(events, (replace(stop, cause=overdue.id),))
        if starts:
            ledger.observe((TIMER,), (again,))
        else:
            with pytest.raises(Finding, match="a group starts that has ended"):
                ledger.observe((TIMER,), (again,))


def test_a_replica_that_is_wanted_again_starts_at_once_whatever_else_is_lost() -> None:
    first, other = (StartProcess(kind="replica", index=index, life=2, cause=0) for index in (0, 1))
    lost = ProcessLost(kind="replica", index=0, life=1, reason="killed")
    unborn = replace(lost, life=2, reason="unborn", final=True)
    begun, again = (0.0, lost, (first,)), replace(first, life=3)
    by_hand(begun, (1.0, unborn, ()), (1.0, replace(lost, index=1), (other, again)))
    with pytest.raises(Finding, match="starts failed, so the next one waits 1 s"):
        by_hand(begun, (1.0, unborn, (again,)))
