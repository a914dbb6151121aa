"""A policy of one's own: a curriculum for admission, which begins with few groups at once and widens as they do better.

    python examples/custom_policy.py                       # in one process, without Ray or torch: about a second
    engine check examples/custom_policy.yaml               # tests it in 24 small simulated runs
    engine run   examples/custom_policy.yaml               # trains the quickstart's model under it

Few groups at once keep the data fresh while the model changes fastest; more of them keep every slot busy once it is
steady. The policy sees figures alone and says how many groups start; what it remembers is the scheduler's, which
hashes it, records nothing of it, and has it again after a replay or a resume.
"""

from typing import Any

from engine import policies
from engine.states.view import View

WIDER = 0.05
"""The reward must rise by so much for one more group to be open at once."""


@policies.register("admission", "curriculum", api=1)
class Curriculum:
    """One batch of groups open at first, and one more for every 0.05 that the best step's reward has risen."""

    memory: dict[str, Any]

    def admit(self, view: View, legal: int) -> int:
        memory, batch = self.memory, view.limits.train_batch_size
        reward = view.step_reward
        if reward is not None:
            first = memory.setdefault("first", reward)
            memory["best"] = max(memory.get("best", first), reward)
            memory["width"] = batch + int((memory["best"] - first) / WIDER)
        open_groups = view.running + view.parked + view.ready
        return max(0, min(legal, memory.get("width", batch) - open_groups))


def main() -> Any:
    from embed import Guesser, Learner

    import engine.runtime.local
    from engine.states.limits import Limits

    limits = Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=20)
    questions = [f"Is {number} odd?" for number in range(1, 200, 2)]
    result = engine.runtime.local.run(
        generators=[Guesser(), Guesser()], trainer=Learner(), prompts=questions, limits=limits, samples=4, slots=6,
        policies={"admission": "curriculum"},
    )  # fmt: skip
    first, last = result.metrics[0], result.metrics[-1]
    print(f"{result.outcome}: {result.steps} train steps, reward {first['reward']:.2f} -> {last['reward']:.2f}")
    return result


if __name__ == "__main__":
    main()
