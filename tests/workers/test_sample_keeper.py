"""Samples that the workers keep: of each trained step and each measured chunk, whatever becomes of the files."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_bench
from event_loops import played
from test_measurement import Answering, measure, stage
from worker_bench import plan_of

from engine.commands import TrainStep
from engine.events import Event, RowsMeasured, StepTrained
from engine.protocols import Batch, RolloutFigures
from engine.runtime.local import SimpleTrainer, response
from engine.storage.samples import FOLDER, TRAIN, VALIDATION, SampleFiles, SamplePolicy
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup
from engine.workers import sample_keeper
from engine.workers.plan import Redo, Restore
from engine.workers.sample_keeper import keeper_of, prompt_text, response_text, shortened
from engine.workers.trainer import TrainerWorker

EVERYTHING = SamplePolicy(per_step=100)


class Telling(SimpleTrainer):
    """Knows figures of its rollouts: `figures(batch)`."""

    def __init__(self, figures: Callable[[Batch], Any]) -> None:
        self.figures = figures
        self.batch: Batch | None = None
        self.steps = 0

    def train(self, batch: Batch) -> dict[str, float]:
        self.batch = batch
        self.steps += 1
        return {}

    def rollout_figures(self) -> Any:
        assert self.batch is not None
        return self.figures(self.batch)


class Bench(worker_bench.Bench):
    """A trainer's worker over groups 0 and 1, of two responses each."""

    def __init__(self, trainer: Any, run_dir: Path, policy: SamplePolicy, trajectories: Any = None) -> None:
        plan = plan_of(
            trainer=trainer, run_dir=run_dir, sample_policy=policy, restore_trainer=lambda trainer, restore: None
        )
        super().__init__(TrainerWorker, plan, trajectories)

    async def step(self, step: int = 5) -> Event:
        for number in range(2):
            prompt = Prompt(row=number + 7, text=f"{number} + 1", source="math" if number else "")
            group = TrajectoryGroup(group=number, prompt=prompt, trajectories=[])
            for index in range(2):
                group.trajectories.append(response([1] * (index + 1), reward=float(number + index), version=3))
                group.trajectories[-1].reward_parts = {"right": 1.0, "brief": 0.5} if number else {}
                group.trajectories[-1].text = f"answer {number}{index}"
            group.trajectories[0].finish_reason = "length"
            group.trajectories[1].shown_prompt = "what is asked" if number else ""
            await self.trajectories.put(group, attempt=1)
        self.worker.carry_out(TrainStep(step=step, attempt=1, groups=(0, 1), staleness=(2, 0), number=step, cause=0))
        return await self.news()


def kept(run_dir: Path, kind: str = TRAIN) -> list[dict[str, Any]]:
    return list(SampleFiles(run_dir / FOLDER).rows(kind))


def figures_of(batch: Batch) -> list[list[RolloutFigures]]:
    return [[RolloutFigures(group.group + 0.5, None), RolloutFigures(None, 0.25)] for group in batch.groups]


@played
async def test_a_reported_step_has_its_samples_with_what_is_known_of_them(tmp_path: Path) -> None:
    assert isinstance(await (await Bench(Telling(figures_of), tmp_path, EVERYTHING).open()).step(), StepTrained)
    rows = kept(tmp_path)
    assert [(row["group"], row["sample"], row["response"], row["reward"], row["tokens"]) for row in rows] == [
        (0, 0, "answer 00", 0.0, 1), (0, 1, "answer 01", 1.0, 2), (1, 0, "answer 10", 1.0, 1),
        (1, 1, "answer 11", 2.0, 2),
    ]  # fmt: skip
    assert [(row["advantage"], row["logprob_gap"]) for row in rows] == [
        (0.5, None),
        (None, 0.25),
        (1.5, None),
        (None, 0.25),
    ]
    assert [row["staleness"] for row in rows] == [2, 2, 0, 0]
    assert [row["source"] for row in rows] == [None, None, "math", "math"]
    assert [row["reward_parts"] for row in rows] == [None, None, *[{"right": 1.0, "brief": 0.5}] * 2]
    assert "worst" in rows[0]["reasons"] and {"best", "longest"} & set(rows[3]["reasons"])
    assert [row["prompt"] for row in rows] == ["0 + 1", "0 + 1", "1 + 1", "what is asked"]
    others = ("prompt_row", "prompt", "oldest_version", "newest_version", "finish_reason", "step", "segments")
    assert [rows[0][name] for name in others] == [7, "0 + 1", 3, 3, "length", 5, 1]


def fail(batch: Batch) -> Any:
    raise ValueError("they are gone")


@pytest.mark.parametrize(
    "figures",
    [fail, lambda batch: [], lambda batch: [[RolloutFigures(1.0)]], lambda batch: None, lambda batch: [[1.0, 2.0]] * 2],
)
@played
async def test_figures_that_cannot_be_had_are_left_out(tmp_path: Path, figures: Callable[[Batch], Any]) -> None:
    assert isinstance(await (await Bench(Telling(figures), tmp_path, EVERYTHING).open()).step(), StepTrained)
    assert [row["advantage"] for row in kept(tmp_path)] == [None] * 4


