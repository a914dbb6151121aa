"""Worlds of the oracle without a clock: the next event is random, or all possible events happen in turn.

All processes may end at the same time. The run then resumes from its record, with trajectories or from a checkpoint.
"""

from collections.abc import Callable
from random import Random

from engine.events import DrainRequested, SchedulerRecovered
from engine.policies import PolicySet
from engine.record.frames import Tick
from tests.core.adversary import AT_REST, Adversary
from tests.oracle.figures import any_limits, any_policies
from tests.oracle.worlds import RunReport, request

Move = Callable[[], None]


class Seen(Adversary):
    """Reports every event with its commands. Events that a recovery replays are reported once."""

    report: RunReport

    def _observe(self, tick: Tick) -> None:
        self.report.observe(tick)
        super()._observe(tick)


def begin(random: Random, report: RunReport) -> tuple[Seen, int]:
    """(a world, the minimum number of its replicas)."""
    limits, named = any_limits(random), any_policies(random)
    policies = PolicySet.from_names(named)
    report.limits, report.policies = limits, dict(policies.names)
    cls = type("Reporting", (Seen,), {"report": report})  # the constructor already reports the first event
    world: Seen = cls(limits, policies, random.randint(1, 60), random.randint(1, 4), random.choice([0, 7]))
    least = limits.validators().stop
    for id in range(max(least, random.randint(1, 3))):
        world.join(id)
    return world, least


def crash(world: Seen, random: Random, least: int) -> None:
    gap = random.randint(2, 9)
    world.crash(
        max(least, random.randint(1, 3)), kept=random.random() < 0.5, missing=lambda group: group % gap == 1
    )  # fmt: skip


def cut(number: int, report: RunReport) -> None:
    """All possible events happen in turn. Sometimes all processes end, or the user drains the run."""
    random = Random(f"cut/{number}")
    world, least = begin(random, report)
    for _ in range(random.randint(1, 4)):
        for _ in range(random.randint(0, 60)):
            if world.driver.outcome is not None or not world.act():
                break
        if world.driver.outcome is None and random.random() < 0.2:
            world.deliver(DrainRequested(reason=AT_REST))
        elif world.driver.outcome is None or world.driver.outcome.outcome != "finished":
            crash(world, random, least)
    world.complete()
    report.scheduler = world.scheduler


def wild(number: int, report: RunReport) -> None:
    """Random events in random order."""
    random = Random(f"wild/{number}")
    world, least = begin(random, report)
    for _ in range(random.randint(30, 300)):
        if world.driver.outcome is not None:
            if world.driver.outcome.outcome == "finished":
                break
            crash(world, random, least)
        random.choice(moves(world, random, least))()
    world.complete()
    report.scheduler = world.scheduler


def moves(world: Seen, random: Random, least: int) -> list[Move]:
    """One possible move of each kind; likely kinds appear several times."""
    likely = random.random() < 0.8
    found: list[Move] = []

    def may(weight: int, move: Callable[..., object], among: list) -> None:  # type: ignore[type-arg]
        if among:
            one = among[random.randrange(len(among))]
            found.extend([lambda: move(one)] * weight)

    def finish(running: tuple) -> None:  # type: ignore[type-arg]
        replica, group = running
        if not replica.frozen:
            replica.sample(group, random.randint(0, 3))
            replica.finish(group, spread=random.choice([0.0, 1.0]))

    def ask(_: object) -> None:
        event = request(random, world)
        if event is not None:
            world.deliver(event)

    def late(_: object) -> None:
        world.time += random.choice([0.0, 10.0, 200.0])
        world.fire()

    going, rare_loss = world.driver.outcome is None, random.random() < 0.2
    may(6, world.arrive_up, world.sources())
    may(6, world.arrive_down, world.addressees())
    may(2, lambda one: one[0].sample(one[1], random.randint(1, 3)), world.running())
    may(4, finish, world.running())
    may(1, lambda one: one[0].keep_prefix(one[1]), world.running())
    may(1, lambda one: one[0].fail(one[1], random.choice(["infrastructure", "data"])), world.running())
    may(4, lambda one: one.sync(likely), world.syncing())
    may(3, lambda one: one[0].measure(one[1], likely), world.measuring())
    may(3, lambda one: world.leave(one, "" if likely else random.choice(["infrastructure", "data"])),
        list(range(len(world.judged))))  # fmt: skip
    may(5, lambda one: one.do(likely), world.working())
    may(5, lambda one: world.draw(), world.draws if going else [])
    may(2, late, world.timers)
    may(1, lambda one: world.kill(one, random.random() < 0.7), list(world.replicas))
    may(3, world.come_up, list(world.starting))
    may(1, world.fail_start, list(world.starting))
    may(1, lambda one: world.kill_worker(*one), world.killable() if going and rare_loss else [])
    may(1, world.join, [len(world.incarnations)] if len(world.incarnations) < 4 and not least else [])
    may(1, ask, [None])
    may(1, world.repeat, list(range(len(world.past))))
    rare = random.randrange(10)
    may(1, lambda one: crash(world, random, least), [None] if rare < 2 else [])
    may(1, lambda one: world.deliver(DrainRequested(reason=AT_REST)), [None] if rare == 2 else [])
    may(1, lambda one: world.deliver(SchedulerRecovered()), [None] if rare == 3 and going else [])
    return found
