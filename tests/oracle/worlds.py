"""The worlds of the oracle: a thousand small simulated runs, each determined by its family and number.

Importing this module registers the policies that recorded worlds name.

Six families:

* `calm`: no faults, and only lengths are random, so an extra or missing order changes nothing else.
* `preset`: small versions of the shipped configurations, in each layout and mode that they list.
* `rough`: any limits and policies, with all faults.
* `asked`: the user drains, scales, removes replicas and changes settings during the run.
* `cut`: no clock; all possible events happen in turn, and sometimes all processes end at the same time.
* `wild`: no clock; random events in random order.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from engine.config import load_config
from engine.events import DrainRequested, Event, ReplicaLeaves, ReplicasWanted, StopRequested
from engine.policies import DEFAULTS, PolicySet, register
from engine.record.frames import Tick
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.settings import live_settings
from engine.simulation.simulated_models import Dice
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits
from engine.states.timeouts import Timeouts
from tests.core.adversary import AT_REST
from tests.core.moves import any_change, any_limits, any_policies
from tests.steady_world import SteadyDice

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
FAMILIES = {"calm": 200, "preset": 180, "rough": 220, "asked": 120, "cut": 120, "wild": 160}

ROUGH = Faults(
    lose=0.1, duplicate=0.1, die=0.01, stay_dead=0.2, fail_group=0.03, fail_data=0.03, fail_sync=0.1,
    fail_trainer=0.1, fail_state=0.05, fail_rows=0.1,
)  # fmt: skip
STEPS = 10
"""Maximum train steps of a preset's world."""


@register("admission", "oracle-halves")
class Halves:
    """Starts half of the allowed groups, rounded up."""

    def admit(self, view: Any, legal: int) -> int:
        return (legal + 1) // 2


@register("retry", "oracle-rarely")
class Rarely:
    def retry(self, view: Any, group: Any, cause: str) -> bool:
        return bool(cause != "data" and group.infrastructure_failures < 2)


@register("validation", "oracle-odd")
class Odd:
    def due(self, view: Any, version: int, steps_before: int, steps: int) -> bool:
        return version % 2 == 1


OWN = {"admission": "oracle-halves", "retry": "oracle-rarely", "validation": "oracle-odd"}
"""Custom policies."""


def some_policies(random: Random) -> dict[str, str]:
    """For each decision the default or any shipped policy, at even odds; in every tenth world custom ones, too."""
    shipped = any_policies(random)
    named = {decision: random.choice((DEFAULTS[decision], shipped[decision])) for decision in DEFAULTS}
    return named | OWN if random.random() < 0.1 else named


class RunReport:
    """The report of one run: its initial limits and policies, then every event with its commands."""

    limits: Limits
    policies: dict[str, str]
    scheduler: Scheduler

    def __init__(self) -> None:
        self.ticks: list[Tick] = []

    def observe(self, tick: Tick) -> None:
        self.ticks.append(tick)


def a_setting(random: Random, limits: Limits, **others: Any) -> Setting:
    own = limits.validation.own_from if limits.validation is not None else None
    return Setting(
        limits=limits, replicas=2 if own is not None or limits.pools else random.randint(1, 3),
        slots=random.randint(1, 4), prompts=random.randint(6, 90), seed=random.randrange(2**31), max_tokens=200,
        tick_size=1,
        train_s=random.choice([2.0, 20.0, 60.0]), sync_s=random.choice([0.2, 2.0, 10.0]), **others,
    )  # fmt: skip


def in_world(
    setting: Setting, named: dict[str, str], report: RunReport, asks: Sequence[Any] = (), dice: Dice | None = None
) -> None:
    """Run a simulated world. `asks`: pairs of a time and a function from the world to a user's event or None."""

    class Seen(World):
        def _observe(self, tick: Tick) -> None:
            report.observe(tick)
            super()._observe(tick)

    world = Seen(setting, PolicySet.from_names(named), check=False, dice=dice)
    report.limits, report.policies = setting.limits, dict(world.scheduler.policies.names)
    report.scheduler = world.scheduler

    def ask(make: Callable[[World], Event | None]) -> None:
        event = make(world) if world.driver.outcome is None else None
        if event is not None:
            world.driver.deliver(event)

    for when, make in asks:
        world.after(when, lambda make=make: ask(make))
    world.run()


# families


def calm(number: int, report: RunReport) -> None:
    random = Random(f"calm/{number}")
    limits = replace(any_limits(random), timeouts=Timeouts.every(None))
    named = some_policies(random)
    setting = a_setting(random, limits)
    in_world(setting, named, report, dice=SteadyDice(setting))  # so the order of the draws does not matter


def rough(number: int, report: RunReport) -> None:
    random = Random(f"rough/{number}")
    limits, named = any_limits(random), some_policies(random)
    if number % 3 == 0:  # limits that take effect: short steps, rolling installs, deaths
        named |= {"deadline": ("shrink", "drop", "truncate")[number // 3 % 3], "sync": "rolling"}
        limits = replace(limits, deadline_timeout_s=1.0, max_drops=3, infrastructure_attempts=50)
    setting = a_setting(
        random, limits, faults=ROUGH, spread=random.choice([1.0, 0.5]),
        prefix_every_tokens=random.choice([0, 10]),
    )  # fmt: skip
    if number % 20 == 1:  # all or nearly all groups fail
        setting = replace(setting, prompts=150, faults=Faults(fail_data=random.choice([1.0, 0.98])))
    in_world(setting, named, report)


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
    limits = config.limits if random.random() < 0.5 else replace(config.limits, validation=None)
    setting = Setting(
        limits=limits, replicas=config.rollout.replicas, slots=config.rollout.slots, prompts=8 * STEPS,
        seed=random.randrange(2**31), latency_s=random.choice([0.0, 0.1, 2.0]), max_tokens=400, tick_size=1,
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
        return ReplicaLeaves(replica=chosen.id, incarnation=chosen.incarnation, reason="spot")
    return any_change(world.scheduler, random.choice(live_settings()), random)


def asked(number: int, report: RunReport) -> None:
    random = Random(f"asked/{number}")
    limits, named = any_limits(random), some_policies(random)
    if number % 2:
        limits = replace(limits, pools=(), validation=None)
    asks: list[Any] = [
        (random.uniform(0.0, 250.0), lambda world: request(random, world)) for _ in range(random.randint(1, 8))
    ]
    last = (None, DrainRequested(reason=AT_REST), StopRequested(reason="enough"))[number % 3]
    if last is not None:
        asks.append((random.uniform(20.0, 250.0), lambda world: last))
    faults = ROUGH if number % 4 == 0 else Faults()
    in_world(a_setting(random, limits, faults=faults, prefix_every_tokens=10), named, report, asks)


FAMILY: dict[str, Callable[[int, RunReport], None]] = {
    "calm": calm, "preset": preset, "rough": rough, "asked": asked,
}  # fmt: skip


def corpus() -> Iterator[tuple[str, int]]:
    for family, count in FAMILIES.items():
        yield from ((family, number) for number in range(count))
