"""Groups per second of the scheduler alone, recording on, through their whole life; and bytes per live group.

    python benchmarks/scheduler.py [--live 1000 10000 100000 1000000]

One core, no executor: events are made from the commands that come back, so what is timed is driver, scheduler,
machines, ledger, laws
and record. "live" groups are started and not consumed while one batch after another goes through.
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

from engine.commands import (
    Command,
    DrawPrompts,
    InstallWeights,
    PauseReplica,
    PublishWeights,
    StageWeights,
    StartGroup,
    TrainStep,
)
from engine.driver import Driver
from engine.events import (
    Event,
    GroupGenerated,
    PromptsDrawn,
    ReplicaJoined,
    ReplicaPaused,
    RunStarted,
    StepTrained,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.schedule.frames import Header
from engine.schedule.recorder import Recorder
from engine.scheduler import Scheduler
from engine.states.limits import Limits

REPLICAS = 16


class Echo:
    """Answers every command at once, first come first served; generated groups finish in the order they started."""

    def __init__(self) -> None:
        self.answers: deque[Event] = deque()
        self.running: deque[StartGroup] = deque()
        self.drawn = 0

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartGroup():
                    self.running.append(command)
                case DrawPrompts():
                    drawn = {"first": self.drawn, "count": command.count, "number": command.number}
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
    return {"replica": command.replica, "incarnation": command.incarnation, "attempt": command.attempt}


class Wall:
    def __init__(self) -> None:
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start


def drive(driver: Driver, echo: Echo, scheduler: Scheduler, groups: int) -> None:
    """Until so many more groups are consumed."""
    until = scheduler.state.ledger.consumed + groups
    replicas = scheduler.state.fleet.replicas
    while scheduler.state.ledger.consumed < until:
        if echo.answers:
            driver.deliver(echo.answers.popleft())
            continue
        start = echo.running.popleft()
        version = replicas[start.replica].version
        driver.deliver(
            GroupGenerated(
                group=start.group, attempt=start.attempt, replica=start.replica, incarnation=start.incarnation,
                tokens=900, oldest_version=version, newest_version=version, live=8, reward_mean=0.5, reward_spread=1.0,
            )
        )  # fmt: skip


def measure(live: int, groups: int, directory: Path) -> tuple[float, float, float]:
    """(groups/s, events/s, bytes per live group) at about `live` live groups."""
    batch = max(1, live // 4)
    limits = Limits(train_batch_size=batch, max_staleness_steps=3, max_concurrent_groups=live)
    scheduler, echo = Scheduler(limits), Echo()
    header = Header(run="benchmark", limits=limits.to_plain(), policies=dict(scheduler.policies.names))
    recorder = Recorder(directory, header)
    driver = Driver(scheduler, Wall(), recorder, echo)
    gc.collect()
    tracemalloc.start()
    for id in range(REPLICAS):
        driver.deliver(ReplicaJoined(replica=id, incarnation=1, slots=-(-live // REPLICAS), version=0))
    driver.deliver(RunStarted())
    while echo.answers:
        driver.deliver(echo.answers.popleft())
    size = 0
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/engine/states/*")])
    size = sum(statistic.size for statistic in snapshot.statistics("filename"))
    tracemalloc.stop()
    started = len(scheduler.state.groups)
    drive(driver, echo, scheduler, batch)
    gc.collect()
    gc.freeze()
    events, begin = driver.events_handled, time.perf_counter()
    drive(driver, echo, scheduler, max(groups, batch))
    elapsed = time.perf_counter() - begin
    recorder.close()
    return max(groups, batch) / elapsed, (driver.events_handled - events) / elapsed, size / started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--groups", type=int, default=40_000, help="groups timed per run")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    base = None
    print("live groups   groups/s   events/s  us/group  cost ratio  bytes/group")
    for live in args.live:
        results = []
        for _ in range(args.runs if live < 1_000_000 else 1):
            with tempfile.TemporaryDirectory() as directory:
                results.append(measure(live, args.groups, Path(directory) / "schedule"))
        rate, events, size = (statistics.median(column) for column in zip(*results, strict=True))
        base = base or rate
        figures = f"{live:>11} {rate:>10.0f} {events:>10.0f} {1e6 / rate:>9.1f} {base / rate:>11.2f} {size:>12.0f}"
        print(figures, flush=True)


if __name__ == "__main__":
    main()
