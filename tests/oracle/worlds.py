"""The worlds of the oracle in which no order has a time limit: small simulated runs, each determined by its family and
number. They make the inputs of recordings.

Importing this module registers the policies that recorded worlds name.

Eight families:

* `calm`: no faults, and only lengths are random.
* `preset`: small versions of the shipped configurations, in each layout and mode that they list.
* `rough`: any limits and policies, with all faults.
* `asked`: the user drains, scales, removes replicas and changes settings during the run.
* `taken`: the scheduler's process ends at random times, and another takes the run over from its record.
* `fleet`: many replicas with many slots.
* `cut`: no clock; all possible events happen in turn, and sometimes all processes end at the same time. The run then
  resumes from its record, with trajectories or from a checkpoint.
* `wild`: no clock; random events in random order, echoes of old ones included.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from engine.config import load_config
from engine.events import DrainRequested, Event, ReplicaLeaves, ReplicasWanted, StopRequested
from engine.policies import DEFAULTS, PolicySet, register
from engine.record.frames import Tick
from engine.scheduling.settings import live_settings
from engine.simulation.simulated_models import Dice
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits
from engine.states.timeouts import Timeouts
from tests.core.adversary import AT_REST, Adversary
from tests.core.moves import MOVES, any_change, any_limits, any_policies
from tests.steady_world import SteadyDice

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
ROUGH = Faults(
    lose=0.1, duplicate=0.1, die=0.01, stay_dead=0.2, fail_group=0.03, fail_data=0.03, fail_sync=0.1,
    fail_trainer=0.1, fail_state=0.05, fail_rows=0.1,
)  # fmt: skip
STEPS = 10
"""Maximum train steps of a preset's world."""
NO_LIMITS = Timeouts.every(None)
LIVE = [name for name in live_settings() if not name.startswith("timeouts.")]
"""What users change."""


@register("admission", "oracle-halves")
class Halves:
    """Starts half of the allowed groups."""

    def admit(self, view: Any, legal: int) -> int:
        return (legal + 1) // 2


@register("retry", "oracle-twice")
class Twice:
    def retry(self, view: Any, group: Any, cause: str) -> bool:
        return bool(group.infrastructure_failures < 2)


@register("validation", "oracle-odd")
class Odd:
    def due(self, view: Any, version: int, steps_before: int, steps: int) -> bool:
        return version % 2 == 1


OWN = {"admission": "oracle-halves", "retry": "oracle-twice", "validation": "oracle-odd"}
"""Custom policies."""


def some_limits(random: Random) -> Limits:
    return replace(any_limits(random), timeouts=NO_LIMITS)


def some_policies(random: Random) -> dict[str, str]:
    """For each decision the default or any shipped policy, at even odds; in every tenth world custom ones, too."""
    shipped = any_policies(random)
    named = {decision: random.choice((DEFAULTS[decision], shipped[decision])) for decision in DEFAULTS}
    return named | OWN if random.random() < 0.1 else named


class RunReport:
    """The report of one run: its initial limits and policies, then every event with its commands."""

    limits: Limits
    policies: dict[str, str]

    def __init__(self) -> None:
        self.ticks: list[Tick] = []

    def observe(self, tick: Tick) -> None:
        self.ticks.append(tick)


# with a clock


def a_setting(random: Random, limits: Limits, **others: Any) -> Setting:
    own = limits.validation.own_from if limits.validation is not None else None
    sizes = {
        "replicas": 2 if own is not None or limits.pools else random.randint(1, 3), "slots": random.randint(1, 4),
        "prompts": random.randint(6, 90), "tick_size": random.choice([1, 1, 64, 0]),
    }  # fmt: skip
    return Setting(
        limits=limits, seed=random.randrange(2**31), max_tokens=200,
        train_s=random.choice([2.0, 20.0, 60.0]), sync_s=random.choice([0.2, 2.0, 10.0]), **{**sizes, **others},
    )  # fmt: skip


Act = Callable[[World], object]


def in_world(
    setting: Setting, named: dict[str, str], report: RunReport, acts: Sequence[tuple[float, Act]] = (),
    dice: Dice | None = None,
) -> None:  # fmt: skip
    """Run a simulated world. `acts`: what happens to it at which time, unless the run is over."""

    class Seen(World):
        def _observe(self, tick: Tick) -> None:
            report.observe(tick)
            super()._observe(tick)

    world = Seen(setting, PolicySet.from_names(named), dice=dice)
    report.limits, report.policies = setting.limits, dict(world.scheduler.policies.names)
    for when, act in acts:
        world.after(when, lambda act=act: world.driver.outcome is None and act(world))
    world.run()


