"""Advantages of rewards that belong to single tokens, worked out by hand."""

import math
from collections.abc import Sequence

import pytest

from engine.training.advantages import centered_steps, set_advantages
from engine.training.batch import Sample, pack, samples_of
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt, Span, StepReward, Trajectory, TrajectoryGroup


def response(
    mask: Sequence[int], steps: Sequence[tuple[int, float]], outcome: float = 0.0, **others: bool
) -> Trajectory:
    total = outcome + math.fsum(value for _, value in steps)
    count = len(mask)
    return Trajectory(
        prompt_ids=[1], token_ids=[2] * count, logprobs=[-1.0] * count, loss_mask=list(mask), spans=[Span(0, count, 0)],
        finish_reason="stop", reward=total, step_rewards=[StepReward(*step) for step in steps], **others,
    )  # fmt: skip


def advantages(*trajectories: Trajectory, advantage: str = "dr_grpo") -> list[Sample]:
    group = TrajectoryGroup(group=0, prompt=Prompt(row=0, text="?"), trajectories=list(trajectories))
    samples = samples_of(group)
    set_advantages([samples], TrainerSettings(advantage=advantage))
    return samples


def tokens(sample: Sample) -> list[float]:
    assert sample.token_advantages is not None
    assert sample.advantage == pytest.approx(float(sample.token_advantages.mean()))
    return sample.token_advantages.tolist()


# Turns end at tokens 1 and 3 of the first response and at 0 of the second. Their rewards 1, 0 and 2 have the mean 1.
FIRST, SECOND = [(1, 1.0), (3, 0.0)], [(0, 2.0)]


def test_a_token_gets_the_centered_rewards_from_itself_on() -> None:
    # Centered: 0 and -1; 1. From token 0 or 1 on: 0 - 1 = -1; from 2 or 3 on: -1. The second response: 1, then nothing.
    first, second = advantages(response([1, 1, 1, 1], FIRST), response([1, 1], SECOND))
    assert tokens(first) == [-1.0, -1.0, -1.0, -1.0] and tokens(second) == [1.0, 0.0]


def test_grpo_divides_by_the_standard_deviation_of_all_steps_of_the_group() -> None:
    # Rewards 1, 0, 2: squared distances 0 + 1 + 1, divisor 2, so the standard deviation is 1.
    assert centered_steps([[1.0, 0.0], [2.0]], "grpo") == [
        pytest.approx([0.0, -1.0], abs=1e-5),
        pytest.approx([1.0], abs=1e-5),
    ]
    # 1, 0, 2, 5: mean 2, squares 1 + 4 + 0 + 9 = 14, divisor 3.
    spread = math.sqrt(14 / 3)
    assert centered_steps([[1.0, 0.0], [2.0, 5.0]], "grpo")[1] == pytest.approx([0.0, 3 / spread], rel=1e-5)


def test_the_other_baselines() -> None:
    # Less the mean of the others: 1 - 2, 0 - 2; 2 - 1/2.
    assert centered_steps([[1.0, 0.0], [2.0]], "rloo") == [[-1.0, -2.0], [1.5]]
    assert centered_steps([[1.0, 0.0], [2.0]], "reinforce_pp") == [[1.0, 0.0], [2.0]]
    assert centered_steps([[1.0, 0.0], [2.0]], "reinforce_pp_baseline") == [[0.0, -1.0], [1.0]]
    assert centered_steps([[1.0, 1.0], [1.0]], "grpo") == [[0.0, 0.0], [0.0]], "equal rewards teach nothing"
    assert math.isnan(centered_steps([[math.inf], [1.0]], "grpo")[1][0])


def test_the_outcome_is_added_to_every_token_and_counted_once() -> None:
    # Outcomes 3 and 1: centered 1 and -1. Only the outcome enters their baseline, though `reward` is the whole sum.
    first, second = advantages(response([1, 1, 1, 1], FIRST, 3.0), response([1, 1], SECOND, 1.0))
    assert tokens(first) == [0.0] * 4 and tokens(second) == [0.0, -1.0]


def test_rewards_of_tokens_that_are_not_trained_count_for_those_before_them() -> None:
    # Token 1 is a tool's. Rewards 4 there and 0 elsewhere: mean 2, centered 2 and -2.
    first, second = advantages(response([1, 0, 1], [(1, 4.0)]), response([1], [(0, 0.0)]))
    assert tokens(first) == [2.0, 0.0] and tokens(second) == [-2.0]


def test_earlier_segments_get_what_the_last_one_earns() -> None:
    last = response([1, 1], [(0, 1.0), (1, 3.0)], continues=True)
    earlier = response([1, 1], [])
    earlier.reward = last.reward
    one, two, other = advantages(earlier, last, response([1], [(0, 2.0)]))
    # Mean 2: centered -1, 1 and 0.
    assert tokens(one) == [0.0, 0.0] and tokens(two) == [0.0, 1.0] and tokens(other) == [0.0]


def test_a_response_without_steps_is_trained_beside_one_with_steps() -> None:
    samples = advantages(response([1, 1], [(0, 1.0), (1, 0.0)], 1.0), response([1], [], 0.0))
    assert [tokens(sample) for sample in samples] == [[0.5, 0.0], [-0.5]]
    ((micro, _),) = pack(samples, 100)
    assert micro.advantages.tolist() == [0.5, 0.0, -0.5]


def test_without_steps_every_token_has_the_same_advantage() -> None:
    samples = advantages(response([1, 1], [], 1.0), response([1], [], 0.0))
    assert [(sample.advantage, sample.token_advantages) for sample in samples] == [(0.5, None), (-0.5, None)]
