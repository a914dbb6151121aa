"""Whole runs in the simulated world, clock and faults included; and that the checks would catch the rules known to be
wrong."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import EngineError, TrainerSpoiled
from engine.events import DrainRequested, OrderDone, ProcessLost, StopRequested
from engine.policies import PolicySet
from engine.protocols import Batch
from engine.record.frames import Header, Tick
from engine.record.reader import read
from engine.record.recorder import MemoryRecorder
from engine.record.replayer import replay
from engine.simulation.simulated_models import SimTrainer
from engine.simulation.world import Faults, Finding, Setting
from engine.states.group import Group
from engine.states.ledger import Deadlines
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.states.orders import RELATIONS, TRAINER, Order
from engine.states.state import State
from engine.states.timeouts import KINDS, Timeouts
from engine.workers.replica import ReplicaWorker
from tests.core.moves import any_limits, any_policies, drawn, generating
from tests.judge.judged_world import JudgedWorld
from tests.shipped_policies import SHIPPED

ROUGH = Faults(
    lose=0.1,
    duplicate=0.1,
    die=0.01,
    stay_dead=0.2,
    fail_group=0.03,
    fail_data=0.03,
    fail_sync=0.1,
    fail_trainer=0.05,
    fail_state=0.05,
    fail_rows=0.1,
)


DYING = replace(ROUGH, die=0.03, stay_dead=0.05, die_trainer=0.1, fail_start=0.2)
"""Every kind of process dies, and some of their lives never begin."""
HANGING = replace(ROUGH, hang=0.02, stick=0.1)
ARRIVE = {row.subject for row in RELATIONS.values() if row.answers == (OrderDone,)}
ENDED_WITH_THE_RUN = {"group", "park", "truncate", "sync", "start", "stop", "timer", "state", "draw", "rows", "probe"}
"""What a run that has all its steps does not wait for: groups that no step takes, replicas, probes, prompts
nobody needs, and the other rows of a validation that its last event ended."""


class Watched(JudgedWorld):
    """After every tick it lets the scheduler react again, which must order nothing (law of ticks).

    `left`: what was open as the run finished, but for what its last event answered.
    """

    open: dict[int, Order]
    left: list[Order]

    def _observe(self, tick: Tick) -> None:
        super()._observe(tick)
        assert self.scheduler.tick(()) == (), f"reacting again to {tick.events} orders more"
        orders = self.scheduler.state.orders
        if self.scheduler.state.ending.outcome is None:
            self.open = {order.number: order for order in orders.all()}
            return
        assert len(orders) == 0
        answered = {order.number for matched in orders.matched.values() for order in matched}
        lost = [event for event in tick.events if isinstance(event, ProcessLost) and event.kind == TRAINER]
        done = {("publish", event.published) for event in lost}  # what its loss reports counts as done
        done |= {("checkpoint", steps) for event in lost for steps in event.saved}
        answered |= {order.number for order in self.open.values() if (order.subject, order.id) in done}
        self.left = [order for number, order in self.open.items() if number not in answered]


CUT_WHILE_STOPPED = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, infrastructure_attempts=1, data_attempts=1,
    timeouts=Timeouts.every(4.0, group_s="auto", start_s=60.0, floor_s=0.01, cut_s=0.01),
    validation=ValidationLimits(rows=1, rows_per_slot=1, at_start=False, at_end=False, replicas=1, own_from=2),
)  # fmt: skip
"""In one check, groups exceed their limit, and their replica is stopped for groups that it did not cut before."""


@example(
    limits=CUT_WHILE_STOPPED, names={}, seed=1, replicas=1, slots=3, prompts=9, spread=1.0, faults=Faults(), prefixes=0,
    tick_size=1, drain_at=None,
)  # fmt: skip
@given(
    limits=drawn(any_limits), names=drawn(any_policies), seed=st.integers(0, 2**31), replicas=st.integers(1, 4),
    slots=st.integers(1, 4), prompts=st.integers(1, 60), spread=st.sampled_from([1.0, 0.5]),
    faults=st.sampled_from([Faults(), Faults(), ROUGH, DYING, HANGING]), prefixes=st.sampled_from([0, 3]),
    tick_size=st.sampled_from([1, 64, 0]), drain_at=st.sampled_from([None, None, None, 20.0, 100.0]),
)  # fmt: skip
def test_every_world_keeps_every_law_and_ends(
    limits: Limits,
    names: dict[str, str],
    seed: int,
    replicas: int,
    slots: int,
    prompts: int,
    spread: float,
    faults: Faults,
    prefixes: int,
    tick_size: int,
    drain_at: float | None,
) -> None:
    """Nothing that must be done is open as a run finishes. Processes hang only where every order has a limit."""
    if any(limits.timeouts.given(kind) is None for kind in KINDS):
        faults = replace(faults, hang=0.0, stick=0.0)
    setting = Setting(
        limits=limits, replicas=generating(limits, replicas), slots=slots, prompts=prompts, seed=seed,
        spread=spread, faults=faults, prefix_every_tokens=prefixes, tick_size=tick_size,
    )  # fmt: skip
    world = Watched(setting, PolicySet.from_names(names))
    if drain_at is not None:
        world.run_for(drain_at)
        if world.driver.outcome is None:
            world.tell(DrainRequested(reason="enough"))
    outcome = world.run()
    may_fail = faults != Faults() or limits.timeouts.group_s is not None  # a group may take longer than that, each time
    barren = not world.scheduler.state.training.steps_trained  # its few groups were filtered, or dropped as stragglers
    assert outcome.outcome == "finished" or may_fail or barren or drain_at, outcome
    assert outcome.reason
    if outcome.outcome == "finished":
        assert {order.subject for order in world.left} <= ARRIVE | ENDED_WITH_THE_RUN


@pytest.mark.parametrize("tick_size", [1, 64])
@pytest.mark.parametrize(("decision", "name"), [(kind, name) for kind in SHIPPED for name in SHIPPED[kind]])
def test_a_policy_keeps_every_law_with_ticks_of_one_and_of_many(decision: str, name: str, tick_size: int) -> None:
    figures = Limits(
        train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=6, max_steps=8, sync_mode="abort",
        deadline_timeout_s=5.0, max_drops=8, validation=ValidationLimits(rows=4, every=3),
    )  # fmt: skip
    setting = Setting(
        limits=figures, replicas=2, slots=2, prompts=60, seed=4, spread=0.7, prefix_every_tokens=3, tick_size=tick_size,
        faults=Faults(duplicate=0.1, fail_group=0.05, fail_sync=0.05),
    )  # fmt: skip
    world = Watched(setting, PolicySet.from_names({decision: name}))
    outcome = world.run()
    assert outcome.outcome == "finished", outcome


def dying_world(seed: int, recorder: MemoryRecorder | None = None) -> JudgedWorld:
    """In turn with and without checkpoints, batches to train again, scorers of their own, two steps a version."""
    pools = (
        Pool(tasks=("rollout",), replicas=(0, 1, 2)), Pool(tasks=("train", "old_logprobs"), replicas=()),
        Pool(tasks=("ref_logprobs",), replicas=()),
    )  # fmt: skip
    every = (0, 1, 2)[seed % 3]
    figures = Limits(
        train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=6, max_steps=10, infrastructure_attempts=8,
        sync_every=1 + seed % 2, checkpoint_every=every, keeps_batches=bool(every) and seed % 5 > 0, replica_restarts=4,
        trainer_restarts=6, worker_restarts=6, scoring_tasks=("old_logprobs", "ref_logprobs"),
        pools=pools if seed % 4 else (),
    )  # fmt: skip
    return JudgedWorld(
        Setting(
            limits=figures, replicas=3, slots=2, prompts=200, seed=seed, faults=DYING, tick_size=(1, 64, 0)[seed % 3]
        ),
        recorder=recorder,
    )


def test_worlds_in_which_every_kind_of_process_dies_keep_every_law_and_end() -> None:
    """A run may fail there, but only as its budgets are spent or weights are lost; and most do not."""
    seen: Counter[str] = Counter()
    for seed in range(24):
        limits = dying_world(seed).setting.limits
        recorder = MemoryRecorder(Header(run="dying", limits=limits.to_plain()))
        world = dying_world(seed, recorder)
        outcome = world.run()
        seen[outcome.outcome] += 1
        spent = ("without progress", "failed 8 times", "last error", "could not be written")
        causes = (*spent, "are lost", "no replica is left")
        assert outcome.outcome == "finished" or any(cause in outcome.reason for cause in causes), outcome
        for process in world.scheduler.state.processes.values():
            seen[process.kind] += process.life > 1
        if seed % 8 == 0:
            assert replay(read(recorder)).identical
    assert seen["finished"] >= 12 and seen["trainer"] >= 12 and seen["scorer"] >= 6, seen


def a_world(seed: int, recorder: MemoryRecorder | None = None) -> JudgedWorld:
    figures = Limits(train_batch_size=3, max_staleness_steps=2, max_concurrent_groups=9, max_steps=8, sync_mode="abort")
    return JudgedWorld(
        Setting(limits=figures, replicas=3, slots=3, prompts=200, seed=seed, faults=ROUGH), recorder=recorder
    )


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    records = []
    for seed in (1, 1, 2):
        recorder = MemoryRecorder(Header(run="twice", limits=a_world(0).setting.limits.to_plain()))
        a_world(seed, recorder).run()
        records.append(recorder.to_bytes())
    assert records[0] == records[1] != records[2]


def test_a_world_that_stops_and_goes_on_is_the_same_run() -> None:
    """It stops after every tenth event, then two seconds later."""

    def record(stops: bool) -> bytes:
        recorder = MemoryRecorder(Header(run="twice", limits=a_world(0).setting.limits.to_plain()))
        world = a_world(3, recorder)
        while stops and world.scheduler.state.ending.outcome is None:
            handled = world.driver.events_handled + 10
            if world.run_until(lambda state, handled=handled: world.driver.events_handled == handled):
                world.run_for(2.0)
        assert world.run().outcome == "finished"
        return recorder.to_bytes()

    assert record(stops=False) == record(stops=True)


def test_a_world_takes_a_request_while_it_stands_and_can_be_left_there() -> None:
    world = a_world(1)
    assert world.run_until(lambda state: state.training.steps_trained == 2)
    world.run_for(1.0)
    at, handled = world.time, world.driver.events_handled
    world.tell(StopRequested(reason="enough"))
    assert (world.time, world.driver.events_handled) == (at, handled + 1)
    assert world.run().reason == "enough" and world.time == at
    left = a_world(1)
    assert left.run_until(lambda state: state.training.steps_trained == 1)
    handled = left.driver.events_handled
    left.close()
    assert left.driver.events_handled == handled and not left.run_until(lambda state: state.training.steps_trained == 2)
    with pytest.raises(EngineError, match="the run has ended"):
        left.tell(StopRequested(reason="too late"))


def test_the_staleness_bound_is_attained_and_work_goes_on_out_of_order() -> None:
    worst, orders = set(), 0
    for seed in range(10):
        world = a_world(seed)
        world.run()
        worst.add(world.judge.ledger.worst_staleness)
        steps = list(world.judge.ledger.books.taken.items())
        orders += steps != sorted(steps)
    assert max(worst) == 2
    assert orders


# Rules that docs/STALENESS.md refutes. Put in, each must be caught; else the checks above prove nothing.


def only_those_due_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all groups whose deadline is this step, and otherwise whatever is ready."""
    honest = Deadlines.requirements
    monkeypatch.setattr(
        Deadlines, "requirements", lambda self, step, batch: [r for r in honest(self, step, batch) if r[0] == step]
    )


