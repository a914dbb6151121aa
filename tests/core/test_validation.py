"""Validations: when they are due, what they hold and what they leave alone, and that each ends once, whatever
happens."""

from dataclasses import replace
from typing import Any

import pytest

from engine.commands import (
    DeleteCheckpoint,
    FinishRun,
    MeasureRows,
    RetireWeights,
    StageWeights,
    StartGroup,
    StopMeasuring,
    StopProcess,
)
from engine.errors import ConfigError
from engine.events import (
    CheckpointSaved,
    DrainRequested,
    OrderDone,
    ProcessLost,
    ProcessUp,
    ReplicaPaused,
    RowsFailed,
    RowsMeasured,
    RunResumed,
    StopRequested,
    SyncFailed,
)
from engine.simulation.world import Setting
from engine.states.limits import Limits, ValidationLimits, ValidationSet
from engine.states.timeouts import Timeouts
from engine.states.validation import Validation, WaitingChunks
from tests.core.scripted import Scripted
from tests.judge.judged_world import JudgedWorld

ON_THE_WAY = ValidationLimits(rows=4, rows_per_slot=2, at_start=False, every=1, at_end=False)


class Measured(Scripted):
    """One group a step (B = 1), S = 2; validations by `validation`. Remembers how each ended."""

    def __init__(self, validation: ValidationLimits = ON_THE_WAY, *, replicas: int = 2, **more: Any) -> None:
        self.ended: list[Validation] = []
        figures = {"train_batch_size": 1, "max_staleness_steps": 2, "max_concurrent_groups": 2, **more}
        super().__init__(replicas=replicas, validation=validation, **figures)
        fire = self.state.validations.fire

        def watched(validation: Validation, trigger: str) -> None:
            fire(validation, trigger)
            if validation.state not in ("queued", "running"):
                self.ended.append(validation)

        self.state.validations.fire = watched  # type: ignore[method-assign]

    def next_version(self) -> None:
        """One train step more, and its publication."""
        self.train_on(self.running()[0])

    def out(self) -> list[MeasureRows]:
        """Orders to measure that were neither answered nor taken back."""
        runs = self.state.validations.live
        orders = [order for order in self.ordered(MeasureRows) if order.validation in runs]
        return [
            order
            for order in orders
            if (order.validation, order.chunk) in self.state.orders.of(order.replica, "rows")
            and runs[order.validation].chunks[order.chunk].attempt == order.attempt
        ]

    def measured(self, order: MeasureRows, **changes: Any) -> None:
        said = {
            "validation": order.validation, "chunk": order.chunk, "attempt": order.attempt, "replica": order.replica,
            "life": order.life, "version": order.version, "measured": order.count, "right": 1,
            "reward": 1.0,
        }  # fmt: skip
        self.tell(RowsMeasured(**{**said, **changes}))

    def fail_rows(self, order: MeasureRows) -> None:
        self.tell(
            RowsFailed(
                validation=order.validation, chunk=order.chunk, attempt=order.attempt, replica=order.replica,
                life=order.life, reason="no power",
            )
        )  # fmt: skip

    def measure_all(self) -> None:
        for _ in range(100):
            if not self.out():
                return
            self.measured(self.out()[0])
        raise AssertionError("more than a hundred chunks")

    def lose(self, id: int, final: bool = False) -> None:
        life = self.state.replicas.by_id[id].process.life
        self.tell(ProcessLost(kind="replica", index=id, life=life, final=final, reason="unplugged"))

    def come_back(self, id: int) -> None:
        """The life that was ordered is up."""
        life = self.state.replicas.by_id[id].process.life
        self.tell(ProcessUp(kind="replica", index=id, life=life, slots=100, version=0))

    def staged(self, id: int) -> list[int]:
        return [order.version for order in self.ordered(StageWeights) if order.replica == id]

    def ends(self) -> list[tuple[str, int]]:
        return [(validation.state, validation.version) for validation in self.ended]


# when


