"""Whom the core stops when an order is overdue: it probes the owner, and what that waits for."""

from typing import Any

import pytest

from engine.commands import Command, ProbeProcess, ScoreBatch, StopProcess
from engine.events import BatchScored, ProcessLost, ProcessProbed, ProcessUp, SchedulerRecovered, SettingChanged
from engine.record.codec import pack, unpack
from engine.record.snapshots import restore, snapshot
from engine.scheduling.work_times import limit_of, time_taken
from engine.states.limits import Pool
from engine.states.timeouts import Timeouts
from tests.core.core_rig import require_same_state
from tests.core.scripted import Scripted
from tests.core.test_time_limits import wait

APART = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))
SCORES = "scorer of old_logprobs exceeded its time limit of 50 s (timeouts.score_s) after 50 s in ScoreBatch"


def late_scorer(**timeouts: Any) -> Scripted:
    """A scorer exceeds its limit and is probed; any probe takes 7 s to answer."""
    given = Timeouts(**{"score_s": 50.0, "cut_s": 7.0, **timeouts})
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, timeouts=given, answers_probes=False,
        scoring_tasks=("old_logprobs",), pools=APART, checkpoint_every=1,
    )  # fmt: skip
    run.finish(0, 1)
    wait(run, run.clock + 50.0)
    return run


def probed(run: Scripted) -> list[str]:
    """The chain of each probe so far."""
    return [probe.chain for probe in run.ordered(ProbeProcess)]


def answers(run: Scripted, waits_for: str = "") -> list[Command]:
    """Whoever was probed last answers."""
    return run.probed(run.ordered(ProbeProcess)[-1], waits_for)


def stopped(run: Scripted) -> list[tuple[str, str]]:
    return [(stop.kind, stop.reason) for stop in run.ordered(StopProcess)]


def limit_left(run: Scripted) -> float:
    """How long the scoring order has until it is overdue again."""
    (order,) = run.state.orders.open["score"].values()
    assert not stopped(run)
    return limit_of(run.state, order) - time_taken(run.state, order)


def test_an_overdue_order_is_not_charged_before_its_owner_was_probed() -> None:
    run = late_scorer()
    assert probed(run) == ["scorer 0"] and not stopped(run)
    (wait_,) = [one for one in run.state.orders.all() if one.subject == "probe"]
    assert wait_.owner == "scorer 0"
    answers(run)
    ((kind, reason),) = stopped(run)
    assert (kind, reason.startswith(SCORES)) == ("scorer", True)
    assert run.state.training.steps[0].failures == 0, "it is charged once the process has ended"
    run.tell(ProcessLost(kind="scorer", index=0, incarnation=1, reason=reason))
    assert run.state.training.steps[0].failures == 1


def test_a_process_that_does_not_answer_in_time_hangs() -> None:
    run = late_scorer()
    wait(run, run.clock + 6.0)
    assert not stopped(run)
    wait(run, run.clock + 1.5)
    ((kind, reason),) = stopped(run)
    assert kind == "scorer" and reason.startswith(SCORES) and reason.endswith("; it does not answer")
    assert not run.state.orders.open["probe"]


@pytest.mark.parametrize("hung", ["trainer", "weights store"])
def test_the_innermost_process_that_does_not_answer_is_stopped(hung: str) -> None:
    run = late_scorer()
    answers(run, "weights store")
    chain = ["scorer 0", "scorer 0, weights store"]
    if hung == "trainer":
        answers(run, "trainer")
        chain.append("scorer 0, weights store, trainer")
    assert probed(run) == chain
    wait(run, run.clock + 8.0)
    ((kind, reason),) = stopped(run)
    waits = "scorer 0" if hung == "weights store" else "weights store"
    assert kind == hung
    assert reason.startswith(f"the {hung} does not answer, and {waits} waits for it; {SCORES}")
    again = run.state.orders.find("score", (0, "old_logprobs"))
    assert again is not None and again.command.attempt == 1, "the scorer is not to blame"
    assert limit_of(run.state, again) == 100.0
    assert time_taken(run.state, again) == pytest.approx(0.0, abs=2.0), "it has its full time"


def test_orders_within_limits_are_not_charged_if_another_order_stops_their_process() -> None:
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, answers_probes=False,
        timeouts=Timeouts(score_s=50.0, cut_s=7.0), scoring_tasks=("ref_logprobs",),
        pools=(*APART[:2], Pool(tasks=("ref_logprobs",))), checkpoint_every=1, keeps_batches=True,
    )  # fmt: skip
    run.finish(0, 1)
    run.tell(BatchScored(step=0, task="ref_logprobs", attempt=1))
    run.finish(2, 3)
    assert run.ordered(ScoreBatch)[-1].step == 1 and run.state.orders.find("train", 0) is not None
    wait(run, run.clock + 51.0)
    answers(run, "trainer")
    wait(run, run.clock + 8.0)
    ((kind, reason),) = stopped(run)
    assert kind == "trainer"
    run.tell(ProcessLost(kind="trainer", index=0, incarnation=1, reason=reason))
    assert run.state.training.steps[0].failures == 0
    assert (run.state.training.steps[0].state, run.state.training.steps[0].attempt) == ("scoring", 2), (
        "it is scored and trained again"
    )