@played
async def test_a_step_that_is_trained_again_replaces_its_samples(tmp_path: Path) -> None:
    bench = await Bench(Telling(figures_of), tmp_path, SamplePolicy(per_step=3)).open()
    await bench.step()
    before = kept(tmp_path)
    await bench.worker.close()
    again = Bench(Telling(figures_of), tmp_path, SamplePolicy(per_step=3), bench.trajectories)
    await again.worker.open(Restore(steps=5, redo=(Redo(step=5, groups=(0, 1), staleness=(2, 0)),)))
    assert kept(tmp_path) == before
    assert len(before) == 3


@played
async def test_a_disk_that_takes_nothing_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("in the way")

    caplog.set_level(logging.WARNING)
    trainer = Telling(figures_of)
    bench = await Bench(trainer, tmp_path, EVERYTHING).open()
    for step in range(3):
        assert isinstance(await bench.step(step), StepTrained)
    assert trainer.steps == 3
    await bench.worker.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "samples of train step 0 cannot be written" in message and str(tmp_path / FOLDER) in message


@played
async def test_a_disk_that_hangs_holds_a_step_up_for_a_while_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    hanging = tmp_path / FOLDER / f".step-000000.jsonl.{os.getpid()}.tmp"
    os.mkfifo(hanging)  # to open it for writing waits for a reader

    caplog.set_level(logging.WARNING)
    bench = await Bench(Telling(figures_of), tmp_path, EVERYTHING).open()
    monkeypatch.setattr(sample_keeper, "LONGEST_S", 0.01)
    for step in (0, 1):
        assert isinstance(await bench.step(step), StepTrained)
    assert kept(tmp_path) == [], "nothing is written behind what hangs"
    monkeypatch.setattr(sample_keeper, "LONGEST_S", 60.0)
    with open(hanging, "rb"):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        (hung,) = [task for task in others if "SampleKeeper" in repr(task)]
        await asyncio.wait([hung])
    (tmp_path / FOLDER / "step-000000.jsonl").unlink(missing_ok=True)
    await bench.step(2)
    await bench.worker.close()
    assert {row["step"] for row in kept(tmp_path)} == {2}
    (message,) = [record.getMessage() for record in caplog.records]
    assert "samples of train step 0 cannot be written" in message and "has taken 0.01 s" in message


def test_a_run_without_samples_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeper_of(None, SamplePolicy()) is None
    assert keeper_of(tmp_path, SamplePolicy(per_step=0, validation=0)) is None
    assert keeper_of(tmp_path, SamplePolicy(per_step=0)) is not None
    monkeypatch.setattr(sample_keeper, "lacks_pyarrow", lambda: True)
    assert keeper_of(tmp_path, SamplePolicy()) is None


@played
async def test_chunks_keep_the_same_prompts_in_every_validation(tmp_path: Path) -> None:
    generator = Answering()
    generator.let.set()
    on = await stage(generator, run_dir=tmp_path, sample_policy=SamplePolicy(validation=4))
    for validation in (2, 3):
        for chunk in (0, 1):
            on.worker.carry_out(measure(chunk, 3 * chunk, 3, validation=validation))
        await on.until(2 * (validation - 1))
    assert all(isinstance(event, RowsMeasured) for event in on.events)
    rows = kept(tmp_path, VALIDATION)
    chosen = {
        validation: {row["prompt_row"] for row in rows if row["validation"] == validation} for validation in (2, 3)
    }
    assert chosen[2] == chosen[3]
    assert 3 <= len(chosen[2]) <= 4, "row 5 cannot be judged, and so has no sample"
    assert 5 not in chosen[2]
    assert {(row["prompt"], row["reward"]) for row in rows} == {(f"{r} + 1", float(r % 3 == 0)) for r in chosen[2]}


# -- texts -------------------------------------------------------------------------------------------------------------


def said(text: str, continues: bool = False) -> Trajectory:
    return Trajectory(token_ids=[1], spans=[Span(0, 1, 0)], text=text, finish_reason="stop", continues=continues)


def test_texts_are_readable() -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    assert prompt_text(Prompt(row=0, text="1 + 1", fields={"messages": chat})) == "system: Add.\nuser: 1 + 1"
    assert prompt_text(Prompt(row=0, text="1 + 1", fields={"messages": "none"})) == "1 + 1"
    assert response_text([said("one")]) == "one"
    assert response_text([said("one"), said("two", True)]) == (
        "one\n[segment 2 of 2: the history was rewritten]\ntwo"
    )  # fmt: skip
    assert shortened("a" * 60 + "b" * 50, 100) == f"{'a' * 50}\n[10 characters left out]\n{'b' * 50}"
    assert shortened("lone \ud800", 100) == "lone ?"