def test_the_initial_weights_are_measured_while_groups_run() -> None:
    world = Measured(replace(ON_THE_WAY, at_start=True, rows=5))
    assert [(o.first, o.count, o.version) for o in world.out()] == [(0, 2, 0), (2, 2, 0), (4, 1, 0)]
    assert len(world.running()) == 2
    world.measured(world.out()[0], measured=1, right=1, reward=1.0)
    world.measure_all()
    (validation,) = world.ended
    assert (validation.state, validation.version, validation.steps, validation.measured, validation.right) == (
        "reported",
        0,
        0,
        4,
        3,
    )
    assert (validation.accuracy, validation.reward_mean) == (0.6, 0.75), "a failed row is wrong, and has no reward"


def test_the_version_that_first_contains_a_multiple_is_due() -> None:
    """k = 2, every 3 steps: version 2 holds steps 0 to 3 and so the third, version 3 the sixth, version 4 none new."""
    world = Measured(replace(ON_THE_WAY, every=3), sync_every=2, max_staleness_steps=3, max_concurrent_groups=1)
    due = []
    for _ in range(4):
        for _ in range(2):
            world.finish(world.running()[0])
            world.train()
        world.publish()
        for id in (0, 1):
            world.install(id)
        world.measure_all()
        due.append(bool(world.ended) and world.ended[-1].version == world.state.training.latest_version)
    assert due == [False, True, True, False]
    assert world.ends() == [("reported", 2), ("reported", 3)]


def test_the_end_of_a_run_is_not_measured_where_that_is_not_asked_for() -> None:
    world = Measured(replace(ON_THE_WAY, every=0), max_steps=1)
    world.next_version()
    assert world.ordered(FinishRun)[0].outcome == "finished"
    assert not world.ordered(MeasureRows)


# what it holds


def test_installs_are_delayed_on_its_replica_alone_and_its_version_is_kept() -> None:
    world = Measured()
    world.next_version()
    world.install(0)
    assert {order.version for order in world.out()} == {1} == {order.replica + 1 for order in world.out()}
    world.install(1)
    world.next_version()
    assert (world.staged(0), world.staged(1)) == ([1], [1, 2])
    world.install(1)
    world.next_version()
    world.install(1)
    assert world.staged(1) == [1, 2, 3]
    assert 1 not in [order.version for order in world.ordered(RetireWeights)]
    world.measure_all()
    assert world.ends() == [("cancelled", 2), ("reported", 1), ("reported", 3)]
    assert 1 in [order.version for order in world.ordered(RetireWeights)]


def test_a_validation_that_is_superseded_before_it_begins_is_cancelled() -> None:
    world = Measured()
    for version in (1, 2, 3):
        world.next_version()
        world.install(1)
        if version == 1:
            world.install(0)
    assert [(validation.version, validation.state) for validation in world.state.validations.live.values()] == [
        (1, "running"),
        (3, "queued"),
    ]
    assert world.ends() == [("cancelled", 2)]
    assert world.ended[0].reason == "superseded by version 3 before it started"
    world.measure_all()
    world.install(0)
    assert world.state.replicas.by_id[0].version == 3
    world.measure_all()
    assert world.ends() == [("cancelled", 2), ("reported", 1), ("reported", 3)]


def test_a_validation_that_waited_gets_its_version_installed_despite_a_newer_one() -> None:
    world = Measured(replace(ON_THE_WAY, every=2), max_staleness_steps=5, max_concurrent_groups=6)
    for version in range(1, 6):
        world.next_version()
        world.install(1)
        if version <= 2:
            world.install(0)
    world.measure_all()
    assert world.ends() == [("reported", 2)]
    assert world.staged(0)[-1] == 4
    assert 4 not in [order.version for order in world.ordered(RetireWeights)]


