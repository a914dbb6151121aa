"""How many groups may run on a replica: the policy `kv-cache`, by itself, in the core, and in simulated runs."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, PolicyError
from engine.events import CacheMeasured
from engine.ids import ReplicaId
from engine.metrics.waits import waits
from engine.policies import PolicySet
from engine.policies.built_in import GROW, TRIM, KvCache
from engine.record.frames import Header
from engine.record.reader import read
from engine.record.recorder import MemoryRecorder
from engine.record.replayer import replay
from engine.scheduling.settings import changed_settings
from engine.simulation.simulated_models import SimGenerator
from engine.simulation.world import Faults, Setting, World
from engine.states.causes import limited_replicas
from engine.states.limits import Limits, ValidationLimits
from engine.states.view import ReplicaView, View
from engine.workers.plan import Rollout
from tests.core.scripted import Scripted
from tests.core.test_worlds import ROUGH
from tests.judge.judged_world import JudgedWorld

ADAPTIVE = PolicySet.from_names({"concurrency": "kv-cache"})
SHARES = st.floats(0.0, 1.0)


def seen(slots: int, limit: int, running: int, used: float) -> ReplicaView:
    return ReplicaView(0, "ready", 1, 0, None, slots, running, limit, used)


def limit_after(slots: int, limit: int, running: int, used: float) -> int:
    view: Any = None
    return KvCache().limit(view, seen(slots, limit, running, used))


# the policy


@given(st.integers(1, 300), st.lists(st.tuples(SHARES, SHARES)))
def test_a_limit_stays_from_1_to_the_slots_and_never_grows_above_60_percent(
    slots: int, reports: list[tuple[float, float]]
) -> None:
    limit = limit_after(slots, 0, 0, 0.0)
    for used, busy in reports:
        before, limit = limit, limit_after(slots, limit, round(busy * slots), used)
        assert 1 <= limit <= slots and limit <= before + max(1, before // 4)
        assert used < GROW or limit <= before
        assert used <= TRIM or limit < before or before == 1 or round(busy * slots) > before


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.0, GROW, exclude_max=True))
def test_a_limit_recovers_once_the_cache_has_room(slots: int, limit: int, used: float) -> None:
    limit = min(limit, slots)
    for _ in range(slots - limit):
        limit = limit_after(slots, limit, limit, used)
    assert limit == slots


@pytest.mark.parametrize(
    ("used", "limit", "running", "next_limit"),
    [
        (0.0, 0, 0, 16),
        (0.59, 3, 3, 4),
        (0.59, 8, 8, 10),
        (0.59, 15, 15, 16),
        (0.59, 8, 7, 8),
        (0.59, 16, 16, 16),
        (0.6, 8, 8, 8),
        (0.8, 8, 8, 8),
        (0.81, 8, 8, 7),
        (0.9, 8, 6, 5),
        (0.91, 8, 8, 4),
        (0.99, 4, 8, 4),
        (0.99, 1, 1, 1),
        (0.99, 8, 0, 1),
    ],
)
def test_the_limit_grows_stays_is_trimmed_or_halved(used: float, limit: int, running: int, next_limit: int) -> None:
    assert limit_after(16, limit, running, used) == next_limit


# in the core


def scene() -> Scripted:
    """One replica of 4 slots, all in use; more groups wait."""
    return Scripted(
        policies={"concurrency": "kv-cache"}, slots=4, train_batch_size=4, max_staleness_steps=1,
        max_concurrent_groups=8,
    )  # fmt: skip


def measured(used: float, life: int = 1) -> CacheMeasured:
    return CacheMeasured(kind="replica", index=0, life=life, used=used)


def test_a_report_of_the_cache_starts_groups_or_holds_them_back() -> None:
    run = scene()
    assert run.state.groups.ledger.running == 4
    assert run.tell(measured(0.95)) == [] and run.tell(measured(0.95)) == []
    assert run.state.replicas.by_id[0].limit == 2
    run.finish(0, 1)
    assert run.state.groups.ledger.running == 2, "no other group takes the slots"
    run.finish(2)
    assert run.state.groups.ledger.running == 2
    assert len(run.tell(measured(0.5))) == 1 and run.tell(measured(0.7)) == []
    assert run.state.groups.ledger.running == 3
    echoes = run.state.orders.facts.stale_echoes
    run.tell(measured(0.1, life=2))
    assert run.state.orders.facts.stale_echoes == echoes + 1 and run.state.replicas.by_id[0].cache_used == 0.7


def test_a_held_replica_says_so() -> None:
    run = scene()
    run.tell(measured(0.95))
    assert limited_replicas(run.state) == "", "all slots are in use"
    run.finish(0, 1)
    said = "replica 0 is limited to 2 groups by scheduler.policies.concurrency: its KV cache is 95 % full"
    assert limited_replicas(run.state) == said
    assert said in [wait.detail for wait in waits(run.state)]
    for _ in range(2):
        run.tell(measured(0.1))
    assert run.state.groups.ledger.running == 4 and limited_replicas(run.state) == ""


class Greedy:
    def limit(self, view: Any, replica: ReplicaView) -> int:
        return replica.slots + 1


def test_a_limit_above_the_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvCache, "limit", Greedy.limit)
    with pytest.raises(PolicyError, match="must return an integer from 1 to 4"):
        scene()


def test_the_policy_is_not_asked_about_replicas_that_only_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ReplicaId] = []

    def limit(self: KvCache, view: View, replica: ReplicaView) -> int:
        asked.append(replica.id)
        return replica.slots

    monkeypatch.setattr(KvCache, "limit", limit)
    Scripted(
        policies={"concurrency": "kv-cache"}, replicas=2, train_batch_size=1, max_staleness_steps=0,
        max_concurrent_groups=1, validation=ValidationLimits(rows=1, rows_per_slot=1, own_from=1, replicas=1),
    )  # fmt: skip
    assert asked == [0]


def test_the_policy_of_a_running_run_cannot_be_changed() -> None:
    limits = Limits(train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1)
    with pytest.raises(ConfigError, match="cannot be changed while the run is running"):
        changed_settings(limits, ADAPTIVE, "scheduler.policies.concurrency", "slots")


# in simulated runs


@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_faults_and_a_small_cache_ends_and_can_be_replayed(seed: int) -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=6)
    setting = Setting(
        limits=limits, slots=1 + seed % 6, prompts=100, seed=seed, faults=ROUGH if seed % 2 else Faults(),
        cache_tokens=(1, 30, 100)[seed % 3], tick_size=0,
    )  # fmt: skip
    recorder = MemoryRecorder(Header(run="cache", limits=limits.to_plain(), policies=dict(ADAPTIVE.names)))
    world = JudgedWorld(setting, ADAPTIVE, recorder)
    assert world.run().outcome in (("finished",) if not seed % 2 else ("finished", "failed"))
    report = replay(read(recorder))
    assert report.identical, report.divergence


class FullCache(SimGenerator):
    """Sampling slows down while the running trajectories need more tokens than the cache has room for. If they need x
    times as many, only 1/x of them can run, and each that was preempted computes its tokens once more: each is x * x
    times as slow. Looks once a second."""

    pace = 1.0
    looking = False

    @property
    def token_s(self) -> float:
        return self._setting.token_s * self.pace

    async def generate(self, work: Any) -> Any:
        if not self.looking:
            self.looking = True
            asyncio.get_running_loop().call_later(1.0, self._look)
        return await super().generate(work)

    def _look(self) -> None:
        self.pace, before = max(1.0, self.needed()) ** 2, self.pace
        if self.pace != before:
            self._repace()
        self.looking = bool(self.groups)
        if self.looking:
            asyncio.get_running_loop().call_later(1.0, self._look)


class FullWorld(World):
    def _rollout(self, replica: ReplicaId) -> Rollout:
        generator = self.generators[replica] = FullCache(self.dice, self._fail)
        return Rollout(generator=generator, evaluator=generator)


def seconds(cache_tokens: int, policy: str, steps: int = 8, seed: int = 0) -> float:
    """Virtual seconds of a run with one replica of 32 slots, of groups of about 100 tokens."""
    limits = Limits(train_batch_size=16, max_staleness_steps=2, max_concurrent_groups=48, max_steps=steps)
    setting = Setting(
        limits=limits, replicas=1, slots=32, prompts=10_000, mean_tokens=100.0, max_tokens=300, train_s=1.0,
        sync_s=0.1, cache_tokens=cache_tokens, seed=seed,
    )  # fmt: skip
    world = FullWorld(setting, PolicySet.from_names({"concurrency": policy}))
    assert world.run().outcome == "finished"
    return world.time


def test_a_limit_by_the_cache_beats_slots_that_overfill_it() -> None:
    assert seconds(700, "kv-cache") < 0.8 * seconds(700, "slots")


def test_a_limit_by_the_cache_costs_nothing_where_there_is_room() -> None:
    assert seconds(100_000, "kv-cache") == seconds(100_000, "slots")
