"""Whom the core stops when an order is overdue: its owner, or a process that this one waits for."""

from typing import Any

import pytest

from engine.commands import Command, ScoreBatch, StopProcess
from engine.events import BatchScored, OrderOverdue, ProcessLost, SettingChanged
from engine.runtime.order_times import OverdueOrder
from engine.states.limits import Pool
from engine.states.order_times import limit_of
from engine.states.timeouts import Timeouts
from tests.core.scripted import Scripted
from tests.core.test_time_limits import wait

APART = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))
SCORES = "scorer of old_logprobs exceeded its time limit of 50 s (timeouts.score_s) after 50 s in ScoreBatch"


def late_scorer(**timeouts: Any) -> Scripted:
    """The order of a scorer has reached its limit."""
    given = Timeouts(**{"score_s": 50.0, "cut_s": 7.0, **timeouts})
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, timeouts=given,
        scoring_tasks=("old_logprobs",), pools=APART, checkpoint_every=1,
    )  # fmt: skip
    run.finish(0, 1)
    run.clock += 50.0
    return run


def reported(run: Scripted, *waits_for: str, answered: bool = True) -> list[Command]:
    """The scorer's order is reported; the scorer waits for the first of these, that for the next one, and so on."""
    (order,) = run.state.orders.open["score"].values()
    chain = ("scorer 0", *waits_for)
    about = {"took_s": 50.0, "limit_s": 50.0, "setting": "timeouts.score_s"}
    return run.tell(OrderOverdue(order=order.number, chain=chain, answered=answered, **about), at=run.clock)


def stopped(run: Scripted) -> list[tuple[str, str]]:
    return [(stop.kind, stop.reason) for stop in run.ordered(StopProcess)]


def limit_and_time(run: Scripted) -> tuple[float | None, float]:
    """The limit of the scoring order, and how long it had no progress."""
    (order,) = run.state.orders.open["score"].values()
    return limit_of(run.state, order, {}), run.clock - order.since


@pytest.mark.parametrize("answered", [True, False])
def test_the_owner_of_an_overdue_order_that_waits_for_nobody_is_stopped(answered: bool) -> None:
    run = late_scorer()
    reported(run, answered=answered)
    ((kind, reason),) = stopped(run)
    assert (kind, reason.startswith(SCORES), reason.endswith("; it does not answer")) == ("scorer", True, not answered)
    assert run.state.training.steps[0].failures == 0, "it is charged once the process has ended"
    run.tell(ProcessLost(kind="scorer", index=0, life=1, reason=reason))
    assert run.state.training.steps[0].failures == 1


@pytest.mark.parametrize("chain", [("weights store",), ("weights store", "trainer")])
def test_the_innermost_process_that_gives_no_sign_of_life_is_stopped(chain: tuple[str, ...]) -> None:
    run = late_scorer()
    reported(run, *chain, answered=False)
    ((kind, reason),) = stopped(run)
    assert kind == chain[-1]
    assert reason.startswith(f"the {kind} does not answer, and {('scorer 0', *chain)[-2]} waits for it; {SCORES}")
    again = run.state.orders.find("score", (0, "old_logprobs"))
    assert again is not None and again.command.attempt == 1, "the scorer is not to blame"
    assert limit_and_time(run) == (100.0, 0.0), "it has its full time"


def test_orders_within_limits_are_not_charged_if_another_order_stops_their_process() -> None:
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4,
        timeouts=Timeouts(score_s=50.0, cut_s=7.0), scoring_tasks=("ref_logprobs",),
        pools=(*APART[:2], Pool(tasks=("ref_logprobs",))), checkpoint_every=1, keeps_batches=True,
    )  # fmt: skip
    run.finish(0, 1)
    run.tell(BatchScored(step=0, task="ref_logprobs", attempt=1))
    run.finish(2, 3)
    assert run.ordered(ScoreBatch)[-1].step == 1 and run.state.orders.find("train", 0) is not None
    run.waits, run.silent = {"scorer 0": "trainer"}, {"trainer"}
    wait(run, run.clock + 51.0)
    ((kind, reason),) = stopped(run)
    assert kind == "trainer"
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason=reason))
    assert run.state.training.steps[0].failures == 0
    assert (run.state.training.steps[0].state, run.state.training.steps[0].attempt) == ("scoring", 2), (
        "it is scored and trained again"
    )


def test_the_one_that_waits_for_an_idle_process_is_to_blame() -> None:
    run = late_scorer()
    reported(run, "trainer")
    ((kind, reason),) = stopped(run)
    assert kind == "scorer" and reason.startswith(f"scorer 0 waits for the idle trainer; {SCORES}")


def test_nobody_is_to_blame_while_the_innermost_process_works_within_its_own_limit() -> None:
    run = late_scorer(checkpoint_s=1000.0)
    run.tell(BatchScored(step=0, task="old_logprobs", attempt=1))
    run.train()
    run.publish()
    run.finish(2, 3)
    assert run.state.orders.open["checkpoint"] and run.ordered(ScoreBatch)[-1].step == 1
    run.waits = {"scorer 0": "trainer"}
    for doubled in (100.0, 200.0):
        wait(run, run.clock + doubled / 2 + 1.0)
        limit, since = limit_and_time(run)
        assert not stopped(run) and limit == doubled and since <= 2.0, "it has its full time"


@pytest.mark.parametrize(
    "circle", [("scorer 0",), ("weights store", "scorer 0"), ("trainer", "weights store", "trainer")]
)
def test_in_a_circle_the_owner_of_the_overdue_order_is_to_blame(circle: tuple[str, ...]) -> None:
    run = late_scorer()
    reported(run, *circle)
    assert [kind for kind, _ in stopped(run)] == ["scorer"]


def test_an_order_waits_for_a_process_that_is_being_replaced() -> None:
    run = late_scorer()
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason="killed"))
    reported(run, "trainer")
    assert not stopped(run) and limit_and_time(run) == (100.0, 0.0)


def test_a_report_after_the_overdue_order_has_ended_has_no_effect() -> None:
    run = late_scorer()
    (order,) = run.state.orders.open["score"].values()
    run.waits = {"scorer 0": "trainer"}
    report = run.overdue(OverdueOrder(order, took_s=50.0, limit_s=50.0, setting="timeouts.score_s"))
    run.tell(BatchScored(step=0, task=order.id[1], attempt=1))
    run.tell(report)
    assert not stopped(run)


def test_a_report_after_the_limit_was_lifted_has_no_effect() -> None:
    run = late_scorer()
    run.tell(SettingChanged(setting="timeouts.score_s", value="off"))
    reported(run)
    assert not stopped(run)