def tells(make: Callable[[World], Event | None]) -> Act:
    """A user's request, if `make` gives one."""

    def tell(world: World) -> None:
        event = make(world)
        if event is not None:
            world.driver.deliver(event)

    return tell


def calm(number: int, report: RunReport) -> None:
    random = Random(f"calm/{number}")
    limits = some_limits(random)
    named = some_policies(random)
    setting = a_setting(random, limits)
    in_world(setting, named, report, dice=SteadyDice(setting))


def rough(number: int, report: RunReport) -> None:
    random = Random(f"rough/{number}")
    limits, named = some_limits(random), some_policies(random)
    if number % 3 == 0:  # limits that take effect: short steps, rolling installs, deaths
        named |= {"deadline": ("shrink", "drop", "truncate")[number // 3 % 3], "sync": "rolling"}
        limits = replace(limits, deadline_timeout_s=1.0, max_drops=3, infrastructure_attempts=50)
    dying = {"die": 0.03, "die_trainer": 0.1, "fail_start": 0.2} if number % 4 == 1 else {}
    setting = a_setting(
        random, limits, faults=replace(ROUGH, **dying), spread=random.choice([1.0, 0.5]),
        prefix_every_tokens=random.choice([0, 10]),
    )  # fmt: skip
    if number % 20 == 1:  # all or nearly all groups fail
        setting = replace(setting, prompts=150, faults=Faults(fail_data=random.choice([1.0, 0.98])))
    in_world(setting, named, report)


def fleet(number: int, report: RunReport) -> None:
    random = Random(f"fleet/{number}")
    batch, stale = random.randint(8, 24), random.randint(0, 3)
    limits = Limits(
        train_batch_size=batch, max_staleness_steps=stale, max_steps=random.randint(4, 8), timeouts=NO_LIMITS,
        max_concurrent_groups=random.randint(batch, batch * (stale + 1)), straggler_factor=random.choice([None, 1.1]),
        sync_mode=random.choice(["keep", "abort", "wait"]),
    )  # fmt: skip
    faults = replace(ROUGH, stay_dead=0.05) if number % 2 else Faults()
    replicas, slots = random.randint(6, 40), random.randint(1, 6)
    setting = a_setting(random, limits, replicas=replicas, slots=slots, prompts=400, faults=faults)
    in_world(setting, some_policies(random), report)


SIZES = {
    "sync": [], "stream": [], "quickstart": ["scheduler.max_concurrent_groups=4"],
    "vllm_cpu": ["scheduler.max_concurrent_groups=4"], "one_step_off": ["scheduler.max_concurrent_groups=4"],
    "fully_async": ["scheduler.max_concurrent_groups=4"],
    "generate_ahead": ["scheduler.policy_mini_batch_size=2", "scheduler.max_concurrent_groups=4"],
    "fully_async_minibatches": ["scheduler.policy_mini_batch_size=1", "scheduler.max_concurrent_groups=4"],
    "partial_rollout": ["rollout.slots=4", "scheduler.max_concurrent_groups=8"],
}  # fmt: skip
"""Overrides that batches of four require, by preset."""


def variants() -> list[tuple[str, list[str]]]:
    """Every preset as shipped, and with each set of overrides that its comments list."""
    found: list[tuple[str, list[str]]] = []
    for preset, sizes in sorted(SIZES.items()):
        text = (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8")
        listed = re.findall(r"^#\s+[a-z][a-z -]*: +(--set .*)$", text, re.MULTILINE)
        found += [(preset, [*sizes, *(w for w in shlex.split(s) if w != "--set")]) for s in ["", *listed]]
    return found


def preset(number: int, report: RunReport) -> None:
    random = Random(f"preset/{number}")
    every = variants()
    name, overrides = every[number % len(every)]
    small = [
        f"run.max_steps={STEPS}", "scheduler.train_batch_size=4", "scheduler.samples_per_prompt=2", "rollout.slots=2",
        f"trainer.checkpoint_every={random.choice([0, 2])}", "validation.prompts=6", "run.dir=nowhere",
    ]  # fmt: skip
    config = load_config(CONFIGS / f"{name}.yaml", [*small, *overrides])
    limits = replace(config.limits, timeouts=NO_LIMITS)
    limits = limits if random.random() < 0.5 else replace(limits, validation=None)
    setting = Setting(
        limits=limits, replicas=config.rollout.replicas, slots=config.rollout.slots, prompts=8 * STEPS,
        seed=random.randrange(2**31), latency_s=random.choice([0.0, 0.1, 2.0]), max_tokens=400,
        tick_size=random.choice([1, 64]),
        train_s=random.choice([0.5, 5.0, 20.0, 100.0]), sync_s=random.choice([0.1, 2.0, 30.0]),
        mean_tokens=random.choice([5.0, 20.0, 60.0]),
        faults=replace(ROUGH, stay_dead=0.0, fail_trainer=0.05) if number // len(every) % 2 else Faults(),
    )  # fmt: skip
    in_world(setting, dict(config.policies().names), report)


def request(random: Random, world: Any) -> Event | None:
    """A random user request that is valid now, or None."""
    limits, kind = world.scheduler.limits, random.choice(["wanted", "leaves", "setting", "setting", "setting"])
    choice, replicas = random.randrange(10_000), list(world.replicas.values())
    if kind == "wanted":
        alone = not limits.pools and not limits.validators()
        return ReplicasWanted(replicas=1 + choice % 4) if alone else None
    if kind == "leaves":
        if not replicas:
            return None
        chosen = replicas[choice % len(replicas)]
        return ReplicaLeaves(replica=chosen.index, life=chosen.number, reason="spot")
    return any_change(world.scheduler, random.choice(LIVE), random)


def asked(number: int, report: RunReport) -> None:
    random = Random(f"asked/{number}")
    limits, named = some_limits(random), some_policies(random)
    if number % 2:
        limits = replace(limits, pools=(), validation=None)
    asks = tells(lambda world: request(random, world))
    acts = [(random.uniform(0.0, 250.0), asks) for _ in range(random.randint(1, 8))]
    last = (None, DrainRequested(reason=AT_REST), StopRequested(reason="enough"))[number % 3]
    if last is not None:
        acts.append((random.uniform(20.0, 250.0), tells(lambda world: last)))
    faults = ROUGH if number % 4 == 0 else Faults()
    in_world(a_setting(random, limits, faults=faults, prefix_every_tokens=10), named, report, acts)


def taken(number: int, report: RunReport) -> None:
    random = Random(f"taken/{number}")
    limits, named = some_limits(random), some_policies(random)
    acts: list[tuple[float, Act]] = [
        (random.uniform(5.0, 250.0), lambda world: world.fail_over()) for _ in range(random.randint(1, 4))
    ]
    faults = ROUGH if number % 2 else Faults()
    setting = a_setting(random, limits, faults=faults, prefix_every_tokens=random.choice([0, 10]))
    in_world(setting, named, report, acts)


# without a clock


class Told(Adversary):
    """Reports every event with its commands. Events that a recovery replays are reported once."""

    report: RunReport

    def _observe(self, tick: Tick) -> None:
        self.report.observe(tick)
        self.judge_tick(tick)


def begin(random: Random, report: RunReport) -> Told:
    policies = PolicySet.from_names(any_policies(random))
    report.limits, report.policies = some_limits(random), dict(policies.names)
    cls = type("Reporting", (Told,), {"report": report})  # the constructor already reports the first event
    prompts, slots, together = random.randint(1, 60), random.randint(1, 4), random.choice([1, 1, 4])
    return cls(  # type: ignore[no-any-return]
        report.limits, policies, prompts, slots, replicas=random.randint(1, 3), together=together
    )


def cut(number: int, report: RunReport) -> None:
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


def wild(number: int, report: RunReport) -> None:
    """The likely moves come more often."""
    random = Random(f"wild/{number}")
    world = begin(random, report)
    moves = [move for move in MOVES if move.name not in ("change", "restore_twin")]
    for _ in range(random.randint(30, 300)):
        if world.driver.outcome is None and random.random() < 0.015:
            world.arrive()  # a change is checked against the limits that the earlier changes made
            change = any_change(world.scheduler, random.choice(LIVE), random)
            if change is not None:
                world.deliver(change)
            continue
        able = [move for move in moves if move.among(world)]
        (move,) = random.choices(able, [move.weight for move in able])
        move.act(world, random.choice(list(move.among(world))), random)
    world.complete()


FAMILIES: dict[str, tuple[Callable[[int, RunReport], None], int]] = {
    "calm": (calm, 150), "preset": (preset, 180), "rough": (rough, 180), "asked": (asked, 110), "taken": (taken, 100),
    "fleet": (fleet, 30), "cut": (cut, 120), "wild": (wild, 130),
}  # fmt: skip
"""Each family, with the number of its worlds."""
