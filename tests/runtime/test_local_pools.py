"""Runs in one process whose tasks have pools of their own."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_local_runs import Steady

import engine.runtime.local
from engine.errors import ConfigError
from engine.policies import state_registry
from engine.protocols import Batch, GroupWork
from engine.runtime.local import RunResult, SimpleGenerator, SimpleTrainer, response
from engine.states.limits import AddedState, Limits, Pool
from engine.trajectory import Trajectory, TrajectoryGroup

STEPS = 5
APART = (
    Pool(tasks=("rollout", "reward"), replicas=(0, 1)),
    Pool(tasks=("train",)),
    Pool(tasks=("old_logprobs", "ref_logprobs")),
)


class Counting(SimpleTrainer):
    """Weights are the steps done; keeps the scores of each batch."""

    def __init__(self) -> None:
        self.scores: list[dict[str, float]] = []
        self.scored = 0

    def score(self, batch: Batch, task: str) -> None:
        self.scored += 1

    def train(self, batch: Batch) -> dict[str, float]:
        self.scores.append({task: rows[0][0][0] for task, rows in batch.scores.items()})
        return {}

    def weights(self) -> Any:
        return len(self.scores)


class Reader:
    def __init__(self, tasks: tuple[str, ...]) -> None:
        self.tasks = tasks
        self.weights = 0

    def load(self, weights: Any) -> None:
        self.weights = weights

    def score(self, batch: Batch, task: str) -> Any:
        assert task in self.tasks
        value = float(self.weights) if task == "old_logprobs" else -1.0
        return [[[value] * len(t.token_ids) for t in group.trajectories] for group in batch.groups]


def run(trainer: Counting, pools: tuple[Pool, ...], **options: Any) -> RunResult:
    limits = Limits(
        train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, max_steps=STEPS,
        scoring_tasks=("ref_logprobs", "old_logprobs"), pools=pools,
    )  # fmt: skip
    return engine.runtime.local.run(
        generators=[Steady(), Steady()], trainer=trainer, prompts=[f"question {n}" for n in range(40)], limits=limits,
        samples=2, **options,
    )  # fmt: skip


def test_scores_come_from_a_scorer_of_their_own_under_the_weights_of_their_step() -> None:
    trainer = Counting()
    assert run(trainer, APART, make_scorer=Reader).outcome == "finished"
    assert trainer.scores == [{"old_logprobs": float(n), "ref_logprobs": -1.0} for n in range(STEPS)]
    assert trainer.scored == 0


def test_without_pools_the_trainer_scores() -> None:
    trainer = Counting()
    assert run(trainer, (), make_scorer=Reader).outcome == "finished"
    assert trainer.scores == [{}] * STEPS and trainer.scored == 2 * STEPS


def test_pools_that_need_a_scorer_must_have_one() -> None:
    with pytest.raises(ConfigError, match=r"make_scorer.*have a pool without train"):
        run(Counting(), APART)


class Unrewarded(SimpleGenerator):
    """Leaves rewards to a state of their own."""

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        await asyncio.sleep(0)
        given = [response([1, 2], reward=0.0, version=version) for _ in range(work.samples)]
        for trajectory in given:
            trajectory.reward = None
        return given


class Rewarded(Counting):
    def train(self, batch: Batch) -> dict[str, float]:
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        assert rewards == [0.0, 1.0] * len(batch.groups)
        return super().train(batch)


def test_a_group_that_is_dropped_while_it_is_rewarded_makes_place_for_the_next() -> None:
    under_way: set[int] = set()
    most, cut_short = 0, 0

    async def reward(group: TrajectoryGroup) -> TrajectoryGroup:
        nonlocal most, cut_short
        under_way.add(group.group)
        most = max(most, len(under_way))
        try:
            if group.group % 3 == 0:
                await asyncio.Event().wait()  # never: it is dropped, or the run would not end
        except asyncio.CancelledError:
            cut_short += 1
            raise
        finally:
            under_way.remove(group.group)
        for index, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(index)
        return group

    limits = Limits(
        train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=8, max_steps=STEPS, over_sample=1.0,
        added_states=(AddedState(name="rewarding", concurrency=4),),
    )  # fmt: skip
    result = engine.runtime.local.run(
        generators=[Unrewarded(), Unrewarded()], trainer=Rewarded(), prompts=[f"question {n}" for n in range(60)],
        limits=limits, samples=2, works={"rewarding": reward},
    )  # fmt: skip
    assert (result.outcome, result.steps) == ("finished", STEPS)
    assert cut_short > 4 and most <= 4, "as many at once as it has slots, whatever was dropped"


def test_the_example_of_a_slow_judge_never_asks_it_more_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    monkeypatch.setattr(
        state_registry, "_ADDED", dict(state_registry._ADDED)
    )  # no other test knows the example's state
    import judge_state

    book = judge_state.Book()
    assert judge_state.judged_run(book).outcome == "finished"
    assert judge_state.Judge.busiest == judge_state.AT_ONCE
    assert sum(book.rewards) == len(book.rewards) / 2, "the judge's verdict is what is trained on"
