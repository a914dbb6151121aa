"""A new run begins with the weights, and perhaps the optimizer, of a checkpoint: `engine run --from RUN@step-N`."""

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import save_chat_model, write_rows
from test_api import ROWS, SMALL

from engine.api import configured
from engine.cli import _parser, main
from engine.cli.checkpoint_names import find_checkpoint
from engine.cli.evaluate import subject_of
from engine.cli.run import read_config
from engine.config import Config
from engine.config.inputs import check_inputs
from engine.errors import ConfigError
from engine.metrics.journal import line_of
from engine.plans.configured_plan import check_plan, plan_of
from engine.runtime.local import run_plan
from engine.trajectory import Prompt, Trajectory
from engine.workers.plan import Plan

EVERY = {**SMALL, "trainer.checkpoint_every": 1, "trainer.keep_checkpoints": 3, "trainer.learning_rate": 0.01}


def by_tokens(prompt: Prompt, trajectory: Trajectory) -> float:
    """A reward that differs between the responses of an untrained model."""
    return float(sum(trajectory.token_ids) % 7)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps from a small model are in `first`."""
    monkeypatch.chdir(tmp_path)
    save_chat_model(tmp_path / "model", "chatml", context=64)
    assert run_plan(plan(config_of(), tmp_path / "first")).steps == 2
    return tmp_path


def config_of(**settings: Any) -> Config:
    return configured("model", ROWS, by_tokens, None, None, 2, {**EVERY, **settings})[0]


def plan(config: Config, run_dir: Path) -> Plan:
    return plan_of(config, run_dir, local={"reward.function": by_tokens})


def trainer_of(config: Config, run_dir: Path) -> Any:
    return plan(config, run_dir).make_trainer()


def test_a_run_begins_with_the_weights_of_a_checkpoint(runs: Path) -> None:
    checkpoint = find_checkpoint("first@step-2").path
    config = config_of(**{"model.checkpoint_path": str(checkpoint)})
    assert f"ok: model.checkpoint_path {checkpoint} has weights of this model" in [
        *check_inputs(config, local={"reward.function": by_tokens})
    ]
    (runs / "second").mkdir()
    started, with_all = trainer_of(config, runs / "second"), {"model.checkpoint_optimizer": True}
    (runs / "third").mkdir()
    whole = trainer_of(config_of(**{"model.checkpoint_path": str(checkpoint), **with_all}), runs / "third")
    plain = trainer_of(config_of(), runs / "fourth")
    reached = trainer_of(config_of(), runs / "fourth")
    reached.load(str(checkpoint))
    for name, value in reached.weights().items():
        assert torch.equal(value, started.weights()[name]) and torch.equal(value, whole.weights()[name])
    assert any(not torch.equal(value, plain.weights()[name]) for name, value in reached.weights().items())
    assert not started.optimizer.state and len(whole.optimizer.state) == len(reached.optimizer.state) > 0
    assert whole.optimizer_steps == reached.optimizer_steps > 0 == started.optimizer_steps

    shutil.rmtree(runs / "first")  # the run keeps what it needs
    assert run_plan(plan(config, runs / "second")).steps == 2


def test_the_reference_stays_the_model_of_the_configuration(runs: Path) -> None:
    settings = {"model.checkpoint_path": str(find_checkpoint("first").path), "trainer.kl_loss_coef": 0.1}
    (runs / "second").mkdir()
    trainer = trainer_of(config_of(**settings), runs / "second")
    assert trainer.settings.reference_path == str(runs / "model")


def test_from_names_a_checkpoint_on_the_command_line(runs: Path) -> None:
    (runs / "mine.yaml").write_text("model: {make: arithmetic}\n", encoding="utf-8")
    arguments: Namespace = _parser().parse_args(["run", "mine.yaml", "--from", "first@step-1", "--from-optimizer"])
    config, _ = read_config(arguments)
    assert config.model.checkpoint_path == str(runs / "first" / "checkpoints" / "step-000001")
    assert config.model.checkpoint_optimizer


def test_the_best_and_the_newest_checkpoint_go_by_the_same_names_everywhere(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun_with(name: str) -> str | None:
        return read_config(_parser().parse_args(["run", "mine.yaml", "--from", name]))[0].model.checkpoint_path

    (runs / "mine.yaml").write_text("model: {make: arithmetic}\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        begun_with("first@best")
    assert "trainer.keep_best is not set; name a checkpoint by its steps" in capsys.readouterr().err
    (runs / "first" / "config.yaml").write_text("trainer: {keep_best: {metric: accuracy}}")
    rows = [{"validation": at, "steps": at, "outcome": "reported", "accuracy": 1 / at} for at in (1, 2)]
    (runs / "first" / "metrics.jsonl").write_bytes(b"".join(map(line_of, rows)))
    (runs / "first").rename(runs / "me@work")  # the path of a run may contain an @
    for name, steps in {"me@work": 2, "me@work@best": 1, "me@work@step-2": 2}.items():
        assert begun_with(name) == str(runs / "me@work" / "checkpoints" / f"step-{steps:06d}")
        assert subject_of(name).steps == steps
        assert main(["export", name, "--to", f"model-{name}"]) == 0
        assert f"after {steps} train steps" in capsys.readouterr().out


def test_what_cannot_be_the_beginning_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"names a checkpoint that does not exist; .* nearest: step-1, step-2"):
        find_checkpoint("first@step-9")
    with pytest.raises(ConfigError, match=r"must be RUN, RUN@step-N or RUN@best; for example first@step-2"):
        find_checkpoint("first@newest")
    with pytest.raises(SystemExit):
        _parser().parse_args(["run", "mine.yaml", "--from", "other@step-1"])
    assert "'other' does not exist" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"needs model\.checkpoint_path, whose optimizer state it takes"):
        config_of(**{"model.checkpoint_optimizer": True})
    save_chat_model(runs / "larger", "chatml", context=128, layers=3)
    other = configured(
        "larger", ROWS, by_tokens, None, None, 2, {**EVERY, "model.checkpoint_path": "first/checkpoints/step-000002"}
    )
    with pytest.raises(ConfigError, match=r"is of another model than model\.path"):
        list(check_inputs(other[0], local={"reward.function": by_tokens}))


def test_a_check_refuses_what_a_run_cannot_begin_with(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(runs / "rows.jsonl", {"prompt": "1 + 1", "answer": "2"})
    (runs / "judge_here.py").write_text("def score(prompt, trajectory): return 0.0\n", encoding="utf-8")
    sections = "data: {path: rows.jsonl}\nreward: {function: judge_here:score}\nrollout: {max_tokens: 4}\n"
    (runs / "mine.yaml").write_text(f"model: {{path: ./model}}\n{sections}", encoding="utf-8")

    def refused(checkpoint: Path) -> str:
        assert main(["check", "mine.yaml", "--set", f"model.checkpoint_path={checkpoint}"]) == 2
        return capsys.readouterr().err

    model = runs / "model"
    says = "is a model, not a checkpoint: it has config.json, but no SHA256SUMS; use model.path for it\n"
    assert refused(model) == f"engine: model.checkpoint_path '{model}' {says}"
    with pytest.raises(ConfigError, match=r"^model\.checkpoint_path .* is a model, not a checkpoint"):
        check_plan(config_of(**{"model.checkpoint_path": str(model)}), {"reward.function": by_tokens})
    checkpoint = find_checkpoint("first").path
    assert main(["check", "mine.yaml", "--set", f"model.checkpoint_path={checkpoint}"]) == 0
    (checkpoint / "generation_config.json").unlink()
    says = f"engine: model.checkpoint_path '{checkpoint / 'generation_config.json'}' is missing; use another"
    assert refused(checkpoint).startswith(says)
    (checkpoint / "SHA256SUMS").write_bytes(b"\xb0")
    says = f"engine: model.checkpoint_path is '{checkpoint}': its SHA256SUMS cannot be read"
    assert refused(checkpoint).startswith(says)
