"""The cost of metrics: microseconds per group without them, with them, and with one scrape per second; milliseconds of
a scrape.

    python benchmarks/metrics.py [--live 1000 100000]
    python benchmarks/metrics.py --step

`--step`: milliseconds of CPU time of samples, response figures, health checks and idle accounting in one train step.

Uses one core and no executor: driver, scheduler, machines, laws and record as in `scheduler.py`, on which this is
based. Scrapes come over HTTP, as from Prometheus, both alone and while the scheduler works as fast as it can. Garbage
is collected as in the scheduler's process.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from scheduler import REPLICAS, Echo, Wall, drive

from engine.events import RunStarted
from engine.metrics.collector import RunMetrics
from engine.metrics.export import ExternalFigures, registry
from engine.metrics.health import WINDOW, findings
from engine.metrics.metrics_server import MetricsServer
from engine.protocols import Batch
from engine.record.frames import Header
from engine.record.recorder import Recorder
from engine.reward_histogram import HISTOGRAMS
from engine.runtime.driver import Driver
from engine.runtime.garbage_collection import collect_rarely, freeze_objects
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.storage.samples import BLOCKS, MERGE_EVERY, SamplePolicy
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup
from engine.workers.response_figures import response_figures, reward_histograms
from engine.workers.sample_keeper import SampleKeeper

SCRAPES, PAUSE_S = 40, 0.2
ASKS = """
import sys, time, urllib.request
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    with urllib.request.urlopen(sys.argv[1], timeout=30) as answer:
        answer.read()
    print(time.perf_counter() - began)
    time.sleep(float(sys.argv[3]))
"""


class Run:
    """A run of about `live` live groups, after its start."""

    def __init__(self, live: int, directory: Path, *, metrics: bool) -> None:
        self.batch = max(1, live // 4)
        limits = Limits(train_batch_size=self.batch, max_staleness_steps=3, max_concurrent_groups=live)
        self.scheduler, self.echo = Scheduler(limits), Echo(-(-live // REPLICAS))
        header = Header(run="benchmark", limits=limits.to_plain(), policies=dict(self.scheduler.policies.names))
        self.recorder = Recorder(directory, header)
        self.metrics = RunMetrics(self.scheduler) if metrics else None
        observe = None if self.metrics is None else self.metrics.observe
        self.driver = Driver(self.scheduler, Wall(), self.recorder, self.echo, observe)
        self.driver.deliver(RunStarted(replicas=REPLICAS))
        while self.echo.answers:
            self.driver.deliver(self.echo.answers.popleft())
        drive(self.driver, self.echo, self.scheduler, self.batch)

    def serve(self, directory: Path) -> MetricsServer:
        assert self.metrics is not None
        around = ExternalFigures(record=lambda: self.recorder.progress, directory=directory)
        return MetricsServer(registry(self.metrics, around))

    def microseconds(self, groups: int) -> float:
        gc.collect()
        began = time.process_time()
        drive(self.driver, self.echo, self.scheduler, groups)
        return 1e6 * (time.process_time() - began) / groups


def scrape(url: str) -> int:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return len(answer.read())


def scrapes(url: str) -> list[float]:
    """Wall milliseconds of scrapes, measured in another process."""
    command = [sys.executable, "-c", ASKS, url, str(SCRAPES), str(PAUSE_S)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [1e3 * float(seconds) for seconds in told.split()]


def go_through(run: Run, over: threading.Event) -> None:
    while not over.is_set():
        drive(run.driver, run.echo, run.scheduler, 256)


def cost(live: int, groups: int, runs: int) -> tuple[float, float, float]:
    """Microseconds per group: without metrics, with them, with one scrape per second. Medians of turns."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    with tempfile.TemporaryDirectory() as place:
        bare = Run(live, Path(place) / "bare", metrics=False)
        counted = Run(live, Path(place) / "counted", metrics=True)
        server = counted.serve(Path(place))
        for _ in range(runs):
            found[0].append(bare.microseconds(groups))
            found[1].append(counted.microseconds(groups))
            over = threading.Event()

            def scraping(over: threading.Event = over) -> None:
                while not over.wait(1.0):
                    scrape(server.url)

            thread = threading.Thread(target=scraping)
            thread.start()
            found[2].append(counted.microseconds(groups))
            over.set()
            thread.join()
        server.close()
    low, middle, high = (statistics.median(times) for times in found)
    return low, middle, high