@pytest.mark.parametrize(("conflict", "ends"), [("hold", []), ("cancel", [("cancelled", 1)])])
def test_what_holds_every_replica_is_a_conflict_once_a_newer_version_is_there(
    conflict: str, ends: list[tuple[str, int]]
) -> None:
    world = Measured(replace(ON_THE_WAY, every=3, at_start=True, conflict=conflict, replicas=2), replicas=1)
    world.measure_all()
    world = Measured(replace(ON_THE_WAY, every=1, conflict=conflict), replicas=1)
    world.next_version()
    world.install(0)
    assert world.out()
    assert world.ends() == []
    world.next_version()
    assert world.ends() == ends
    assert bool(world.ordered(StopMeasuring)) == bool(ends)
    assert world.staged(0) == ([1, 2] if ends else [1])


def test_a_replica_that_comes_back_is_no_reason_for_a_conflict() -> None:
    world = Measured(replace(ON_THE_WAY, conflict="cancel"))
    world.next_version()
    world.install(0)
    world.install(1)
    world.lose(1)
    world.next_version()
    assert world.ends() == []
    world.lose(1, final=True)
    assert world.ends() == [("cancelled", 1)]


def test_a_validation_takes_free_slots_before_groups_and_never_more() -> None:
    validation = replace(ON_THE_WAY, at_start=True, rows=6, rows_per_slot=1)
    world = Measured(validation, replicas=0, max_staleness_steps=7, max_concurrent_groups=8)
    world.tell(ProcessUp(kind="replica", index=0, life=1, slots=2, version=0))
    assert (len(world.out()), len(world.running())) == (2, 0)
    world.tell(ProcessUp(kind="replica", index=1, life=1, slots=2, version=0))
    assert (len(world.out()), len(world.running())) == (2, 2)
    assert {order.replica for order in world.ordered(StartGroup)} == {1}
    for _ in range(5):
        if len(world.out()) == 2:
            world.measured(world.out()[0])
    assert (len(world.out()), len(world.running())) == (1, 3)


def test_the_last_version_may_have_every_replica() -> None:
    world = Measured(replace(ON_THE_WAY, every=0, at_end=True), max_steps=1, replicas=3)
    world.next_version()
    assert world.staged(2) == [1]
    for id in range(3):
        world.install(id)
    assert set(next(iter(world.state.validations.live.values())).replicas) == {0, 1, 2}
    assert not world.ordered(FinishRun)
    world.measure_all()
    assert world.ordered(FinishRun)[0].outcome == "finished"
    assert world.ends() == [("reported", 1)]


# what goes wrong


def test_a_lost_replica_s_rows_go_on_where_the_version_is() -> None:
    validation = replace(ON_THE_WAY, at_start=True, every=0)
    world = Measured(validation)
    first = world.out()
    world.lose(0)
    assert [(o.replica, o.first, o.attempt) for o in world.out()] == [(1, 0, 2), (1, 2, 2)]
    before = world.state.orders.facts.stale_echoes
    world.measured(first[0])
    assert world.state.orders.facts.stale_echoes == before + 1
    world.measure_all()
    assert world.ended[0].measured == 4


def test_a_version_that_only_a_lost_replica_had_is_installed_on_its_next_life() -> None:
    world = Measured(replace(ON_THE_WAY, every=2), max_staleness_steps=5, max_concurrent_groups=6)
    for version in (1, 2, 3):
        world.next_version()
        world.install(1)
        if version <= 2:
            world.install(0)
    assert {order.version for order in world.out()} == {2}
    world.lose(0)
    assert world.out() == []
    assert world.ends() == []
    world.come_back(0)
    assert world.staged(0)[-1] == 2
    assert 2 not in [order.version for order in world.ordered(RetireWeights)]
    replica = world.state.replicas.by_id[0]
    assert world.state.is_staging(replica) and replica.next_version == 2


def test_a_validation_whose_version_no_replica_can_have_fails_and_not_the_run() -> None:
    world = Measured(replace(ON_THE_WAY, every=2), max_staleness_steps=5, max_concurrent_groups=6)
    for version in (1, 2, 3):
        world.next_version()
        world.install(1)
        if version <= 2:
            world.install(0)
    world.lose(0, final=True)
    assert world.ends() == [("failed", 2)]
    assert "no replica is left" in world.ended[0].reason
    assert world.state.ending.outcome is None
    assert 2 in [order.version for order in world.ordered(RetireWeights)]


