"""Tests custom policies and states in small simulated runs, with every law checked, before the real run.

Called by `engine check`. In a few dozen seeded runs, it looks for policies that break a law, raise, deadlock a run, or
decide differently on replay. It reports the seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.policies import DEFAULTS, PolicySet
from engine.record.frames import Header, Tick
from engine.record.reader import Record, read
from engine.record.recorder import MemoryRecorder
from engine.record.replayer import Divergence, replay
from engine.record.snapshots import restore
from engine.simulation.world import Faults, Finding, Setting, World
from engine.states.laws import check_all
from engine.states.limits import ROUNDING, Limits
from engine.states.state import State
from engine.states.timeouts import Timeouts
from engine.trajectory import Prompt

WORLDS = 24
EVENTS = 20_000
"""Maximum number of events of one world. The longest correct world needs a tenth of it."""
SNAPSHOT_EVERY = 20
"""Events between two snapshots of a world."""
ROUGH = Faults(
    lose=0.1, duplicate=0.1, die=0.01, fail_group=0.03, fail_data=0.03, fail_sync=0.1, fail_trainer=0.05,
    fail_state=0.05, fail_rows=0.1,
)  # fmt: skip


class LawfulWorld(World):
    """A world in which every law is checked after every tick."""

    def _observe(self, tick: Tick) -> None:
        super()._observe(tick)
        check_all(self.scheduler.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What policies see of groups besides figures: see `run_settings.Setting`."""

    described: tuple[str, ...] | None = None
    rows: Sequence[Prompt] = ()
    rewards: tuple[str, ...] = ()


def prove(limits: Limits, policies: Mapping[str, str], worlds: int = WORLDS, seen: Seen = Seen()) -> int:
    """Run small worlds with these policies, every other one with faults. Returns their number.

    Raises: `ConfigError` with the first finding, its seed and the law.
    """
    small = scaled_down(limits)
    for seed in range(worlds):
        problem = _problem(small, policies, seed, Faults() if seed % 2 == 0 else ROUGH, seen)
        if problem:
            chosen = PolicySet.from_names(policies).custom
            custom = ", ".join([*chosen, *(state.name for state in limits.added_states)])
            field = "scheduler.policies" if chosen or not limits.added_states else "scheduler.states"
            law = f"fails in a simulated run with {small.train_batch_size} groups per step: {problem}"
            raise ConfigError(field, custom or "built-in", law, "correct it: docs/EXTENDING.md says what it may answer")
    return worlds


def scaled_down(limits: Limits) -> Limits:
    """The same limits, scaled down: at most four groups per step, with the same ratios if the laws allow them. Removes
    the time limits, because they apply to real durations."""
    batch, staleness = min(limits.train_batch_size, 4), min(limits.max_staleness_steps, 3)
    every = min(limits.sync_every, staleness + 1)
    ratio = limits.async_ratio
    share = limits.max_concurrent_groups / limits.train_batch_size
    figures: dict[str, Any] = {
        "train_batch_size": batch,
        "max_staleness_steps": staleness,
        "sync_every": every,
        "async_ratio": None if ratio is None else min(max(ratio, every - 1), staleness),
        "over_sample": min(limits.over_sample, 2.0),
        "max_steps": min(limits.max_steps or 6, 6),
        "added_states": tuple(replace(s, concurrency=min(s.concurrency, 3)) for s in limits.added_states),
        "pools": (),
        "validation": None,
        "timeouts": Timeouts.every(None),
    }
    if limits.validation is not None:
        own = 2 if limits.validation.own else None
        rows, replicas = min(limits.validation.rows, 12), min(limits.validation.replicas, 2)
        figures["validation"] = replace(limits.validation, rows=rows, sets=(), replicas=replicas, own_from=own)
    most = replace(limits, **figures, max_concurrent_groups=batch)
    workers = min(max(batch, int(share * batch + ROUNDING)), most.ahead + most.surplus)
    return replace(most, max_concurrent_groups=workers)


def _problem(limits: Limits, policies: Mapping[str, str], seed: int, faults: Faults, seen: Seen) -> str:
    """What is wrong with one world; empty if nothing is."""
    chosen = PolicySet.from_names(policies)
    prompts = 12 + 7 * (seed % 8)
    measures = chosen.names["concurrency"] != DEFAULTS["concurrency"]
    setting = Setting(
        limits=limits, replicas=2, slots=1 + seed % 4, prompts=prompts, seed=seed, spread=(1.0, 0.5)[seed % 3 == 2],
        cache_tokens=(20 + 20 * (seed % 5)) * measures,
        faults=faults, prefix_every_tokens=(0, 5)[seed % 2], tick_size=(1, 64, 0)[seed // 2 % 3],
        described=seen.described, rows=seen.rows, rewards=seen.rewards,
    )  # fmt: skip
    recorder = MemoryRecorder(Header(run="proof", limits=limits.to_plain(), policies=dict(chosen.names)))
    world = LawfulWorld(setting, chosen, recorder, snapshot_every=SNAPSHOT_EVERY)
    try:
        outcome = world.run(events=EVENTS)
    except Finding as finding:
        return str(finding)
    if outcome.outcome != "finished" and faults == Faults() and not _filtered_out(world.scheduler.state):
        return f"the run {outcome.outcome} without any fault: {outcome.reason} [seed {seed}]"
    record = read(recorder)
    divergence = replay(record).divergence or _divergence_after_resume(record)
    if divergence is not None:
        where = str(divergence).splitlines()[0]
        cause = "a clock, random numbers or undeclared memory"
        return f"law 8: it decides differently on replay or after a resume, because of {cause}; {where} [seed {seed}]"
    return ""


def _divergence_after_resume(record: Record) -> Divergence | None:
    """The first decision that differs if a scheduler starts from the middle snapshot, as in a resume. Its policies are
    new objects that have only the memory in the snapshot."""
    places = list(record.snapshots())
    if not places:
        return None
    middle = places[len(places) // 2]
    scheduler = restore(record.snapshot(middle).plain)
    return replay(record, build=lambda _: scheduler, after=middle).divergence


def _filtered_out(state: State) -> bool:
    """Whether the filter policy ended a world. Simulated rewards say nothing about real ones."""
    filtered = state.ending.filtered_in_a_row
    return filtered >= state.limits.filtered_in_a_row or (filtered > 0 and not state.training.steps_trained)
