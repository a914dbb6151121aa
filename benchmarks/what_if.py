"""Compares `engine whatif` with real runs: what it predicts from one recorded run, and what the changed run measured.

    python benchmarks/what_if.py [--runs DIR] [--workloads quickstart,rewards,tools] [--steps 96] [--repeat 2]

Three workloads on the cores of this machine, each with a base run and runs that change one setting. Real runs take
half a minute each and are kept in DIR, so that an interrupted benchmark continues. Run it on a quiet machine: equal
runs differ, so each is repeated, and medians are compared. Prints, for each change, the seconds per train step, the
mean staleness, and the largest difference of a share of slot or trainer time, in points.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from engine.config import load_config
from engine.inspect.history_reader import read_history
from engine.metrics.history import History
from engine.simulation.calibration import window_of
from engine.simulation.schedule import configured_schedule, recorded_schedule
from engine.simulation.what_if import ScheduleFigures, calibrated, figures_of
from engine.tasks.quickstart import prepare

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
REWARD = """\
import time, zlib

def slow(prompt, trajectory):
    share = zlib.crc32(trajectory.text.encode()) % 1000 / 1000
    time.sleep(0.02 + 0.2 * share ** 4)
    from engine.tasks.arithmetic import reward
    return reward(prompt, trajectory)
"""
WINDOW = 64
"""Train steps at the end of a run that are compared."""
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
    async def step(self, turn):
        await asyncio.sleep(0.05)
        return super().step(turn)
"""


class Pair(NamedTuple):
    """What was predicted of a changed run, and what it measured: medians over the repeated runs."""

    workload: str
    change: str
    predicted: list[ScheduleFigures]
    measured: list[ScheduleFigures]

    def medians(self, figure: Callable[[ScheduleFigures], float]) -> tuple[float, float]:
        """(predicted, measured)"""
        return median(map(figure, self.predicted)), median(map(figure, self.measured))

    @property
    def step_error(self) -> float:
        mine, theirs = self.medians(lambda one: one.step_s)
        return mine / theirs - 1

    @property
    def staleness_error(self) -> float:
        """In train steps."""
        mine, theirs = self.medians(lambda one: one.staleness)
        return abs(mine - theirs)

    @property
    def share_error(self) -> tuple[float, str]:
        """(points, cause) of the largest difference of a share of slot or trainer time."""
        found = [(0.0, "")]
        for kind in ("trainer", "slots"):
            for name in {name for one in (*self.predicted, *self.measured) for name in getattr(one, kind)}:
                predicted, measured = (
                    median(getattr(one, kind).get(name, 0.0) for one in runs)
                    for runs in (self.predicted, self.measured)
                )
                found.append((abs(predicted - measured), name))
        return max(found)

    def __str__(self) -> str:
        (mine, theirs), stale = self.medians(lambda one: one.step_s), self.medians(lambda one: one.staleness)
        points, cause = self.share_error
        spread = max(one.step_s for one in self.measured) / min(one.step_s for one in self.measured) - 1
        return (
            f"| {self.workload} | {self.change} | {mine:.3f} | {theirs:.3f} | {self.step_error:+.1%} | {spread:.0%} "
            f"| {stale[0]:.2f} | {stale[1]:.2f} | {100 * points:.0f} ({cause.replace('_', ' ')}) |"
        )


def settings_of(directory: Path, workload: str, settings: Sequence[str], steps: int) -> tuple[Path, list[str]]:
    """The preset of a workload, and all settings of one of its runs."""
    preset, base, _ = WORKLOADS[workload]
    for file, text in (("slow_reward.py", REWARD), ("slow_tool.py", TOOL)):
        (directory / file).write_text(text)
    found = [f"run.code_dir={directory}", *NOTHING_ELSE, *base, f"run.max_steps={steps}", *settings]
    if workload == "rewards":  # a reward of one's own needs a model and data of one's own
        made = prepare(directory / "made", load_config(CONFIGS / preset).model.arithmetic)
        found += ["model.make=null", f"model.path={made.model_path}", f"data.path={made.training_path}"]
    return CONFIGS / preset, found


def run(directory: Path, workload: str, settings: Sequence[str], steps: int, seed: int) -> History:
    """The history of a real run; it is made once."""
    words = [one.split(".")[-1].replace("=", "") for one in settings]
    name = "-".join([workload, str(steps), *words, str(seed)])
    known = directory / f"{name}.path"
    if not known.exists():
        preset, overrides = settings_of(directory, workload, settings, steps)
        overrides += [f"run.dir={directory}", f"run.name={name}", f"run.seed={seed}"]
        command = [sys.executable, "-m", "engine", "run", str(preset)]
        with (directory / f"{name}.log").open("w") as log:
            flags = [part for one in overrides for part in ("--set", one)]
            subprocess.run([*command, *flags], stdout=log, stderr=log, check=True)
        newest = max(directory.glob(f"*-{name}"), key=lambda path: path.stat().st_mtime)
        known.write_text(str(newest))
    return read_history(known.read_text())


def pairs(directory: Path, workload: str, steps: int, repeat: int) -> list[Pair]:
    """Every change of a workload. Each of the repeated base runs predicts, and each change is measured as often."""
    changes = WORKLOADS[workload][2]
    seeds = range(repeat)
    bases = [run(directory, workload, [], steps, seed) for seed in seeds]
    found = [calibrated(history, recorded_schedule(history), steps=WINDOW) for history in bases]
    every = [Pair(workload, "(as recorded)", [one.simulated for one in found], [one.recorded for one in found])]
    print(every[0], flush=True)
    for settings in changes:
        runs = [run(directory, workload, settings, steps, seed) for seed in seeds]
        measured = [figures_of(window_of(history, WINDOW)) for history in runs]
        preset, chosen = settings_of(directory, workload, settings, steps)
        schedule = configured_schedule(load_config(preset, chosen))
        predicted = [one.predict(schedule, seed) for one in found for seed in range(3)]
        every.append(Pair(workload, " ".join(settings), predicted, measured))
        print(every[-1], flush=True)
    return every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("build/what_if"), help="directory of the real runs")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=2, help="real runs of each change")
    parser.add_argument("--json", type=Path, help="write the figures there, for benchmarks/scorecard.py")
    arguments = parser.parse_args()
    directory: Path = arguments.runs.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    print(
        "| workload | change | s/step predicted | measured | error | spread | staleness predicted | measured ", end=""
    )
    print("| largest difference of a share, points |\n|---|---|---:|---:|---:|---:|---:|---:|---|")
    names = arguments.workloads.split(",")
    found = [pair for name in names for pair in pairs(directory, name, arguments.steps, arguments.repeat)]
    changed = [pair for pair in found if pair.change != "(as recorded)"]
    errors = [abs(pair.step_error) for pair in changed]
    shares = [pair.share_error[0] for pair in changed]
    stale = [pair.staleness_error for pair in changed]
    print(f"\n{len(changed)} pairs: seconds per step: median {median(errors):.1%}, "
          f"{sum(error <= 0.1 for error in errors)} within 10 %, worst {max(errors):.1%}")  # fmt: skip
    print(f"largest share: median {100 * median(shares):.1f} points, "
          f"{sum(share <= 0.1 for share in shares)} within 10; staleness: median {median(stale):.2f} steps, "
          f"{sum(one <= 0.1 for one in stale)} within 0.1")  # fmt: skip
    if arguments.json:
        rows: list[Any] = [[one.workload, one.change, *one.medians(lambda one: one.step_s)] for one in found]
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
