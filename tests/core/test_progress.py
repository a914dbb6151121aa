"""Law 7 by hand: whatever the policies answer and whatever fails, a run continues or ends with a named cause."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from engine import policies
from engine.commands import FinishRun, SaveCheckpoint, SetTimer, TrainStep
from engine.errors import ConfigError
from engine.events import (
    CheckpointFailed,
    CheckpointSaved,
    DrainRequested,
    GroupGenerated,
    RunResumed,
    SettingChanged,
    StateFailed,
)
from engine.policies import registry
from engine.scheduling.settings import changed_limits
from engine.simulation.proof import prove
from engine.states.limits import Limits
from engine.states.view import GroupView, View
from tests.core.added_states import CHECKING
from tests.core.scripted import Scripted
from tests.core.test_departures import paused
from tests.core.test_scenarios import small, straggling


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a test registers is known to that test alone."""
    before = {decision: dict(known) for decision, known in registry._REGISTERED.items()}
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


# the last checkpoint


def train_two_steps(run: Scripted) -> None:
    run.finish(*run.running())
    for _ in range(2):
        run.train()
        run.publish()
        run.install()


def fail_checkpoint(run: Scripted, times: int = 1) -> None:
    for _ in range(times):
        run.tell(CheckpointFailed(steps=2, reason="disk full"))


def saves(run: Scripted) -> list[int]:
    return [order.steps for order in run.ordered(SaveCheckpoint)]


SPENT = "the last checkpoint, after 2 train steps, could not be written; it failed 3 times; last error: disk full"


def test_the_last_checkpoint_is_written_again_until_its_attempts_are_spent() -> None:
    run = small(checkpoint_every=2, keeps_batches=True, max_steps=2, infrastructure_attempts=3)
    train_two_steps(run)
    fail_checkpoint(run, 2)
    assert saves(run) == [2, 2, 2] and not run.ordered(FinishRun)
    fail_checkpoint(run)
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.reason) == ("failed", SPENT)
    run.tell(RunResumed(steps=2, replicas=1, consumed=(), released=(), kept=True))
    run.publish()
    fail_checkpoint(run, 2)
    assert saves(run) == [2] * 6 and len(run.ordered(FinishRun)) == 1, "a resumed run has all its attempts again"
    run.tell(CheckpointSaved(steps=2))
    assert run.ordered(FinishRun)[-1].outcome == "finished"


def test_the_last_checkpoint_is_written_even_if_one_after_the_same_step_failed() -> None:
    run = small(
        checkpoint_every=2, keeps_batches=True, prompts=5, policies={"filter": "zero-variance"},
        infrastructure_attempts=1,
    )  # fmt: skip
    train_two_steps(run)
    run.tell(CheckpointFailed(steps=2, reason="disk full"))
    assert not run.ordered(FinishRun), "group 4 is in progress"
    run.finish(4, spread=0.0)
    assert [order.steps for order in run.ordered(SaveCheckpoint)] == [2, 2]
    run.tell(CheckpointSaved(steps=2))
    assert run.ordered(FinishRun)[-1].outcome == "finished"


@pytest.mark.parametrize("failures", [2, 3])
def test_a_drain_repeats_its_checkpoint_until_its_attempts_are_spent(failures: int) -> None:
    run = small(checkpoint_every=2, keeps_batches=True, infrastructure_attempts=3)
    train_two_steps(run)
    run.tell(DrainRequested(reason="maintenance"))
    fail_checkpoint(run)
    paused(run, 0)
    fail_checkpoint(run, failures - 1)
    if failures < 3:
        assert saves(run) == [2, 2, 2]
        run.tell(CheckpointSaved(steps=2))
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.reason) == (("stopped", "maintenance") if failures < 3 else ("failed", SPENT))


# timers


class Waiting:
    """Acts on nothing, though it says that it may."""

    acts = True

    def decide(self, view: View, stragglers: Sequence[GroupView]) -> str:
        return "wait"


@pytest.mark.parametrize("policy", ["waiting", "truncate", "drop"])
def test_a_deadline_policy_that_changes_nothing_is_not_asked_again_at_once(policy: str) -> None:
    policies.register("deadline", "waiting")(Waiting)
    run = straggling(policy, deadline_timeout_s=0.001)
    (again,) = [order for order in run.fire() if isinstance(order, SetTimer)]
    assert again.delay_s >= 1.0


