"""Any limits and policies that the laws allow, and everything that can happen to a run under an adversary.

One table of moves serves the property tests, where Hypothesis chooses, and the oracle, where a seed does.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from engine import policies
from engine.errors import ConfigError
from engine.events import (
    CacheMeasured,
    DrainRequested,
    ReplicaLeaves,
    ReplicasWanted,
    SchedulerRecovered,
    SettingChanged,
)
from engine.scheduling.settings import POLICIES, changed_settings, live_settings
from engine.states.limits import CONFLICTS, SYNC_MODES, AddedState, Limits, Pool, ValidationLimits
from engine.states.process import REPLICA
from engine.states.timeouts import AUTO, KINDS, Timeouts
from tests.core.added_states import CHECKING, FETCHING, GATING, PROVING, SIFTING, WEIGHING
from tests.core.adversary import AT_REST, Adversary
from tests.shipped_policies import SHIPPED

One = TypeVar("One")


class Choices(Protocol):
    """What chooses: a `Random`, or Hypothesis."""

    def randint(self, a: int, b: int) -> int: ...

    def uniform(self, a: float, b: float) -> float: ...

    def choice(self, seq: Sequence[One]) -> One: ...


class Drawn:
    """Hypothesis chooses."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw

    def randint(self, a: int, b: int) -> int:
        return int(self.draw(st.integers(a, b)))

    def uniform(self, a: float, b: float) -> float:
        return float(self.draw(st.floats(a, b)))

    def choice(self, seq: Sequence[One]) -> One:
        return seq[self.randint(0, len(seq) - 1)]


# limits and policies