def test_rows_that_use_up_their_attempts_fail_the_validation_and_not_the_run() -> None:
    world = Measured(replace(ON_THE_WAY, at_start=True, every=0), infrastructure_attempts=3)
    for _ in range(3):
        assert world.ends() == []
        world.fail_rows(next(order for order in world.out() if order.first == 0))
    assert world.ends() == [("failed", 0)]
    assert "3 attempts at the same rows failed; last error: no power" in world.ended[0].reason
    assert world.state.ending.outcome is None
    assert len(world.ordered(StopMeasuring)) == 1


def test_attempts_lost_at_rows_count_while_the_rows_wait() -> None:
    validation = Validation(0, 1, 1, 4, 0, 0.0)
    validation.split(2)
    waiting = WaitingChunks(validation.chunks, ())
    chunk = waiting.take(validation.chunks)
    for failures in (1, 2):
        chunk.failures = failures
        waiting.put_back(chunk)
        assert waiting.worst == failures
        assert waiting.take(validation.chunks) is chunk and waiting.worst == 0


@pytest.mark.parametrize("wrong", [{"version": 7}, {"measured": 3}, {"right": 3}, {"measured": 1, "right": 2}])
def test_an_answer_that_cannot_be_is_an_attempt_lost(wrong: dict[str, int]) -> None:
    world = Measured(replace(ON_THE_WAY, at_start=True, every=0))
    world.measured(world.out()[0], **wrong)
    assert next(iter(world.state.validations.live.values())).chunks[0].failures == 1
    world.measure_all()
    assert (world.ends(), world.ended[0].measured) == ([("reported", 0)], 4)


def test_a_repeated_answer_is_counted_once() -> None:
    world = Measured(replace(ON_THE_WAY, at_start=True, every=0))
    order = world.out()[0]
    world.measured(order)
    world.measured(order)
    world.measure_all()
    world.measured(order)
    assert (world.ended[0].measured, world.state.orders.facts.stale_echoes) == (4, 2)


def test_a_validation_of_which_no_row_could_be_measured_has_failed() -> None:
    world = Measured(replace(ON_THE_WAY, at_start=True, every=0))
    for order in world.out():
        world.measured(order, measured=0, right=0, reward=0.0, reason=f"row {order.first}: the reward is lost")
    assert (world.ends(), world.ended[0].accuracy) == ([("failed", 0)], None)
    assert world.ended[0].reason == "no row could be measured: row 0: the reward is lost"


def test_a_last_version_that_cannot_be_installed_fails_its_validation_not_the_run() -> None:
    limits = {"max_steps": 1, "infrastructure_attempts": 2}
    world = Measured(replace(ON_THE_WAY, every=0, at_end=True), replicas=1, **limits)
    world.next_version()
    for _ in range(20):
        if world.state.ending.outcome is not None:
            break
        replica = world.state.replicas.by_id[0]
        place = {"replica": 0, "life": replica.life, "attempt": replica.sync_attempt}
        if replica.process.state == "stopping":
            world.lose(0)
            world.come_back(0)
        else:
            world.tell(SyncFailed(**place, version=1, reason="torn"))
    assert world.ends() == [("failed", 1)]
    assert world.ended[0].reason == "2 replicas could not install version 1"
    assert len(world.ordered(StopProcess)) == 2, world.ordered(StopProcess)
    assert world.state.ending.outcome is not None and world.state.ending.outcome.outcome == "finished"


def test_a_stopped_run_cancels_what_is_being_measured() -> None:
    world = Measured(replace(ON_THE_WAY, at_start=True))
    world.tell(StopRequested(reason="enough"))
    assert (world.ends(), world.ended[0].reason) == ([("cancelled", 0)], "the run ended: enough")
    assert world.ordered(FinishRun)[0].outcome == "stopped"


