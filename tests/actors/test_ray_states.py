"""The work of added states in an actor of its own: it dies and continues, and rewards can be given there."""

from pathlib import Path

import pytest
from ray_plans import Counter, Quick, events_of, plan

from engine.actors.launch import start
from engine.events import ProcessLost, ProcessUp, StateLeft
from engine.protocols import Batch
from engine.runtime.plan import Rollout
from engine.runtime.prompt_sources import listed
from engine.states.limits import AddedState, Limits

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS = 5


class Judged(Counter):
    def train(self, batch: Batch) -> dict[str, float]:
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        assert rewards == [7.0, 9.0] * len(batch.groups), "a step took what was not judged"
        return super().train(batch)


def test_the_process_of_the_states_dies_and_goes_on(tmp_path: Path) -> None:
    limits = Limits(
        train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=STEPS,
        added_states=(AddedState(name="refereeing", concurrency=2),),
    )  # fmt: skip
    marker = str(tmp_path / "died")
    judged = plan(
        tmp_path,
        limits=limits,
        make_trainer=Judged,
        make_rollout=lambda replica: Rollout(generator=Quick()),
        make_prompts=lambda: listed([marker] * 40),
        config={"run": {"extensions": ["refereeing_state"], "code_dir": str(Path(__file__).parent)}},
    )
    with start(judged) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    (lost,) = events_of(tmp_path, ProcessLost)
    assert lost.kind == "added states" and "died" in lost.reason
    (up,) = [event for event in events_of(tmp_path, ProcessUp) if event.kind == "added states"]
    assert up.incarnation == 2
    assert events_of(tmp_path, StateLeft)
