"""Seconds to read the history of a recorded run, the first time and again, and to write its Perfetto trace and its
report.

    python benchmarks/inspection.py [--groups 100000] [--together 64]

The first reading replays the record, and writes its history log. The record is that of `benchmarks/scheduler.py`: 16
replicas with 16 slots each, batches of 64 groups, new weights on every replica after each step. `--together` is the
number of events that arrive at once: 64 is a run whose scheduler is busy all the time, 1 is one whose events arrive
alone, where every event costs a whole tick.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import scheduler as machine

from engine.cli.recorded_run import HISTORY_OBJECTS
from engine.events import RunStarted
from engine.inspect.history_reader import read_history
from engine.inspect.report import report_html
from engine.inspect.timeline import timeline_of
from engine.inspect.timeline_files import write_perfetto
from engine.record import Header, Recorder
from engine.runtime.driver import Driver
from engine.runtime.garbage_collection import collect_rarely, rare_collection
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits

BATCH = machine.REPLICAS * machine.SLOTS // (machine.STALENESS + 1)
Result = TypeVar("Result")


def make_record(directory: Path, groups: int) -> None:
    """Record a run until `groups` groups are consumed."""
    limits = Limits(
        train_batch_size=BATCH, max_staleness_steps=machine.STALENESS,
        max_concurrent_groups=machine.REPLICAS * machine.SLOTS,
    )  # fmt: skip
    scheduler, echo = Scheduler(limits), machine.Echo(machine.SLOTS)
    header = Header(run="benchmark", limits=limits.to_plain(), policies=dict(scheduler.policies.names))
    recorder = Recorder(directory / "schedule", header)
    driver = Driver(scheduler, machine.Steady(), recorder, echo, snapshot_every=25_000)
    driver.deliver(RunStarted(replicas=machine.REPLICAS))
    machine.drive(driver, echo, scheduler, groups)
    recorder.close()


def timed(name: str, work: Callable[[], Result]) -> Result:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    print(f"{name:<22} {time.perf_counter() - wall:>7.1f} s wall {time.process_time() - cpu:>7.1f} s CPU", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--together", type=int, default=64)
    arguments = parser.parse_args()
    machine.TOGETHER = arguments.together
    with tempfile.TemporaryDirectory() as place, rare_collection():
        directory = Path(place)
        timed("make the record", lambda: make_record(directory, arguments.groups))
        collect_rarely(HISTORY_OBJECTS)  # as the commands do
        timed("read the history", lambda: read_history(directory))
        history = timed("read it again", lambda: read_history(directory))
        print(f"{history.events} events in {history.ticks} ticks, {len(history.attempts)} attempts")
        timeline = timed("make the timeline", lambda: timeline_of(history))
        timed("write the trace", lambda: write_perfetto(timeline, directory / "trace.json"))
        page = timed("write the report", lambda: report_html(timeline))
        trace = (directory / "trace.json").stat().st_size
        print(f"trace {trace / 1e6:.1f} MB, report {len(page) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
