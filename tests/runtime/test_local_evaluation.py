"""Several validation sets in a whole run: their figures, what is kept, and what a resume knows of it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.cli.checkpoint_names import best_step
from engine.cli.evaluate import _run
from engine.errors import ConfigError
from engine.protocols import Batch, GroupWork
from engine.record import read, replay
from engine.runtime.local import RunResult, SimpleGenerator, SimpleTrainer, response, run
from engine.runtime.prompt_sources import CountedPrompts
from engine.states.limits import Limits, ValidationLimits, ValidationSet
from engine.storage.run_directory import RunDirectory
from engine.storage.samples import FOLDER, VALIDATION, SampleFiles
from engine.trajectory import Prompt, Trajectory
from engine.workers.plan import Plan, Rollout

SETS = (ValidationSet(name="easy", prompts=4), ValidationSet(name="hard", prompts=3, samples=4, k=(2, 4)))
LIMITS = Limits(
    train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1, max_steps=4, checkpoint_every=1,
    keep_checkpoints=1, keep_best="hard/pass@2",
    validation=ValidationLimits(rows=16, sets=SETS, rows_per_slot=4, every=1, at_start=False),
)  # fmt: skip
HELD_OUT = [
    *(Prompt(row=row, text=f"easy {row}") for row in range(4)),
    *(Prompt(row=row, text=f"hard {row}") for row in range(3) for _ in range(4)),
]
RIGHT_OF_HARD = {1: 3, 2: 6, 3: 5, 4: 4, 5: 5, 6: 5}
"""Right responses of the twelve, by version: the second is best."""


class Answering(SimpleGenerator):
    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        if not work.held_out:
            return [response([1], reward=float(number), version=version) for number in range(work.samples)]
        number = (-1 - work.group) % 16 - 4
        right = work.validation_set == "easy" or number % 12 < RIGHT_OF_HARD[version]
        return [response([1, 2], reward=float(right), version=version)]


class Counting(SimpleTrainer):
    """Each step publishes what it is worth waiting for: nothing. Checkpoints can be loaded."""

    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> None: ...

    def save(self, directory: str, step: int) -> None:
        Path(directory, "weights").write_text(str(step))

    def load(self, directory: str) -> None: ...


def trained(directory: Path, **options: Any) -> RunResult:
    given = {"limits": LIMITS, "samples": 2, "run_dir": directory, "prompts": [f"question {n}" for n in range(40)]}
    return run(generators=lambda replica: Answering(), trainer=Counting(), held_out=HELD_OUT, **given | options)


def validated(directory: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {row["steps"]: row for row in rows if row.get("outcome") == "reported"}


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def configured(directory: Path, text: str) -> RunDirectory:
    """The directory as a configured run has it."""
    (directory / "config.yaml").write_text(text)
    return RunDirectory(directory)


def test_figures_come_from_the_record_and_the_best_checkpoint_outlasts_a_resume(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert trained(directory).outcome == "finished"
    rows = validated(directory)
    for steps, row in rows.items():
        assert row["sets"]["easy"]["avg@1"] == 1.0 and row["sets"]["easy"]["avg@1_low"] == pytest.approx(0.51, abs=0.01)
        assert row["sets"]["hard"]["avg@4"] == pytest.approx(RIGHT_OF_HARD[steps] / 12)
        assert row["accuracy"] == pytest.approx((4 + RIGHT_OF_HARD[steps]) / 16)
    assert rows[4]["sets"]["hard"]["prompts"] == 3
    assert list(rows) == [1, 2, 3, 4] and left(directory) == ["step-000002", "step-000004"]
    keep = "trainer: {keep_best: {metric: hard/pass@2}}"
    assert best_step(configured(directory, keep)) == 2
    assert replay(read(directory / "schedule")).identical

    resumed = trained(directory, resume=True, limits=replace(LIMITS, max_steps=5))
    assert resumed.outcome == "finished" and resumed.validations[-1]["validation"] == len(rows)
    assert f" events; the next validation has number {len(rows)}" in resumed.resumed
    assert left(directory) == ["step-000002", "step-000005"]
    assert best_step(configured(directory, keep.replace("}}", ", mode: min}}"))) == 5


def test_samples_name_their_set_and_the_number_of_the_response(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    trained(tmp_path / "run")
    rows = list(SampleFiles(tmp_path / "run" / FOLDER).rows(VALIDATION, [0]))
    places = sorted((row["validation_set"], row["prompt_row"], row["sample"]) for row in rows)
    assert places == [
        *(("easy", row, 0) for row in range(4)),
        *(("hard", row, sample) for row in range(3) for sample in range(4)),
    ]


def test_a_run_without_a_best_checkpoint_says_so(tmp_path: Path) -> None:
    for text, law in (
        ("{}", "keep_best is not set"),
        ("trainer: {keep_best: {metric: accuracy}}", "has no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=law):
            best_step(configured(tmp_path, text))


def test_an_interrupted_evaluation_closes_its_generator() -> None:
    class Endless(SimpleGenerator):
        closed = False

        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            began.set()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def close(self) -> None:
            self.closed = True

    async def interrupted() -> None:
        task = asyncio.create_task(_run(plan, lambda text: None))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began, endless = asyncio.Event(), Endless()
    plan = Plan(
        limits=replace(LIMITS, keep_best="", checkpoint_every=0, validation=ValidationLimits(rows=16, at_end=False)),
        samples=1, held_out=HELD_OUT, make_trainer=Counting,
        make_rollout=lambda replica: Rollout(generator=endless, evaluator=endless),
        make_prompts=lambda: CountedPrompts(0, lambda group: HELD_OUT[0]),
    )  # fmt: skip
    asyncio.run(interrupted())
    assert endless.closed
