"""What a group costs in a real run over Ray: CPU time of each process, and the calls between processes by method.

    python benchmarks/group_cost.py [--steps 60] [--skip 15] [--set PATH=VALUE ...] [--directory D]

It runs the quickstart on a task with shorter answers, so that there are many groups, and prints figures per trained
group for the steps after the first `--skip`. Ray's calls are counted where they are made, in the scheduler, the
replicas and the trainer; the stores are hardly callers. The model is made once in `--directory`.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from engine.actors.launch import start
from engine.actors.private_cluster import connect
from engine.config import load_config, parse_config
from engine.plans.configured_plan import plan_of
from engine.tasks.quickstart import prepare

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
SHORT = (
    "model.arithmetic.median_steps=1.5", "model.arithmetic.spread=0.4", "model.arithmetic.most_steps=4",
    "model.arithmetic.short_steps=4", "rollout.max_tokens=48", "validation.at_start=false", "validation.every=0",
    "trainer.checkpoint_every=0", "metrics.port=0",
)  # fmt: skip
CONTROL = ("SchedulerActor", "TrajectoryStoreActor", "WeightsStoreActor")
"""The processes that only pass things on."""
AFTER = 10
"""Steps of the run after the measured ones: its processes still run at the last measurement."""
EVERY_S = 0.25
"""Seconds between two notes of a process."""


def counting(directory: str, make: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call `make`, in a process whose calls to actors are counted from now on."""
    from ray.actor import ActorMethod

    if not hasattr(ActorMethod, "counted"):
        calls: Counter[str] = Counter()
        remote, noted = ActorMethod._remote, 0.0
        file = Path(directory) / f"{os.getpid()}.json"

        def counted(method: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal noted
            calls[method._method_name] += 1
            if time.monotonic() > noted + EVERY_S:
                file.with_suffix(".new").write_text(json.dumps(dict(calls)))
                file.with_suffix(".new").replace(file)
                noted = time.monotonic()
            return remote(method, *args, **kwargs)

        ActorMethod._remote, ActorMethod.counted = counted, True
    return make(*given, **options)


def calls_in(directory: Path) -> Counter[str]:
    return sum((Counter(json.loads(file.read_text())) for file in directory.glob("*.json")), Counter[str]())


def cpu_seconds() -> Counter[str]:
    """By class of actor."""
    used: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            name, times = process.cmdline()[:1], process.cpu_times()
        except psutil.Error:
            continue
        if name and name[0].startswith("ray::"):
            used[name[0].removeprefix("ray::").partition(".")[0]] += times.user + times.system
    return used


def measure(arguments: argparse.Namespace, directory: Path) -> None:
    chosen = [*SHORT, f"run.max_steps={arguments.steps + AFTER}", f"run.dir={directory}", *arguments.set]
    config = load_config(QUICKSTART, chosen)
    assert config.model.arithmetic is not None
    made = prepare(Path(arguments.directory or directory), config.model.arithmetic)
    tree = config.model_dump(mode="json")
    tree["model"] = {"path": made.model_path}
    tree["data"] |= {"path": made.training_path, "validation_path": made.validation_path}
    tree["reward"] |= {"function": made.reward}
    run_dir, counts = directory / "run", directory / "calls"
    for place in (run_dir, counts):
        place.mkdir()
    plan = plan_of(parse_config(tree), run_dir)
    counted = partial(partial, counting, str(counts))
    plan = replace(
        plan, make_prompts=counted(plan.make_prompts), make_rollout=counted(plan.make_rollout),
        make_trainer=counted(plan.make_trainer),
    )  # fmt: skip
    first: tuple[int, float, Counter[str], Counter[str]] | None = None
    with start(plan) as run:
        for status in run.updates():
            if status.step >= arguments.skip and first is None:
                first = status.step, time.perf_counter(), cpu_seconds(), calls_in(counts)
            last = status.step, time.perf_counter(), cpu_seconds(), calls_in(counts)
            if status.step >= arguments.steps:
                break
    assert first is not None
    groups = (last[0] - first[0]) * config.scheduler.train_batch_size
    cpu, calls = last[2] - first[2], last[3] - first[3]
    control = 1000 * sum(cpu[name] for name in CONTROL) / groups
    print(f"{groups} groups at {groups / (last[1] - first[1]):.1f}/s, load {os.getloadavg()[0]:.1f}")
    print(
        f"scheduler and stores: {control:.2f} ms of CPU per group; {sum(calls.values()) / groups:.2f} calls per group"
    )
    print("CPU ms per group:", ", ".join(f"{name} {1000 * cpu[name] / groups:.2f}" for name in cpu))
    print("calls per group:", ", ".join(f"{name} {count / groups:.3f}" for name, count in calls.most_common()))


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time and calls of one group in the quickstart over Ray.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=15, help="first steps that are not measured")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a field")
    parser.add_argument("--directory", help="where the model is made, or was")
    arguments = parser.parse_args()
    connect()
    with tempfile.TemporaryDirectory(prefix="group-cost-") as directory:
        measure(arguments, Path(directory))


if __name__ == "__main__":
    main()
