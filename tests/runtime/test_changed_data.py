"""A run whose data changes while it is stopped: refused, or continued by the content of the rows."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from embedded_run import FIGURES as EMBEDDED
from embedded_run import PROMPTS, Quick, Saving, options
from remembering_trainer import Remembering

import engine.runtime.local
from engine.config import Config
from engine.config.loading import parse_config
from engine.errors import ConfigError, RunDamaged, RunFailed
from engine.plans.input_changes import settle_inputs
from engine.plans.run_inputs import Inputs, make_prompts
from engine.protocols.named_code import find
from engine.record import read, recover, replay
from engine.runtime.local.run import run_plan
from engine.runtime.prompt_sources import MixedPrompts
from engine.states.limits import Limits, ValidationLimits
from engine.tasks.dataset import Dataset
from engine.tasks.source_files import PassRate
from engine.trajectory import Prompt
from engine.workers.plan import Plan, Resumption, Rollout

FIGURES: dict[str, Any] = {
    "train_batch_size": 4, "max_staleness_steps": 1, "max_concurrent_groups": 8, "checkpoint_every": 3,
}  # fmt: skip


def write(directory: Path, name: str, texts: Sequence[str]) -> None:
    (directory / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def texts_in(directory: Path, names: str = "ab") -> list[str]:
    files = [directory / f"{name}.jsonl" for name in names]
    return [json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()]


def configured(directory: Path, sources: Sequence[str] = "ab") -> Config:
    """Of a run with 10 rows of the source a, or also 30 rows of the source b."""
    for name, rows in (("a", 10), ("b", 30)):
        write(directory, name, [f"{name} {row}" for row in range(rows)])
    (directory / "code").mkdir()
    paths = [{"name": name, "path": str(directory / f"{name}.jsonl")} for name in sources]
    data: dict[str, Any] = {"path": paths[0]["path"]} if len(paths) == 1 else {"sources": paths}
    run = {"dir": str(directory / "runs"), "code_dir": str(directory / "code")}
    reward = {"function": "rewards:score"}
    return parse_config({"model": {"path": str(directory / "model")}, "data": data, "run": run, "reward": reward})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path)


def quick(replica: int) -> Rollout:
    return Rollout(generator=Quick(), evaluator=Quick())


class Scene:
    """Runs of a configuration, begun and resumed as `actors.launch.launch` does it, but in this process."""

    def __init__(self, config: Config, trajectories: str = "disk") -> None:
        self.config, self.trajectories = config, trajectories
        self.notes: list[str] = []

    @property
    def inputs(self) -> Inputs:
        return Inputs("model", tuple(self.config.data.source_files()), None, None, "prompt")

    def plan(self, run_dir: Path, trainer: Remembering) -> Plan:
        return Plan(
            limits=Limits(**FIGURES), samples=2, make_rollout=quick,
            make_trainer=lambda: trainer, make_prompts=partial(make_prompts, self.config, self.inputs, run_dir),
            restore_trainer=lambda trainer, restore: trainer.load(restore.checkpoint), run_dir=run_dir,
            trajectories=self.trajectories,
        )  # fmt: skip

    def run(self, run_dir: Path, copies: Sequence[int] = (), accept: bool | None = None, **others: Any) -> Remembering:
        """Begin a run; with `accept`, resume it. Returns its trainer."""
        trainer = Remembering(run_dir, copies)
        plan = replace(self.plan(run_dir, trainer), resume=accept is not None, **others)
        settle_inputs(self.config, self.inputs, plan, bool(accept), self.notes.append)
        result = run_plan(plan)
        assert result.outcome == "finished" and replay(read(run_dir / "schedule")).identical
        return trainer


def edit(directory: Path) -> set[str]:
    """Delete, edit, add and move rows of both files. Returns the rows that are gone."""
    before = {*texts_in(directory)}
    for name in "ab":
        rows = texts_in(directory, name)
        rows = [*rows[5:], f"{name} new", *rows[2:5]]
        rows[1] = f"{name} edited"
        write(directory, name, rows)
    return before - {*texts_in(directory)}


@pytest.mark.parametrize(
    ("sources", "step", "trajectories"),
    [("a", 1, "disk"), ("ab", 2, "disk"), ("ab", 2, "memory"), ("ab", 8, "disk")],
    ids=["one source", "kept", "branched", "late"],
)
def test_a_resume_refuses_changed_data_or_continues_by_the_content_of_its_rows(
    tmp_path: Path, sources: str, step: int, trajectories: str
) -> None:
    scene, copy = Scene(configured(tmp_path, sources), trajectories), tmp_path / f"run-{step}"
    assert sorted(scene.run(tmp_path / "run", [step]).texts()) == sorted(texts_in(tmp_path, sources))
    gone = edit(tmp_path)
    with pytest.raises(ConfigError) as refused:
        scene.run(copy, accept=False)
    field = "data.path" if sources == "a" else "data.sources.a"
    words = (
        rf"{field} '.*/a\.jsonl' has changed since the run read it: 10 rows before, 9 now: 3 rows \(0, 1, 6\) gone, "
        r"2 rows \(1, 5\) new, in another order;.* by number, this epoch would repeat "
        rf"\d rows?.* of {field} and leave out \d rows?.*; restore the data, or .* --accept-data-change`"
    )
    assert re.fullmatch(words, str(refused.value)) and not scene.notes
    trained = Counter(scene.run(copy, [step + 1], accept=True).texts())
    present = {*texts_in(tmp_path, sources)}
    assert {text: trained[text] for text in present} == dict.fromkeys(present, 1) and {*trained} <= present | gone
    assert scene.notes.pop().startswith(f"note: the run continues with changed data: {field}: 10 rows before")
    write(tmp_path, "a", [*texts_in(tmp_path, "a")[1:], "a newer"])
    again = Counter(scene.run(Path(f"{copy}-{step + 1}"), accept=True).texts())
    present = {*texts_in(tmp_path, sources)}
    assert {text: again[text] for text in present} == dict.fromkeys(present, 1)


def test_a_run_that_goes_back_behind_a_change_draws_present_rows(tmp_path: Path, config: Config) -> None:
    scene, copy = Scene(config), tmp_path / "run-5"
    scene.run(tmp_path / "run", [5])
    for name, rows in (("a", 10), ("b", 30)):
        write(tmp_path, name, [f"other {name} {row}" for row in range(rows)])
    scene.run(copy, [8], accept=True)
    trained = Counter(scene.run(Path(f"{copy}-8"), accept=False, resumption=Resumption(force_from="initial")).texts())
    assert trained == Counter(texts_in(tmp_path))


def test_a_source_that_learns_draws_the_rows_of_the_record_after_a_change(tmp_path: Path, config: Config) -> None:
    sources = [source.model_copy(update={"pass_rate": PassRate(max=0.4)}) for source in config.data.sources]
    learning = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
    scene, copy = Scene(learning), tmp_path / "run-2"
    scene.run(tmp_path / "run", [2])
    edit(tmp_path)
    with pytest.raises(ConfigError, match=r"another order; data\.sources\.b: .* another order; restore the data"):
        scene.run(copy, accept=False)
    trainer = scene.run(copy, accept=True)
    again = scene.plan(copy, trainer).make_prompts()
    assert isinstance(again, MixedPrompts) and again.learns
    recover(read(copy / "schedule")).replay_all(again.watch)
    late = [group for group in trainer.by_group if group >= 16]
    assert late and {group: again.prompt(group).text for group in late} == {g: trainer.by_group[g] for g in late}


def crash() -> Remembering:
    raise RuntimeError("the machine is lost")


def test_a_resume_that_ended_before_its_first_event_is_made_again(tmp_path: Path, config: Config) -> None:
    scene, copy = Scene(config), tmp_path / "run-2"
    scene.run(tmp_path / "run", [2])
    edit(tmp_path)
    with pytest.raises(RunFailed, match=r"trainer could not be started: .*the machine is lost"):
        scene.run(copy, accept=True, make_trainer=crash)
    trained = Counter(scene.run(copy, accept=False).texts())
    assert {text: trained[text] for text in texts_in(tmp_path)} == dict.fromkeys(texts_in(tmp_path), 1)


def test_data_that_changes_while_the_run_is_running_ends_its_relaunch(tmp_path: Path, config: Config) -> None:
    scene = Scene(config)
    scene.run(tmp_path / "run")
    prompts = scene.plan(tmp_path / "run", Remembering(tmp_path)).make_prompts
    assert prompts().prompt(0)
    edit(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.sources\.a .*a\.jsonl' was changed while the run was running"):
        prompts()


def test_other_code_than_the_run_began_with_is_noted(tmp_path: Path, config: Config) -> None:
    (tmp_path / "code" / "scoring_of_the_day.py").write_text("RIGHT = 1.0\n")
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / "model" / name).write_text("first")
    find("scoring_of_the_day:RIGHT", str(tmp_path / "code"), "reward.function")
    scene = Scene(config)
    scene.run(tmp_path / "run", [2])
    scene.run(tmp_path / "run-2", [3], accept=False)
    assert scene.notes == []
    (tmp_path / "code" / "scoring_of_the_day.py").write_text("RIGHT = 2.0\n")
    (tmp_path / "model" / "chat_template.jinja").write_text("second")
    scene.run(tmp_path / "run-2-3", accept=False)
    names = "model.path chat_template.jinja, scoring_of_the_day.py"
    assert scene.notes == [f"note: changed since the run began: {names}"]


def test_changed_validation_rows_are_refused_like_training_rows(tmp_path: Path, config: Config) -> None:
    def held(*texts: str) -> dict[str, Any]:
        limits = Limits(**FIGURES, validation=ValidationLimits(rows=len(texts), at_start=False))
        return {"held_out": [Prompt(row=row, text=text) for row, text in enumerate(texts)], "limits": limits}

    scene = Scene(config)
    scene.run(tmp_path / "run", [2], **held("x", "y"))
    words = r"2 rows before, 2 now: 1 row \(1\) gone, 1 row \(1\) new; figures before and after do not compare; restore"
    with pytest.raises(ConfigError, match=words):  # no training row is repeated or left out
        scene.run(tmp_path / "run-2", accept=False, **held("x", "z"))
    with pytest.raises(ConfigError, match=r"must have as many rows as the run measures: 2 rows before, 3 now"):
        scene.run(tmp_path / "run-2", accept=True, **held("x", "y", "z"))
    assert scene.run(tmp_path / "run-2", accept=True, **held("x", "z")).steps
    assert len(scene.notes) == 1


def test_other_prompts_of_a_list_are_refused(tmp_path: Path) -> None:
    few = Limits(**{**EMBEDDED, "max_steps": 2})
    engine.runtime.local.run(**options(tmp_path, Saving(), limits=few))
    more = Limits(**{**EMBEDDED, "max_steps": 4})
    for prompts in (["question 0"], [f"question {n}" for n in reversed(range(PROMPTS))]):
        with pytest.raises(ConfigError, match=rf"prompts .* has changed since the run .* began: {PROMPTS} rows before"):
            engine.runtime.local.run(**options(tmp_path, Saving(), limits=more, prompts=prompts, resume=True))
    assert engine.runtime.local.run(**options(tmp_path, Saving(), limits=more, resume=True)).steps == 4


def test_damaged_or_missing_inputs_are_named(tmp_path: Path, config: Config) -> None:
    scene, copy = Scene(config), tmp_path / "run-2"
    scene.run(tmp_path / "run", [2])
    file = copy / "inputs" / "0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunDamaged, match=r"inputs/0 is damaged; restore it from a copy"):
        scene.run(copy, accept=True)
    file.unlink()
    with pytest.raises(RunDamaged, match=r"inputs is missing: it says what the run read; restore it"):
        scene.run(copy, accept=True)


def test_a_row_is_the_same_row_in_every_format(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"answer": "2", "prompt": "b"}]
    write_json = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(write_json)
    (tmp_path / "b.json").write_text(json.dumps([dict(reversed(row.items())) for row in rows], indent=1))
    (tmp_path / "c.csv").write_text("answer,prompt\n1,a\n2,b\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert len({Dataset.load(path).ids() for path in sorted(tmp_path.iterdir())}) == 1
    whole = Dataset.load(tmp_path / "a.jsonl")
    assert whole.only([1]).ids() == whole.ids()[8:]
