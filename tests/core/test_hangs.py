"""Whole worlds on a virtual clock: what hangs is replaced within its time limit, and healthy work is never stopped."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.commands import Command, StopProcess
from engine.events import ProcessUp
from engine.record.frames import Tick
from engine.simulation.proof import prove
from engine.simulation.world import Faults, Setting
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.states.orders import RELATIONS
from engine.states.process import ADDED_STATES, GATEWAY, REPLICA, SCORER, TRAINER
from engine.states.timeouts import SLOW_FLOOR_S, TIMES_FLOOR, TIMES_LONGEST, Timeouts
from tests.core.added_states import CHECKING
from tests.judge.judged_world import JudgedWorld

every = Timeouts.every


class Seen(JudgedWorld):
    """Counts the commands of a run, and remembers when it ended."""

    def __init__(self, setting: Setting) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(setting)

    def _observe(self, tick: Tick) -> None:
        self.seen.update(type(command).__name__ for command in tick.commands)
        super()._observe(tick)


def a_world(seed: int, timeouts: Timeouts, faults: Faults, **others: Any) -> Seen:
    limits = Limits(
        train_batch_size=3, max_staleness_steps=2, max_concurrent_groups=9, max_steps=8, infrastructure_attempts=20,
        timeouts=timeouts, scoring_tasks=("old_logprobs",), checkpoint_every=2,
        validation=ValidationLimits(rows=12, rows_per_slot=3, every=2), added_states=(CHECKING,),
    )  # fmt: skip
    limits = replace(limits, **others)
    return Seen(Setting(limits=limits, replicas=3, slots=3, prompts=200, seed=seed, faults=faults, max_tokens=400,
                        prefix_every_tokens=10))  # fmt: skip


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_no_healthy_world_is_disturbed(mode: str) -> None:
    """Limits little above what single orders take, far below what they wait for one another."""
    turns = (Pool(tasks=("rollout", "train", "old_logprobs"), replicas=(0, 1, 2)),)
    timeouts = every(45.0, cut_s=5.0, start_s=60.0)
    for others in ({}, {"pools": turns}):
        world = a_world(0, timeouts, Faults(), sync_mode=mode, **others)
        assert world.run().outcome == "finished"
        assert not world.seen["ParkGroup"] and not world.seen["StopProcess"]
        assert not any(group.exceeded for group in world.scheduler.state.groups.live.values())


HEALTHY = {
    "most groups are short and a few take hours": {"token_s": 100.0, "mean_tokens": 30.0, "prefix_every_tokens": 5},
    "a train step takes the better part of an hour, the first too": {"train_s": 2300.0},
    "a validation takes two hours": {"measure_s": 7200.0 / 1.5},
    "weights take minutes to arrive": {"sync_s": 300.0},
    "the work of a state takes long": {"state_s": 2000.0},
}


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize("others", HEALTHY.values(), ids=HEALTHY)
def test_slow_healthy_worlds_are_not_disturbed(others: dict[str, Any], mode: str) -> None:
    setting = a_world(0, Timeouts(), Faults(), sync_mode=mode).setting
    world = Seen(replace(setting, max_tokens=None if "token_s" in others else 400, **others))
    assert world.run().outcome == "finished"
    assert not world.seen["ParkGroup"] and not world.seen["StopProcess"] and not world.seen["StopMeasuring"]


@pytest.mark.parametrize("timeouts", [Timeouts(), every(45.0, cut_s=5.0)], ids=["auto", "seconds"])
def test_groups_that_are_stuck_are_cut_short_and_go_on(timeouts: Timeouts) -> None:
    """As if their rewards never came: each costs its group an attempt."""
    world = a_world(0, timeouts, Faults(stick=0.1))
    assert world.run().outcome == "finished"
    assert world.seen["ParkGroup"] and not world.seen["StopProcess"]


@pytest.mark.parametrize("seed", range(3))
def test_a_world_whose_agents_hang_recovers_or_ends_within_the_limits(seed: int) -> None:
    timeouts = every(100.0, cut_s=5.0)
    world = a_world(seed, timeouts, Faults(hang=0.004), keeps_batches=True)
    calm = a_world(seed, timeouts, Faults())
    assert calm.run().outcome == "finished"
    outcome = world.run()
    assert outcome.outcome in ("finished", "stopped")
    if outcome.outcome == "stopped":
        assert "exceeded its time limit" in outcome.reason
        assert outcome.again != ("the data source" in outcome.reason), "but for that, it begins again by itself"
    hangs = 1 + world.seen["StopProcess"] + world.seen["ParkGroup"]
    assert world.time <= 3 * calm.time + 2 * 105.0 * hangs


def test_limits_are_not_for_the_made_up_times_of_a_proof() -> None:
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, timeouts=every(1.0, cut_s=1.0)
    )  # fmt: skip
    assert prove(limits, {}, runs=2) == 2


def test_without_limits_a_hang_is_for_ever() -> None:
    """What the limits are for."""
    with pytest.raises(Exception, match="liveness"):
        for seed in range(6):
            a_world(seed, every(None), Faults(hang=0.02)).run()


HUNG = [
    ("group", "replica", "finished"),
    ("sync", "replica", "finished"),
    ("resume", "replica", "finished"),
    ("rows", "replica", "finished"),
    ("train", "trainer", "finished"),
    ("publish", "trainer", "finished"),
    ("checkpoint", "trainer", "finished"),
    ("score", "scorer", "finished"),
    ("state", "added states", "finished"),
    ("start", "replica", "finished"),
    ("discard", "trajectory store", "begins again"),
    ("retire", "weights store", "begins again"),
    ("draw", "data source", "stopped"),
    ("stop", "replica", "begins again"),
]
"""What hangs over an order of a subject, and how the run ends. The gateway executes no orders."""
IN_SECONDS = every(100.0, cut_s=5.0)
HANGS = [
    *(pytest.param(*row, IN_SECONDS, id=row[0]) for row in HUNG),
    *(pytest.param(*row, Timeouts(), id=f"{row[0]}, auto") for row in HUNG if row[0] in ("group", "train", "discard")),
]


class HangsOnce(Seen):
    """The process that executes the second order of a subject hangs over it, forever."""

    def __init__(self, setting: Setting, subject: str) -> None:
        self.subject, self.left, self.hung = subject, 1 if subject in ("start", "stop") else 2, ""
        self.hung_at = self.stopped_at = self.up_at = 0.0
        super().__init__(setting)
        if subject == "start":
            self.after(30.0, lambda: self.process(REPLICA).die())
        elif subject == "stop":
            self.after(30.0, lambda: self.hang(REPLICA, 0))

    def hang(self, kind: str, index: int) -> None:
        self.process(kind, index).hung = True

    def execute(self, commands: Sequence[Command]) -> None:
        chosen = next((command for command in commands if self._is_the_one(command)), None)
        owner = None if chosen is None else getattr(chosen, "kind", RELATIONS[type(chosen)].owner)
        by_worker = owner in (REPLICA, TRAINER, SCORER, ADDED_STATES) and not isinstance(chosen, StopProcess)
        super().execute([command for command in commands if by_worker or command is not chosen])
        if owner is not None:
            self.hung, self.hung_at = owner, self.time
            if by_worker:
                self.hang(owner, getattr(chosen, "replica", 0))

    def _is_the_one(self, command: Command) -> bool:
        relation = RELATIONS.get(type(command))
        if relation is None or relation.subject != self.subject or not self.left or not self.time:
            return False
        self.left -= 1
        return not self.left

    def _observe(self, tick: Tick) -> None:
        for command in tick.commands:
            if isinstance(command, StopProcess) and not self.stopped_at:
                self.hung, self.stopped_at = command.kind, self.time
        came_up = any(isinstance(event, ProcessUp) and event.life > 1 for event in tick.events)
        if self.stopped_at and not self.up_at and came_up:
            self.up_at = self.time
        super()._observe(tick)


@pytest.mark.parametrize(("subject", "kind", "end", "timeouts"), HANGS)
def test_whatever_hangs_is_stopped_in_time_and_another_carries_on(
    subject: str, kind: str, end: str, timeouts: Timeouts
) -> None:
    apart = (Pool(tasks=("rollout",), replicas=(0, 1, 2)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))
    setting = a_world(1, timeouts, Faults(), pools=apart, keeps_batches=True, max_steps=10).setting
    train_s = 2000.0 if timeouts == Timeouts() else 20.0
    world = HangsOnce(replace(setting, train_s=train_s), subject)
    last = world.run()
    assert (world.hung, last.outcome) == (kind, "finished" if end == "finished" else "stopped"), last.reason
    assert last.again == (end == "begins again")
    assert not list(world.scheduler.state.orders.all())
    longest = 100.0 if train_s == 20.0 else max(TIMES_FLOOR * SLOW_FLOOR_S, TIMES_LONGEST * 1.5 * train_s)
    ahead = 3 * train_s  # orders of the trainer: the clock begins when they are over
    assert 0 <= (world.stopped_at or world.time) - world.hung_at <= longest + timeouts.cut_s + ahead
    assert world.seen["StopProcess"] == (kind != "data source")
    if end == "finished":
        assert world.stopped_at < world.up_at < world.stopped_at + 60.0 + 2 * 1.5 * train_s, "it trains two steps again"
    else:
        assert f"{kind}{' 0' * (kind == 'replica')} exceeded its time limit of" in last.reason


def test_no_order_is_for_the_gateway() -> None:
    """So it never exceeds a limit: what waits for it does."""
    owners = {relation.owner for relation in RELATIONS.values()}
    assert TRAINER in owners and GATEWAY not in owners
