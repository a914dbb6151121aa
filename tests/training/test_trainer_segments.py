"""Rollouts of several segments, worked by hand: one vote each, the same advantage and weight for all their tokens."""

import math
from collections.abc import Callable, Sequence

import pytest

from engine.protocols import Batch
from engine.training.advantages import set_advantages
from engine.training.batch import by_rollout, samples_of
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Span, Trajectory, TrajectoryGroup

MakeGroup = Callable[..., TrajectoryGroup]
MakeBatch = Callable[[int, Sequence[TrajectoryGroup]], Batch]


def segmented(group: MakeGroup) -> TrajectoryGroup:
    """Rewards 1, 0, 0; the first rollout in two segments of 3 and 5 tokens, the others of 3."""
    made = group(0, [1.0, 1.0, 0.0, 0.0], responses=[[5, 6, 7], [6, 7, 8, 9, 10], [7, 8, 9], [8, 9, 10]])
    made.trajectories[1].continues = True
    return made


def test_a_rollout_votes_once_and_all_its_segments_get_its_advantage(group: MakeGroup) -> None:
    """Rewards 1, 0, 0: mean 1/3, deviations 2/3, -1/3, -1/3, sample std sqrt(1/3)."""
    samples = samples_of(segmented(group))
    set_advantages([samples], TrainerSettings())
    std = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
    high, low = (2 / 3) / std, (-1 / 3) / std
    assert [s.advantage for s in samples] == pytest.approx([high, high, low, low], abs=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 14] * 4),
        ("sequence_mean", [1 / (3 * 8), 1 / (3 * 8), 1 / (3 * 3), 1 / (3 * 3)]),
        ("constant", [1 / (3 * 10)] * 4),
    ],
)
def test_a_rollout_weighs_as_one_however_it_is_cut(
    model_path: str, group: MakeGroup, aggregation: str, weights: list[float]
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(aggregation=aggregation, aggregation_tokens=10))
    ((*samples,),) = trainer._minibatches([samples_of(segmented(group))])
    assert [s.weight for s in samples] == pytest.approx(weights)


def test_reward_metrics_are_over_rollouts(model_path: str, group: MakeGroup, as_batch: MakeBatch) -> None:
    metrics = ModelTrainer(model_path, TrainerSettings()).train(as_batch(0, [segmented(group)]))
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert metrics["response_tokens"] == 14
    assert metrics["zero_advantage_groups"] == 0
    assert metrics["segments"] == pytest.approx(4 / 3)


def test_a_first_segment_with_nothing_to_train_leaves_its_vote_to_the_next(group: MakeGroup) -> None:
    made = segmented(group)
    made.trajectories[0].loss_mask = [0, 0, 0]
    rollouts = by_rollout(samples_of(made))
    assert [[s.tokens for s in rollout] for rollout in rollouts] == [[5], [3], [3]]


def test_given_tokens_are_of_the_version_that_went_on_from_them() -> None:
    trajectory = Trajectory()
    trajectory.extend([1, 2], [-1.0, -1.0], [Span(0, 2, 3)])
    trajectory.extend([4, 5], [-2.0, -2.0], [Span(0, 1, 4), Span(1, 2, 6)], given_ids=[8, 9])
    assert trajectory.token_ids == [1, 2, 8, 9, 4, 5]
    assert trajectory.loss_mask == [1, 1, 0, 0, 1, 1]
    assert trajectory.spans == [(0, 2, 3), (2, 5, 4), (5, 6, 6)]
    trajectory.extend([7], [-1.0], [Span(0, 1, 6)], given_ids=[8])
    assert trajectory.spans == [(0, 2, 3), (2, 5, 4), (5, 8, 6)]
