"""A custom policy: a curriculum for admission. It starts with few groups at once, and allows more as rewards rise.

    python examples/custom_policy.py                       # in one process, without Ray or torch: about a second
    engine check examples/custom_policy.yaml               # tests it in 24 small simulated runs
    engine run   examples/custom_policy.yaml               # trains the quickstart's model with it

Few groups at once keep the data fresh while the model changes fastest. Later, more groups keep every slot busy. The
policy sees only figures, and says how many groups start. Its attributes belong to the scheduler's state: they are part
of the state hash, and a replay or a resume rebuilds them.
"""

from typing import Any

from engine import policies
from engine.states.view import View

WIDER = 0.05
"""Rise of the reward that allows one more open group."""


@policies.register("admission", "curriculum", api=1)
class Curriculum:
    """Allows one batch of open groups at first, and one more group each time the best step's reward rises by 0.05."""

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
