"""Added states of train steps, worked out by hand: what they inspect and when, refusals, failures, losses, a resume."""

from typing import Any

import pytest

from engine import policies
from engine.commands import EnterState, InspectStep, PublishWeights, StageWeights, StartProcess, StopProcess, TrainStep
from engine.errors import ConfigError
from engine.events import ProcessLost, ProcessUp, RunResumed, StateLeft, StepInspected
from engine.ids import NO_VERSION
from engine.states.step import STEP, step_table
from engine.states.timeouts import Timeouts
from tests.core.added_states import CHECKING
from tests.core.agents import inspection_answer
from tests.core.scripted import Scripted


class Everything:
    def enters(self, view: Any, step: Any) -> bool:
        return True

    async def work(self, given: Any) -> str | None:
        return None


for name in ("first-gate", "second-gate"):
    policies.add_state(machine="step", state=name, between=("scoring", "training"), policy=Everything)
for name in ("every-version", "again"):
    policies.add_state(machine="step", state=name, between=("publishing", "finished"), policy=Everything)
FIRST, SECOND, WEIGHTS, AGAIN = policies.added_states(("first-gate", "second-gate", "every-version", "again"))


def small(*states: Any, **others: Any) -> Scripted:
    """B = 1, S = 1, K = 2."""
    figures = {"train_batch_size": 1, "max_staleness_steps": 1, "max_concurrent_groups": 2}
    return Scripted(**{**figures, "added_states": states, **others})


def inspected(run: Scripted, *, refused: str = "", succeed: bool = True) -> None:
    """The newest inspection ends."""
    run.tell(inspection_answer(run.ordered(InspectStep)[-1], succeed=succeed, refused=refused))


def orders(run: Scripted) -> list[tuple[str, int, int, int]]:
    return [(c.state, c.step, c.version, c.attempt) for c in run.ordered(InspectStep)]


def test_a_batch_passes_its_states_in_order_before_it_is_trained() -> None:
    run = small(FIRST, SECOND)
    run.finish(0)
    assert run.state.training.steps[0].state == "first-gate" and not run.ordered(TrainStep)
    inspected(run)
    assert orders(run) == [("first-gate", 0, NO_VERSION, 1), ("second-gate", 0, NO_VERSION, 1)]
    assert run.ordered(InspectStep)[-1].groups == (0,) and not run.ordered(TrainStep)
    run.tell(StepInspected(step=0, attempt=1, state="first-gate"))
    assert run.state.training.steps[0].state == "second-gate", "a repeated answer is a stale echo"
    inspected(run)
    assert [c.step for c in run.ordered(TrainStep)] == [0]


def test_a_refused_batch_is_not_trained_and_the_run_says_why() -> None:
    run = small(FIRST, policies={"filter": "none"})
    run.finish(0)
    inspected(run, refused="a reward is 900")
    outcome = run.state.ending.outcome
    assert outcome is not None and (outcome.outcome, outcome.again) == ("failed", False)
    assert outcome.reason == "state first-gate refused the batch of train step 0: a reward is 900"
    assert not run.ordered(TrainStep)


def test_replicas_get_weights_only_after_they_have_passed() -> None:
    run = small(WEIGHTS)
    run.train_on(0)
    assert orders(run) == [("every-version", 0, 1, 1)] and run.state.training.latest_version == 0
    run.finish(1)
    assert not run.ordered(StageWeights) and len(run.ordered(TrainStep)) == 1, "and no step is trained meanwhile"
    inspected(run)
    assert run.state.training.latest_version == 1
    assert [c.version for c in run.ordered(StageWeights)] == [1] and len(run.ordered(TrainStep)) == 2


def test_refused_weights_reach_no_replica() -> None:
    run = small(WEIGHTS)
    run.train_on(0)
    inspected(run, refused="embed is not finite")
    outcome = run.state.ending.outcome
    assert outcome is not None and outcome.outcome == "failed"
    assert outcome.reason == "state every-version refused weights version 1, after 1 train step: embed is not finite"
    assert not run.ordered(StageWeights) and run.state.training.latest_version == 0


def test_a_failed_inspection_costs_the_step_an_attempt_and_is_repeated() -> None:
    run = small(FIRST, infrastructure_attempts=2)
    run.finish(0)
    inspected(run, succeed=False)
    assert [attempt for *_, attempt in orders(run)] == [1, 2]
    inspected(run, succeed=False)
    assert run.state.ending.outcome is not None
    assert run.state.ending.outcome.reason == "train step 0 failed 2 times; last error: state first-gate: fault"


