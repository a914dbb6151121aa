"""Validation prompts in a user's own program: measured beside training, by the generators themselves."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine.runtime.local
from engine.errors import ConfigError
from engine.protocols import Batch, GroupWork
from engine.record import read, replay
from engine.runtime.local import RunResult, SimpleGenerator, SimpleTrainer, response
from engine.runtime.prompt_sources import listed
from engine.states.limits import Limits, ValidationLimits
from engine.trajectory import Prompt, Trajectory
from engine.workers.plan import Plan, Rollout

LIMITS = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=6)
HELD_OUT = [f"held out {n}" for n in range(10)]


class Learning(SimpleGenerator):
    """Right on as many validation prompts as its version says. `groups`: what it was given to train on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.measured: list[int] = []

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        (self.measured if work.held_out else self.trained).append(work.group)
        right = work.prompt.row < version if work.held_out else work.group % 2 == 0
        return [response([1, 2], reward=float(right), version=version) for _ in range(work.samples)]


class Nothing(SimpleTrainer):
    def train(self, batch: Batch) -> dict[str, float]:
        assert all(group.group >= 0 for group in batch.groups)
        return {}

    def weights(self) -> Any:
        return None


def run(generators: Any, limits: Limits = LIMITS, held_out: Sequence[str] = HELD_OUT, **options: Any) -> RunResult:
    prompts = [f"question {n}" for n in range(40)]
    return engine.runtime.local.run(
        generators=generators, trainer=Nothing(), prompts=prompts, limits=limits, samples=3, held_out=held_out,
        **options,
    )  # fmt: skip


def test_weights_are_measured_before_after_and_on_the_way() -> None:
    before_after = run([Learning(), Learning()])
    assert [(v["version"], v["accuracy"]) for v in before_after.validations] == [(0, 0.0), (6, 0.6)]
    limits = replace(LIMITS, validation=ValidationLimits(rows=10, rows_per_slot=4, every=3))
    on_the_way = run([Learning(), Learning()], limits)
    assert on_the_way.steps == 6
    ends = {v["version"]: (v["outcome"], v["accuracy"]) for v in on_the_way.validations}
    assert (ends[0], ends[6]) == (("reported", 0.0), ("reported", 0.6))
    assert ends[3] == ("reported", 0.3) or ends[3][0] == "cancelled"
    report = replay(read(on_the_way.record))  # type: ignore[arg-type]
    assert report.identical, report


def test_generators_of_its_own_do_nothing_else() -> None:
    generators = [Learning(), Learning(), Learning()]
    limits = replace(LIMITS, validation=ValidationLimits(rows=10, rows_per_slot=2, own_from=2))
    result = run(generators, limits)
    assert [(v["version"], v["accuracy"]) for v in result.validations] == [(0, 0.0), (6, 0.6)]
    assert len(generators[2].measured) == 20 and not generators[2].trained
    assert not generators[0].measured + generators[1].measured


def test_nothing_is_measured_where_nothing_is_held_out() -> None:
    assert run([Learning()], held_out=()).validations == []


@pytest.mark.parametrize(
    ("validation", "held_out", "field"),
    [
        (ValidationLimits(rows=9), HELD_OUT, "limits.validation.rows"),
        (ValidationLimits(rows=9), (), "limits.validation.rows"),
        (ValidationLimits(rows=10, own_from=3), HELD_OUT, "limits.validation.own_from"),
        (ValidationLimits(rows=10, own_from=0), HELD_OUT, "limits.validation.own_from"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    validation: ValidationLimits, held_out: Sequence[str], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        run([Learning(), Learning()], replace(LIMITS, validation=validation), held_out)


def test_held_out_prompts_without_anyone_to_answer_them_are_refused(tmp_path: Path) -> None:
    """Before the first prompt is drawn, so the run never waits for an answer."""
    held_out = [Prompt(row=row, text=text) for row, text in enumerate(HELD_OUT)]

    def planned(validation: ValidationLimits) -> Plan:
        return Plan(
            limits=replace(LIMITS, validation=validation), samples=2, held_out=held_out,
            make_rollout=lambda replica: Rollout(generator=Learning()), make_trainer=SimpleTrainer,
            make_prompts=lambda: listed(["a question"]), run_dir=tmp_path / "run",
        )  # fmt: skip

    with pytest.raises(ConfigError, match="needs an evaluator"):
        engine.runtime.local.run_plan(planned(ValidationLimits(rows=10)))
    with pytest.raises(ConfigError, match=r"limits\.validation\.rows"):
        planned(ValidationLimits(rows=11))