def batch_of(groups: int, samples: int, tokens: int) -> Batch:
    """A batch of different responses with two rewards each, as a reward function leaves them."""
    found = []
    for group in range(groups):
        responses = [
            Trajectory(
                token_ids=[7] * tokens, logprobs=[-0.5] * tokens, spans=[Span(0, tokens, 0)], reward=float(one % 3),
                text=f"{group} {one} " * (tokens // 2), finish_reason="stop",
                reward_parts={"right": float(one % 2), "short": one / samples},
            )
            for one in range(samples)
        ]  # fmt: skip
        prompt = Prompt(row=group, text=f"What is {group} + {group}?")
        found.append(TrajectoryGroup(group=group, prompt=prompt, trajectories=responses))
    return Batch(step=0, groups=found, staleness=[0] * groups)


def of_a_step(groups: int, samples: int, tokens: int, runs: int = 10) -> None:
    """Print the CPU time of each part of a train step: of samples the mean, because their files are merged now and
    then, else medians. The first time, with its imports, does not count."""
    batch = batch_of(groups, samples, tokens)
    responses = response_figures(batch.groups) | {HISTOGRAMS: reward_histograms(batch.groups)}
    row = {"step": 0, "groups": groups, "tokens": groups * samples * tokens, "lr": 1e-6, **responses}
    rows = [row | {"step": step} for step in range(WINDOW)]
    with tempfile.TemporaryDirectory() as place:
        keeper = SampleKeeper(Path(place), SamplePolicy())
        counted = Run(1_000, Path(place) / "counted", metrics=True)
        bare = Run(1_000, Path(place) / "bare", metrics=False)
        steps = itertools.count()

        def keep() -> None:
            batch.step = next(steps)
            asyncio.run(keeper.keep_step(batch, ()))

        parts: dict[str, Callable[[], object]] = {
            "response figures and histograms": lambda: (
                response_figures(batch.groups),
                reward_histograms(batch.groups),
            ),
            "samples": keep,
            "health checks, once": lambda: findings(rows),
        }
        total = 0.0
        for name, work in parts.items():
            work()
            times = [_cpu_ms(work) for _ in range(BLOCKS["step"] + MERGE_EVERY if work is keep else runs)]
            total += (milliseconds := (statistics.mean if work is keep else statistics.median)(times))
            print(f"{name:<34} {milliseconds:8.2f} ms")
        turns = [(bare.microseconds(2_000), counted.microseconds(2_000)) for _ in range(5)]
        accounting = statistics.median(more - less for less, more in turns) * groups / 1e3
        print(f"{'idle accounting and all counters':<34} {accounting:8.2f} ms")
        print(f"{'together':<34} {total + accounting:8.2f} ms of CPU for {groups} x {samples} x {tokens} tokens")


def _cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", action="store_true", help="only the parts of a train step")
    parser.add_argument("--live", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--groups", type=int, default=40_000, help="groups timed per run")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    collect_rarely()
    freeze_objects()
    if args.step:
        of_a_step(groups=16, samples=8, tokens=32)
        of_a_step(groups=64, samples=8, tokens=1024)
        return
    bare, counted, scraped = cost(1_000, args.groups, args.runs)
    print(f"us/group  without {bare:.1f}  with metrics {counted:.1f}  scraped every second {scraped:.1f}", flush=True)
    print("live groups   scrape, nothing else: CPU ms  wall p50  max   while groups go through: wall p50  max")
    for live in args.live:
        with tempfile.TemporaryDirectory() as place:
            run = Run(live, Path(place) / "schedule", metrics=True)
            server = run.serve(Path(place))
            began = time.process_time()
            idle = scrapes(server.url)
            busy_ms = 1e3 * (time.process_time() - began) / SCRAPES
            over = threading.Event()
            thread = threading.Thread(target=go_through, args=(run, over))
            thread.start()
            loaded = scrapes(server.url)
            over.set()
            thread.join()
            server.close()
            figures = (busy_ms, statistics.median(idle), max(idle), statistics.median(loaded), max(loaded))
            print(f"{live:>11} " + " ".join(f"{figure:>10.1f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