def resumed_at(steps: int, *, kept: bool) -> Measured:
    """Version 2, the first to contain two steps, is being measured as the third step is trained; then every process
    ends, and the run continues after `steps`."""
    world = Measured(replace(ON_THE_WAY, every=2), checkpoint_every=1, keep_checkpoints=3)
    for step in range(3):
        world.next_version()
        world.tell(CheckpointSaved(steps=step + 1))
    assert [order.version for order in world.out()] == [] and list(world.state.validations.live)
    again = tuple(range(steps, 3))
    world.tell(RunResumed(steps=steps, replicas=2, consumed=again, released=(), kept=kept))
    world.publish()
    world.come_back(0)
    world.install(0)
    return world


@pytest.mark.parametrize(("steps", "kept"), [(3, True), (2, False)])
def test_a_validation_cut_off_by_a_crash_measures_the_weights_the_run_resumes_with(steps: int, kept: bool) -> None:
    world = resumed_at(steps, kept=kept)
    assert world.ends() == [("cancelled", 2)] and "the next version is measured instead" in world.ended[0].reason
    assert {order.version for order in world.out()} == {4}
    world.measure_all()
    assert world.ends() == [("cancelled", 2), ("reported", 4)] and world.ended[1].steps == steps


def test_a_validation_of_steps_that_a_resume_took_back_comes_again_with_them() -> None:
    world = resumed_at(1, kept=False)
    assert world.ends() == [("cancelled", 2)] and "its steps are trained again" in world.ended[0].reason
    assert not world.state.validations.live
    world.next_version()
    world.install(0)
    assert {order.version for order in world.out()} == {5}


def test_a_run_that_is_cut_off_twice_owes_its_validation_still() -> None:
    world = Measured(replace(ON_THE_WAY, every=2))
    for _ in range(3):
        world.next_version()
    for _ in range(2):
        world.tell(RunResumed(steps=3, replicas=2, consumed=(), released=(), kept=True))
    world.publish()
    world.come_back(0)
    world.install(0)
    assert {order.version for order in world.out()} == {4}


def test_a_version_published_while_a_run_drains_is_measured_once_it_is_resumed() -> None:
    world = Measured(replace(ON_THE_WAY, every=2))
    world.next_version()
    world.finish(world.running()[0])
    world.tell(DrainRequested(reason="maintenance"))
    world.train()
    world.publish()
    world.abort(*world.running())
    for id in (0, 1):
        replica = world.state.replicas.by_id[id]
        world.tell(ReplicaPaused(replica=id, life=replica.life, attempt=replica.sync_attempt))
    assert world.ordered(FinishRun)[-1].outcome == "stopped" and world.ends() == [("cancelled", 2)]
    world.tell(RunResumed(steps=2, replicas=2, consumed=(), released=(), kept=True))
    world.publish()
    world.come_back(0)
    world.install(0)
    assert {order.version for order in world.out()} == {3}


# replicas of its own


def test_replicas_of_its_own_run_no_group_and_take_only_versions_to_be_measured() -> None:
    validation = replace(ON_THE_WAY, at_start=True, every=2, own_from=1, at_end=True)
    world = Measured(validation, replicas=2, max_steps=3)
    assert {order.replica for order in world.ordered(StartGroup)} == {0}
    assert {order.replica for order in world.out()} == {1}
    world.measure_all()
    for version in (1, 2, 3):
        world.next_version()
        world.install(0)
        if version == 2:
            world.install(1)
    assert (world.staged(0), world.staged(1)) == ([1, 2, 3], [2])
    assert 2 not in [order.version for order in world.ordered(RetireWeights)]
    assert world.view.least_loaded(0) == 0
    world.measure_all()
    world.install(1)
    assert not world.ordered(FinishRun)
    world.measure_all()
    assert world.ends() == [("reported", 0), ("reported", 2), ("reported", 3)]
    assert world.ordered(FinishRun)[0].outcome == "finished"


