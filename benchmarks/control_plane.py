"""The control plane through Ray: groups per second, calls per group, and how long a replica waits.

    python benchmarks/control_plane.py [--seconds 10] [--replicas 2] [--disk-against-memory 3]

Runs use the same actors as in production, with recording on. In the saturated run, generation takes no time, so all
measured time is the engine's; in the others, generation takes a while. `decision` is the time from a report's arrival
at the scheduler until the resulting orders are decided, recorded and sent. `refill` is the time from the end of a group
on a replica to the start of the next group in its slot: store, report, decision, order, three calls through Ray. `echo`
is the round trip of a call to an actor that does nothing, made during the run. Figures are in `benchmarks/README.md`.
Trajectories are stored on disk, which is the default. `--disk-against-memory N` measures the cost of this in the
saturated run, with N runs of each kind in turns.
"""

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray

from engine.actors.launch import start
from engine.actors.private_cluster import connect
from engine.ids import ReplicaId
from engine.protocols import Batch, Generated, GroupWork, Prompts
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.runtime.prompt_sources import CountedPrompts
from engine.states.limits import Limits
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.plan import Plan, Rollout

SATURATED_PER_S, HALF_LOAD_PER_S, ECHOES = 10_000, 4_000, 2.0
"""Targets: groups per second, saturated and at half load; p99 of a decision at half load, as a multiple of an
echo's."""
ECHO_PAUSE_S = 0.01


class Idle(SimpleGenerator):
    """Generates one token after `seconds`. Notes when groups begin and end, and writes this to a file when closed."""

    def __init__(self, seconds: float, slots: int, notes: str) -> None:
        super().__init__()
        self.seconds = seconds
        self.slots = slots
        self.notes = notes
        self.begun: list[float] = []
        self.ended: list[float] = []

    async def generate(self, work: GroupWork) -> Generated:
        self.begun.append(time.perf_counter())
        if self.seconds:
            await asyncio.sleep(self.seconds)
        self.ended.append(time.perf_counter())
        trajectories = [response([1], reward=1.0, version=self.version)]
        return Generated(group=TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=trajectories))

    async def close(self) -> None:
        """The i-th slot to become free is the i-th to be filled again. The first ones are left out, because they
        connect the actors."""
        waits = [begun - ended for begun, ended in zip(self.begun[self.slots :], self.ended, strict=False)]
        Path(self.notes).write_text(json.dumps(waits[2 * self.slots :]), encoding="utf-8")


class Absent(SimpleTrainer):
    """Trains nothing."""

    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> int:
        return 0


class Echo:
    """A context manager that measures the round trips of calls to an actor that does nothing."""

    def __init__(self) -> None:
        self.trips_ms: list[float] = []
        self._actor = ray.remote(EchoActor).options(num_cpus=0, max_concurrency=8).remote()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._call)

    def __enter__(self) -> "Echo":
        ray.get(self._actor.echo.remote())
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.trips_ms.sort()
        ray.kill(self._actor)

    def _call(self) -> None:
        while not self._ended.wait(ECHO_PAUSE_S):
            called = time.perf_counter()
            ray.get(self._actor.echo.remote())
            self.trips_ms.append(1000 * (time.perf_counter() - called))


class EchoActor:
    """Answers."""

    async def echo(self) -> None:
        return None


def make_rollout(directory: str, slots: int, seconds: float, replica: ReplicaId) -> Rollout:
    return Rollout(generator=Idle(seconds, slots, os.path.join(directory, f"waits-{replica}.json")))


def make_prompts() -> Prompts:
    return CountedPrompts(None, lambda group: Prompt(row=group, text="What is 1 + 1?", fields={"answer": "2"}))


def measure(
    name: str, *, seconds: float, generation_s: float, replicas: int, slots: int, batch: int, trajectories: str = "disk"
) -> float:
    """Run for a while and print a row of figures. Returns the groups consumed per second."""
    with tempfile.TemporaryDirectory(prefix="control-plane-") as directory:
        return _measure(name, Path(directory), seconds, generation_s, replicas, slots, batch, trajectories)