def test_no_timer_is_set_again_once_the_policy_is_one_that_never_acts() -> None:
    run = straggling("drop", deadline_timeout_s=0.001)
    run.tell(SettingChanged(setting="scheduler.policies.deadline", value="wait"))
    assert not [order for order in run.fire() if isinstance(order, SetTimer)]
    run.finish(3)
    assert len(run.ordered(TrainStep)) == 2


# retries without end


class Stubborn:
    """Never gives a group up."""

    def retry(self, view: View, group: GroupView, cause: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("cause", "budget", "attempts"), [("data", 2, 20), ("infrastructure", 5, 20), ("data", 30, 30)]
)
def test_a_group_has_an_end_of_attempts_whatever_the_retry_policy_says(cause: str, budget: int, attempts: int) -> None:
    policies.register("retry", "stubborn")(Stubborn)
    run = small(policies={"retry": "stubborn"}, **{f"{cause}_attempts": budget})
    for _ in range(attempts):
        assert 0 in run.state.groups.live
        run.fail(0, cause=cause)
    assert 0 not in run.state.groups.live and run.view.phase_counts()["released"] == 1
    assert run.state.ending.failed_in_a_row == 1


def test_the_work_of_an_added_state_has_an_end_of_attempts_too() -> None:
    policies.register("retry", "stubborn")(Stubborn)
    run = small(policies={"retry": "stubborn"}, added_states=(CHECKING,))
    run.finish(0)
    for _ in range(20):
        attempt = run.state.groups.live[0].attempt
        run.tell(StateFailed(group=0, attempt=attempt, state=CHECKING.name, cause="data", reason="no judge"))
    assert 0 not in run.state.groups.live and run.state.ending.failed_in_a_row == 1


class Picky:
    """Keeps nothing."""

    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        return False


def test_a_filter_is_not_unlawful_for_dropping_what_a_simulated_run_makes_up() -> None:
    policies.register("filter", "picky")(Picky)
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_filtered_in_a_row=1)
    assert prove(limits, {"filter": "picky"}, runs=2) == 2
    assert prove(replace(limits, max_filtered_in_a_row=1000), {"filter": "picky"}, runs=2) == 2


# a filter that keeps nothing


def filtered(groups: int, **others: object) -> Scripted:
    """So many groups end with equal rewards, which the filter drops."""
    run = small(**{"policies": {"filter": "zero-variance"}, **others})
    for _ in range(groups):
        run.finish(run.running()[0], spread=0.0)
    return run


def test_a_filter_that_drops_group_after_group_ends_the_run_by_name() -> None:
    run = filtered(99, max_filtered_in_a_row=100)
    assert not run.ordered(FinishRun)
    run.finish(run.running()[0], spread=0.0)
    (end,) = run.ordered(FinishRun)
    assert end.outcome == "failed"
    assert "the filter 'zero-variance' dropped 100 prompt groups in a row" in end.reason
    assert "scheduler.max_filtered_in_a_row" in end.reason


def test_a_group_that_the_filter_keeps_begins_the_count_anew() -> None:
    run = filtered(99, max_filtered_in_a_row=100)
    run.finish(run.running()[0])
    assert run.state.ending.filtered_in_a_row == 0
    for _ in range(99):
        run.finish(run.running()[-1], spread=0.0)
    assert not run.ordered(FinishRun)


def test_many_workers_may_have_more_groups_filtered_in_a_row() -> None:
    figures = {"train_batch_size": 8, "max_concurrent_groups": 16, "max_filtered_in_a_row": 1}
    assert Limits(max_staleness_steps=1, **figures).filtered_in_a_row == 64, "four times K"
    assert Limits(train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=1).filtered_in_a_row == 1000


def test_a_run_that_resumes_after_its_filter_ended_it_may_filter_as_many_again() -> None:
    run = filtered(100, max_filtered_in_a_row=100)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True))
    assert len(run.ordered(FinishRun)) == 1 and run.state.ending.filtered_in_a_row == 0


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (0, "no group could be trained on; the filter 'zero-variance' dropped all 5"),
        (1, "no group could be trained on; the filter 'zero-variance' dropped 4 of 5; the last failure: no number"),
        (5, "no group could be trained on; the last failure: no number"),
    ],
)
def test_a_run_that_used_up_its_prompts_without_a_step_has_failed(spoiled: int, says: str) -> None:
    run = small(policies={"filter": "zero-variance"}, prompts=5, data_attempts=1)
    for id in range(5):
        if id < spoiled:
            run.fail(id, cause="data")
        else:
            run.finish(id, spread=0.0)
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.reason) == ("failed", says)


