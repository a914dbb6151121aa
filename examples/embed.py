"""Schedule your own generator and trainer with the engine: one process, plain Python, no Ray, no torch.

The "model" is one number: the probability of the answer 1. A group is four answers to a question. An answer is right if
it is 1.
"""

import asyncio
import random

import engine.runtime.local
from engine.protocols import Batch, GroupWork
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.states.limits import Limits
from engine.trajectory import Trajectory


class Guesser(SimpleGenerator):
    """Answers 1 with the probability given by the weights. Long questions take longer."""

    async def sample(self, work: GroupWork, weights: float | None, version: int) -> list[Trajectory]:
        chance = 0.2 if weights is None else weights
        draw = random.Random(work.group)
        await asyncio.sleep(0.001 * len(work.prompt.text))
        answers = [int(draw.random() < chance) for _ in range(work.samples)]
        return [response([answer], reward=float(answer), version=version, text=str(answer)) for answer in answers]


class Learner(SimpleTrainer):
    """Raises the probability of answers that are better than the mean of their group."""

    def __init__(self) -> None:
        self.chance = 0.2

    def train(self, batch: Batch) -> dict[str, float]:
        rewards = [t.reward or 0.0 for group in batch.groups for t in group.trajectories]
        mean = sum(rewards) / len(rewards)
        self.chance = min(0.95, self.chance + 0.5 * mean * (1 - mean))
        return {"reward": mean, "chance": self.chance}

    def weights(self) -> float:
        return self.chance


def main() -> engine.runtime.local.RunResult:
    limits = Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=20)
    questions = [f"Is {number} odd?" for number in range(1, 200, 2)]
    result = engine.runtime.local.run(
        generators=[Guesser(), Guesser()], trainer=Learner(), prompts=questions, limits=limits, samples=4, slots=6
    )
    first, last = result.metrics[0], result.metrics[-1]
    print(f"{result.outcome}: {result.steps} train steps in {result.seconds:.2f} s, {result.events} events recorded")
    print(f"reward {first['reward']:.2f} -> {last['reward']:.2f}, staleness at most {result.staleness_max} steps")
    return result


if __name__ == "__main__":
    main()
