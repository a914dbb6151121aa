"""Records of simulated runs, for the tests of what reads records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.policies import PolicySet
from engine.record import Header, Record, Recorder, read
from engine.record.recorder import MemoryRecorder
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits
from engine.states.state import State
from tests.oracle.worlds import RunReport

LIMITS = Limits(
    train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=8, sync_mode="abort", max_steps=6
)  # fmt: skip


def recorded(
    limits: Limits = LIMITS, steps: int | None = None, directory: Path | None = None, run: str = "r",
    until: Callable[[State], bool] | None = None, **setting: Any,
) -> Record:  # fmt: skip
    """The record of a run, in memory or in a directory; it breaks off after so many train steps, while groups run, or
    when `until` holds."""
    header = Header(run=run, limits=limits.to_plain(), policies=PolicySet.from_names({}).names)
    recorder = MemoryRecorder(header) if directory is None else Recorder(directory, header)
    world = World(Setting(limits=limits, **setting), recorder=recorder)

    def breaks_off(state: State) -> bool:
        return state.training.steps_trained == steps and state.groups.ledger.running > 0

    if steps is None and until is None:
        world.run()
    else:
        assert world.run_until(until or breaks_off)
        world.close()
    recorder.close()
    return read(recorder if directory is None else directory)


def faulty_record(**options: Any) -> Record:
    """With aborts, failures, filtered groups and lost replicas."""
    faults = Faults(die=0.08, fail_group=0.1)
    return recorded(seed=2, spread=0.7, faults=faults, prefix_every_tokens=5, **options)


def record_of(family: Any, number: int) -> Record:
    """The record of a world of a family of `tests.oracle.worlds`."""
    report = RunReport()
    family(number, report)
    recorder = MemoryRecorder(Header(run="world", limits=report.limits.to_plain(), policies=report.policies))
    for tick in report.ticks:
        recorder.write(tick.events, tick.commands)
    recorder.close()
    return read(recorder)
