"""The cost of recording, replaying and simulating, and how close a simulated run comes to its lower bound.

    python benchmarks/simulation.py

Prints the events per second of a run while it is recorded and while it is replayed, both in one process; the CPU
seconds of a simulated step of 1 024 groups, with rare garbage collection as in every command of the engine; and, for
three balances of generation and training, the virtual seconds of a run over their lower bound: max(tokens of all groups
/ slots, seconds of training). The longest group takes three times the mean time of a step, which S = 4 allows; with a
longer tail, a hard bound would make steps wait for it.
"""

import gc
import statistics
import tempfile
import time
from pathlib import Path

from scheduler import REPLICAS, Echo, Wall, drive

from engine.events import RunStarted
from engine.record import Header, Recorder, read
from engine.record.replayer import replay
from engine.runtime.driver import Driver
from engine.runtime.garbage_collection import rare_collection
from engine.scheduling.scheduler import Scheduler
from engine.simulation.world import Setting, World
from engine.states.limits import Limits

GROUPS, BATCH, STEPS = 20_000, 1024, 50
TOKEN_S = 10.0


def replay_ratio(directory: Path) -> tuple[float, float]:
    """(events/s recorded, events/s replayed) of the same run."""
    limits = Limits(train_batch_size=256, max_staleness_steps=3, max_concurrent_groups=1024)
    scheduler, echo = Scheduler(limits), Echo(1024 // REPLICAS)
    header = Header(run="benchmark", limits=limits.to_plain(), policies=dict(scheduler.policies.names))
    recorder = Recorder(directory, header)
    driver = Driver(scheduler, Wall(), recorder, echo)
    gc.collect()
    begin = time.perf_counter()
    driver.deliver(RunStarted(replicas=REPLICAS))
    drive(driver, echo, scheduler, GROUPS)
    recorder.close()
    recorded = driver.events_handled / (time.perf_counter() - begin)
    begin = time.perf_counter()
    report = replay(read(directory))
    assert report.divergence is None and report.events == driver.events_handled
    return recorded, report.events / (time.perf_counter() - begin)


def simulate(train_s: float) -> tuple[float, float]:
    """(CPU seconds of a step, virtual seconds over the lower bound) of a run with 1 024 groups per step."""
    replicas, slots = 16, 96
    limits = Limits(
        train_batch_size=BATCH, max_staleness_steps=4, max_concurrent_groups=replicas * slots, max_steps=STEPS
    )
    setting = Setting(
        limits=limits, replicas=replicas, slots=slots, prompts=BATCH * STEPS, train_s=train_s, sync_s=0.0,
        latency_s=0.0, mean_tokens=20.0, max_tokens=30, token_s=TOKEN_S,
    )  # fmt: skip
    world = World(setting)
    gc.collect()  # the world of the run before
    begin = time.process_time()
    with rare_collection():
        outcome = world.run()
    elapsed = time.process_time() - begin
    assert outcome.outcome == "finished"
    tokens = sum(world.dice.length(group) for group in range(BATCH * STEPS))
    return elapsed / STEPS, world.now() / max(tokens * TOKEN_S / (replicas * slots), world.trainer_busy_s)


def main() -> None:
    ratios = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as directory:
            ratios.append(replay_ratio(Path(directory) / "schedule"))
    recorded, replayed = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"recording {recorded:.0f} events/s, replaying {replayed:.0f} events/s: {replayed / recorded:.2f} x")
    for name, train_s in (("generation-bound", 20.0), ("balanced", 100.0), ("training-bound", 400.0)):
        cpu_s, ratio = simulate(train_s)
        print(f"{name:<17} {1000 * cpu_s:5.0f} ms of CPU per step of {BATCH} groups; {ratio:.3f} x its lower bound")
    print("targets: replay 0.8 x, 150 ms a step, 1.03 x the bound")


if __name__ == "__main__":
    main()