def test_the_one_that_waits_for_an_idle_process_is_to_blame() -> None:
    run = late_scorer()
    answers(run, "trainer")
    answers(run)
    ((kind, reason),) = stopped(run)
    assert kind == "scorer" and reason.startswith(f"scorer 0 waits for the idle trainer; {SCORES}")


def test_nobody_is_to_blame_while_the_innermost_process_works_within_its_own_limit() -> None:
    run = late_scorer(checkpoint_s=1000.0)
    run.tell(BatchScored(step=0, task="old_logprobs", attempt=1))
    run.train()
    run.publish()
    run.finish(2, 3)
    assert run.state.orders.open["checkpoint"] and run.ordered(ScoreBatch)[-1].step == 1
    run.orders.clear()
    wait(run, run.clock + 53.0)
    for _ in range(2):
        assert probed(run) == ["scorer 0"], "it has its full time, and is probed again"
        answers(run, "trainer")
        answers(run)
        assert limit_left(run) >= 50.0
        run.orders.clear()
        wait(run, run.clock + limit_left(run) + 2.5)


@pytest.mark.parametrize(
    "circle", [("scorer 0",), ("weights store", "scorer 0"), ("trainer", "weights store", "trainer")]
)
def test_in_a_circle_the_owner_of_the_overdue_order_is_to_blame(circle: tuple[str, ...]) -> None:
    run = late_scorer()
    for waits_for in circle:
        answers(run, waits_for)
    assert [kind for kind, _ in stopped(run)] == ["scorer"]
    assert len(probed(run)) == len(circle)


def test_an_order_waits_for_a_process_that_is_being_replaced() -> None:
    run = late_scorer()
    run.tell(ProcessLost(kind="trainer", index=0, incarnation=1, reason="killed"))
    answers(run, "trainer")
    assert probed(run) == ["scorer 0"] and limit_left(run) == pytest.approx(100.0, abs=1.0)


def test_a_process_that_is_lost_before_it_answers_is_not_stopped_again() -> None:
    run = late_scorer()
    answers(run, "trainer")
    run.tell(ProcessLost(kind="trainer", index=0, incarnation=1, reason="killed"))
    assert not run.state.orders.open["probe"]
    assert limit_left(run) == pytest.approx(100.0, abs=1.0)


def test_a_replica_that_dies_while_it_is_probed_charges_only_what_is_overdue() -> None:
    """As if it were stopped for its silence: new weights are overdue, its groups are not."""
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, answers_probes=False,
        timeouts=Timeouts.every(None, sync_s=50.0, cut_s=7.0),
    )  # fmt: skip
    run.train_on(0, 1)
    run.wait(51.0)
    assert probed(run) == ["replica 0"]
    running = run.running()
    run.tell(ProcessLost(kind="replica", index=0, incarnation=1, reason="killed"))
    assert [run.view.group(id).infrastructure_failures for id in running] == [0] * len(running) != []  # type: ignore[union-attr]


def test_the_next_life_of_a_probed_process_is_not_stopped_for_the_last_ones_silence() -> None:
    run = late_scorer()
    answers(run, "trainer")
    run.tell(ProcessUp(kind="trainer", index=0, incarnation=2))
    wait(run, run.clock + 8.0)
    assert not stopped(run) and not run.state.orders.open["probe"]


def test_an_answer_after_the_overdue_order_has_ended_is_without_effect() -> None:
    for answer in (True, False):
        run = late_scorer()
        run.tell(BatchScored(step=0, task="old_logprobs", attempt=1))
        if answer:
            answers(run)
        wait(run, run.clock + 20.0)
        assert not stopped(run) and not run.state.orders.open["probe"]


def test_an_answer_after_the_limit_was_lifted_is_without_effect() -> None:
    run = late_scorer()
    run.tell(SettingChanged(setting="timeouts.score_s", value="off"))
    answers(run)
    assert not stopped(run)


def test_an_answer_of_an_earlier_life_is_stale() -> None:
    run = late_scorer()
    probe = run.ordered(ProbeProcess)[-1]
    stale = run.state.orders.stale_echoes
    run.tell(ProcessProbed(kind="scorer", index=0, incarnation=0, order=probe.order))
    assert run.state.orders.stale_echoes == stale + 1 and not stopped(run)


def test_several_overdue_orders_of_a_process_are_one_chain() -> None:
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, answers_probes=False,
        timeouts=Timeouts(group_s=50.0, cut_s=7.0),
    )  # fmt: skip
    wait(run, 63.0)
    assert probed(run) == ["replica 0"]
    answers(run, "trajectory store")
    wait(run, run.clock + 7.5)
    assert [kind for kind, _ in stopped(run)] == ["trajectory store"]
    wait(run, run.clock + 7.5)
    assert len([chain for chain in probed(run) if chain == "replica 0"]) == 2, (
        "it has its time again, and is late again"
    )


def test_a_chain_survives_a_snapshot_and_a_failover() -> None:
    run = late_scorer()
    answers(run, "trainer")
    probe = run.ordered(ProbeProcess)[-1]
    again = restore([unpack(pack(part)) for part in snapshot(run.scheduler)])
    require_same_state(again, run.scheduler)
    assert probe in again.state.orders.reissued(run.clock)
    run.tell(SchedulerRecovered(), at=run.clock + 500.0)
    assert not stopped(run), "answers may be on their way"
    wait(run, run.clock + 7.5)
    assert [kind for kind, _ in stopped(run)] == ["trainer"]
