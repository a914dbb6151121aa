"""The simulated worlds on which the advice of `engine explain` is judged, and the changes that it may advise.

Used by `benchmarks/advice.py`. Committed before the advice was written. Worlds with an even number may be looked at
while rules are written; those with an odd number are held out. A world is one of sixteen families, with sizes and
durations drawn from its number. In the last five families, two or three parts of the run are equally busy, so that no
change of one setting gains 3 %; they were committed before the advice was judged on them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from engine.policies import PolicySet
from engine.record import Header
from engine.record.recorder import MemoryRecorder
from engine.simulation.simulated_models import Dice
from engine.simulation.world import Setting, World
from engine.states.limits import REWARDING, AddedState, Limits, ValidationLimits

IMPROVABLE = 66
"""Number of worlds of the first families: six of each."""
COUNT = 96
"""Number of worlds: six of each family."""
STEPS = 32
SATURATED_STEPS = 96
"""Train steps of a world in which nothing is to be gained: in fewer, a faster start would count."""


class SteadyDice(Dice):
    """Constant durations, so that the effect of one changed setting is visible. Lengths still vary."""

    def vary(self, seconds: float) -> float:
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceWorld:
    """One world: what a run has, as its configuration would say it."""

    number: int
    family: str
    setting: Setting
    policies: Mapping[str, str]

    @property
    def held_out(self) -> bool:
        return self.number % 2 == 1

    def run(self) -> tuple[float, MemoryRecorder]:
        """The virtual seconds of the run, and its record. Raises: `EngineError` unless it finishes."""
        limits = self.setting.limits
        policies = PolicySet.from_names(self.policies)
        recorder = MemoryRecorder(
            Header(run=f"world {self.number}", limits=limits.to_plain(), policies=dict(policies.names))
        )
        world = World(self.setting, policies, recorder, dice=SteadyDice(self.setting))
        outcome = world.run()
        if outcome.outcome != "finished":
            raise RuntimeError(f"world {self.number}: {outcome.reason}")
        return world.now(), recorder

    def changed(self, setting: str, value: Any) -> "AdviceWorld":
        """The world after a change of one setting, named as in a configuration. Raises: `KeyError` for a setting that
        no world has, `ConfigError` for a value that is not allowed."""
        return CHANGES[setting](self, value)


# -- the changes -------------------------------------------------------------------------------------------------------


def _of_limits(field: str) -> Callable[[AdviceWorld, Any], AdviceWorld]:
    def change(world: AdviceWorld, value: Any) -> AdviceWorld:
        limits = replace(world.setting.limits, **{field: value})
        return replace(world, setting=replace(world.setting, limits=limits))

    return change


def _of_setting(field: str) -> Callable[[AdviceWorld, Any], AdviceWorld]:
    def change(world: AdviceWorld, value: Any) -> AdviceWorld:
        return replace(world, setting=replace(world.setting, **{field: value}))

    return change


def _of_policies(decision: str) -> Callable[[AdviceWorld, Any], AdviceWorld]:
    def change(world: AdviceWorld, value: Any) -> AdviceWorld:
        return replace(world, policies={**world.policies, decision: value})

    return change


def _of_staleness(world: AdviceWorld, value: Any) -> AdviceWorld:
    """S, with K raised to what it then allows, as `scheduler.max_concurrent_groups: auto` does, up to the slots."""
    setting = world.setting
    most = setting.limits.train_batch_size * (value + 1)
    workers = max(setting.limits.max_concurrent_groups, min(most, setting.replicas * setting.slots))
    limits = replace(setting.limits, max_staleness_steps=value, max_concurrent_groups=min(most, workers))
    return replace(world, setting=replace(setting, limits=limits))


def _of_rewards(world: AdviceWorld, value: Any) -> AdviceWorld:
    limits = replace(world.setting.limits, added_states=(AddedState(name=REWARDING, concurrency=value),))
    return replace(world, setting=replace(world.setting, limits=limits))


def _of_validation(field: str) -> Callable[[AdviceWorld, Any], AdviceWorld]:
    def change(world: AdviceWorld, value: Any) -> AdviceWorld:
        validation = world.setting.limits.validation
        if validation is None:
            raise KeyError(f"validation.{field}")
        limits = replace(world.setting.limits, validation=replace(validation, **{field: value}))
        return replace(world, setting=replace(world.setting, limits=limits))

    return change


def _of_replicas(world: AdviceWorld, value: Any) -> AdviceWorld:
    """More replicas, with K raised to their slots as far as the bound allows."""
    setting, limits = world.setting, world.setting.limits
    most = limits.train_batch_size * (limits.max_staleness_steps + 1)
    workers = max(limits.max_concurrent_groups, min(most, value * setting.slots))
    limits = replace(limits, max_concurrent_groups=workers)
    return replace(world, setting=replace(setting, replicas=value, limits=limits))


def _of_ranks(world: AdviceWorld, value: Any) -> AdviceWorld:
    """More ranks: the trainer is faster by 80 % of each further rank. A world begins with one."""
    return replace(world, setting=replace(world.setting, train_s=world.setting.train_s / (1 + 0.8 * (value - 1))))


CHANGES: dict[str, Callable[[AdviceWorld, Any], AdviceWorld]] = {
    "scheduler.max_staleness_steps": _of_staleness,
    "scheduler.max_concurrent_groups": _of_limits("max_concurrent_groups"),
    "scheduler.sync_every": _of_limits("sync_every"),
    "scheduler.policies.deadline": _of_policies("deadline"),
    "rollout.replicas": _of_replicas,
    "rollout.sync_mode": _of_limits("sync_mode"),
    "rollout.sync_order": _of_policies("sync"),
    "reward.concurrency": _of_rewards,
    "validation.every": _of_validation("every"),
    "validation.replicas": _of_validation("replicas"),
    "trainer.ranks": _of_ranks,
}
"""What each setting of a configuration changes in a world."""


# -- the families ------------------------------------------------------------------------------------------------------


def _base(random: Random, number: int, *, load: float, batch: int | None = None, **limits: Any) -> Setting:
    """A setting whose rollouts take `load` times as long as its training, if every slot is always busy."""
    batch = batch or random.choice((8, 16, 24))
    replicas, slots = random.choice((2, 4)), random.choice((8, 12, 16))
    most = batch * (limits.get("max_staleness_steps", 2) + 1)
    limits.setdefault("max_staleness_steps", 2)
    limits.setdefault("max_concurrent_groups", max(batch, min(most, replicas * slots)))
    mean = random.uniform(20, 40)
    rollout_s = batch * mean / min(replicas * slots, limits["max_concurrent_groups"])
    return Setting(
        limits=Limits(train_batch_size=batch, max_steps=STEPS, **limits),
        replicas=replicas, slots=slots, prompts=batch * (STEPS + 8), seed=number,
        latency_s=0.01, train_s=rollout_s / load, sync_s=0.02 * rollout_s, token_s=1.0,
        mean_tokens=mean, max_tokens=int(2.5 * mean),
    )  # fmt: skip


def _training_bound(random: Random, number: int) -> Setting:
    """The trainer is always busy: only faster training helps."""
    return _base(random, number, load=random.uniform(0.2, 0.5), max_staleness_steps=4)


def _generation_bound(random: Random, number: int) -> Setting:
    """Every slot is always busy: only more slots help."""
    return _base(random, number, load=random.uniform(2.5, 5), max_staleness_steps=4)


def _balanced(random: Random, number: int) -> Setting:
    """Generation and training take as long, and the bound has room for both: no single setting helps much."""
    setting = _base(random, number, load=1.0, max_staleness_steps=5)
    setting = replace(setting, sync_s=0.0, max_tokens=int(1.2 * setting.mean_tokens))
    dice, groups = SteadyDice(setting), range(setting.limits.train_batch_size * STEPS)
    workers = min(setting.replicas * setting.slots, setting.limits.max_concurrent_groups)
    rollout_s = sum(dice.length(group) for group in groups) / STEPS / workers
    return replace(setting, train_s=rollout_s * random.uniform(1.0, 1.03))


def _synchronous(random: Random, number: int) -> Setting:
    """S = 0: generation and training take turns."""
    return _base(random, number, load=random.uniform(0.7, 1.5), max_staleness_steps=0)


def _few_workers(random: Random, number: int) -> Setting:
    """K is far below the slots."""
    setting = _base(random, number, load=random.uniform(0.8, 1.2), batch=8, max_staleness_steps=4)
    return replace(
        setting, replicas=4, slots=10, limits=replace(setting.limits, max_concurrent_groups=random.choice((8, 10, 12)))
    )


def _long_tails(random: Random, number: int) -> Setting:
    """A few responses take far longer than a step, and S = 1 makes steps wait for them."""
    setting = _base(random, number, load=random.uniform(0.6, 0.9), max_staleness_steps=1)
    return replace(setting, max_tokens=int(random.uniform(8, 12) * setting.mean_tokens))


def _slow_sync(random: Random, number: int) -> Setting:
    """Weight syncs take a large part of a step, and `wait` lets slots run empty first."""
    setting = _base(random, number, load=random.uniform(1.5, 2.5), max_staleness_steps=4, sync_mode="wait")
    return replace(setting, sync_s=random.uniform(4, 8) * setting.sync_s)


def _slow_rewards(random: Random, number: int) -> Setting:
    """Rewards are computed a few at a time, slower than groups are generated."""
    setting = _base(random, number, load=random.uniform(0.6, 0.9), max_staleness_steps=2)
    batch, concurrency = setting.limits.train_batch_size, random.choice((1, 2, 3))
    limits = replace(setting.limits, added_states=(AddedState(name=REWARDING, concurrency=concurrency),))
    slow = random.uniform(1.5, 3) * setting.train_s * concurrency / batch
    return replace(setting, limits=limits, state_s=slow)


def _frequent_validation(random: Random, number: int) -> Setting:
    """A validation after every step holds a replica most of the time."""
    setting = _base(random, number, load=random.uniform(1.2, 2), max_staleness_steps=2)
    validation = ValidationLimits(rows=setting.slots * 2, every=1, replicas=1, at_start=False, at_end=False)
    return replace(setting, measure_s=setting.train_s, limits=replace(setting.limits, validation=validation))


def _failures(random: Random, number: int) -> Setting:
    """The trainer is always busy, and groups fail now and then: no setting helps but faster training."""
    setting = _base(random, number, load=random.uniform(0.3, 0.5), max_staleness_steps=3)
    return replace(setting, faults=replace(setting.faults, fail_group=0.05))


def _short_batches(random: Random, number: int) -> Setting:
    """S = 1, and slots for more than the bound lets start."""
    setting = _base(random, number, load=random.uniform(0.8, 1.3), batch=8, max_staleness_steps=1)
    return replace(setting, replicas=4, slots=8)


FAMILIES: tuple[Callable[[Random, int], Setting], ...] = (
    _training_bound, _generation_bound, _balanced, _synchronous, _few_workers, _long_tails, _slow_sync, _slow_rewards,
    _frequent_validation, _failures, _short_batches,
)  # fmt: skip


def _saturated(random: Random, number: int, *, train: float, rewards: float = 0.0) -> Setting:
    """A setting whose slots are always busy. `train` and `rewards`: time that training and rewards need, as a share of
    the time that generation needs."""
    replicas, slots = random.choice((2, 4)), random.choice((2, 3, 4))
    workers, mean = replicas * slots, random.uniform(60, 120)
    batch = workers // random.choice((1, 2))
    limits = Limits(
        train_batch_size=batch, max_steps=SATURATED_STEPS, max_staleness_steps=random.choice((4, 5)),
        max_concurrent_groups=workers,
    )  # fmt: skip
    setting = Setting(
        limits=limits, replicas=replicas, slots=slots, prompts=batch * (SATURATED_STEPS + 8), seed=number,
        latency_s=0.001, train_s=1.0, sync_s=0.0, token_s=1.0, mean_tokens=mean, max_tokens=int(0.5 * mean),
    )  # fmt: skip
    dice, groups = SteadyDice(setting), range(batch * SATURATED_STEPS)
    rollout_s = sum(dice.length(group) for group in groups) / SATURATED_STEPS / workers
    if rewards:
        concurrency = random.choice((1, 2, 3))
        limits = replace(limits, added_states=(AddedState(name=REWARDING, concurrency=concurrency),))
        setting = replace(setting, limits=limits, state_s=rewards * rollout_s * concurrency / batch)
    return replace(setting, train_s=train * rollout_s)


def _training_and_slots(random: Random, number: int) -> Setting:
    """Training takes exactly as long as generation: a change that makes one faster only makes it wait for the other."""
    return _saturated(random, number, train=1.0)


def _rewards_and_slots(random: Random, number: int) -> Setting:
    """Rewards take exactly as long as generation, and training is fast."""
    return _saturated(random, number, train=random.uniform(0.2, 0.5), rewards=1.0)


def _training_and_rewards(random: Random, number: int) -> Setting:
    """Training and rewards take equally long, and half of the slots would be enough."""
    share = random.uniform(1.5, 2)
    return _saturated(random, number, train=share, rewards=share)


def _everything(random: Random, number: int) -> Setting:
    """Training, rewards and generation take equally long."""
    return _saturated(random, number, train=1.0, rewards=1.0)


def _nearly_even(random: Random, number: int) -> Setting:
    """Training takes 1 or 2 % longer or less than generation: the gain of one change is below 3 %."""
    return _saturated(random, number, train=random.choice((0.98, 0.99, 1.01, 1.02)))


SATURATED: tuple[Callable[[Random, int], Setting], ...] = (
    _training_and_slots, _rewards_and_slots, _training_and_rewards, _everything, _nearly_even,
)  # fmt: skip
"""The families in which nothing is to be gained."""


def world_of(number: int) -> AdviceWorld:
    """World `number`, from 0."""
    families, index = (FAMILIES, number) if number < IMPROVABLE else (SATURATED, number - IMPROVABLE)
    family = families[index // 2 % len(families)]
    setting = family(Random(f"advice {number}"), number)
    return AdviceWorld(number=number, family=family.__name__[1:], setting=setting, policies={})


def worlds() -> list[AdviceWorld]:
    return [world_of(number) for number in range(COUNT)]
