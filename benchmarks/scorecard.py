"""Compares what the simulated world predicts with published runs, and with real ones: the tables of docs/SCORECARD.md.

    python benchmarks/scorecard.py [--measured FILE]

`published.yaml` describes the published runs. What it does not give follows from one set of rules for all, which the
page states. No figure is fitted to a published ratio. `--measured`: what `what_if.py --json FILE` wrote.
"""

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from math import ceil, exp
from pathlib import Path
from statistics import NormalDist, median
from typing import Any, NamedTuple

import yaml

from engine.config.workload import typical, workload_of
from engine.simulation.schedule import configured_schedule
from engine.simulation.what_if import Interval, predicted

PUBLISHED = Path(__file__).resolve().with_name("published.yaml")
PAGE = PUBLISHED.parents[1] / "docs" / "SCORECARD.md"
CLOSE, SEEDS = 0.15, 3
GROUPS, STEPS = 64, 8
"""Groups of a simulated step, at most; published steps whose time is taken."""
MFU, DECODE_FLOPS, BANDWIDTH, CACHE, LOOP_S, MOST = 0.4, 0.6, 0.8, 0.8, 0.006, 1024
SPREAD, WITHIN, PARTS = 0.6, 0.5, 32
UNBOUNDED = 16
"""verl and AReaL bound how much is generated ahead, not how old a group becomes: this bound never makes a step wait."""


def lengths(mean: float, limit: int) -> list[float]:
    """Mean lengths of groups at equal shares: log-normal up to the last share, which rises to the limit."""
    shape = [exp(SPREAD * NormalDist().inv_cdf(max(part / PARTS, 0.01))) for part in range(PARTS)]
    scale = (mean - limit / PARTS / 2) / typical([*shape, 0.0])
    return [*(round(scale * one, 1) for one in shape), float(limit)]


