"""How often a run begins again from its record: the core counts, and the launching process obeys `FinishRun.again`."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.commands import FinishRun
from engine.events import DrainRequested, ProcessLost, RunInterrupted, RunResumed, StopRequested
from tests.core.core_rig import state_of
from tests.core.scripted import Scripted
from tests.core.test_departures import joined, small

LOST = "the weights store is lost: killed"


def trains(**others: Any) -> Scripted:
    """B = 1, S = 3, K = 1, one replica: every finished group is a train step."""
    figures = {"replicas": 1, "train_batch_size": 1, "max_staleness_steps": 3, "max_concurrent_groups": 1}
    return small(**figures, checkpoint_every=100, keeps_batches=True, **others)


def lose_store(run: Scripted) -> FinishRun:
    life = run.state.process("weights store", 0).life
    run.tell(ProcessLost(kind="weights store", index=0, life=life, reason="killed"))
    return run.ordered(FinishRun)[-1]


def interrupt(run: Scripted, reason: str = "the scheduler died", *, launch: bool = False) -> FinishRun | None:
    answer = run.tell(RunInterrupted(reason=reason, launch=launch))
    assert all(isinstance(command, FinishRun) for command in answer[-1:])
    return answer[-1] if answer else None  # type: ignore[return-value]


def resume(run: Scripted, *, again: bool = True, steps: int | None = None) -> None:
    """The run continues in new processes: with everything it had, or from the weights after `steps` train steps."""
    state = run.state
    consumed = (
        () if steps is None else tuple(group for batch in state.checkpoints.batches(steps) for group in batch.groups)
    )
    run.tell(RunResumed(steps=state.training.steps_trained if steps is None else steps, replicas=1, consumed=consumed,
                        released=(), kept=steps is None, again=again))  # fmt: skip
    run.publish()
    joined(run, 0, state.replicas.by_id[0].process.life)
    run.install()


def step(run: Scripted) -> None:
    """One train step more."""
    run.train_on(run.running()[0])
    run.install()


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("lose", [lose_store, interrupt], ids=["store", "scheduler"])
def test_the_run_begins_again_within_its_budget_and_then_fails_with_the_cause(lose: Any, budget: int) -> None:
    run = trains(run_restarts=budget)
    for _ in range(budget):
        end = lose(run)
        assert (end.outcome, end.again) == ("stopped", True) and "begins again" not in end.reason
        resume(run)
    end = lose(run)
    assert (end.outcome, end.again) == ("failed", False)
    cause = LOST if lose is lose_store else "the scheduler died"
    count = f"; the run restarted {budget} times without a train step (run_restarts)" if budget else ""
    assert end.reason == f"{cause}{count}"
    assert interrupt(run) is None, "it has ended for good"


def test_a_launch_that_fails_uses_up_the_same_budget() -> None:
    run = trains(run_restarts=2)
    assert lose_store(run).again
    again = interrupt(run, "it could not begin again: no memory", launch=True)
    assert again is not None and again.again and again.reason == "it could not begin again: no memory"
    end = interrupt(run, "it could not begin again: no memory", launch=True)
    assert end is not None and (end.outcome, end.again) == ("failed", False)


@pytest.mark.parametrize("lose", [lose_store, interrupt], ids=["store", "scheduler"])
def test_a_scheduler_that_dies_while_it_takes_the_run_down_costs_nothing_more(lose: Any) -> None:
    run = trains(run_restarts=1)
    assert lose(run).again
    before = state_of(run.scheduler)
    assert interrupt(run) is None, "the record says already that the run begins again"
    assert (run.state.ending.restarts, state_of(run.scheduler)) == (1, before)
    resume(run)
    assert run.state.ending.outcome is None


def test_a_train_step_fills_the_budget() -> None:
    run = trains(run_restarts=1)
    for _ in range(3):
        assert lose_store(run).again
        resume(run)
        step(run)
    assert lose_store(run).again
    resume(run)
    assert not lose_store(run).again


def test_a_step_that_is_trained_once_more_does_not_fill_the_budget() -> None:
    """Else a run without checkpoints that dies after each first step would begin again without end."""
    run = trains(run_restarts=1)
    step(run)
    step(run)
    assert lose_store(run).again
    resume(run, steps=0)
    step(run)
    assert run.state.training.steps_trained == 1
    assert not lose_store(run).again


def test_a_user_who_resumes_the_run_fills_the_budget() -> None:
    run = trains(run_restarts=1)
    assert lose_store(run).again
    resume(run)
    assert not lose_store(run).again
    resume(run, again=False)
    assert lose_store(run).again, "the whole budget is there"
    resume(run)
    assert not lose_store(run).again


@pytest.mark.parametrize("lose", [lose_store, interrupt], ids=["store", "scheduler"])
def test_a_run_that_a_user_drains_does_not_begin_again(lose: Any) -> None:
    run = trains()
    run.tell(DrainRequested(reason="enough"))
    end = lose(run)
    assert (end.outcome, end.again) == ("stopped", False)


def test_a_run_that_a_user_has_stopped_stays_stopped() -> None:
    run = trains()
    run.tell(StopRequested(reason="enough"))
    before = state_of(run.scheduler)
    assert interrupt(run) is None and state_of(run.scheduler) == before


@settings(max_examples=60)
@given(
    st.integers(0, 3),
    st.lists(st.sampled_from(["store", "scheduler", "failed launch", "step", "user"]), max_size=25),
)
def test_whatever_happens_the_run_begins_again_at_most_as_often_as_its_budget_says(
    budget: int, happenings: list[str]
) -> None:
    run = trains(run_restarts=budget)
    left = budget
    for what in happenings:
        if what == "step":
            step(run)
            left = budget
            continue
        if what == "user":
            run.tell(StopRequested(reason="enough"))
            resume(run, again=False)
            left = budget
            continue
        end = lose_store(run) if what == "store" else interrupt(run)
        if what == "failed launch" and left:
            left -= 1
            assert end is not None and end.again
            end = interrupt(run, launch=True)
        assert end is not None and end.again == bool(left)
        if not end.again:
            assert end.outcome == "failed" and len(run.state.orders) == 0
            return
        left -= 1
        assert interrupt(run) is None, "begins again already"
        resume(run)
