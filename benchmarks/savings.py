"""The gain from skipped work in the train step: trained groups per second of whole runs, with and without it.

    python benchmarks/savings.py [--steps 40] [--repeat 3] [--quick]

Runs `configs/quickstart.yaml` in one process, on its own task and on one whose answers have a longer tail. Each run has
a separate process; kinds take turns, and figures are medians. *Nothing saved* pads each trajectory to the longest of
its pass, and also computes trajectories of groups with equal rewards, whose gradient is zero. *Zero advantages* skips
these. *Everything* also packs rows without padding and computes shared prompts once, as the engine does by default. The
engine has no setting to compute trajectories without a gradient, so this benchmark replaces the property that marks
them. Figures are from the end of the first train step to the end of the last one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine.config import load_config
from engine.plans.configured_plan import plan_of
from engine.runtime.local import run_plan
from engine.training.batch import Sample

PRESET = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
TASKS: dict[str, list[str]] = {
    "quickstart": [],
    "long tail": [
        "model.arithmetic.median_steps=4", "model.arithmetic.spread=1.0", "model.arithmetic.most_steps=24",
        "rollout.max_tokens=160",
    ],
}  # fmt: skip
WANTED = 1.5


@dataclass(frozen=True)
class Kind:
    """The work that a run skips."""

    settings: tuple[str, ...] = ()
    passes_over: bool = True
    """Whether trajectories without an advantage are skipped."""


KINDS = {
    "nothing saved": Kind(("trainer.packing=off",), passes_over=False),
    "zero advantages": Kind(("trainer.packing=off",)),
    "everything": Kind(),
}


def measure(task: str, kind: str, directory: str, steps: int, quick: bool) -> dict[str, float]:
    """One run in this process."""
    shared = [
        f"run.max_steps={steps}", f"run.dir={directory}", "trainer.checkpoint_every=0", "validation.at_start=false",
        "validation.every=0", "validation.at_end=false", *(["model.arithmetic.warmup_steps=20"] if quick else []),
    ]  # fmt: skip
    config = load_config(PRESET, [*shared, *TASKS[task], *KINDS[kind].settings])
    if not KINDS[kind].passes_over:
        Sample.teaches_nothing = False  # type: ignore[assignment]
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    result = run_plan(plan_of(config, run_dir))
    if result.outcome != "finished":
        raise SystemExit(f"{task}, {kind}: {result.outcome}, {result.reason}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    each = [row for row in rows if "step" in row]
    seconds = each[-1]["elapsed_s"] - each[0]["elapsed_s"]
    return {
        "groups/s": config.scheduler.train_batch_size * (len(each) - 1) / seconds,
        "training s": sum(row["trainer_seconds"]["train"] for row in each[1:]),
        "tokens with a gradient": statistics.fmean(row["trained_token_share"] for row in each),
        "groups without an advantage": statistics.fmean(
            row["zero_advantage_groups"] / config.scheduler.train_batch_size for row in each
        ),
    }


def compare(task: str, directory: str, steps: int, repeat: int, quick: bool) -> None:
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(repeat):
        for kind, runs in found.items():
            asked = [sys.executable, __file__, f"--steps={steps}", *(["--quick"] if quick else [])]
            done = subprocess.run(
                [*asked, "--one", task, kind, directory], stdout=subprocess.PIPE, text=True, check=True
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
              for kind, runs in found.items()}  # fmt: skip
    plain = middle["nothing saved"]
    idle = middle["everything"]["groups without an advantage"]
    print(f"\n{task}: {steps} steps, medians of {repeat}, {idle:.0%} of the groups have equal rewards\n")
    print("| | groups/s | ratio | training s | tokens with a gradient |\n|---|---:|---:|---:|---:|")
    for kind, one in middle.items():
        print(
            f"| {kind} | {one['groups/s']:.1f} | {one['groups/s'] / plain['groups/s']:.2f} x | "
            f"{one['training s']:.1f} | {one['tokens with a gradient']:.0%} |"
        )
    ratio = middle["everything"]["groups/s"] / plain["groups/s"]
    print(f"\n{ratio:.2f} x the groups per second (wanted: {WANTED} x)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="train steps of each run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind; figures are medians")
    parser.add_argument("--quick", action="store_true", help="a few steps, once: shows whether it works, not how well")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "KIND", "DIRECTORY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        task, kind, directory = given.one
        print(json.dumps(measure(task, kind, directory, given.steps, given.quick)))
        return
    steps, repeat = (4, 1) if given.quick else (given.steps, given.repeat)
    with tempfile.TemporaryDirectory(prefix="savings-") as directory:
        for task in TASKS:
            compare(task, directory, steps, repeat, given.quick)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
