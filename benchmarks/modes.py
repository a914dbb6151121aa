"""Compares the presets: real runs of four modes on three workloads, and the least time that their work could take.

Run by hand, on a quiet machine with two cores: `python benchmarks/modes.py [--steps 60] [--repeat 3] [--quick]`. It
uses the quickstart's model and task, with the same number of steps for every mode. Modes take turns, and figures are
medians. Rewards against wall-clock time are plotted into `--plot FILE` (PNG; needs the extra `bench`).

- *plain*: the quickstart's task, whose responses have a long tail.
- *slow rewards*: the same task, but each reward waits, without CPU, for a time that also has a long tail.
- *short*: short responses by a model that answers most questions right, so that most groups have equal rewards.

*K / slots* is `max_concurrent_groups` over the slots of all replicas. Two rows show the gain from slots that count
trajectories. In `fully_async, whole groups` K is that of the preset, but generators do not report ended trajectories
(this is optional), so a group keeps its slot until its last trajectory ends: only K is raised. In
`fully_async, K = slots`, K is also lowered to the number of slots.

`sync` uses both cores in every phase, with the thread split that was fastest in a trial at the start. The time of a run
is from the draw of its prompts to the end of its last train step. *Work* is CPU seconds over the threads that may do
it. No run can take less than the *bound*: the largest of the rollout's work, the trainer's work, and all CPU seconds
over the cores.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from engine.actors.launch import start
from engine.actors.private_cluster import connect
from engine.config import Config, load_config, parse_config
from engine.ids import ReplicaId
from engine.metrics.status import Status
from engine.plans.configured_plan import plan_of
from engine.protocols import Generated, GroupWork
from engine.tasks.arithmetic import reward
from engine.tasks.quickstart import Prepared, prepare
from engine.trajectory import Prompt, Trajectory
from engine.workers.plan import Rollout

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
CORES = 2
REWARD_MEDIAN_S, REWARD_SPREAD = 0.3, 0.7
"""Seconds that a slow reward waits: log-normal, 1.5 s at the 99th percentile."""
REWARD_SLOTS = 64
"""Number of groups whose slow rewards wait at once."""

WHOLE_GROUPS = "fully_async, whole groups"
AT_SLOTS = "fully_async, K = slots"
MODES: dict[str, list[str]] = {
    "sync": [],
    "one_step_off": [],
    "fully_async": [],
    WHOLE_GROUPS: [],
    AT_SLOTS: ["scheduler.max_concurrent_groups=16"],
    # The other modes' loss, which needs no scoring: the benchmark compares modes, not objectives.
    "partial_rollout": ["trainer.loss=ppo_clip", "pools=[{tasks: [rollout, train]}]"],
}
"""Overrides of each mode. The words before a comma name its preset."""


@dataclass(frozen=True)
class Workload:
    """A task on which the modes are compared."""

    made: tuple[str, ...] = ()
    """Overrides for the model and data that the engine makes."""
    runs: tuple[str, ...] = ()
    """Overrides of each run."""
    slow: bool = False
    """Whether rewards wait, in a separate pool."""


WORKLOADS = {
    "plain": Workload(),
    "slow rewards": Workload(slow=True),
    "short": Workload(
        made=("model.arithmetic.median_steps=1.5", "model.arithmetic.spread=0.4", "model.arithmetic.most_steps=4",
              "model.arithmetic.short_steps=4", "model.arithmetic.carelessness=0.05"),
        runs=("rollout.max_tokens=48",),
    ),
}  # fmt: skip

SPLITS = {"2 replicas x 1 thread": (2, 1), "1 replica x 2 threads": (1, 2)}
"""Ways for rollout to use both cores, as (replicas, threads). Each is tried with one and with two trainer threads."""
COLOCATED = {"sync": 16, "partial_rollout": 24}
"""Modes that use both cores in every phase, and their slots. They run with the split that is best for `sync`."""


COLUMNS = (
    "mode", "K / slots", "wall s", "over sync", "CPU busy", "idle slots", "idle trainer", "rollout s", "training s",
    "bound s", "of bound", "accuracy",
)  # fmt: skip


def keeping_slots(make_rollout: Callable[[ReplicaId], Rollout], replica: ReplicaId) -> Rollout:
    """A replica whose generator does not report ended trajectories."""
    rollout = make_rollout(replica)
    generate = rollout.generator.generate

    async def whole(work: GroupWork) -> Generated:
        return await generate(replace(work, finished=lambda count: None))

    rollout.generator.generate = whole  # type: ignore[method-assign]
    return rollout


def slow_reward(prompt: Prompt, trajectory: Trajectory) -> float:
    """The task's own reward, after a wait that depends on prompt and response."""
    draws = random.Random(f"{prompt.row} {trajectory.text}")
    time.sleep(REWARD_MEDIAN_S * draws.lognormvariate(0.0, REWARD_SPREAD))
    return reward(prompt, trajectory)


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One run, or the medians of several."""

    wall_s: float
    cpu_share: float
    """Busy share of all cores."""
    rollout_idle: float
    """Share of slot time without a group."""
    trainer_idle: float
    rollout_s: float
    """Work: seconds, if all threads share it."""
    train_s: float
    bound_s: float
    accuracy: float
    """Accuracy of the last weights on validation prompts."""
    workers: float
    """K over the slots of all replicas."""
    trained: float
    """Share of the tokens with a gradient. Those of groups with equal rewards have none."""
    curve: tuple[tuple[float, float], ...] = ()
    """(seconds, mean reward) of each step."""


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """The present name and the CPU seconds of this process and all its descendants, by process id."""
    seconds: dict[int, tuple[str, float]] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            seconds[process.pid] = (" ".join(process.cmdline()[:1]), used.user + used.system)
    return seconds


def until_trained(handle: Any) -> tuple[Status, float, dict[int, tuple[str, float]]]:
    """The status after the last train step, the time when it was seen, and the CPU times until then."""
    for status in handle.updates():
        if status.step == status.max_steps or status.outcome is not None:
            return status, time.perf_counter(), cpu_seconds()
    raise SystemExit("the run ended before its last step")


def measure(config: Config, run_dir: Path, *, whole_groups: bool) -> Measured:
    """Run to the end, including the last validation. `whole_groups`: each group keeps its slot until it ends."""
    run_dir.mkdir(parents=True)
    plan = plan_of(config, run_dir)
    if whole_groups:
        plan = replace(plan, make_rollout=partial(keeping_slots, plan.make_rollout))
    with start(plan) as handle:
        begun, before = time.perf_counter(), cpu_seconds()
        trained, ended, after = until_trained(handle)
        last = handle.wait() if trained.outcome is None else trained
    if last.outcome != "finished":
        raise SystemExit(f"{run_dir.name}: {last.outcome}, {last.reason}")
    wall = ended - begun
    used = [(name, seconds - before.get(pid, (name, 0.0))[1]) for pid, (name, seconds) in after.items()]
    total = sum(seconds for _, seconds in used)
    rollout, trainer = (
        sum(seconds for name, seconds in used if actor in name) for actor in ("RolloutActor", "TrainerActor")
    )
    rollout_s = rollout / min(CORES, config.rollout.replicas * config.rollout.threads)
    train_s = trainer / min(CORES, config.trainer.threads or CORES)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    return Measured(
        wall_s=wall,
        cpu_share=total / (CORES * wall),
        rollout_idle=trained.rollout_idle_share,
        trainer_idle=trained.trainer_idle_share,
        rollout_s=rollout_s,
        train_s=train_s,
        bound_s=max(rollout_s, train_s, total / CORES),
        accuracy=last.accuracy or 0.0,
        workers=config.scheduler.max_concurrent_groups / (config.rollout.replicas * config.rollout.slots),
        trained=statistics.fmean(row["trained_token_share"] for row in steps),
        curve=tuple((row["elapsed_s"], row["reward_mean"]) for row in steps),
    )


def median_of(runs: Sequence[Measured]) -> Measured:
    """The medians of all figures, and the curve of the run with the median time."""
    names = [name for name in Measured.__dataclass_fields__ if name != "curve"]
    middle = sorted(runs, key=lambda run: run.wall_s)[(len(runs) - 1) // 2]
    return Measured(
        **{name: statistics.median(getattr(run, name) for run in runs) for name in names}, curve=middle.curve
    )


# -- workloads ---------------------------------------------------------------------------------------------------------


class Bench:
    """The directory of all runs, and their common settings."""

    def __init__(self, directory: Path, steps: int, seed: int, warmup: Sequence[str]) -> None:
        self.directory = directory
        self.steps = steps
        self.runs = 0
        self.seed = seed
        self.made: dict[str, Prepared] = {}
        for name, workload in WORKLOADS.items():
            model = load_config(CONFIGS / "sync.yaml", [*workload.made, *warmup]).model.arithmetic
            self.made[name] = prepare(directory / "made", model)

    def config(self, mode: str, overrides: Sequence[str], name: str, steps: int) -> Config:
        """A preset on the model that was made for a workload."""
        made, workload = self.made[name], WORKLOADS[name]
        shared = [
            f"run.max_steps={steps}",
            f"run.seed={self.seed}",
            f"run.dir={self.directory / 'runs'}",
            "trainer.checkpoint_every=0",
            "validation.at_start=false",
            "validation.every=0",
            "metrics.port=0",
        ]
        preset, chosen = mode.split(",")[0], [*shared, *workload.runs, *MODES[mode], *overrides]
        tree = load_config(CONFIGS / f"{preset}.yaml", chosen).model_dump(mode="json")
        tree["model"] = {"path": made.model_path}
        tree["data"] |= {"path": made.training_path, "validation_path": made.validation_path}
        tree["reward"] |= {"function": "modes:slow_reward" if workload.slow else made.reward}
        if workload.slow:
            apart = tree["pools"] or [{"tasks": ["rollout"]}, {"tasks": ["train"]}]
            tree["pools"] = [*apart, {"tasks": ["reward"], "slots": REWARD_SLOTS}]
        return parse_config(tree)

    def run(self, mode: str, overrides: Sequence[str] = (), name: str = "plain", steps: int = 0) -> Measured:
        self.runs += 1
        run_dir = self.directory / "runs" / f"{self.runs:03d}-{mode.split(',')[0]}"
        config = self.config(mode, overrides, name, steps or self.steps)
        return measure(config, run_dir, whole_groups=mode in (WHOLE_GROUPS, AT_SLOTS))


Split = tuple[int, int, int]
"""Replicas, threads of each, threads of the trainer."""


def split_between(mode: str, replicas: int, threads: int, trainer: int) -> list[str]:
    """Overrides for the threads of a mode that uses both cores in every phase; empty for the other modes."""
    if mode not in COLOCATED:
        return []
    slots = COLOCATED[mode] // replicas
    rollout = [f"rollout.replicas={replicas}", f"rollout.slots={slots}", f"rollout.threads={threads}"]
    return [*rollout, f"trainer.threads={trainer}"]


def best_split(bench: Bench, steps: int) -> Split:
    """The thread split with which `sync` is fastest in runs of a few steps."""
    tried: dict[str, tuple[float, Split]] = {}
    for name, split in SPLITS.items():
        for threads in (1, 2):
            seconds = bench.run("sync", split_between("sync", *split, threads), steps=steps).wall_s
            tried[f"{name}, trainer {threads} thread{'s' * (threads > 1)}"] = (seconds, (*split, threads))
    for name, (seconds, _) in tried.items():
        print(f"sync, {steps} steps, {name}: {seconds:.1f} s")
    best = min(tried, key=lambda name: tried[name][0])
    print(f"{' and '.join(COLOCATED)} run with {best}")
    return tried[best][1]


def compare(bench: Bench, split: Split, repeat: int, name: str) -> dict[str, Measured]:
    runs: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for round_number in range(repeat):
        for mode, measured in runs.items():
            measured.append(bench.run(mode, split_between(mode, *split), name))
            told = f"{measured[-1].wall_s:.1f} s, accuracy {measured[-1].accuracy:.2f}"
            print(f"  {name}, {round_number + 1}/{repeat}, {mode}: {told}", file=sys.stderr, flush=True)
    return {mode: median_of(measured) for mode, measured in runs.items()}


def table(name: str, steps: int, repeat: int, modes: dict[str, Measured]) -> None:
    told = f"{statistics.fmean(m.trained for m in modes.values()):.0%} of the tokens have a gradient"
    print(f"\n{name}: {steps} steps, medians of {repeat}, {told}, load {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
    for mode, m in modes.items():
        print(
            f"| {mode} | {m.workers:.2f} | {m.wall_s:.1f} | {modes['sync'].wall_s / m.wall_s:.2f} x | "
            f"{m.cpu_share:.0%} | {m.rollout_idle:.0%} | {m.trainer_idle:.0%} | "
            f"{m.rollout_s:.1f} | {m.train_s:.1f} | {m.bound_s:.1f} | "
            f"{m.bound_s / m.wall_s:.0%} | {m.accuracy:.2f} |"
        )


def draw(workloads: dict[str, dict[str, Measured]], file: Path) -> None:
    """Plot mean reward against wall-clock time, with a panel for each workload."""
    try:
        import matplotlib
    except ImportError:
        print(f"\nno {file}: matplotlib is not installed (pip install -e '.[bench]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(workloads), figsize=(6 * len(workloads), 4), squeeze=False)
    for panel, (name, modes) in zip(panels[0], workloads.items(), strict=True):
        for mode, measured in modes.items():
            panel.plot(*zip(*measured.curve, strict=True), label=mode)
        panel.set(title=name, xlabel="wall-clock, s", ylabel="mean reward of a step", ylim=(0, 1))
        panel.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"\n{file}")


def main(steps: int, repeat: int, trial: int, plot: Path, seed: int, warmup: Sequence[str] = ()) -> None:
    sys.path.append(str(Path(__file__).resolve().parent))  # actors find `modes:slow_reward` there
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), steps, seed, warmup)
        connect()
        split = best_split(bench, trial)
        workloads = {name: compare(bench, split, repeat, name) for name in WORKLOADS}
    for name, modes in workloads.items():
        table(name, steps, repeat, modes)
    busy = workloads["slow rewards"]["sync"].cpu_share
    print(f"\nsync with slow rewards keeps {busy:.0%} of the CPU busy (declared: at most 60%)")
    draw(workloads, plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="train steps of each run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each mode; figures are medians")
    parser.add_argument("--trial", type=int, default=10, help="train steps of each trial of a thread split for sync")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, sampling and model")
    parser.add_argument("--plot", type=Path, default=Path("modes.png"), help="file of the plot")
    parser.add_argument("--quick", action="store_true", help="a few steps, once: shows whether it works, not how well")
    chosen = parser.parse_args()
    try:
        if chosen.quick:
            main(4, 1, 2, chosen.plot, chosen.seed, ["model.arithmetic.warmup_steps=20"])
        else:
            main(chosen.steps, chosen.repeat, chosen.trial, chosen.plot, chosen.seed)
    except KeyboardInterrupt:
        sys.exit("interrupted")
