"""Worlds of the oracle without a clock: the next event is random, or all possible events happen in turn.

All processes may end at the same time. The run then resumes from its record, with trajectories or from a checkpoint.
"""

from random import Random

from engine.events import DrainRequested
from engine.policies import PolicySet
from engine.record.frames import Tick
from tests.core.adversary import AT_REST, Adversary
from tests.core.moves import MOVES, any_limits, any_policies
from tests.oracle.worlds import RunReport


class Seen(Adversary):
    """Reports every event with its commands. Events that a recovery replays are reported once."""

    report: RunReport

    def _observe(self, tick: Tick) -> None:
        self.report.observe(tick)
        super()._observe(tick)


def begin(random: Random, report: RunReport) -> Seen:
    policies = PolicySet.from_names(any_policies(random))
    report.limits, report.policies = any_limits(random), dict(policies.names)
    cls = type("Reporting", (Seen,), {"report": report})  # the constructor already reports the first event
    prompts, slots, snapshot_every = random.randint(1, 60), random.randint(1, 4), random.choice([0, 7])
    return cls(report.limits, policies, prompts, slots, snapshot_every, replicas=random.randint(1, 3))  # type: ignore[no-any-return]


def cut(number: int, report: RunReport) -> None:
    """All possible events happen in turn. Sometimes all processes end, or the user drains the run."""
    random = Random(f"cut/{number}")
    world = begin(random, report)
    for _ in range(random.randint(1, 4)):
        for _ in range(random.randint(0, 60)):
            if world.driver.outcome is not None or not world.act():
                break
        if world.driver.outcome is None and random.random() < 0.2:
            world.deliver(DrainRequested(reason=AT_REST))
        elif world.driver.outcome is None or world.driver.outcome.outcome != "finished":
            gap = random.randint(2, 9)
            world.crash(
                max(random.randint(1, 3), world.least), kept=random.random() < 0.5,
                missing=lambda group, gap=gap: group % gap == 1,
            )  # fmt: skip
    world.complete()
    report.scheduler = world.scheduler


def wild(number: int, report: RunReport) -> None:
    """Random moves in random order, the likely ones more often."""
    random = Random(f"wild/{number}")
    world = begin(random, report)
    for _ in range(random.randint(30, 300)):
        able = [move for move in MOVES if move.among(world)]
        (move,) = random.choices(able, [move.weight for move in able])
        move.act(world, random.choice(list(move.among(world))), random)
    world.complete()
    report.scheduler = world.scheduler
