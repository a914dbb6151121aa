"""Measures whether the memory or the number of open files grows during a long run.

    python benchmarks/soak.py                 # eight hours of a run on a virtual clock, in minutes
    python benchmarks/soak.py --minutes 10    # every process of a real run over Ray

On the virtual clock, a simulated world without accounting of its own feeds the production driver, scheduler, recorder
and metrics. Replicas die and come back, attempts fail, and checkpoints and snapshots are written; a step takes ten
seconds. Python's allocations are traced by file. The target is a change of at most 5 % after the first fifth; otherwise
the command fails.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler import REPLICAS, Echo

from engine.actors.launch import start
from engine.commands import Command, DeleteCheckpoint, DiscardGroups, RetireWeights, SaveCheckpoint, StopProcess
from engine.events import CheckpointSaved, GroupFailed, GroupGenerated, OrderDone, ProcessLost, RunStarted
from engine.metrics.collector import RunMetrics
from engine.metrics.journal import Journal
from engine.protocols import Batch, GroupWork
from engine.record import Header, Recorder
from engine.runtime.driver import Driver
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.runtime.prompt_sources import CountedPrompts
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.trajectory import Prompt, Trajectory
from engine.workers.plan import Plan, Rollout

HOURS, STEP_S, BATCH = 8, 10.0, 32
FLAT = 0.05
SAMPLES = 20
PAGE = os.sysconf("SC_PAGE_SIZE")


class Endless(Echo):
    """An `Echo` with checkpoints, acknowledged deletions, and replicas that die."""

    def execute(self, commands: Sequence[Command]) -> None:
        super().execute(commands)
        for command in commands:
            if isinstance(command, SaveCheckpoint):
                self.answers.append(CheckpointSaved(steps=command.steps))
            elif isinstance(command, DeleteCheckpoint | DiscardGroups | RetireWeights):
                self.answers.append(OrderDone(orders=(command.number,)))
            elif isinstance(command, StopProcess):
                self.lose(command.index, command.life)

    def lose(self, replica: int, life: int) -> None:
        """Let a replica die. It restarts with the initial weights."""
        self.answers.append(ProcessLost(kind="replica", index=replica, life=life, reason="soak"))


class Virtual:
    """A clock that advances with the trained steps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def soak(hours: float) -> list[tuple[float, int, int]]:
    """(hour, bytes traced, resident bytes) at intervals during a run of `hours` hours."""
    limits = Limits(train_batch_size=BATCH, max_staleness_steps=2, max_concurrent_groups=3 * BATCH, checkpoint_every=10)
    taken: list[tuple[float, int, int]] = []
    with tempfile.TemporaryDirectory() as place:
        scheduler, echo, clock = Scheduler(limits), Endless(slots=8), Virtual()
        header = Header(run="soak", limits=limits.to_plain(), policies=dict(scheduler.policies.names))
        recorder = Recorder(Path(place) / "schedule", header)
        metrics = RunMetrics(scheduler, Journal(Path(place) / "metrics.jsonl"))
        driver = Driver(scheduler, clock, recorder, echo, metrics.observe, snapshot_every=50_000)
        driver.deliver(RunStarted(replicas=REPLICAS))
        steps = int(hours * 3600 / STEP_S)
        tracemalloc.start()
        began = tracemalloc.take_snapshot()
        for step in range(steps):
            while scheduler.state.training.steps_trained <= step:
                turn(driver, echo, scheduler)
            clock.seconds += STEP_S
            if step % 100 == 50:
                replica = scheduler.state.replicas.by_id[step // 100 % REPLICAS]
                echo.lose(replica.id, replica.life)
            if (step + 1) % (steps // SAMPLES) == 0:
                gc.collect()
                taken.append((clock.seconds / 3600, tracemalloc.get_traced_memory()[0], resident(os.getpid())))
            if step + 1 == steps // 5:
                began = tracemalloc.take_snapshot()
        grown = tracemalloc.take_snapshot().compare_to(began, "lineno")
        print("largest growth since the first fifth:")
        for line in [entry for entry in grown if "/engine/" in entry.traceback[0].filename][:8]:
            frame = line.traceback[0]
            print(f"  {line.size_diff / 1e3:8.1f} kB  {frame.filename.split('/engine/')[-1]}:{frame.lineno}")
        tracemalloc.stop()
        recorder.close()
    return taken


def turn(driver: Driver, echo: Endless, scheduler: Scheduler) -> None:
    """Deliver one event: a waiting answer, else the end of the group that has run longest."""
    if echo.answers:
        driver.deliver(echo.answers.popleft())
        return
    start = echo.running.popleft()
    address: dict[str, Any] = {
        "group": start.group, "attempt": start.attempt, "replica": start.replica, "life": start.life,
    }  # fmt: skip
    if start.group % 97 == 0 and start.attempt == 1:
        driver.deliver(GroupFailed(**address, cause="infrastructure", reason="soak"))
        return
    version = scheduler.state.replicas.by_id[start.replica].version
    driver.deliver(
        GroupGenerated(
            **address, tokens=900, oldest_version=version, newest_version=version, trainable=8, reward_mean=0.5,
            reward_spread=1.0,
        )
    )  # fmt: skip


# over Ray


class Short(SimpleGenerator):
    async def sample(self, work: GroupWork, weights: object, version: int) -> Sequence[Trajectory]:
        return [response([1, 2, 3], reward=float(i % 2), version=version) for i in range(work.samples)]


class Still(SimpleTrainer):
    def train(self, batch: Batch) -> dict[str, float]:
        time.sleep(0.2)
        return {"loss": 0.0}

    def weights(self) -> bytes:
        return bytes(100_000)

    def save(self, directory: str, step: int) -> None:
        Path(directory, "weights").write_bytes(self.weights())


def soak_over_ray(minutes: float) -> dict[str, list[tuple[int, int]]]:
    """(resident bytes, open files) of each process of a real run, measured every few seconds."""
    limits = Limits(train_batch_size=16, max_staleness_steps=2, max_concurrent_groups=48, checkpoint_every=20)
    taken: dict[str, list[tuple[int, int]]] = {}
    with tempfile.TemporaryDirectory() as place:
        plan = Plan(
            limits=limits, samples=4, replicas=2, slots=24, make_rollout=lambda replica: Rollout(generator=Short()),
            make_trainer=Still, make_prompts=lambda: CountedPrompts(None, lambda g: Prompt(row=g, text=f"prompt {g}")),
            run_dir=Path(place), snapshot_every=20_000,
        )  # fmt: skip
        with start(plan) as run:
            began = sampled = time.monotonic()
            for _ in run.updates():
                now = time.monotonic()
                if now - sampled >= 60 * minutes / 100:
                    sampled = now
                    for pid, name in processes():
                        taken.setdefault(f"{name} {pid}", []).append((resident(pid), open_files(pid)))
                if now - began >= 60 * minutes:
                    break
    return taken


def processes() -> list[tuple[int, str]]:
    """This process and its descendants that are actors or parts of Ray."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                stat = Path(entry.path, "stat").read_text()
                said = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            pid = int(entry.name)
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
            names[pid] = os.path.basename(said[0].decode().split(".")[0].strip()) or stat.split("(")[1].split(")")[0]
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return [
        (pid, names[pid]) for pid in sorted(mine) if pid == os.getpid() or "ray" in names[pid] or "gcs" in names[pid]
    ]


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except OSError:
        return 0


def open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def drift(figures: Sequence[float]) -> float:
    """The change from the second fifth to the last, as a share. The first fifth is warm-up."""
    fifth = max(1, len(figures) // 5)
    return statistics.fmean(figures[-fifth:]) / statistics.fmean(figures[fifth : 2 * fifth]) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=HOURS, help="length of the run on the virtual clock")
    parser.add_argument("--minutes", type=float, help="instead, length of a real run over Ray")
    chosen = parser.parse_args()
    flat = True
    if chosen.minutes is None and chosen.hours * 3600 < SAMPLES * STEP_S:
        least = SAMPLES * STEP_S / 3600
        parser.error(f"--hours is {chosen.hours:g}, but must be at least {least:.3f}: {SAMPLES} samples are taken")
    if chosen.minutes is None:
        taken = soak(chosen.hours)
        resident_mb = [row[2] / 1e6 for row in taken]
        (first, before, _), (last, after, _) = taken[len(taken) // 5], taken[-1]
        shown = ", ".join(f"{figure:.1f}" for figure in resident_mb[:: max(1, len(taken) // 8)])
        print(f"resident: {shown} MB; {drift(resident_mb):+.1%} after warm-up")
        print(
            f"allocated by Python: {(after - before) / (last - first) / 1e3:+.0f} kB an hour, of {after / 1e6:.1f} MB"
        )
        flat = abs(drift(resident_mb)) <= FLAT
    else:
        for name, rows in soak_over_ray(chosen.minutes).items():
            if len(rows) >= 10:
                memory, files = drift([row[0] for row in rows]), drift([row[1] for row in rows])
                print(f"{name:<40} {rows[-1][0] / 1e6:7.1f} MB {memory:+.1%}   {rows[-1][1]:4d} files {files:+.1%}")
                flat = flat and memory <= FLAT and files <= FLAT
    print(f"target: within {FLAT:.0%} after warm-up: {'held' if flat else 'NOT held'}")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
