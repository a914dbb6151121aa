"""The cost of metrics: microseconds per group without them, with them, and with one scrape per second; milliseconds of
a scrape.

    python benchmarks/metrics.py [--live 1000 1000000]

Uses one core and no executor: driver, scheduler, machines, laws and record as in `scheduler.py`, on which this is
based. Scrapes come over HTTP, as from Prometheus, both alone and while the scheduler works as fast as it can. Garbage
is collected as in the scheduler's process.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from scheduler import REPLICAS, Echo, Wall, drive

from engine.events import RunStarted
from engine.metrics.collector import RunMetrics
from engine.metrics.export import ExternalFigures, registry
from engine.metrics.metrics_server import MetricsServer
from engine.metrics.transitions import Transitions
from engine.record.frames import Header
from engine.record.recorder import Recorder
from engine.runtime.driver import Driver
from engine.runtime.garbage_collection import collect_rarely, freeze_objects
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits

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
        transitions = Transitions() if metrics else None
        self.scheduler, self.echo = (
            Scheduler(limits, observe=None if transitions is None else transitions.changed),
            Echo(-(-live // REPLICAS)),
        )
        header = Header(run="benchmark", limits=limits.to_plain(), policies=dict(self.scheduler.policies.names))
        self.recorder = Recorder(directory, header)
        self.metrics = None if transitions is None else RunMetrics(self.scheduler, transitions)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--groups", type=int, default=40_000, help="groups timed per run")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    collect_rarely()
    freeze_objects()
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
