"""Compares `engine whatif` with real runs: what it predicts from one recorded run, and what the changed run measured.

    python benchmarks/what_if.py --runs DIR [--workloads quickstart,rewards,tools] [--steps 96]

Three workloads on the cores of this machine, each with a base run and runs that change one setting. Real runs take
about a minute each and are kept in DIR, so that an interrupted benchmark continues. Run it on a quiet machine. Prints,
for each pair, the seconds per train step, the mean staleness, and the largest difference of a share of slot or trainer
time, in points.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import load_config
from engine.inspect.history_reader import read_history
from engine.metrics.history import History
from engine.simulation.calibration import window_of
from engine.simulation.schedule import configured_schedule, recorded_schedule
from engine.simulation.what_if import ScheduleFigures, calibrated, figures_of

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
REWARD = """\
import time, zlib

def slow(prompt, trajectory):
    share = zlib.crc32(trajectory.text.encode()) % 1000 / 1000
    time.sleep(0.02 + 0.2 * share ** 4)
    from engine.tasks.arithmetic import reward
    return reward(prompt, trajectory)
"""
NOTHING_ELSE = ["validation.every=0", "trainer.checkpoint_every=0", "run.epochs=null"]
WORKLOADS: dict[str, tuple[str, list[str], list[list[str]]]] = {
    "quickstart": ("quickstart.yaml", [], [
        ["scheduler.max_staleness_steps=0", "scheduler.max_concurrent_groups=16"],
        ["scheduler.max_staleness_steps=1"],
        ["scheduler.max_staleness_steps=4", "scheduler.max_concurrent_groups=48"],
        ["scheduler.max_concurrent_groups=16"],
        ["scheduler.max_concurrent_groups=24"],
        ["scheduler.sync_every=2"],
        ["rollout.slots=4"],
        ["rollout.slots=16"],
        ["rollout.replicas=1"],
        ["rollout.sync_mode=abort"],
        ["scheduler.train_batch_size=8", "scheduler.max_concurrent_groups=24"],
        ["scheduler.samples_per_prompt=4"],
    ]),
    "rewards": ("quickstart.yaml", ["reward.function=slow_reward:slow", "reward.concurrency=8"], [
        ["reward.concurrency=4"],
        ["reward.concurrency=16"],
        ["scheduler.max_staleness_steps=0", "scheduler.max_concurrent_groups=16"],
        ["scheduler.max_staleness_steps=4", "scheduler.max_concurrent_groups=64"],
        ["scheduler.max_concurrent_groups=48"],
        ["rollout.replicas=3"],
    ]),
    "tools": ("environment.yaml", ["environment.class_name=slow_tool:SlowLookup"], [
        ["scheduler.max_staleness_steps=0", "scheduler.max_concurrent_groups=16"],
        ["scheduler.max_staleness_steps=1"],
        ["scheduler.max_concurrent_groups=16"],
        ["rollout.slots=4"],
        ["rollout.replicas=1"],
        ["scheduler.sync_every=3"],
    ]),
}  # fmt: skip
"""Preset, settings of the base run, and the changes."""
TOOL = """\
import asyncio
from engine.environments.lookup import Lookup

class SlowLookup(Lookup):
    async def step(self, *given, **named):
        await asyncio.sleep(0.05)
        found = super().step(*given, **named)
        return await found if asyncio.iscoroutine(found) else found