def _measure(
    name: str,
    directory: Path,
    seconds: float,
    generation_s: float,
    replicas: int,
    slots: int,
    batch: int,
    trajectories: str,
) -> float:
    limits = Limits(
        train_batch_size=batch,
        max_staleness_steps=10_000,
        max_concurrent_groups=replicas * slots,
        sync_every=10_000,  # no weights are sent, so a replica waits only for the control plane
    )
    plan = Plan(
        limits=limits,
        samples=1,
        replicas=replicas,
        slots=slots,
        make_rollout=partial(make_rollout, str(directory), slots, generation_s),
        make_trainer=Absent,
        make_prompts=make_prompts,
        run_dir=directory,
        trajectories=trajectories,
    )
    with start(plan) as run, Echo() as echo:
        before, began = run.traffic(), time.perf_counter()
        for status in run.updates():
            groups = status.step * batch
            if time.perf_counter() - began >= seconds:
                break
        elapsed, after = time.perf_counter() - began, run.traffic()
    waits = sorted(
        1000 * wait for path in directory.glob("waits-*.json") for wait in json.loads(path.read_text("utf-8"))
    )
    decisions = sorted(1000 * wait for wait in after.decisions_s)
    events = after.events - before.events
    calls = after.calls + after.reports - before.calls - before.reports
    print(
        f"{name:<10} {groups / elapsed:9.0f} groups/s  {events / elapsed:9.0f} events/s"
        f"  {calls / groups:6.3f} calls/group"
        f"  decision p50 {at(decisions, 0.5):5.2f} p99 {at(decisions, 0.99):6.2f} ms"
        f"  refill p50 {at(waits, 0.5):6.2f} p99 {at(waits, 0.99):7.2f} ms"
        f"  echo p50 {at(echo.trips_ms, 0.5):5.2f} p99 {at(echo.trips_ms, 0.99):6.2f} ms"
        f"  ({groups} groups, {replicas} replicas of {slots} slots)",
        flush=True,
    )
    return groups / elapsed


def at(ordered: Sequence[float], share: float) -> float:
    """A percentile of sorted figures."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def against_memory(turns: int, **options: Any) -> None:
    """Print the cost of trajectories on disk: medians of `turns` runs of each kind. The kinds take turns, so that other
    load on the machine affects both."""
    rates: dict[str, list[float]] = {"memory": [], "disk": []}
    for turn in range(turns):
        for kept in ("memory", "disk") if turn % 2 == 0 else ("disk", "memory"):
            rates[kept].append(measure(kept, generation_s=0.0, trajectories=kept, **options))
    memory, disk = median(rates["memory"]), median(rates["disk"])
    print(f"disk / memory: {disk / memory:.3f} ({disk:.0f} / {memory:.0f} groups/s, medians of {turns})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1024, help="groups per train step where saturated")
    parser.add_argument("--disk-against-memory", type=int, default=0, metavar="N", help="turns; 0: the usual rows")
    arguments = parser.parse_args()
    connect()
    options: dict[str, Any] = {"seconds": arguments.seconds, "replicas": arguments.replicas}
    if arguments.disk_against_memory:
        against_memory(arguments.disk_against_memory, slots=arguments.slots, batch=arguments.batch, **options)
        return
    rate = measure("saturated", generation_s=0.0, slots=arguments.slots, batch=arguments.batch, **options)
    slots = 64
    measure("half load", generation_s=2 * slots * arguments.replicas / rate, slots=slots, batch=64, **options)
    measure("light", generation_s=0.1, slots=8, batch=8, **options)
    print(
        f"targets: {SATURATED_PER_S} groups/s saturated, {HALF_LOAD_PER_S} at half load; there, the p99 of a decision "
        f"at most {ECHOES:g} times that of an echo"
    )


if __name__ == "__main__":
    main()