class Scale(NamedTuple):
    """The size of a simulated run."""

    groups: int
    replicas: int
    stands_for: float
    """Responses for which a simulated one stands."""

    @property
    def slots(self) -> int:
        return ceil(self.groups / self.replicas)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A synchronous run and another one, as a source compares them. The fields are those of `published.yaml`."""

    source: str
    setup: str
    published: Sequence[float]
    model: Mapping[str, float]
    gpu: Mapping[str, float]
    tp: int
    gpus: int
    groups: int
    samples: int
    limit: int
    mean: float = 0.0
    passes: Sequence[int] = (0, 0)
    times: Mapping[str, float] = field(default_factory=dict)
    mode: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    generating: int
    training: int
    update_s: float | None = None
    forward: bool = True
    scoring: int = 0

    def _pass_s(self, gpus: int) -> float:
        """Seconds of a forward pass over one token of every response of a step: 2 FLOPs for each parameter."""
        return 2e-3 * self.model["params"] * self.groups * self.samples / (gpus * self.gpu["tflops"] * MFU)

    @property
    def length(self) -> float:
        """The mean; an update is three forward passes."""
        return self.mean or self.times["update"] / (3 * self._pass_s(self.gpus))

    def train_s(self, asynchronous: bool) -> float:
        """Seconds of a published step, without generation and what has GPUs of its own."""
        times = self.times
        if "step" not in times:
            gpus = self.training if asynchronous else self.gpus
            return (3 + self.passes[asynchronous]) * self.length * self._pass_s(gpus)
        if not asynchronous:
            return times["step"] - times["decoding"]
        more = self.gpus / self.training
        rest = times["step"] - times["generation"] - times["forward"] - times["update"]
        return (self.update_s or more * times["update"]) + self.forward * more * times["forward"] + rest

    def tree(self, asynchronous: bool, slower: float) -> tuple[dict[str, Any], Scale]:
        """The workload of one side."""
        gpu, model = self.gpu, self.model
        groups, real = min(GROUPS, self.groups), (self.generating if asynchronous else self.gpus) // self.tp
        replicas = max(1, round(real * groups / self.groups))
        at = Scale(groups, replicas, (self.groups / real) / (groups / replicas))
        bandwidth_gb = 1000 * self.tp * gpu["bandwidth_tb"] * BANDWIDTH
        held = 1e6 * (self.tp * gpu["memory_gb"] * CACHE - model["weights_gb"]) / (model["cache_kb"] * self.length)
        response_s = 1e-6 * model["cache_kb"] * self.length / 2 / bandwidth_gb
        response_s += 2e-3 * model["params"] / (self.tp * gpu["tflops"] * DECODE_FLOPS)
        settings = MODES[self.mode](at, **self.arguments) if asynchronous else sync(at)
        settings["scheduler"]["samples_per_prompt"] = self.samples
        settings["rollout"] |= {"replicas": at.replicas, "max_tokens": self.limit}
        share = settings["scheduler"]["train_batch_size"] / at.groups
        return {
            "settings": settings | {"validation": {"at_start": False, "at_end": False}},
            "responses": {"tokens": lengths(self.length, self.limit), "spread": WITHIN, "max_tokens": self.limit},
            "replica": {
                "step_s": slower * (LOOP_S + model["weights_gb"] / bandwidth_gb),
                "response_s": slower * at.stands_for * response_s,
                "most_responses": max(1, round(min(MOST, held) / at.stands_for)),
            },
            "trainer": {
                "step_s": self.train_s(asynchronous) * share,
                "score_s": self.length * self._pass_s(self.scoring) if self.scoring else 0.0,
            },
        }, at

    def seconds(self, asynchronous: bool, seed: int) -> float:
        """Of a published step, or of its generation if the source gives only that."""
        slower, published = 1.0, self.times.get("decoding", self.times.get("generation"))
        if published is not None:
            slower = published / (self._simulated(False, 1.0, 0) - self.train_s(False))
        step_s = self._simulated(asynchronous, slower, seed)
        return step_s - self.train_s(asynchronous) if "step" not in self.times and self.times else step_s

    def _simulated(self, asynchronous: bool, slower: float, seed: int) -> float:
        tree, at = self.tree(asynchronous, slower)
        return simulated(json.dumps(tree), at.groups, seed)


@cache
def simulated(tree: str, groups: int, seed: int) -> float:
    """Seconds in which the run of a workload trains so many groups."""
    workload = workload_of(json.loads(tree), "published")
    schedule = configured_schedule(workload.config())
    steps = groups // schedule.limits.train_batch_size
    return steps * predicted(schedule, workload, seed=seed, steps=STEPS * steps).step_s


# -- modes (docs/MODES.md) ---------------------------------------------------------------------------------------------

COLOCATED = {"pools": [{"tasks": ["rollout", "train"]}]}


def _settings(batch: int, staleness: int, running: int, slots: int, how: str = "keep", **others: Any) -> dict[str, Any]:
    scheduler = {"train_batch_size": batch, "max_staleness_steps": staleness, "max_concurrent_groups": running}
    return {"scheduler": scheduler | others, "rollout": {"slots": slots, "sync_mode": how}}


def sync(at: Scale) -> dict[str, Any]:
    return _settings(at.groups, 0, at.groups, at.slots) | COLOCATED


def generate_ahead(at: Scale, strict: bool = False) -> dict[str, Any]:
    policies = {"admission": "whole-batches"}
    return _settings(at.groups, 1, at.groups, at.slots, "wait", train_after_sync=strict, policies=policies)


def own_reference(at: Scale) -> dict[str, Any]:
    pools = [{"tasks": ["train"]}, {"tasks": ["ref_logprobs"]}, {"tasks": ["rollout"]}]
    return generate_ahead(at) | {"pools": pools, "trainer": {"kl_loss_coef": 0.001}}


def stream(at: Scale, threshold: float, require: int) -> dict[str, Any]:
    """`require` of the 16 parts of a step are trained at once; 16 prompts run on a replica (verl's default)."""
    batch, syncs, slots = at.groups * require // 16, 16 // require, round(16 / at.stands_for)
    ratio = (1 + threshold) * syncs - 1
    running = min(max(batch, slots * at.replicas), int((1 + ratio) * batch + 1e-9))
    how = "abort" if threshold else "wait"
    return _settings(batch, UNBOUNDED * syncs, running, slots, how, sync_every=syncs, async_ratio=ratio)


MODES: dict[str, Callable[..., dict[str, Any]]] = {
    "one_step_off": lambda at: generate_ahead(at, strict=True),
    "generate_ahead": generate_ahead,
    "own_reference": own_reference,
    "partial_rollout": lambda at: _settings(at.groups, UNBOUNDED, 2 * at.groups, at.slots) | COLOCATED,
    "fully_async": lambda at: _settings(at.groups, UNBOUNDED, 5 * at.groups, 5 * at.slots, async_ratio=4),
    "stream": stream,
}


# -- the page ----------------------------------------------------------------------------------------------------------


def published_rows(runs: Sequence[Run]) -> Iterator[str]:
    """The table of published runs, with a summary."""
    yield "| source | run | published | ratio | predicted s/step | ratio | error | within 15 % |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    errors = []
    for run in runs:
        sides = [[run.seconds(asynchronous, seed) for seed in range(SEEDS)] for asynchronous in (False, True)]
        ratio = Interval.of([one / other for one, other in zip(*sides, strict=True)])
        wanted = run.published[0] / run.published[1]
        errors.append(ratio.median / wanted - 1)
        yield (
            f"| {run.source} | {run.setup} | {run.published[0]:g} → {run.published[1]:g} | {wanted:.2f} "
            f"| {median(sides[0]):.0f} → {median(sides[1]):.0f} "
            f"| {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) "
            f"| {errors[-1]:+.0%} | {'yes' if abs(errors[-1]) <= CLOSE else 'no'} |"
        )
    right = sum(abs(error) <= CLOSE for error in errors)
    yield f"\n{right} of {len(errors)} ratios are within 15 %; the median error is {median(map(abs, errors)):.0%}."


AS_RECORDED = "(as recorded)"
"""The run that predicts the others: its row shows the calibration."""


def measured_rows(pairs: Sequence[Any]) -> Iterator[str]:
    """The table of real runs, with a summary."""
    yield "| workload | change | predicted s/step | measured | error |"
    yield "|---|---|---:|---:|---:|"
    errors = []
    for workload, change, mine, theirs in pairs:
        error = mine / theirs - 1
        errors += [error] if change != AS_RECORDED else []
        yield f"| {workload} | {change} | {mine:.3f} | {theirs:.3f} | {error:+.1%} |"
    close = sum(abs(error) <= 0.1 for error in errors)
    yield f"\n{close} of {len(errors)} changes are within 10 %; the median error is {median(map(abs, errors)):.1%}."


def write(name: str, lines: Iterator[str]) -> None:
    """Put a table between its marks on the page."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=PAGE.parent)
    table = "\n".join([f"{date.today()}, commit {commit.stdout.strip()}.\n", *lines])
    PAGE.write_text(f"{before}{start}\n{table}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, help="only write the table of real runs, from this file")
    arguments = parser.parse_args()
    if arguments.measured:
        write("measured", measured_rows(json.loads(arguments.measured.read_text())))
    else:
        write("published", published_rows([Run(**one) for one in yaml.safe_load(PUBLISHED.read_text())["runs"]]))


if __name__ == "__main__":
    main()
