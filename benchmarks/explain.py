"""The time of `engine explain` on a long record.

`python benchmarks/explain.py [--events 1000000]` simulates a run with about this number of events, records it in a
temporary directory with snapshots and a history log as in runs, and prints the seconds of reading its history and of
each question. The first reading uses the log, the second replays the record, the third uses the log that the second
wrote.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cli.recorded_run import HISTORY_OBJECTS
from engine.inspect.explanation import explain_group, explain_idle, explain_moment, explain_run, explain_step
from engine.inspect.history_reader import read_history
from engine.metrics.collector import RunMetrics
from engine.metrics.history_log import FILE, HistoryLog
from engine.policies import PolicySet
from engine.record import Header, Recorder, Tick
from engine.runtime.garbage_collection import collect_rarely, rare_collection
from engine.runtime.local.session import SNAPSHOT_EVERY
from engine.simulation.advice import advise
from engine.simulation.world import Setting, World
from engine.states.limits import Limits

BATCH, REPLICAS, SLOTS = 256, 16, 64
EVENTS_PER_GROUP = 2.25
"""One for its first trajectory, one for its last, and now and then one for a draw or a sync."""


def record(directory: Path, events: int) -> None:
    steps = round(events / EVENTS_PER_GROUP / BATCH)
    limits = Limits(
        train_batch_size=BATCH, max_staleness_steps=4, max_concurrent_groups=REPLICAS * SLOTS, max_steps=steps
    )
    setting = Setting(
        limits=limits, replicas=REPLICAS, slots=SLOTS, prompts=BATCH * steps, train_s=50.0, sync_s=1.0, latency_s=0.0,
        mean_tokens=20.0, max_tokens=60, token_s=10.0,
    )  # fmt: skip
    header = Header(run="long", limits=limits.to_plain(), policies=dict(PolicySet.from_names({}).names))
    recorder = Recorder(directory / "schedule", header)
    world = World(setting, recorder=recorder, snapshot_every=SNAPSHOT_EVERY)
    metrics, log = RunMetrics(world.scheduler), HistoryLog(directory)
    log.begin(world.scheduler, metrics, recorder)
    judge = world.driver.observe or (lambda tick: None)

    def observe(tick: Tick) -> None:
        metrics.observe(tick)
        log.take(tick)
        judge(tick)

    world.driver.observe = observe
    world.run(events=10 * events)
    recorder.close()
    log.close()


def timed(name: str, act: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = act()
    spent = time.perf_counter() - wall, time.process_time() - cpu
    print("{:14} {:8.2f} s wall {:8.2f} s CPU".format(name, *spent), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="about this number of events")
    events = parser.parse_args().events
    with tempfile.TemporaryDirectory() as folder, rare_collection():
        directory = Path(folder)
        timed("simulating", lambda: record(directory, events))
        collect_rarely(HISTORY_OBJECTS)  # as the commands do
        size = sum(path.stat().st_size for path in (directory / "schedule").iterdir())
        timed("reading", lambda: read_history(directory))
        (directory / FILE).unlink()
        timed("reading anew", lambda: read_history(directory))
        history = timed("reading again", lambda: read_history(directory))
        print(f"{history.events} events, {len(history.groups)} groups, {size / 2**20:.1f} MiB")
        timed("the run", lambda: str(explain_run(history)))
        timed("the advice", lambda: str(advise(history).lines))
        timed("a step", lambda: str(explain_step(history, 5)))
        timed("a group", lambda: str(explain_group(history, len(history.groups) // 2)))
        timed("a moment", lambda: str(explain_moment(history, history.end / 2)))
        timed("idle", lambda: str(explain_idle(history)))


if __name__ == "__main__":
    main()
