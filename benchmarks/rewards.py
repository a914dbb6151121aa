"""The time that a separate process adds to a reward, per trajectory.

    python benchmarks/rewards.py [--groups N] [--samples N] [--tokens N] [--processes N]

Scores the same groups with the same trivial function, in turns on threads of this process and in separate processes.
Prints the median time per trajectory for both, and their difference. The first group, which starts the processes, is
not counted.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from engine.config.reward import NamedReward, RewardSection
from engine.config.reward_functions import reward_of_section
from engine.rollout.reward_parts import RewardParts
from engine.rollout.scoring import Grader
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup

EXACT = "engine.tasks.rewards:exact_match"


class Words:
    """A decoder that takes nearly no time."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return "word " * len(token_ids)


def group_of(samples: int, tokens: int) -> TrajectoryGroup:
    prompt = Prompt(row=0, text="question " * 50, fields={"answer": "4", "source": "made"})
    return TrajectoryGroup(
        group=0,
        prompt=prompt,
        trajectories=[
            Trajectory(
                prompt_ids=list(range(100)), token_ids=list(range(tokens)), logprobs=[-0.5] * tokens,
                loss_mask=[1] * tokens, spans=[Span(0, tokens, 0)], finish_reason="stop",
            )
            for _ in range(samples)
        ],
    )  # fmt: skip


def reward(processes: int, concurrency: int) -> RewardParts:
    """The reward on threads or in processes. Both kinds judge the same number of responses at once."""
    settings: dict[str, Any] = {"processes": processes} if processes else {"processes": 0, "concurrency": concurrency}
    found = reward_of_section(RewardSection(functions=[NamedReward(name="exact", function=EXACT, **settings)]), None)
    assert found is not None
    return found


async def measure(groups: int, samples: int, tokens: int, processes: int) -> dict[str, float]:
    """Median milliseconds per trajectory."""
    rewards = {"threads": reward(0, processes), "processes": reward(processes, processes)}
    graders = {name: Grader(Words(), found, timeout_s=30.0) for name, found in rewards.items()}
    taken: dict[str, list[float]] = {name: [] for name in graders}
    for _ in range(groups + 1):
        for name, grader in graders.items():
            group = group_of(samples, tokens)
            began = time.perf_counter()
            await grader.score(group)
            taken[name].append((time.perf_counter() - began) / samples * 1000)
    for found in rewards.values():
        found.close()
    figures = {f"{name}_ms": median(values[1:]) for name, values in taken.items()}
    return {**figures, "added_ms": figures["processes_ms"] - figures["threads_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    asked = vars(parser.parse_args())
    figures = asyncio.run(measure(**asked))
    print(json.dumps({**asked, **{name: round(value, 3) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
