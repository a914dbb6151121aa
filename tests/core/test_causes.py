"""The causes of waits: in every state of a run there is one for its slots and one for its trainer, and it has words."""

from typing import Any

import pytest

from engine.events import DrainRequested
from engine.record.frames import Tick
from engine.simulation.world import Faults, Setting
from engine.states.causes import (
    SLOT_CAUSES,
    TASKS,
    TRAINER_CAUSES,
    limited_replicas,
    what_the_trainer_does,
    why_slots_are_free,
)
from engine.states.limits import Limits, Pool
from tests.core.added_states import CHECKING, GATING, PROVING
from tests.judge.judged_world import JudgedWorld

TURNS = (Pool(tasks=("rollout", "train", "old_logprobs"), replicas=(0, 1)),)
WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in turns": {"pools": TURNS, "scoring_tasks": ("old_logprobs",)},
    "added states": {"added_states": (CHECKING, GATING, PROVING), "checkpoint_every": 2},
    "trains after the sync": {"train_after_sync": True, "scoring_tasks": ("old_logprobs",)},
}


class Explained(JudgedWorld):
    """Asks for the causes after each tick, and notes their names."""

    def __init__(self, setting: Setting) -> None:
        self.named: set[str] = set()
        super().__init__(setting)

    def _observe(self, tick: Tick) -> None:
        super()._observe(tick)
        state = self.scheduler.state
        slots, trainer = why_slots_are_free(state, state.training.latest_version), what_the_trainer_does(state)
        assert slots in SLOT_CAUSES and trainer in (*TASKS, *TRAINER_CAUSES)
        for cause in (slots, trainer):
            assert "None" not in cause.now(state) and "  " not in cause.now(state)
            self.named.add(cause.name)
        assert not limited_replicas(state) or "is limited to" in limited_replicas(state)


@pytest.mark.parametrize("figures", WORLDS.values(), ids=WORLDS)
def test_every_state_of_a_run_has_a_cause_for_slots_and_trainer(figures: dict[str, Any]) -> None:
    limits = Limits(
        train_batch_size=3, max_staleness_steps=2, max_concurrent_groups=9, max_steps=8, infrastructure_attempts=20,
        trainer_restarts=9, run_restarts=0, **{"keeps_batches": True, "checkpoint_every": 1, **figures},
    )  # fmt: skip
    faults = Faults() if "pools" in figures else Faults(die=0.02, die_trainer=0.05, fail_start=0.1)
    world = Explained(Setting(limits=limits, replicas=2, slots=3, prompts=26, seed=3, faults=faults, max_tokens=200))
    world.run_until(lambda state: state.training.steps_trained >= 5)
    world.tell(DrainRequested(reason="enough"))
    world.run()
    assert len(world.named) >= 6, world.named
