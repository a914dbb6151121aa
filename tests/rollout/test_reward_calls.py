"""How reward functions are called: their forms, batches, limits of their own, and rewards of turns and tokens."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from test_generator import Letters

from engine.errors import DataFailure
from engine.rollout.reward_parts import RewardPart, RewardParts
from engine.rollout.scoring import Grader
from engine.tasks.reward_forms import bind
from engine.tasks.rewards import boxed_answer, final_number, multiple_choice
from engine.trajectory import NoAnswer, Prompt, Scored, StepReward, Trajectory, TrajectoryGroup


def responses(*texts: str) -> list[Trajectory]:
    """Responses of letters; a capital letter is a token that the policy did not sample."""
    return [
        Trajectory(
            token_ids=[ord(letter.lower()) - ord("a") for letter in text],
            loss_mask=[int(letter.islower()) for letter in text], finish_reason="stop",
        )
        for text in texts
    ]  # fmt: skip


def group_of(*texts: str, row: int = 4, **fields: Any) -> TrajectoryGroup:
    return TrajectoryGroup(group=row, prompt=Prompt(row=row, text="?", fields=fields), trajectories=responses(*texts))


def part_of(function: Callable[..., Any], **settings: Any) -> RewardPart:
    bound = bind(function, {}, "tests:function", "reward.function")
    return RewardPart(function=bound.call, form=bound.form, shown="tests.function", **settings)


def scored(group: TrajectoryGroup, *parts: RewardPart, **settings: Any) -> list[Trajectory]:
    asyncio.run(Grader(Letters(), RewardParts(parts), **settings).score(group))
    return group.trajectories


def ranked(prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[float]:
    """1 for the longest."""
    longest = max(len(trajectory.text) for trajectory in trajectories)
    return [float(len(trajectory.text) == longest) for trajectory in trajectories]


def trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
    assert kwargs["prompts"] == ["?"] * len(completions) and "completion_ids" in kwargs
    return [None if text == "d" else float(text == right) for text, right in zip(completions, answer, strict=True)]


def test_a_function_of_the_group_gets_all_its_unscored_responses() -> None:
    group = group_of("a", "abc", "ab")
    group.trajectories[2].reward = 7.0
    assert [one.reward for one in scored(group, part_of(ranked))] == [0.0, 1.0, 7.0]


def test_figures_of_a_value_stand_beside_the_values() -> None:
    def score(prompt: Prompt, trajectory: Trajectory) -> float:
        return Scored(0.5, {"forged": 1.0})

    (named,) = scored(group_of("a"), part_of(score, name="code"))
    assert (named.reward, named.reward_parts) == (0.5, {"code": 0.5, "code_forged": 1.0})
    (alone,) = scored(group_of("a"), part_of(score))
    assert (alone.reward, alone.reward_parts) == (0.5, {"forged": 1.0})


def test_a_figure_that_is_no_number_is_the_rewards_fault() -> None:
    def score(prompt: Prompt, trajectory: Trajectory) -> float:
        return Scored(0.5, {"share": math.nan})

    with pytest.raises(DataFailure, match="returned the figure 'share' as nan on prompt row 4, not a finite"):
        scored(group_of("a"), part_of(score))


def test_a_response_without_an_answer_is_marked() -> None:
    def score(prompt: Prompt, trajectory: Trajectory) -> float:
        return NoAnswer(-0.5) if trajectory.text == "a" else 1.0

    def one(prompt: Prompt, trajectory: Trajectory) -> float:
        return 1.0

    first, second = scored(group_of("a", "b"), part_of(score, name="score"), part_of(one, name="one"))
    assert (first.reward, first.unparsable, second.reward, second.unparsable) == (0.5, True, 2.0, False)
    prompt = Prompt(row=0, text="?", fields={"answer": "(B) is 7, or \\boxed{7}"})
    for built_in in (final_number, boxed_answer, multiple_choice):
        assert isinstance(built_in(prompt, Trajectory(text="I do not know.")), NoAnswer)
        assert not isinstance(built_in(prompt, Trajectory(text="\\boxed{5} A. (C) 8")), NoAnswer)


def test_a_function_as_trl_calls_it_gets_lists_and_columns() -> None:
    parts = [part_of(trl, name="right"), part_of(ranked, name="long", weight=0.5)]
    first, second = scored(group_of("ab", "d", answer="ab"), *parts)
    assert (first.reward, first.reward_parts) == (1.5, {"right": 1.0, "long": 1.0})
    assert (second.reward, second.reward_parts) == (0.0, {"long": 0.0})
    with pytest.raises(DataFailure, match="row 4 has no column 'answer', which the reward requires"):
        scored(group_of("ab"), part_of(trl, name="right"))


def test_requests_that_wait_share_a_call_of_whole_groups() -> None:
    calls: list[list[int]] = []
    entered, leave = threading.Semaphore(0), threading.Semaphore(0)

    def slow(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[float]:
        calls.append([prompt.row for prompt in prompts])
        entered.release()
        leave.acquire()
        return [float(prompt.row) for prompt in prompts]

    async def scene() -> None:
        part = part_of(slow, batch_size=4, concurrency=1)
        grader = Grader(Letters(), RewardParts((part,)))
        groups = [group_of("a", "b", row=row) for row in range(4)]
        tasks = [asyncio.create_task(grader.score(groups[0]))]
        await asyncio.to_thread(entered.acquire)
        tasks += [asyncio.create_task(grader.score(group)) for group in groups[1:]]
        for _ in range(10):
            await asyncio.sleep(0)
        leave.release(3)
        await asyncio.gather(*tasks)
        assert [[one.reward for one in group.trajectories] for group in groups] == [
            [float(row)] * 2 for row in range(4)
        ]

    try:
        asyncio.run(scene())
    finally:
        leave.release(3)
    assert calls == [[0, 0], [1, 1, 2, 2], [3, 3]]


@pytest.mark.parametrize(
    ("function", "settings", "story"),
    [
        (lambda prompt, trajectories: [1.0], {}, r"tests\.function returned 1 value for 2 responses on prompt row 4"),
        (lambda prompt, trajectories: 1.0, {}, "returned a float, not a list with a value for each response on prompt"),
        (lambda prompt, trajectories: {0: 0.5, 1: 0.7}, {}, "returned a dict, not a list with"),
        (lambda prompt, trajectories: [1.0, "x"], {}, "returned 'x' of type str on prompt row 4, not a finite number"),
        (
            lambda prompt, trajectory: [1.0],
            {"unit": "token"},
            "returned 1 numbers on prompt row 4, not one finite number for each token of the response, which has 2",
        ),
        (
            lambda prompt, trajectory: 1.0,
            {"unit": "turn"},
            "returned 1.0 of type float on prompt row 4, not one finite",
        ),
        (lambda prompt, trajectory: [1.0, None], {"unit": "token"}, "returned a list with None on"),
        (lambda prompt, trajectory: {0.5, 1.0}, {"unit": "token"}, "of type set on prompt row 4, not one"),
    ],
)
def test_a_wrong_number_of_values_is_named(function: Callable[..., Any], settings: Any, story: str) -> None:
    with pytest.raises(DataFailure, match=story):
        scored(group_of("ab", "bc"), part_of(function, **settings))


def test_rewards_of_turns_and_tokens_belong_to_their_tokens() -> None:
    parts = [
        part_of(lambda prompt, trajectory: [1.0, 2.0], name="turns", unit="turn", weight=2.0),
        part_of(lambda prompt, trajectory: [0.25] * 4, name="tokens", unit="token"),
        part_of(lambda prompt, trajectory: 5.0, name="outcome"),
    ]
    (found,) = scored(group_of("abCd"), *parts)
    assert found.step_rewards == [StepReward(0, 0.25), StepReward(1, 2.25), StepReward(2, 0.25), StepReward(3, 4.25)]
    assert found.reward == 2.0 * 3.0 + 1.0 + 5.0
    assert found.reward_parts == {"turns": 3.0, "tokens": 1.0, "outcome": 5.0}


def test_an_overdue_coroutine_is_cancelled() -> None:
    cancelled = threading.Event()

    async def forever(prompt: Prompt, trajectory: Trajectory) -> float:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    async def scene() -> None:
        with pytest.raises(DataFailure, match=r"reward tests\.function took longer than 0\.01 s on prompt row 4"):
            await Grader(Letters(), RewardParts((part_of(forever, timeout_s=0.01),))).score(group_of("a"))
        assert await asyncio.to_thread(cancelled.wait, 20)

    asyncio.run(scene())


def test_a_timeout_error_of_a_coroutine_is_its_own() -> None:
    async def late(prompt: Prompt, trajectory: Trajectory) -> float:
        raise TimeoutError("the server is slow")

    with pytest.raises(DataFailure, match="raised TimeoutError on prompt row 4: the server is slow"):
        scored(group_of("a"), part_of(late))


def test_calls_are_measured_by_function_with_who_waits_for_them() -> None:
    began, leave = threading.Event(), threading.Event()

    def slow(prompt: Prompt, trajectory: Trajectory) -> float:
        began.set()
        leave.wait(60)
        return 1.0

    async def scene() -> None:
        changes: list[int] = []
        grader = Grader(Letters(), RewardParts((part_of(slow, name="slow", concurrency=1, setting="a.b"),)))
        grader.watch_calls(lambda: changes.append(1))
        running = [asyncio.ensure_future(grader.score(group_of("a", "b", row=row))) for row in range(2)]
        await asyncio.to_thread(began.wait, 60)
        (busy,) = grader.call_figures()
        assert (busy.function, busy.at_once, busy.setting) == ("reward slow", 1, "a.b")
        assert (busy.groups, busy.queued, busy.calls) == (2, 3, 0) and busy.running_s > 0 and len(changes) == 4
        leave.set()
        await asyncio.gather(*running)
        (done,) = grader.call_figures()
        assert (done.groups, done.queued, done.calls, done.running_s) == (0, 0, 4, 0.0) and done.seconds > 0

    try:
        asyncio.run(scene())
    finally:
        leave.set()


def test_texts_are_given_and_rewards_left_to_who_gives_them_later() -> None:
    calls: list[str] = []

    def reward(prompt: Prompt, trajectory: Trajectory) -> float:
        calls.append(trajectory.text)
        return 1.0

    group = group_of("ab", "ab")
    group.trajectories[1].reward = 0.5  # brought by an agent

    async def scene() -> None:
        await Grader(Letters(), reward, later=True).score(group)
        assert [t.reward for t in group.trajectories] == [None, 0.5]
        assert [t.text for t in group.trajectories] == ["ab", "ab"] and calls == []
        await Grader(Letters(), reward).score(group)
        assert [t.reward for t in group.trajectories] == [1.0, 0.5] and calls == ["ab"]

    asyncio.run(scene())


# -- several functions -------------------------------------------------------------------------------------------------


def letters(prompt: Prompt, trajectory: Trajectory) -> float:
    return len(trajectory.text)


def only_short(prompt: Prompt, trajectory: Trajectory) -> float | None:
    return 1.0 if len(trajectory.text) < 3 else None


def never(prompt: Prompt, trajectory: Trajectory) -> None:
    return None


def wrong(prompt: Prompt, trajectory: Trajectory) -> float:
    raise KeyError("anser")


def test_the_reward_is_the_weighted_sum_of_the_parts_that_apply() -> None:
    group = group_of("ab", "a", "abc")
    group.trajectories[2].continues = True  # the last segment of the second rollout
    parts = [RewardPart(name="length", weight=0.5, function=letters)]
    scored(group, *parts, RewardPart(name="short", weight=-2.0, function=only_short))
    assert [t.reward for t in group.trajectories] == [0.5 * 2 - 2.0, 1.5, 1.5]
    assert [t.reward_parts for t in group.trajectories] == [{"length": 2.0, "short": 1.0}, *[{"length": 3.0}] * 2]
    assert all(type(t.reward) is float for t in group.trajectories)


@pytest.mark.parametrize(
    ("weights", "functions", "story"),
    [
        ([1.0, 1.0], [never, never], "a, b returned None; at least one must return a number"),
        ([1.0, 1.0], [letters, wrong], r"reward b \(.*wrong\) raised KeyError on prompt row 4"),
        ([1.0], [lambda *_: math.nan], "reward a .* returned nan on prompt row 4, neither a finite number"),
        ([1e9], [lambda *_: 1e300], "the weighted sum of a on prompt row 4 is inf"),
    ],
)
def test_a_failure_names_the_part(weights: list[float], functions: list[Any], story: str) -> None:
    parts = [RewardPart(name=name, weight=w, function=f) for name, w, f in zip("ab", weights, functions, strict=False)]
    group = group_of("ab", "bc")
    with pytest.raises(DataFailure, match=story) as caught:
        scored(group, *parts)
    assert caught.value.details["row"] == 4
    assert caught.value.judged is group, "engine samples --failed shows them"
