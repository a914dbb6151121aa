"""Judges the advice of `engine explain` on the simulated worlds of `advice_worlds.py`.

`python benchmarks/advice.py [--worlds 0,2,4] [--held-out | --seen] [--no-oracle] [--few]`. Every world runs, its record
is read, the first line of the advice is applied, and the world runs again. The oracle is the best of a fixed list of
changes of one setting, each of which runs too; where it gains less than 3 %, the advice should say that nothing is to
be gained. Where rewards are named as the cause, twice their concurrency counts as the advice. Worlds with odd numbers
are held out: they were not looked at while the advice was written.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from advice_worlds import COUNT, AdviceWorld, world_of

from engine.errors import ConfigError
from engine.inspect.history_reader import read_history
from engine.record import read
from engine.simulation.advice import FEW_GROUPS, MOST_GROUPS, advise
from engine.states.limits import REWARDING, SYNC_MODES

WORLD_NAMES = {f"concurrency of state {REWARDING}": "reward.concurrency"}
HELPS, COSTS, NOTHING = 0.01, 0.03, 0.03
"""Advice helps from this gain on, and is harmful from this loss on; a smaller gain than the last is none."""


class Verdict(NamedTuple):
    """What the advice did in one world. Gains are shares of the time of the run."""

    world: AdviceWorld
    advised: str
    """Setting and value; empty: the advice says that nothing is to be gained."""
    expected: float
    """How many times as fast the run is with it, as the advice says; 0 if it names a cause."""
    found: float
    """The same, as measured."""
    best: float
    """The oracle's; 0 if it was not asked."""
    best_change: str
    advice_s: float

    @property
    def right(self) -> bool:
        if not self.advised:
            return self.best < 1 + NOTHING
        return self.found > 1 + HELPS

    @property
    def harmful(self) -> bool:
        return self.found < 1 / (1 + COSTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", help="numbers, divided by commas; default: all")
    parser.add_argument("--held-out", action="store_true", help="only worlds with odd numbers")
    parser.add_argument("--seen", action="store_true", help="only worlds with even numbers")
    parser.add_argument("--no-oracle", action="store_true", help="ask the oracle only where no setting is advised")
    parser.add_argument("--few", action="store_true", help="judge the advice of the table at the end of a run")
    arguments = parser.parse_args()
    numbers = list(range(COUNT)) if arguments.worlds is None else [int(n) for n in arguments.worlds.split(",")]
    worlds = [world_of(number) for number in numbers]
    if arguments.held_out or arguments.seen:
        worlds = [world for world in worlds if world.held_out == arguments.held_out]
    verdicts = []
    print("| world | family | advice | expected | found | best change | its gain |\n|---:|---|---|---:|---:|---|---:|")
    for world in worlds:
        most_groups = FEW_GROUPS if arguments.few else MOST_GROUPS
        verdicts.append(judge(world, most_groups, always=not arguments.no_oracle))
        print(_row(verdicts[-1]), flush=True)
    print()
    for name, held_out in (("seen", False), ("held out", True)):
        among = [verdict for verdict in verdicts if verdict.world.held_out == held_out]
        if among:
            print(_totals(name, among))


def judge(world: AdviceWorld, most_groups: int, *, always: bool) -> Verdict:
    """Run a world, take its advice and run it again. `always`: ask the oracle even if a setting is advised."""
    seconds, recorder = world.run()
    history = read_history(read(recorder))
    began = time.process_time()
    counsel = advise(history, most_groups=most_groups)
    took = time.process_time() - began
    change, expected, found = None, 0.0, 1.0
    if counsel.causes and "raise reward.concurrency" in counsel.causes[0]:
        change = "reward.concurrency", 2 * world.setting.limits.added_states[0].concurrency
    elif counsel.advice:
        first = counsel.advice[0]
        change, expected = (WORLD_NAMES.get(first.setting, first.setting), first.value), first.faster
    if change is not None:
        found = seconds / world.changed(*change).run()[0]
    advised = "" if change is None else f"{change[0]} = {change[1]}"
    best, best_change = 0.0, ""
    if always or not advised:
        best, best_change = max(_gains(world, seconds), default=(1.0, ""))
    return Verdict(world, advised, expected, found, best, best_change, took)


def _gains(world: AdviceWorld, seconds: float) -> Iterator[tuple[float, str]]:
    """The gain of every change that the laws and the world allow."""
    for setting, value in _changes(world):
        try:
            changed = world.changed(setting, value)
        except (KeyError, ConfigError):
            continue
        yield seconds / changed.run()[0], f"{setting} = {value}"


def _changes(world: AdviceWorld) -> Iterator[tuple[str, Any]]:
    setting, limits = world.setting, world.setting.limits
    most = limits.train_batch_size * (limits.max_staleness_steps + 1)
    for workers in sorted({min(most, setting.replicas * setting.slots), most}):
        if workers != limits.max_concurrent_groups:
            yield "scheduler.max_concurrent_groups", workers
    for more in (1, 2):
        yield "scheduler.max_staleness_steps", limits.max_staleness_steps + more
    yield "scheduler.sync_every", 2 * limits.sync_every
    yield "scheduler.policies.deadline", "drop"
    for mode in SYNC_MODES:
        if mode != limits.sync_mode:
            yield "rollout.sync_mode", mode
    yield "rollout.sync_order", "rolling"
    for state in limits.added_states:
        yield "reward.concurrency", 2 * state.concurrency
        yield "reward.concurrency", 4 * state.concurrency
    if limits.validation is not None:
        yield "validation.every", 2 * limits.validation.every
        yield "validation.every", 4 * limits.validation.every
        yield "validation.replicas", limits.validation.replicas + 1
    yield "rollout.replicas", setting.replicas + 1
    yield "rollout.replicas", 2 * setting.replicas
    yield "trainer.ranks", 2


def _row(one: Verdict) -> str:
    expected = f"{one.expected:.3f}" if one.expected else ""
    found = f"{one.found:.3f}" if one.advised else ""
    best = f"{one.best_change} | {one.best:.3f}" if one.best else "| "
    wrong = "" if one.right else " **wrong**"
    return (
        f"| {one.world.number} | {one.world.family} | {one.advised or 'none'}{wrong} | {expected} | {found} | {best} |"
    )


def _totals(name: str, among: list[Verdict]) -> str:
    advised = [one for one in among if one.advised]
    misses = sorted(abs(one.expected / one.found - 1) for one in advised if one.expected) or [0.0]
    nothing = [one for one in among if one.best and one.best < 1 + NOTHING]
    share = [(one.found - 1) / (one.best - 1) for one in advised if one.best > 1 + NOTHING]
    lines = [
        f"{name}: right in {sum(one.right for one in among)} of {len(among)} worlds; "
        f"{sum(one.harmful for one in among)} cost more than {COSTS:.0%}",
        f"  advised in {len(advised)}: {sum(one.right for one in advised)} help by more than {HELPS:.0%}, worst "
        f"{min((one.found for one in advised), default=1.0):.3f} x",
        f"  expected against found: median {misses[len(misses) // 2]:.1%}, worst {misses[-1]:.1%} apart",
        f"  nothing to gain in {len(nothing)}, said in {sum(not one.advised for one in nothing)} of them",
        f"  time of the advice: at most {max(one.advice_s for one in among):.2f} CPU s",
    ]
    if share:
        lines.append(f"  median share of the oracle's gain: {sorted(share)[len(share) // 2]:.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