LAYOUTS: tuple[tuple[Pool, ...], ...] = (
    (),
    (),
    (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs", "ref_logprobs"))),
    (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs")), Pool(tasks=("ref_logprobs",))),
    (Pool(tasks=("ref_logprobs",)), Pool(tasks=("old_logprobs",)), Pool(tasks=("train",))),
    (Pool(tasks=("rollout", "train", "old_logprobs", "ref_logprobs"), replicas=(0, 1)),),
    (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("rollout", "train"), replicas=(1,))),
    (Pool(tasks=("rollout", "ref_logprobs"), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs"))),
    (Pool(tasks=("rollout", "old_logprobs"), replicas=(0,)), Pool(tasks=("rollout", "train"), replicas=(1,))),
)
"""No task shares a pool with rollout, scoring has a pool of its own, or rollout shares pools with other tasks."""
ADDED: tuple[tuple[AddedState, ...], ...] = (
    (), (), (), (WEIGHING,), (WEIGHING, CHECKING), (FETCHING,), (FETCHING, CHECKING), (GATING,), (PROVING,),
    (AddedState(name="rewarding", concurrency=2),), (WEIGHING, CHECKING, GATING, SIFTING, PROVING),
)  # fmt: skip


def any_limits(choose: Choices) -> Limits:
    """Any small limits that the laws allow."""
    one = choose.choice
    batch, staleness, pools = choose.randint(1, 4), choose.randint(0, 3), one(LAYOUTS)
    shared = any(pool.shared and "train" in pool.tasks for pool in pools)
    sync_every = one([1, 1, choose.randint(1, staleness + 1)])
    ratio = one([None, None, choose.uniform(sync_every - 1, staleness)])
    over = one([0.0, 0.0, 0.25, 0.5, 1.5])
    most = floor((staleness + 1 if ratio is None else 1 + ratio) * batch + 1e-9) + floor(over * batch + 1e-9)
    every = choose.randint(0, 2)
    return Limits(
        train_batch_size=batch, max_staleness_steps=staleness, max_concurrent_groups=choose.randint(batch, most),
        sync_every=sync_every, async_ratio=ratio, over_sample=over, max_steps=one([None, choose.randint(1, 6)]),
        sync_mode=one(SYNC_MODES), scoring_tasks=one([(), ("old_logprobs",), ("ref_logprobs", "old_logprobs")]),
        deadline_timeout_s=one([1.0, 10.0, 60.0]), max_drops=choose.randint(0, 3),
        infrastructure_attempts=choose.randint(1, 5), data_attempts=choose.randint(1, 2), checkpoint_every=every,
        validation=one([None, any_validation(choose)]), pools=pools,
        train_after_sync=not shared and one([False, True]), added_states=one(ADDED), timeouts=any_timeouts(choose),
        straggler_factor=one([None, None, 1.1]), give_up_s=one([0.0, 0.0, 5.0]),
        keeps_batches=every > 0 and one([False, True]),
    )  # fmt: skip


def any_timeouts(choose: Choices) -> Timeouts:
    """Draws time limits: none, one for groups only, one for each order, or the defaults."""
    one = choose.choice
    chosen = one(["none", "groups", "all", "all", "auto"])
    if chosen in ("none", "groups"):
        return Timeouts.every(None, group_s=4.0 if chosen == "groups" else None)
    if chosen == "auto":
        return Timeouts()
    return Timeouts(
        **{f"{kind}_s": one([4.0, 60.0, 60.0, AUTO, AUTO]) for kind in KINDS}, floor_s=one([0.01, 2.0, 10.0]),
        cut_s=one([0.01, 2.0, 20.0]), max_s=one([None, None, 1.0, 30.0]),
    )  # fmt: skip


def any_validation(choose: Choices) -> ValidationLimits:
    """Any way to validate. Replicas from 2 on are validators, where there are any."""
    one = choose.choice
    return ValidationLimits(
        rows=choose.randint(1, 30), rows_per_slot=choose.randint(1, 8), at_start=one([False, True]),
        every=choose.randint(0, 3), at_end=one([False, True]), replicas=choose.randint(1, 3), own_from=one([None, 2]),
        conflict=one(CONFLICTS),
    )  # fmt: skip


def any_policies(choose: Choices) -> dict[str, str]:
    """A built-in policy for each decision."""
    return {decision: choose.choice(names) for decision, names in SHIPPED.items()}


def generating(limits: Limits, replicas: int) -> int:
    """The number of replicas that generate: what the limits require, otherwise `replicas`."""
    if limits.validation is not None and limits.validation.own_from is not None:
        return limits.validation.own_from
    return len([replica for pool in limits.pools for replica in pool.replicas]) or replicas


@st.composite
def drawn(draw: st.DrawFn, make: Callable[[Choices], One]) -> One:
    """What Hypothesis chooses: `drawn(any_limits)`."""
    return make(Drawn(draw))


# moves

Act = Callable[[Adversary, Any, Choices], object]
MOSTLY = (True, True, True, False)
CAUSES = ("infrastructure", "data")


@dataclass(frozen=True)
class Move:
    """One kind of thing that can happen."""

    name: str
    weight: float
    """How often a seed chooses it, relative to other moves."""
    among: Callable[[Adversary], Collection[Any]]
    """What it can happen to now."""
    act: Act


MOVES: list[Move] = []


def move(weight: float, among: Callable[[Adversary], Collection[Any]]) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        MOVES.append(Move(act.__name__, weight, among, act))
        return act

    return add


def once(possible: Callable[[Adversary], Any]) -> Callable[[Adversary], Collection[Any]]:
    """For a move that happens to the whole run."""
    return lambda world: (None,) if possible(world) else ()


def goes_on(world: Adversary) -> bool:
    return world.driver.outcome is None


def all_limited(world: Adversary) -> bool:
    """Whether what hangs is stopped in time."""
    given = world.scheduler.limits.timeouts
    return goes_on(world) and all(given.given(kind) is not None for kind in KINDS)


@move(6, lambda world: world.sources())
def arrive_up(world: Adversary, source: int, choose: Choices) -> None:
    world.arrive_up(source)


@move(6, lambda world: world.addressees())
def arrive_down(world: Adversary, id: int, choose: Choices) -> None:
    world.arrive_down(id)


@move(2, lambda world: world.running())
def sample(world: Adversary, running: Any, choose: Choices) -> None:
    replica, group = running
    replica.sample(group, choose.randint(1, 3))


@move(4, lambda world: [(replica, group) for replica, group in world.running() if not replica.frozen])
def finish(world: Adversary, running: Any, choose: Choices) -> None:
    replica, group = running
    replica.sample(group, choose.randint(0, 3))
    replica.finish(group, spread=choose.choice([0.0, 1.0]))


@move(1, lambda world: world.running())
def report_ended(world: Adversary, running: Any, choose: Choices) -> None:
    replica, group = running
    replica.report_ended(group, choose.randint(0, 4))


@move(1, lambda world: world.working())
def progress(world: Adversary, worker: Any, choose: Choices) -> None:
    worker.progress()


@move(1, lambda world: world.running())
def keep_prefix(world: Adversary, running: Any, choose: Choices) -> None:
    replica, group = running
    replica.keep_prefix(group)


@move(1, lambda world: world.running())
def fail(world: Adversary, running: Any, choose: Choices) -> None:
    replica, group = running
    replica.fail(group, choose.choice(CAUSES))


@move(1, lambda world: list(world.replicas.values()))
def measure_cache(world: Adversary, replica: Any, choose: Choices) -> None:
    used = choose.choice([0.1, 0.7, 0.85, 0.95])
    world.deliver(CacheMeasured(kind=REPLICA, index=replica.id, life=replica.life, used=used))


@move(4, lambda world: world.syncing())
def sync(world: Adversary, replica: Any, choose: Choices) -> None:
    replica.sync(choose.choice(MOSTLY))


@move(3, lambda world: world.measuring())
def measure(world: Adversary, measuring: Any, choose: Choices) -> None:
    replica, chunk = measuring
    replica.measure(chunk, choose.choice(MOSTLY))


@move(3, lambda world: world.in_added_states())
def leave(world: Adversary, index: int, choose: Choices) -> None:
    world.leave(index, choose.choice(["", "", "", *CAUSES]))


@move(5, lambda world: world.working())
def work(world: Adversary, worker: Any, choose: Choices) -> None:
    worker.do(choose.choice(MOSTLY))


@move(3, lambda world: range(len(world.done)))
def say_done(world: Adversary, first: int, choose: Choices) -> None:
    world.say_done(first, choose.randint(1, 3))


@move(5, once(lambda world: world.draws and goes_on(world)))
def draw(world: Adversary, _: None, choose: Choices) -> None:
    world.draw(choose.choice([0, 1, 2, 99, 99]))


@move(2, once(lambda world: world.timers))
def fire(world: Adversary, _: None, choose: Choices) -> None:
    world.fire(choose.choice([False, True]))


@move(1, lambda world: list(world.replicas))
def kill(world: Adversary, id: int, choose: Choices) -> None:
    world.kill(id, final=choose.choice([False, False, True]))


@move(0.2, lambda world: world.killable() if goes_on(world) else ())
def kill_worker(world: Adversary, process: tuple[str, int], choose: Choices) -> None:
    world.kill_worker(*process)


@move(3, lambda world: list(world.starting))
def come_up(world: Adversary, process: tuple[str, int], choose: Choices) -> None:
    world.come_up(process)


@move(1, lambda world: list(world.starting))
def fail_start(world: Adversary, process: tuple[str, int], choose: Choices) -> None:
    world.fail_start(process, final=choose.choice([False, False, True]))


@move(1, once(lambda world: len(world.lives) <= world.first))
def join_another(world: Adversary, _: None, choose: Choices) -> None:
    world.join(len(world.lives))


@move(0.2, once(lambda world: getattr(world.driver.outcome, "outcome", "") != "finished"))
def crash(world: Adversary, _: None, choose: Choices) -> None:
    """If trajectories survive the crash, those of some groups, of no group or of all groups are lost."""
    every = choose.choice([0, 0, 1, 2])
    world.crash(
        max(choose.randint(1, 3), world.least), kept=choose.choice([False, True]),
        missing=lambda group: every > 0 and group % every == 0,
    )  # fmt: skip
    if goes_on(world) and choose.choice([False, True]):
        world.restore_twin()


@move(0.1, once(lambda world: goes_on(world) and not world.state.ending.draining))
def drain(world: Adversary, _: None, choose: Choices) -> None:
    world.deliver(DrainRequested(reason=AT_REST))


@move(0.1, once(goes_on))
def lose_scheduler(world: Adversary, _: None, choose: Choices) -> None:
    world.deliver(SchedulerRecovered())


@move(0.2, once(lambda world: not world.limits.pools and not world.limits.validators()))
def want(world: Adversary, _: None, choose: Choices) -> None:
    world.deliver(ReplicasWanted(replicas=choose.randint(1, 3)))


@move(0.2, lambda world: list(world.replicas.values()))
def take_away(world: Adversary, replica: Any, choose: Choices) -> None:
    world.deliver(ReplicaLeaves(replica=replica.id, life=replica.life, reason="spot"))


@move(0.6, lambda world: live_settings())
def change(world: Adversary, setting: str, choose: Choices) -> None:
    world.arrive()  # a change is checked against the limits that the earlier changes made
    event = any_change(world.scheduler, setting, choose)
    if event is not None:
        world.deliver(event)


def any_change(scheduler: Any, setting: str, choose: Choices) -> SettingChanged | None:
    """A change of a setting, unless it breaks a law."""
    value, decision = str(choose.randint(0, 12)), setting.removeprefix(POLICIES)
    if decision in policies.DEFAULTS:
        value = choose.choice(SHIPPED[decision])
    try:
        changed_settings(scheduler.limits, scheduler.policies, setting, value)
    except ConfigError:
        return None
    return SettingChanged(setting=setting, value=value)


@move(0.1, lambda world: list(world.replicas.values()) if all_limited(world) else ())
def hang_replica(world: Adversary, replica: Any, choose: Choices) -> None:
    replica.hung = True


@move(0.1, lambda world: world.working() if all_limited(world) else ())
def hang_worker(world: Adversary, worker: Any, choose: Choices) -> None:
    worker.hung = True


@move(0.2, lambda world: world.unanswered() if all_limited(world) else ())
def lose_order(world: Adversary, orders: list[Any], choose: Choices) -> None:
    """An order to the data source, to an added state or to a store is never answered."""
    orders.pop(0)


@move(1, once(lambda world: goes_on(world) and world.is_timed))
def find_overdue(world: Adversary, _: None, choose: Choices) -> None:
    waits_for = choose.choice([(), ("trainer",), ("scorer 0",), ("trainer", "weights store"), ("nobody",)])
    world.find_overdue(waits_for, choose.choice([True, True, False]))


@move(0.1, once(goes_on))
def restore_twin(world: Adversary, _: None, choose: Choices) -> None:
    world.restore_twin()


@move(0.3, once(lambda world: True))
def nothing_happens(world: Adversary, _: None, choose: Choices) -> None:
    world.time += choose.choice([0.5, 3.0, 59.0, 61.0, 5000.0])


@move(1, lambda world: range(len(world.past)))
def repeat(world: Adversary, index: int, choose: Choices) -> None:
    world.repeat(index)