def test_a_failed_inspection_of_weights_is_repeated_without_another_publication() -> None:
    run = small(WEIGHTS, infrastructure_attempts=2)
    run.train_on(0)
    inspected(run, succeed=False)
    assert [attempt for *_, attempt in orders(run)] == [1, 2] and len(run.ordered(PublishWeights)) == 1
    inspected(run, succeed=False)
    assert run.state.ending.outcome is not None
    reason = "version 1 could not be inspected in 2 attempts; last error: state every-version: fault"
    assert run.state.ending.outcome.reason == reason


def test_each_state_has_all_attempts_to_inspect_weights() -> None:
    run = small(WEIGHTS, AGAIN, infrastructure_attempts=2)
    run.train_on(0)
    for succeed in (False, True, False, True):
        inspected(run, succeed=succeed)
    assert [state for state, *_ in orders(run)] == ["every-version", "every-version", "again", "again"]
    assert run.state.training.latest_version == 1


def test_an_inspection_is_ordered_again_if_its_process_is_lost() -> None:
    run = small(FIRST)
    run.finish(0)
    run.tell(ProcessLost(kind="added states", index=0, life=1, reason="killed"))
    assert [attempt for *_, attempt in orders(run)] == [1, 2]
    assert run.state.training.steps[0].failures == 1
    process = run.state.process("added states", 0)
    assert process.deaths == 1
    run.tell(ProcessUp(kind="added states", index=0, life=2))
    inspected(run)
    assert process.deaths == 0, "it has all its restarts again"


def test_an_inspection_of_weights_is_not_charged_if_its_process_hangs_over_a_group() -> None:
    limits = Timeouts.every(None, state_s=50.0)
    run = small(WEIGHTS, CHECKING, timeouts=limits, max_staleness_steps=2, max_concurrent_groups=3)
    run.finish(0)
    work = {"state": CHECKING.name, "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}
    run.tell(StateLeft(group=0, attempt=run.ordered(EnterState)[-1].attempt, **work))
    run.finish(1)
    run.wait(30.0)
    run.train()
    run.publish()
    run.wait(22.0)
    (stop,) = run.ordered(StopProcess)
    run.tell(ProcessLost(kind="added states", index=0, life=1, reason=stop.reason))
    assert [attempt for *_, attempt in orders(run)] == [1, 2]
    assert run.state.training.publish_failures == 0
    assert run.state.groups.live[1].infrastructure_failures == 1


def test_a_batch_is_inspected_again_if_the_trainer_is_lost_meanwhile() -> None:
    """The trainer may have lost the scores that it computed."""
    run = small(FIRST)
    run.finish(0)
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason="killed"))
    assert [attempt for *_, attempt in orders(run)] == [1, 2]
    assert run.state.training.steps[0].failures == 0, "it is not charged"


def test_a_lost_trainer_begins_with_weights_that_are_still_inspected() -> None:
    run = small(WEIGHTS)
    run.train_on(0)
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason="killed"))
    assert run.state.ending.outcome is None
    begins = [c for c in run.ordered(StartProcess) if c.kind == "trainer"]
    assert [(c.version, c.steps) for c in begins] == [(1, 1)]


def test_no_step_is_trained_before_the_weights_of_a_resume_have_passed() -> None:
    run = small(WEIGHTS)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True))
    run.publish()
    assert orders(run) == [("every-version", -1, 1, 1)], "the initial weights, as a new version"
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=2, samples=1))
    run.finish(0)
    assert not run.ordered(TrainStep)
    inspected(run)
    assert [c.step for c in run.ordered(TrainStep)] == [0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"phase": "parked"}, "phase is 'parked': train steps have no phases; leave it out"),
        ({"between": ("queued", "generating")}, "use .'scoring', 'training'. or .'publishing', 'finished'."),
        ({"state": "training"}, "is already a state or trigger of steps"),
        ({"state": "republish"}, "is already a state or trigger of steps"),
        ({"policy": type("Idle", (), {"enters": lambda self, view, step: True})}, "must be a class with a method work"),
        ({"concurrency": 2}, "concurrency is 2, but must be 1"),
    ],
)
def test_a_state_of_train_steps_that_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    lawful = {"machine": "step", "state": "fresh", "between": ("scoring", "training"), "policy": Everything}
    with pytest.raises(ConfigError, match=says):
        policies.add_state(**{**lawful, **wrong})
    assert "fresh" not in policies.state_names()


def test_the_table_of_steps_has_each_state_in_its_place() -> None:
    assert step_table() is STEP
    table = step_table(("gate", "second"), ("check",))
    assert table.target("scoring", "gate") == "gate" and table.target("gate", "second") == "second"
    assert table.target("second", "gate") is None and table.target("gate", "train") == "training"
    assert table.target("publishing", "check") == "check" and table.target("training", "check") is None
