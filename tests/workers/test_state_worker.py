"""`StateWorker`: what the work of a state may do to a group, and what is said of each way in which it ends."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import worker_bench
from event_loops import played
from worker_bench import Distant, plan_of

from engine.commands import DiscardGroups, EnterState, InspectStep
from engine.errors import DataFailure, EngineError
from engine.events import GroupGenerated, InspectionFailed, StateFailed, StateLeft, StepInspected
from engine.protocols import Generated, GroupWork, PublishedWeights
from engine.protocols.user_code import MOST_HANGING
from engine.rollout.reward_parts import RewardPart, RewardParts
from engine.rollout.scoring import Grader
from engine.runtime.local import response
from engine.states.limits import GENERATED, REWARDING, SCORING, AddedState
from engine.storage.trajectories import copy_group
from engine.trajectory import Prompt, StepReward, Trajectory, TrajectoryGroup
from engine.workers.added_states import StateWorker, check_worked
from engine.workers.group_reports import Versions, check_generated, generated_event
from engine.workers.plan import Work

PROMPT = Prompt(row=7, text="?")
INITIAL = Versions(admitted=0, oldest=0, newest=0)


class Digits:
    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, token_ids))


async def praise(group: TrajectoryGroup) -> TrajectoryGroup:
    for index, trajectory in enumerate(group.trajectories):
        trajectory.reward = float(index)
    return group


class Bench(worker_bench.Bench):
    """`place`: where the state stands."""

    def __init__(
        self, work: Any, state: str = "judging", place: str = GENERATED, trajectories: Any = None, **changes: Any
    ) -> None:
        states = (AddedState(name=state, concurrency=1, place=place),)
        makes = {"make_inspection" if place == SCORING else "make_work": lambda name: work}
        super().__init__(StateWorker, plan_of(limits={"added_states": states}, **makes, **changes), trajectories)

    def order(self, group: int = 3, attempt: int = 2, state: str = "judging", prompt: Prompt | None = None) -> None:
        self.worker.carry_out(EnterState(group=group, attempt=attempt, state=state, cause=0), prompt)

    async def until(self, count: int) -> Any:
        return (await super().until(count))[-1]


async def filled(bench: Bench) -> Bench:
    """With two groups that have no rewards yet."""
    for number in (3, 4):
        group = TrajectoryGroup(group=number, prompt=PROMPT, trajectories=[])
        group.trajectories = [response([5, 6], reward=0.0, version=0) for _ in range(3)]
        for trajectory in group.trajectories:
            trajectory.reward = None
        await bench.trajectories.put(group, attempt=1)
    return bench


@played
async def test_the_work_is_kept_before_it_is_reported() -> None:
    bench = await filled(await Bench(praise).open())
    bench.order()
    left = await bench.until(1)
    assert left == StateLeft(group=3, attempt=2, state="judging", trainable=3, reward_mean=1.0, reward_spread=2.0)
    (kept,) = await bench.trajectories.get([3])
    assert [t.reward for t in kept.trajectories] == [0.0, 1.0, 2.0]


@played
async def test_a_repeat_changes_nothing_and_a_newer_attempt_ends_the_older() -> None:
    calls: list[int] = []
    ended: list[int] = []

    async def first_for_ever(group: TrajectoryGroup) -> TrajectoryGroup:
        calls.append(group.group)
        if len(calls) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(group.group)
        return await praise(group)

    bench = await filled(await Bench(first_for_ever).open())
    for attempt in (2, 2, 3):
        bench.order(attempt=attempt)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    left = await bench.until(1)
    assert isinstance(left, StateLeft) and left.attempt == 3
    bench.order(attempt=3)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert calls == [3, 3] and ended == [3] and len(bench.events) == 1, "one that was reported is none to begin"


async def tokens(group: TrajectoryGroup) -> Any:
    (await praise(group)).trajectories[1].token_ids[0] = 9
    return group


async def mask(group: TrajectoryGroup) -> Any:
    (await praise(group)).trajectories[1].loss_mask[0] = 0
    return group


async def fewer(group: TrajectoryGroup) -> Any:
    (await praise(group)).trajectories.pop()
    return group


async def nothing(group: TrajectoryGroup) -> Any:
    return None


async def no_rewards(group: TrajectoryGroup) -> Any:
    return group


async def no_number(group: TrajectoryGroup) -> Any:
    (await praise(group)).trajectories[2].reward = math.nan
    return group


async def odd_part(group: TrajectoryGroup) -> Any:
    (await praise(group)).trajectories[1].reward_parts = {"right": None}  # type: ignore[dict-item]
    return group


async def other_text(group: TrajectoryGroup) -> Any:
    (await praise(group)).trajectories[1].text = "I agree."
    return group


async def other_prompt(group: TrajectoryGroup) -> Any:
    return replace(await praise(group), prompt=replace(group.prompt, text="Do you agree?"))


async def bad_row(group: TrajectoryGroup) -> Any:
    raise DataFailure("row 7 has no rubric")


async def broken(group: TrajectoryGroup) -> Any:
    group.trajectories[0].token_ids.clear()
    raise RuntimeError("the judge is away")


async def cancelled(group: TrajectoryGroup) -> Any:
    raise asyncio.CancelledError("by its own client")


async def leaving(group: TrajectoryGroup) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("work", "cause", "words"),
    [
        (tokens, "infrastructure", "changed token_ids of trajectory 1; it may change rewards only"),
        (mask, "infrastructure", "changed loss_mask of trajectory 1"),
        (other_text, "infrastructure", "changed text of trajectory 1"),
        (other_prompt, "infrastructure", "changed the prompt; it may change rewards only"),
        (fewer, "infrastructure", "another number of trajectories"),
        (nothing, "infrastructure", "must return the group, not NoneType"),
        (no_rewards, "data", "trajectory 0: it has no reward"),
        (no_number, "data", "trajectory 2: its reward is nan"),
        (
            odd_part,
            "data",
            "group 3, trajectory 1: its reward_parts have the figure 'right' as None, not a finite number",
        ),
        (bad_row, "data", "row 7 has no rubric"),
        (broken, "infrastructure", "RuntimeError: the judge is away (test_state_worker.py:"),
        (cancelled, "infrastructure", "CancelledError: by its own client"),
        (leaving, "infrastructure", "SystemExit: 3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@played
async def test_what_work_does_wrong_costs_an_attempt_and_leaves_the_group_as_it_was(
    work: Work, cause: str, words: str
) -> None:
    bench = await filled(await Bench(work).open())
    (kept,) = await bench.trajectories.get([3])
    before = copy_group(kept)
    bench.order()
    failed = await bench.until(1)
    assert isinstance(failed, StateFailed)
    assert (failed.group, failed.attempt, failed.state, failed.cause) == (3, 2, "judging", cause)
    assert words in failed.reason
    assert await bench.trajectories.get([3]) == [before]
    bench.order(attempt=3)
    assert (await bench.until(2)).attempt == 3  # type: ignore[attr-defined]


@played
async def test_work_that_takes_too_long_is_ended() -> None:
    async def for_ever(group: TrajectoryGroup) -> TrajectoryGroup:
        await asyncio.Event().wait()
        return group

    bench = await filled(await Bench(for_ever, state_timeout_s=0.01).open())
    bench.order()
    failed = await bench.until(1)
    assert isinstance(failed, StateFailed) and failed.cause == "infrastructure"
    assert "the work of judging exceeded its limit of 0.01 s on group 3" in failed.reason


@pytest.mark.parametrize("stuck", [1, MOST_HANGING])
@played
async def test_the_calls_of_a_reward_have_a_time_of_their_own_and_may_get_stuck(stuck: int) -> None:
    go_on = threading.Event()

    def reward(prompt: Prompt, trajectory: Trajectory) -> float:
        go_on.wait()
        return 1.0

    grader = Grader(Digits(), reward, threads=stuck, timeout_s=0.01)
    bench = await filled(await Bench(grader, state_timeout_s=1e-9, state=REWARDING).open())
    for number in range(10, 10 + stuck):
        group = TrajectoryGroup(group=number, prompt=PROMPT, trajectories=[response([5], reward=0.0, version=0)])
        group.trajectories[0].reward = None
        await bench.trajectories.put(group, attempt=1)
        bench.order(group=number, state=REWARDING)
    failed = await bench.until(stuck)
    assert isinstance(failed, StateFailed) and failed.cause == "data", failed
    assert "took longer than 0.01 s on prompt row 7" in failed.reason
    while stuck == MOST_HANGING and not bench.worker.broken:
        await asyncio.sleep(0)
    assert ("64 calls of reward" in bench.worker.broken) == (stuck == MOST_HANGING)
    go_on.set()


@played
async def test_the_processes_of_a_reward_end_with_the_worker() -> None:
    closed: list[str] = []

    part = RewardPart(function=lambda *_: 1.0, close=lambda: closed.append("reward"))
    bench = await filled(await Bench(Grader(Digits(), RewardParts((part,))), state=REWARDING).open())
    await bench.worker.close()
    assert closed == ["reward"]


@played
async def test_a_group_that_is_forgotten_meanwhile_stays_so() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(group: TrajectoryGroup) -> TrajectoryGroup:
        begun.set()
        await go_on.wait()
        return await praise(group)

    bench = await filled(await Bench(slow).open())
    bench.order()
    await begun.wait()
    await bench.trajectories.discard([3])
    go_on.set()
    await bench.until(1)
    assert bench.trajectories.store.stats().groups == 1
    bench.order(attempt=9)
    assert "does not hold groups [3]" in (await bench.until(2)).reason  # type: ignore[attr-defined]


@played
async def test_work_on_a_group_that_is_dropped_is_ended_without_a_word() -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def stubborn(group: TrajectoryGroup) -> TrajectoryGroup:
        begun.append(group.group)
        if group.group == 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(group.group)
        return await praise(group)

    bench = await filled(await Bench(stubborn).open())
    bench.order(group=3)
    while not begun:
        await asyncio.sleep(0)
    bench.worker.carry_out(DiscardGroups(groups=(3, 5), cause=0))
    bench.order(group=4)
    left = await bench.until(1)
    assert isinstance(left, StateLeft) and left.group == 4
    assert ended == [3] and begun == [3, 4] and bench.events == [left]


@played
async def test_a_state_that_nobody_works_in_is_named() -> None:
    bench = await filled(await Bench(praise).open())
    bench.order(state="other")
    assert "no work is defined for the state other" in (await bench.until(1)).reason  # type: ignore[attr-defined]


@played
async def test_close_ends_work_without_a_word() -> None:
    async def for_ever(group: TrajectoryGroup) -> TrajectoryGroup:
        await asyncio.Event().wait()
        return group

    bench = await filled(await Bench(for_ever).open())
    bench.order()
    await asyncio.sleep(0)
    await bench.worker.close()
    assert bench.events == []


def test_rewards_may_be_left_out_where_they_are_given_later_and_only_there() -> None:
    work = GroupWork(group=1, attempt=1, prompt=PROMPT, samples=1)
    group = TrajectoryGroup(group=1, prompt=PROMPT, trajectories=[response([5], reward=0.0, version=0)])
    group.trajectories[0].reward = None
    check_generated(work, Generated(group=group), INITIAL, rewarded=False)
    event = generated_event(group, 1, 0, 1)
    assert isinstance(event, GroupGenerated) and (event.trainable, event.reward_mean) == (1, 0.0)
    with pytest.raises(DataFailure, match="it has no reward"):
        check_generated(work, Generated(group=group), INITIAL)
    group.trajectories[0].reward = math.inf
    with pytest.raises(DataFailure, match="its reward is inf"):
        check_generated(work, Generated(group=group), INITIAL, rewarded=False)
    assert issubclass(DataFailure, EngineError)


BAD_STEPS: list[list[Any]] = [[(2, 1.0)], [(-1, 1.0)], [(1, 1.0), (0, 1.0)], [(0, 1.0)] * 2, [(0, math.nan)], [0.5]]


@pytest.mark.parametrize("steps", BAD_STEPS)
def test_rewards_of_tokens_that_do_not_fit_the_response_are_refused(steps: list[Any]) -> None:
    before = TrajectoryGroup(group=3, prompt=PROMPT, trajectories=[response([5, 6], reward=0.0, version=0)])
    after = copy_group(before)
    after.trajectories[0].step_rewards = [StepReward(0, 1.0), StepReward(1, 2.0)]
    check_worked("judging", before, after)
    after.trajectories[0].step_rewards = steps
    with pytest.raises(DataFailure, match=r"trajectory 0: its step_rewards have .*, which must be \(position of a"):
        check_worked("judging", before, after)


def odd_prompts() -> dict[str, Callable[[TrajectoryGroup], Any]]:
    """What the work of a state before generation may not do, by what is said of it."""

    def changed(**fields: Any) -> Callable[[TrajectoryGroup], Any]:
        return lambda group: replace(group, prompt=replace(group.prompt, **fields))

    return {
        "must return the group, not str": lambda group: "done",
        "changed the row or the source of the prompt": changed(row=8),
        "text of the prompt is a int": changed(text=8),
        "fields of the prompt is a list": changed(fields=[]),
        "returned another group, or trajectories": lambda group: replace(
            group, trajectories=[response([1], reward=0.0, version=0)]
        ),
    }


@pytest.mark.parametrize("says", odd_prompts())
@played
async def test_the_work_before_generation_may_change_only_the_prompt(says: str) -> None:
    async def work(group: TrajectoryGroup) -> Any:
        return odd_prompts()[says](group)

    bench = await filled(await Bench(work).open())
    bench.order(group=9, attempt=1, prompt=PROMPT)
    event = await bench.until(1)
    assert isinstance(event, StateFailed) and says in event.reason and event.cause == "infrastructure"
    assert await bench.trajectories.partial(9) is None


@played
async def test_the_changed_fields_of_a_prompt_are_reported() -> None:
    async def level(group: TrajectoryGroup) -> Any:
        return replace(group, prompt=replace(group.prompt, fields={"level": 2, "page": "..."}))

    bench = await filled(await Bench(level, described=("level",)).open())
    bench.order(group=9, attempt=1, prompt=PROMPT)
    event = await bench.until(1)
    assert isinstance(event, StateLeft) and event.described == '{"source": "", "fields": {"level": 2}}'


@played
async def test_a_group_that_is_dropped_while_its_prompt_is_stored_is_not_kept() -> None:
    async def unchanged(group: TrajectoryGroup) -> TrajectoryGroup:
        return group

    distant = Distant()
    bench = await Bench(unchanged, trajectories=distant).open()
    bench.order(group=9, attempt=1, prompt=PROMPT)
    await bench.settle()
    bench.worker.carry_out(DiscardGroups(groups=(9,), cause=0))
    await bench.settle()
    distant.gate.set()
    await bench.settle()
    assert bench.events == [] and bench.trajectories.store.stats().groups == 0


async def refuses(given: Any) -> str | None:
    """Refuses what it is given, and says what that was."""
    if isinstance(given, PublishedWeights):
        return f"version {given.version} after {given.steps} steps: {given.weights}"
    given.groups[0].trajectories.clear()  # a copy
    return f"step {given.step}, groups {[group.group for group in given.groups]}, staleness {given.staleness}"


async def inspecting(work: Any) -> Bench:
    bench = await Bench(work, state="gate", place=SCORING).open()
    bench.weights.store.put(5, "the weights")
    return bench


BATCH = InspectStep(step=2, attempt=1, state="gate", groups=(3, 4), staleness=(0, 1), cause=0)
WEIGHTS = InspectStep(step=2, attempt=1, state="gate", version=5, cause=0)


@played
async def test_a_state_of_train_steps_is_given_the_batch_and_the_weights() -> None:
    bench = await filled(await inspecting(refuses))
    for order, says in (
        (BATCH, "step 2, groups [3, 4], staleness [0, 1]"),
        (WEIGHTS, "version 5 after 3 steps: the weights"),
    ):
        bench.events.clear()
        bench.worker.carry_out(order)
        bench.worker.carry_out(order)  # a repeat changes nothing
        answer = StepInspected(step=2, attempt=1, state="gate", version=order.version, refused=says)
        assert await bench.until(1) == answer
    assert len((await bench.trajectories.get([3]))[0].trajectories) == 3


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, ""),
        (True, "must return None if it lets them pass, or a text with the reason if it refuses them, not True"),
        ("  ", "must return None"),
        (RuntimeError("the judge is away"), "the judge is away (test_state_worker.py:"),
        (DataFailure("the judge refuses"), "the judge refuses (test_state_worker.py:"),
    ],
)
@played
async def test_an_inspection_lets_pass_or_fails_with_what_its_work_did(result: Any, says: str) -> None:
    async def work(given: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    bench = await filled(await inspecting(work))
    bench.worker.carry_out(BATCH)
    event = await bench.until(1)
    if result is None:
        assert event == StepInspected(step=2, attempt=1, state="gate")
    else:
        assert isinstance(event, InspectionFailed) and says in event.reason