def test_the_loss_of_its_own_replicas_ends_validations_and_never_the_run() -> None:
    world = Measured(replace(ON_THE_WAY, at_start=True, own_from=1, at_end=True), replicas=2, max_steps=1)
    world.lose(1, final=True)
    assert world.ends() == [("failed", 0)]
    world.next_version()
    assert world.ends() == [("failed", 0), ("failed", 1)]
    assert world.ordered(FinishRun)[0].outcome == "finished"


# worlds


@pytest.mark.parametrize("own_from", [None, 2])
def test_a_validation_that_takes_for_ever_delays_nobody_else(own_from: int | None) -> None:
    """Measuring takes a million seconds: every step is trained, and every version installed elsewhere, before that."""
    validation = ValidationLimits(rows=4, at_start=True, every=1, at_end=True, own_from=own_from)
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=8, validation=validation,
        timeouts=Timeouts(rows_s=None),
    )  # fmt: skip
    world = JudgedWorld(Setting(limits=limits, replicas=2, prompts=40, measure_s=1e6, max_tokens=60))
    assert world.run().outcome == "finished"
    assert len(world.judge.trained_at) == 8
    assert max(world.judge.trained_at.values()) < 1e4
    installed = {id: {v: at for (r, v), at in world.judge.installed_at.items() if r == id} for id in range(2)}
    quick = [id for id, versions in installed.items() if versions and max(versions.values()) < 1e4]
    assert len(quick) == (2 if own_from is not None else 1)
    assert all(set(installed[id]) >= {2, 4, 6, 8} for id in quick)
    reported = [version for state, version, _ in world.judge.validations.values() if state == "reported"]
    assert reported == [0, 8]


# figures


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rows": 0}, "rows"),
        ({"every": -1}, "every"),
        ({"every": 1.5}, "every"),
        ({"conflict": "wait"}, "conflict"),
        ({"replicas": 0}, "replicas"),
    ],
)
def test_figures_out_of_law_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"validation.{field}"):
        ValidationLimits(**{"rows": 4, **changes})


def test_figures_travel_in_a_header() -> None:
    limits = Limits(train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1, validation=ON_THE_WAY)
    assert Limits.from_plain(limits.to_plain()) == limits
    plain = limits.to_plain()
    plain["validation"]["unheard"] = 1
    with pytest.raises(ConfigError, match=r"limits\.validation"):
        Limits.from_plain(plain)


# the best checkpoint

TWO_SETS = replace(
    ON_THE_WAY,
    rows=5,
    sets=(ValidationSet(name="one", prompts=1), ValidationSet(name="four", prompts=1, samples=4, k=(4,))),
)


def rated(best: str = "four/avg@4", **more: Any) -> Measured:
    return Measured(TWO_SETS, checkpoint_every=1, keep_checkpoints=1, keep_best=best, **more)


def measure(world: Measured, right: int, failed: int = 0) -> None:
    """Answer every open chunk: so many of the four responses are right, the first row is wrong, and the last ones
    failed."""
    while world.out():
        order = world.out()[0]
        rows = tuple(row for row in range(order.first, order.first + order.count) if row < TWO_SETS.rows - failed)
        rewards = tuple(float(0 < row <= right) for row in rows)
        figures = {"measured": len(rows), "right": int(sum(rewards)), "reward": sum(rewards)}
        figures["right_rows"] = tuple(row for row in rows if 0 < row <= right)
        reason = "" if len(rows) == order.count else f"row {order.first + len(rows)}: no answer"
        world.measured(order, rows=rows, rewards=rewards, answers=(5,) * len(rows), reason=reason, **figures)


def save_and_measure(world: Measured, *shares: int, failed: int = 0) -> None:
    """A step, its version and its checkpoint for each share, and its validation."""
    for right in shares:
        world.next_version()
        for id in (0, 1):
            world.install(id)
        world.tell(CheckpointSaved(steps=world.state.training.steps_trained))
        measure(world, right, failed)
        for order in world.ordered(DeleteCheckpoint):
            world.tell(OrderDone(orders=(order.number,)))


