"""Groups per second of the scheduler alone, with recording on, and bytes per live group.

    python benchmarks/scheduler.py [--live 1000 10000 100000 1000000]
    python benchmarks/scheduler.py --replicas 10,1000 [--k 16000]
    python benchmarks/scheduler.py --no-time-limits

Uses one core and no executor: events are made from the returned commands, so the measured time is that of driver,
scheduler, machines, ledger, laws and record. Groups pass through their whole life, batch after batch, while `--live`
groups have started and are not consumed. `--replicas` instead compares fleets with these numbers of replicas, each with
16 slots: a batch is a quarter of the slots, and every replica takes new weights after every step, so that a group costs
the same number of events in every fleet. With `--k`, every fleet has so many slots in all, so that a large one takes
more syncs for each group. `--no-time-limits` gives no order a time limit.
"""

import argparse
import gc
import statistics
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.commands import (
    Command,
    DrawPrompts,
    InstallWeights,
    ParkGroup,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    StageWeights,
    StartGroup,
    StartProcess,
    TrainStep,
)
from engine.events import (
    Event,
    GroupAborted,
    GroupGenerated,
    ProcessUp,
    PromptsDrawn,
    ReplicaPaused,
    RunStarted,
    StepTrained,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.record.frames import Header
from engine.record.recorder import Recorder
from engine.runtime.driver import Driver
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.states.timeouts import Timeouts

REPLICAS = 16
SLOTS = 16
"""Slots of each replica in the comparison of fleets."""
STALENESS = 3
SLOW_EVERY = 10
"""With stragglers, one of this many replicas samples a third of the tokens of the others."""
TOGETHER = 64
"""Events that arrive together, as many as the driver decides about in one tick."""
SYNC_EVENTS = (WeightsStaged, ReplicaPaused, WeightsInstalled)


class Echo:
    """Answers every command at once, in order of arrival. Groups finish in the order in which they started. Every
    replica has `slots` slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.answers: deque[Event] = deque()
        self.running: deque[StartGroup | ResumeGroup] = deque()
        self.parked: set[tuple[int, int]] = set()
        """Attempts of groups that were parked, which do not finish."""
        self.drawn = 0

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartGroup() | ResumeGroup():
                    self.running.append(command)
                case ParkGroup():
                    self.parked.add((command.group, command.attempt))
                    self.answers.append(
                        GroupAborted(
                            group=command.group, attempt=command.attempt, replica=command.replica,
                            life=command.life, tokens=0, oldest_version=-1, newest_version=-1,
                            unfinished=0,
                        )
                    )  # fmt: skip
                case StartProcess():
                    self.answers.append(
                        ProcessUp(
                            kind=command.kind, index=command.index, life=command.life, slots=self.slots
                        )
                    )  # fmt: skip
                case DrawPrompts():
                    drawn: dict[str, Any] = {"first": self.drawn, "count": command.count, "number": command.number}
                    self.answers.append(PromptsDrawn(**drawn, exhausted=False))
                    self.drawn += command.count
                case TrainStep():
                    self.answers.append(StepTrained(step=command.step, attempt=command.attempt))
                case PublishWeights():
                    self.answers.append(WeightsPublished(version=command.version, attempt=command.attempt))
                case StageWeights():
                    self.answers.append(WeightsStaged(**_address(command), version=command.version))
                case PauseReplica():
                    self.answers.append(ReplicaPaused(**_address(command)))
                case InstallWeights():
                    self.answers.append(WeightsInstalled(**_address(command), version=command.version))


def _address(command: StageWeights | PauseReplica | InstallWeights) -> dict[str, int]:
    return {"replica": command.replica, "life": command.life, "attempt": command.attempt}


class Steady:
    """A clock on which every event takes the same time."""

    def __init__(self) -> None:
        self.events = 0

    def now(self) -> float:
        self.events += 1
        return self.events * 1e-3


class Wall:
    def __init__(self) -> None:
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start


def drive(driver: Driver, echo: Echo, scheduler: Scheduler, groups: int) -> None:
    """Run until `groups` more groups are consumed."""
    until = scheduler.state.groups.ledger.consumed + groups
    replicas = scheduler.state.replicas.by_id
    while scheduler.state.groups.ledger.consumed < until:
        events: list[Event] = [echo.answers.popleft() for _ in range(min(TOGETHER, len(echo.answers)))]
        while not events or (not echo.answers and len(events) < TOGETHER and echo.running):
            start = echo.running.popleft()
            version = replicas[start.replica].version
            if (start.group, start.attempt) in echo.parked:
                echo.parked.remove((start.group, start.attempt))
                continue
            events.append(
                GroupGenerated(
                    group=start.group, attempt=start.attempt, replica=start.replica, life=start.life,
                    tokens=900 if start.replica % SLOW_EVERY else 300, oldest_version=version, newest_version=version,
                    trainable=8, reward_mean=0.5, reward_spread=1.0,
                )
            )  # fmt: skip
        driver.deliver(*events)


def measure(live: int, groups: int, directory: Path, timeouts: Timeouts) -> tuple[float, float, float]:
    """(groups/s, events/s, bytes per live group) at about `live` live groups."""
    batch = max(1, live // 4)
    limits = Limits(train_batch_size=batch, max_staleness_steps=3, max_concurrent_groups=live, timeouts=timeouts)
    scheduler, echo = Scheduler(limits), Echo(-(-live // REPLICAS))
    header = Header(run="benchmark", limits=limits.to_plain(), policies=dict(scheduler.policies.names))
    recorder = Recorder(directory, header)
    driver = Driver(scheduler, Wall(), recorder, echo)
    gc.collect()
    tracemalloc.start()
    driver.deliver(RunStarted(replicas=REPLICAS))
    while echo.answers:
        driver.deliver(echo.answers.popleft())
    size = 0
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/engine/states/*")])
    size = sum(statistic.size for statistic in snapshot.statistics("filename"))
    tracemalloc.stop()
    started = len(scheduler.state.groups.live)
    drive(driver, echo, scheduler, batch)
    gc.collect()
    gc.freeze()
    events, begin = driver.events_handled, time.process_time()
    drive(driver, echo, scheduler, max(groups, batch))
    elapsed = time.process_time() - begin
    recorder.close()
    return max(groups, batch) / elapsed, (driver.events_handled - events) / elapsed, size / started


class Timed(Driver):
    """Adds up the CPU time of events, with those of weight syncs separate, and keeps the longest."""

    sync_s = 0.0
    syncs = 0
    longest_s = 0.0

    def deliver(self, *events: Event) -> None:
        begin = time.process_time()
        super().deliver(*events)
        took = time.process_time() - begin
        self.longest_s = max(self.longest_s, took)
        if isinstance(events[0], SYNC_EVENTS):
            self.sync_s += took
            self.syncs += 1


class Figures(NamedTuple):
    """Figures of one fleet. `first_ms` and `longest_ms`: the longest event while the fleet fills, and after that."""

    groups_per_s: float
    sync_us: float
    first_ms: float
    longest_ms: float


def measure_fleet(
    replicas: int, slots: int, groups: int, directory: Path, timeouts: Timeouts, straggler_factor: float | None = None
) -> Figures:
    """Measure a fleet with all slots busy, and a weight sync after every batch. All times are CPU times, so that other
    load on the cores does not change the ratios."""
    batch = slots // (STALENESS + 1)
    limits = Limits(
        train_batch_size=batch, max_staleness_steps=STALENESS, max_concurrent_groups=slots,
        straggler_factor=straggler_factor, timeouts=timeouts,
    )  # fmt: skip
    scheduler, echo = Scheduler(limits), Echo(-(-slots // replicas))
    header = Header(run="benchmark", limits=limits.to_plain(), policies=dict(scheduler.policies.names))
    recorder = Recorder(directory, header)
    driver = Timed(scheduler, Steady(), recorder, echo)
    driver.deliver(RunStarted(replicas=replicas))
    drive(driver, echo, scheduler, 2 * batch)
    first_s, driver.longest_s, driver.sync_s, driver.syncs = driver.longest_s, 0.0, 0.0, 0
    gc.collect()
    gc.freeze()
    gc.disable()
    begin = time.process_time()
    timed = max(1, round(groups / batch)) * batch
    drive(driver, echo, scheduler, timed)
    elapsed = time.process_time() - begin
    gc.enable()
    gc.unfreeze()
    recorder.close()
    return Figures(timed / elapsed, 1e6 * driver.sync_s / driver.syncs, 1e3 * first_s, 1e3 * driver.longest_s)


def compare_fleets(fleets: dict[int, int], groups: int, runs: int, timeouts: Timeouts) -> None:
    """Print a row of medians for each fleet, given with its slots. Ratios are relative to the first fleet in the same
    turn."""
    kinds = (None, 2.0)
    found: dict[tuple[int, float | None], list[Figures]] = {(n, kind): [] for n in fleets for kind in kinds}
    for _ in range(runs):
        for n, kind in found:
            with tempfile.TemporaryDirectory() as directory:
                found[n, kind].append(measure_fleet(n, fleets[n], groups, Path(directory) / "schedule", timeouts, kind))
    print(
        "replicas      K      B | groups/s  ratio  us/sync event  longest ms (filling) |  stragglers: groups/s  ratio"
    )
    smallest = next(iter(fleets))
    for n, slots in fleets.items():
        row = f"{n:>8} {slots:>6} {slots // (STALENESS + 1):>6} |"
        for kind in kinds:
            own, first = found[n, kind], found[smallest, kind]
            rate, sync, filling, longest = (statistics.median(column) for column in zip(*own, strict=True))
            ratio = statistics.median(a.groups_per_s / b.groups_per_s for a, b in zip(own, first, strict=True))
            if kind is None:
                row += f" {rate:>8.0f} {ratio:>6.2f} {sync:>14.1f} {longest:>11.1f} ({filling:>7.1f}) |"
            else:
                row += f" {rate:>20.0f} {ratio:>6.2f}"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--groups", type=int, default=40_000, help="groups timed per run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--replicas", help="compare fleets with these numbers of replicas, for example 10,1000")
    parser.add_argument("--k", type=int, help="slots of every fleet, with --replicas; default: 16 per replica")
    parser.add_argument("--no-time-limits", action="store_true", help="give no order a time limit")
    args = parser.parse_args()
    timeouts = Timeouts.every(None) if args.no_time_limits else Timeouts()
    if args.replicas:
        fleets = {int(n): args.k or int(n) * SLOTS for n in args.replicas.split(",")}
        compare_fleets(fleets, args.groups, args.runs, timeouts)
        return
    base = None
    print("live groups   groups/s   events/s  us/group  cost ratio  bytes/group")
    for live in args.live:
        results = []
        for _ in range(args.runs if live < 1_000_000 else 1):
            with tempfile.TemporaryDirectory() as directory:
                results.append(measure(live, args.groups, Path(directory) / "schedule", timeouts))
        rate, events, size = (statistics.median(column) for column in zip(*results, strict=True))
        base = base or rate
        figures = f"{live:>11} {rate:>10.0f} {events:>10.0f} {1e6 / rate:>9.1f} {base / rate:>11.2f} {size:>12.0f}"
        print(figures, flush=True)


if __name__ == "__main__":
    main()
