"""The time to recover a run from its record, with and without snapshots, and the cost of a snapshot during a run.

    python benchmarks/recovery.py [--events 100000] [--repeats 5]

Makes a record of `--events` events in the simulated world. Recovers it from its newest snapshot, and from a copy
without snapshots by replaying all events. Then measures how long snapshots of many live groups take to write and read.
Figures are medians.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.policies import PolicySet
from engine.record import Header, Recorder, read, recover
from engine.record.codec import unpack
from engine.record.frames import encode_snapshot
from engine.record.snapshots import restore, snapshot
from engine.scheduling.scheduler import Scheduler
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits

SNAPSHOT_EVERY = 50_000
"""The default of `durability.snapshot_every`, which limits the number of replayed events."""
LIMITS = Limits(train_batch_size=256, max_staleness_steps=3, max_concurrent_groups=1024, checkpoint_every=10)


def make_record(directory: Path, events: int, snapshot_every: int) -> int:
    """Record a run of 16 replicas, some of which die, and cut it off after `events` events. Returns the number of live
    groups at the end."""
    policies = PolicySet.from_names({})
    header = Header(run="recovery", limits=LIMITS.to_plain(), policies=dict(policies.names))
    recorder = Recorder(directory, header)
    setting = Setting(
        limits=LIMITS, replicas=16, slots=64, prompts=10 * events, faults=Faults(die=1e-4, fail_group=0.01),
        max_tokens=300,
    )  # fmt: skip
    world = World(setting, policies, recorder, snapshot_every=snapshot_every)
    try:
        world.run(events=events)
    except EngineError as ended:
        assert "still running" in str(ended)
    recorder.close()
    return len(world.scheduler.state.groups.live)


def median_s(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process); medians."""
    times = []
    for _ in range(repeats):
        gc.collect()
        begin, busy = time.perf_counter(), time.process_time()
        work()
        times.append((time.perf_counter() - begin, time.process_time() - busy))
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def started(groups: int) -> Scheduler:
    """A scheduler with `groups` live groups, all parked and with different figures."""
    limits = Limits(train_batch_size=groups, max_staleness_steps=1, max_concurrent_groups=groups, checkpoint_every=1)
    scheduler = Scheduler(limits)
    state = scheduler.state
    state.groups.draw(0, groups)
    for group in state.groups.live.values():
        group.attempt, group.admitted_version, group.deadline, group.tokens = 1, 0, 1, 1000 + group.id
        group.oldest_version = group.newest_version = 0
        group.resume_key = (1,)
        state.groups.fire(group, "start")
        state.groups.fire(group, "abort")
    state.groups.waiting.clear()
    state.groups.settle(state.limits.max_concurrent_groups)
    return scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    for name, every in (("whole replay", 0), ("from its snapshot, as late as by default", SNAPSHOT_EVERY + 1)):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "schedule"
            live = make_record(path, chosen.events, every)
            size = sum(segment.stat().st_size for segment in path.iterdir())
            seconds, busy = median_s(lambda path=path: recover(read(path)), chosen.repeats)  # type: ignore[misc]
            begun = recover(read(path)).began_at
            told = f"{begun.position} events before it" if begun else "no snapshot"
            print(
                f"{name}: {chosen.events} events, {size / 1e6:.1f} MB, {live} live groups, {told}: "
                f"{seconds:.2f} s, {busy:.2f} s of CPU"
            )
    for groups in (10_000, 100_000):
        scheduler = started(groups)
        payload = encode_snapshot(0, 0, snapshot(scheduler))
        _, writing = median_s(lambda s=scheduler: encode_snapshot(0, 0, snapshot(s)), chosen.repeats)  # type: ignore[misc]
        _, reading = median_s(lambda p=payload: restore(unpack(p)[3]), chosen.repeats)  # type: ignore[misc]
        print(
            f"{groups} live groups: {len(payload) / 1e6:.1f} MB, "
            f"{1e3 * writing / groups * 10_000:.0f} ms of CPU per 10 000 to write, "
            f"{1e3 * reading / groups * 10_000:.0f} ms to put in place and check"
        )
    print("targets: 100 000 events in 5 s")


if __name__ == "__main__":
    main()
