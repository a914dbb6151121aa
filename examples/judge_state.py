"""An added state: a slow judge between rollout and training, which is asked about at most four groups at once.

    python examples/judge_state.py

Groups leave their replica after their last token, so slots do not wait for the judge. They keep their place under the
staleness bound, and no step takes a group that is not judged.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from engine import policies
from engine.policies import added_states
from engine.protocols import Batch, GroupWork
from engine.runtime.local import RunResult, SimpleGenerator, SimpleTrainer, response, run
from engine.states.limits import Limits
from engine.trajectory import Trajectory, TrajectoryGroup

AT_ONCE = 4


class Judge:
    """Stands for a model that is called over the network: it is slow, and accepts only a few requests at once."""

    asked = busiest = 0

    def enters(self, view: Any, group: Any) -> bool:
        """Every group is judged. Another rule may use the view and the group."""
        return True

    async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """May change rewards, never tokens. After an exception, the group is retried: `DataFailure` uses its `data`
        budget, any other exception its `infrastructure` budget."""
        Judge.asked += 1
        Judge.busiest = max(Judge.busiest, Judge.asked)
        try:
            await asyncio.sleep(0.01)  # the time of the judge
            for trajectory in group.trajectories:
                trajectory.reward = 1.0 if trajectory.token_ids[-1] % 2 == 0 else 0.0
            return group
        finally:
            Judge.asked -= 1


policies.add_state(
    machine="group", state="judging", phase="parked", between=("generated", "batched"), policy=Judge,
    concurrency=AT_ONCE,
)  # fmt: skip


class Dice(SimpleGenerator):
    """Each answer is one number. Only the judge knows which answers are right."""

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        await asyncio.sleep(0)
        return [response([work.group + index], reward=0.0, version=version) for index in range(work.samples)]


class Book(SimpleTrainer):
    """Trains nothing, and records the rewards that the judge gave."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def train(self, batch: Batch) -> dict[str, float]:
        self.rewards += [trajectory.reward or 0.0 for group in batch.groups for trajectory in group.trajectories]
        return {"reward": sum(self.rewards) / len(self.rewards)}

    def weights(self) -> int:
        return len(self.rewards)


def judged_run(trainer: Book) -> RunResult:
    """A run of ten steps with four judged groups each."""
    limits = Limits(
        train_batch_size=4, max_staleness_steps=3, max_concurrent_groups=16, max_steps=10,
        added_states=added_states(("judging",)),
    )  # fmt: skip
    return run(
        generators=[Dice(), Dice()], trainer=trainer, prompts=[f"question {n}" for n in range(60)], limits=limits,
        samples=2,
    )  # fmt: skip


if __name__ == "__main__":
    book = Book()
    result = judged_run(book)
    print(f"{result.outcome} after {result.steps} steps; {sum(book.rewards):.0f} of {len(book.rewards)} answers right")
    print(f"the judge was asked about {Judge.busiest} groups at once; the maximum is {AT_ONCE}")