def test_a_run_whose_stragglers_were_all_dropped_has_failed() -> None:
    run = small(policies={"deadline": "drop"}, prompts=2, max_staleness_steps=0, max_concurrent_groups=2)
    run.fire()
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.reason) == ("failed", "no group could be trained on; all 2 were filtered or dropped")


def test_a_run_without_prompts_is_finished() -> None:
    (end,) = small(prompts=0).ordered(FinishRun)
    assert (end.outcome, end.reason) == ("finished", "0 train steps")


# rewards that fail too often


def judged(outcomes: str, **others: object) -> Scripted:
    """Attempts in order: `.` ends with rewards, `x` fails on its data, `i` on its replica."""
    run = small(prompts=1000, data_attempts=1000, infrastructure_attempts=1000, **{"max_failure_share": 0.25, **others})
    for outcome in outcomes:
        if run.state.ending.outcome is not None:
            break
        group = run.running()[0]
        if outcome == ".":
            run.finish(group)
            while run.state.training.training_step is not None:
                run.train()
                run.publish()
                run.install()
        else:
            run.fail(group, cause="data" if outcome == "x" else "infrastructure")
    return run


def test_a_run_whose_rewards_fail_too_often_ends_by_name() -> None:
    run = judged("...x" * 16)
    assert not run.ordered(FinishRun), "a quarter is allowed"
    run.fail(run.running()[0], cause="data")
    (end,) = run.ordered(FinishRun)
    assert end.outcome == "failed"
    assert end.reason == (
        "17 of the latest 65 attempts failed on their prompt, agent or reward, more than "
        "reward.max_failure_share = 0.25: training without them would bias the data; last error: no number"
    )
    run.tell(RunResumed(steps=run.state.training.steps_trained, replicas=1, consumed=(), released=(), kept=True))
    assert (run.state.ending.judged, run.state.ending.misjudged) == (0, 0) and len(run.ordered(FinishRun)) == 1


@pytest.mark.parametrize(("share", "enough"), [(0.5, 16), (0.25, 11), (0.0, 8)])
def test_a_run_ends_after_a_few_attempts_if_all_of_them_fail(share: float, enough: int) -> None:
    run = judged("x" * (enough - 1), max_failure_share=share)
    assert not run.ordered(FinishRun)
    run.fail(run.running()[0], cause="data")
    (end,) = run.ordered(FinishRun)
    assert end.outcome == "failed"
    all_failed = f"the first {enough} attempts all failed on their prompt, agent or reward"
    assert end.reason == f"{all_failed}; last error: no number"


@pytest.mark.parametrize(
    ("outcomes", "others"),
    [
        ("x" * 10 + "." * 40, {}),
        ("." + "x" * 62, {}),
        ("x" * 63, {"max_failure_share": 0.9}),
        ("x" * 63, {"max_failure_share": None}),
        ("i" * 63, {}),
        ("." * 48 + "i" * 60, {}),
        (".x" * 40, {"max_failure_share": None}),
        (".x" * 40, {"max_failure_share": 0.5}),
    ],
)
def test_a_run_continues_with_fewer_failures(outcomes: str, others: dict[str, object]) -> None:
    assert not judged(outcomes, **others).ordered(FinishRun)


def test_only_the_latest_attempts_count() -> None:
    run = judged("." * 500 + "x" * 26, max_failure_share=0.25)
    assert run.ordered(FinishRun), "of all, 6 % have failed; of the latest, a quarter"
    assert run.state.ending.judged < 128


def test_the_share_may_be_changed_while_the_run_runs() -> None:
    run = judged("...x" * 16)
    run.tell(SettingChanged(setting="reward.max_failure_share", value="0.1"))
    assert run.ordered(FinishRun)[0].outcome == "failed"
    assert changed_limits(run.state.limits, "reward.max_failure_share", "null").max_failure_share is None
    with pytest.raises(
        ConfigError, match=r"reward\.max_failure_share is 2\.0, but must be a number from 0 to 1, or null"
    ):
        changed_limits(run.state.limits, "reward.max_failure_share", "2")