def test_the_best_checkpoint_stays_until_a_better_one_is_measured() -> None:
    world = rated()
    save_and_measure(world, 1, 3, 2, 3)
    assert world.state.checkpoints.steps == [2, 4], "the best, of equal ones the oldest, and the newest"
    save_and_measure(world, 4)
    assert world.state.checkpoints.steps == [5]
    assert world.state.checkpoints.ratings == {1: 0.25, 2: 0.75, 3: 0.5, 4: 0.75, 5: 1.0}


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("accuracy", "max"), ("four/avg@4", "max"), ("four/reward_mean", "max"), ("reward_mean", "max"),
     ("reward_mean", "min"), ("four/reward_mean", "min")],
)  # fmt: skip
def test_responses_that_fail_make_no_checkpoint_the_best(metric: str, mode: str) -> None:
    """Of the second version, two responses fail; what is left of it has a better mean than the first."""
    world = rated(metric, keep_best_mode=mode)
    save_and_measure(world, 3 if mode == "max" else 2)
    save_and_measure(world, 2 if mode == "max" else 3, failed=2)
    assert world.state.checkpoints.best(world.state.limits) == 1
    assert world.ended[-1].reason.endswith(": no answer") and not world.ended[0].reason


def test_responses_to_dropped_prompts_are_wrong() -> None:
    one = ValidationSet(name="four", prompts=2, samples=2, k=(2,), dropped=2)
    world = Measured(replace(ON_THE_WAY, at_start=True, every=0, rows=4, sets=(one,)))
    measure(world, 3)
    (validation,) = world.ended
    found = {figure.metric: figure.value for figure in validation.figures}
    assert (validation.accuracy, validation.asked, found) == (
        3 / 8,
        8,
        {"avg@2": 0.375, "pass@2": 0.5, "reward_mean": 0.75},
    )


def test_the_smallest_value_can_be_best() -> None:
    world = rated("reward_mean", keep_best_mode="min")
    save_and_measure(world, 3, 1, 2)
    assert world.state.checkpoints.steps == [2, 3]


def test_a_checkpoint_stays_while_its_weights_are_measured() -> None:
    world = rated()
    for _ in range(2):
        world.next_version()
        world.tell(CheckpointSaved(steps=world.state.training.steps_trained))
        if world.state.training.steps_trained == 1:
            world.install(0)
    assert [validation.steps for validation in world.state.validations.live.values()] == [1, 2]
    assert world.state.surplus_checkpoints() == []


def test_going_back_forgets_what_later_weights_measured() -> None:
    world = rated(keep_checkpoints_every=1)
    save_and_measure(world, 1, 3, 2)
    world.state.checkpoints.branch(1)
    assert world.state.checkpoints.ratings == {1: 0.25}
    assert world.state.checkpoints.best(world.state.limits) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": (0,)},
        {"rows": (0, 7)},
        {"rows": (1, 1)},
        {"rewards": (1.0,)},
        {"answers": ()},
        {"right_rows": (0, 1)},
        {"right_rows": (2,)},
        {"part_rows": (0,), "part_places": (0,)},
        {"part_rows": (2,), "part_places": (0,), "part_values": (1.0,)},
    ],
)
def test_an_answer_that_does_not_name_each_row_once_costs_the_chunk_an_attempt(changes: dict[str, Any]) -> None:
    world = rated()
    world.next_version()
    world.install(0)
    order = world.out()[0]
    assert (order.first, order.count) == (0, 2)
    lawful = {"rows": (0, 1), "rewards": (0.0, 1.0), "answers": (0, 0), "right_rows": (1,)}
    world.measured(order, **{**lawful, **changes})
    (validation,) = world.state.validations.live.values()
    assert validation.chunks[0].failures == 1 and not validation.measured


def test_a_best_checkpoint_needs_checkpoints_and_a_validation() -> None:
    for limits in ({"checkpoint_every": 0}, {"validation": None}, {"keep_best_mode": "best"}):
        with pytest.raises(ConfigError, match=r"trainer\.keep_best"):
            replace(rated().state.limits, **limits)  # type: ignore[arg-type]