def short_steps_not_charged_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the groups that steps took in place of B for each step."""

    def held(state: State) -> int:
        ledger = state.groups.ledger
        return ledger.unconsumed + ledger.batched + ledger.consumed

    monkeypatch.setattr(State, "held", property(held))


def parked_groups_resume_on_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a group continue wherever a slot is free, and have the replicas not refuse it."""
    monkeypatch.setattr(Group, "resumes_from", property(lambda self: 0))
    monkeypatch.setattr(ReplicaWorker, "_is_behind", lambda self, kept: False)
    monkeypatch.setattr("engine.workers.replica.check_generated", lambda *args, **others: None)


@pytest.mark.parametrize(
    "put_in", [only_those_due_now, short_steps_not_charged_in_full, parked_groups_resume_on_older_versions]
)
def test_refuted_variants_are_caught(
    put_in: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the true books alone: the checks inside the engine are switched off, so that only consequences count."""
    put_in(monkeypatch)
    monkeypatch.setattr("engine.scheduling.steps.check_room", lambda state: None)
    monkeypatch.setattr("engine.scheduling.steps.check_batch", lambda *args: None)
    monkeypatch.setattr("engine.scheduling.groups.require", lambda *args, **figures: None)
    monkeypatch.setattr("tests.judge.judged_world.check_all", lambda state: None)
    with pytest.raises(EngineError) as caught:
        for world in _worlds_that_are_tight(400):
            world.run()
    assert isinstance(caught.value, Finding)


def test_worlds_in_which_bounds_bind_keep_every_law() -> None:
    for world in _worlds_that_are_tight(18):
        world.run()


def _worlds_that_are_tight(count: int) -> Iterator[JudgedWorld]:
    """Small worlds in which bounds bind: short steps, rolling installs, deaths."""
    for seed in range(count):
        batch, staleness = 1 + seed % 3, 1 + seed // 3 % 2
        figures = Limits(
            train_batch_size=batch, max_staleness_steps=staleness, max_concurrent_groups=batch * (staleness + 1),
            sync_mode="abort", deadline_timeout_s=1.0, infrastructure_attempts=50,
        )  # fmt: skip
        names = {"deadline": ("shrink", "wait")[seed % 2], "sync": "rolling"}
        faults = Faults(die=0.02, lose=0.1)
        setting = Setting(
            limits=figures, replicas=3, slots=2, prompts=40, seed=seed, train_s=5.0, faults=faults,
            tick_size=(1, 64, 0)[seed // 6 % 3],
        )  # fmt: skip
        yield JudgedWorld(setting, PolicySet.from_names(names))


def test_a_train_step_that_reports_progress_may_take_longer_than_its_limit() -> None:
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=3, trainer_restarts=0,
        timeouts=Timeouts.every(None, train_s=10.0),
    )  # fmt: skip
    setting = Setting(limits=limits, prompts=12, train_s=100.0)
    ends = [JudgedWorld(replace(setting, train_reports=reports)).run() for reports in (0, 30)]
    assert [end.outcome for end in ends] == ["failed", "finished"]
    assert "the trainer exceeded its time limit of 10 s" in ends[0].reason


def test_a_spoiled_trainer_is_replaced_and_trains_from_its_checkpoint_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    train = SimTrainer.train

    async def spoiled(trainer: SimTrainer, batch: Batch) -> dict[str, float]:
        trained.append(batch.step)
        if batch.step == 6 and trained.count(6) == 1:
            raise TrainerSpoiled("out of memory")
        return await train(trainer, batch)

    monkeypatch.setattr(SimTrainer, "train", spoiled)
    limits = Limits(
        train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=6, max_steps=9, checkpoint_every=4,
        keeps_batches=True,
    )  # fmt: skip
    assert JudgedWorld(Setting(limits=limits, replicas=2, prompts=40, seed=1)).run().outcome == "finished"
    assert trained == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8], "an attempt of step 6 was not answered"