"""


class Pair(NamedTuple):
    """A predicted and a measured run."""

    workload: str
    change: str
    predicted: ScheduleFigures
    measured: ScheduleFigures

    @property
    def step_error(self) -> float:
        return abs(self.predicted.step_s / self.measured.step_s - 1)

    @property
    def staleness_error(self) -> float:
        """In train steps."""
        return abs(self.predicted.staleness - self.measured.staleness)

    @property
    def share_error(self) -> tuple[float, str]:
        """(points, cause) of the largest difference of a share."""
        found = [(0.0, "")]
        for mine, theirs in (
            (self.predicted.trainer, self.measured.trainer),
            (self.predicted.slots, self.measured.slots),
        ):
            found += [(abs(mine.get(name, 0.0) - theirs.get(name, 0.0)), name) for name in {**mine, **theirs}]
        return max(found)


def run(directory: Path, workload: str, settings: Sequence[str], steps: int) -> History:
    """The history of a real run; it is made once."""
    preset, base, _ = WORKLOADS[workload]
    name = "-".join([workload, str(steps), *(one.split(".")[-1].replace("=", "") for one in settings)]) or workload
    known = directory / f"{name}.path"
    if not known.exists():
        overrides = [
            *NOTHING_ELSE,
            *base,
            f"run.max_steps={steps}",
            *settings,
            f"run.dir={directory}",
            f"run.name={name}",
        ]
        flags = [part for one in overrides for part in ("--set", one)]
        for file, text in (("slow_reward.py", REWARD), ("slow_tool.py", TOOL)):
            (directory / file).write_text(text)
        command = [
            sys.executable,
            "-m",
            "engine",
            "run",
            str(CONFIGS / preset),
            "--set",
            f"run.code_dir={directory}",
            *flags,
        ]
        with (directory / f"{name}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True)
        newest = max(directory.glob(f"*-{name}"), key=lambda path: path.stat().st_mtime)
        known.write_text(str(newest))
    return read_history(known.read_text())


def pairs(directory: Path, workload: str, steps: int) -> list[Pair]:
    preset, base, changes = WORKLOADS[workload]
    history = run(directory, workload, [], steps)
    calibration = calibrated(history, recorded_schedule(history), steps=64)
    found = [Pair(workload, "(as recorded)", calibration.simulated, calibration.recorded)]
    print(_row(found[0]), flush=True)
    for settings in changes:
        measured = run(directory, workload, settings, steps)
        schedule = configured_schedule(load_config(CONFIGS / preset, [*NOTHING_ELSE, *base, *settings]))
        seeds = [calibration.predict(schedule, seed) for seed in range(3)]
        chosen = sorted(seeds, key=lambda one: one.step_s)[1]
        found.append(Pair(workload, " ".join(settings), chosen, figures_of(window_of(measured, 64))))
        print(_row(found[-1]), flush=True)
    return found


def _row(one: Pair) -> str:
    points, cause = one.share_error
    mine, theirs = one.predicted, one.measured
    error = mine.step_s / theirs.step_s - 1
    return (
        f"| {one.workload} | {one.change} | {mine.step_s:.3f} | {theirs.step_s:.3f} | {error:+.1%} "
        f"| {mine.staleness:.2f} | {theirs.staleness:.2f} | {100 * points:.0f} ({cause}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the real runs")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    print(
        "| workload | change | s/step predicted | measured | error | staleness predicted | measured | share, points |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---|")
    found = [
        pair
        for name in arguments.workloads.split(",")
        for pair in pairs(arguments.runs.resolve(), name, arguments.steps)
    ]
    changed = [pair for pair in found if pair.change != "(as recorded)"]
    errors = [pair.step_error for pair in changed]
    shares = [pair.share_error[0] for pair in changed]
    stale = [pair.staleness_error for pair in changed]
    print(f"\n{len(changed)} pairs: seconds per step: median {statistics.median(errors):.1%}, "
          f"{sum(error <= 0.1 for error in errors)} within 10 %, worst {max(errors):.1%}")  # fmt: skip
    print(f"largest share: median {100 * statistics.median(shares):.1f} points, "
          f"{sum(share <= 0.1 for share in shares)} within 10; staleness: median {statistics.median(stale):.2f} steps, "
          f"{sum(one <= 0.1 for one in stale)} within 0.1")  # fmt: skip
    if arguments.json:
        rows: list[Any] = [[one.workload, one.change, one.predicted.step_s, one.measured.step_s] for one in found]
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
