"""Checkpoints: transformers loads them, a run continues from them to the bit, and half of one is never seen."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from file_limits import largest_file
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.cli import main
from engine.errors import ConfigError
from engine.protocols import Batch
from engine.storage.checkpoints import save_checkpoint
from engine.training import model_checkpoint
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]
SETTINGS = TrainerSettings(learning_rate=1e-2, policy_mini_batch_size=2, lr_warmup_steps=5, weight_decay=0.1)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_resuming_is_exact_to_the_bit(model_path: str, batch: MakeBatch, tmp_path: Path) -> None:
    """Train 2, save, load elsewhere, train 1 = train 3: weights, moments, learning rate and metrics."""
    straight, stopped, resumed = (ModelTrainer(model_path, SETTINGS) for _ in range(3))
    for trainer, steps in ((straight, 3), (stopped, 2)):
        for step in range(steps):
            last = trainer.train(batch(step))
        if trainer is straight:
            expected = last
    target = str(tmp_path / "step-2")
    stopped.save(target, 2)
    resumed.train(batch(9))  # a life of its own before, which the checkpoint must overwrite
    torch.rand(1)  # the random state moves on after the save, and the load takes it back
    assert resumed.load(target) == 2
    assert torch.equal(torch.get_rng_state(), load_file(Path(target) / "random.safetensors")["cpu"])
    metrics = resumed.train(batch(2))
    assert same(straight.weights(), resumed.weights())
    moments = [model_checkpoint.optimizer_tensors(each.model, each.optimizer) for each in (straight, resumed)]
    assert moments[0]
    assert same(*moments)
    steady = [name for name in expected if not name.startswith("seconds_")]
    assert {name: metrics[name] for name in steady} == {name: expected[name] for name in steady}


def test_transformers_loads_it_with_its_tokenizer(model_path: str, batch: MakeBatch, tmp_path: Path) -> None:
    trainer = ModelTrainer(model_path, SETTINGS)
    trainer.train(batch(0))
    trainer.save(str(tmp_path / "saved"), 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trainer.model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("w3 w5").input_ids == [3, 5]
    again = ModelTrainer(str(tmp_path / "saved"), SETTINGS)  # a checkpoint is a model to begin with, too
    assert same(again.weights(), trainer.weights())


def test_a_checkpoint_names_the_type_that_the_model_had_when_training_began(model_path: str, tmp_path: Path) -> None:
    """Saving needs no configuration at the model's path, which may be a name on a hub."""
    AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    trainer = ModelTrainer(str(tmp_path / "model"), TrainerSettings(publish_dtype="float32"))
    (tmp_path / "model" / "config.json").unlink()
    trainer.save(str(tmp_path / "step-1"), 1)
    assert json.loads((tmp_path / "step-1" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_state_file_says_what_it_is(model_path: str, tmp_path: Path) -> None:
    trainer = ModelTrainer(model_path, SETTINGS)
    trainer.save(str(tmp_path / "deep" / "step-0"), 0)
    state = json.loads((tmp_path / "deep" / "step-0" / "trainer_state.json").read_text())
    assert (state["step"], state["optimizer_steps"], state["settings"]["lr_warmup_steps"]) == (0, 0, 5)
    assert trainer.load(str(tmp_path / "deep" / "step-0")) == 0


def test_a_save_that_fails_is_never_visible(model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ModelTrainer(model_path, SETTINGS)

    def full(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(model_checkpoint, "save_file", full)
        with pytest.raises(OSError, match="disk full"):
            trainer.save(str(tmp_path / "step-1"), 1)
    assert not (tmp_path / "step-1").exists()
    (tmp_path / "step-1").mkdir()  # an empty directory made beforehand is as good as none
    trainer.save(str(tmp_path / "step-1"), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_saving_again_changes_nothing_and_never_overwrites(model_path: str, batch: MakeBatch, tmp_path: Path) -> None:
    trainer = ModelTrainer(model_path, SETTINGS)
    trainer.save(str(tmp_path / "kept"), 1)
    before = (tmp_path / "kept" / "model.safetensors").read_bytes()
    trainer.train(batch(0))
    trainer.save(str(tmp_path / "kept"), 1)
    assert (tmp_path / "kept" / "model.safetensors").read_bytes() == before
    with pytest.raises(ConfigError, match="not empty"):
        trainer.save(str(tmp_path / "kept"), 2)


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(model_path: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_path)
    config.num_hidden_layers, config.intermediate_size = 1, 24
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    ModelTrainer(str(tmp_path / "other"), SETTINGS).save(str(tmp_path / "saved"), 1)
    trainer = ModelTrainer(model_path, SETTINGS)
    before = trainer.weights()
    with pytest.raises(ConfigError, match="another model"):
        trainer.load(str(tmp_path / "saved"))
    assert same(before, trainer.weights())


@pytest.mark.parametrize("damage", ["missing", "torn", "format"])
def test_an_incomplete_checkpoint_is_refused_and_changes_nothing(model_path: str, tmp_path: Path, damage: str) -> None:
    trainer = ModelTrainer(model_path, SETTINGS)
    trainer.save(str(tmp_path / "bad"), 1)
    state = tmp_path / "bad" / "trainer_state.json"
    if damage == "missing":
        state.unlink()
    else:
        state.write_text('{"format": 1, "st' if damage == "torn" else '{"format": 99}')
    before = trainer.weights()
    with pytest.raises(ConfigError, match="checkpoint"):
        trainer.load(str(tmp_path / "bad"))
    assert same(before, trainer.weights())


def test_a_checkpoint_is_exported_as_a_model(
    model_path: str, batch: MakeBatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = tmp_path / "run", tmp_path / "model"
    (run / "schedule").mkdir(parents=True)
    export = ["export", str(run), "--to", str(target)]
    assert main(export) == 2 and "has no checkpoint" in capsys.readouterr().err
    trainer = ModelTrainer(model_path, SETTINGS)
    for step in (1, 2):
        trainer.train(batch(step))
        save_checkpoint(trainer, run / "checkpoints", step)
    assert main([*export, "--dtype", "bfloat16"]) == 0
    assert "after 2 train steps" in capsys.readouterr().out
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    expected = {name: value.bfloat16() for name, value in trainer.weights().items()}
    assert same(dict(model.state_dict()), expected)
    assert AutoTokenizer.from_pretrained(target)("w3 w5").input_ids == [3, 5]

    assert main(export) == 2 and "is there already" in capsys.readouterr().err
    assert main(["export", f"{run}@step-7", "--to", str(tmp_path / "other")]) == 2
    assert "nearest: step-1, step-2" in capsys.readouterr().err
    with (run / "checkpoints" / "step-000001" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert main(["export", f"{run}@step-1", "--to", str(tmp_path / "other")]) == 2
    assert "model.safetensors" in capsys.readouterr().err and not (tmp_path / "other").exists()

    (tmp_path / "file").touch()
    assert main([*export[:-1], str(tmp_path / "file" / "below")]) == 2
    assert "/file/below' cannot be written: Not a directory" in capsys.readouterr().err
    with largest_file(4096):
        assert main([*export[:-1], str(tmp_path / "full")]) == 2
    assert "/full' cannot be written: " in (said := capsys.readouterr().err) and "File too large" in said
    assert not list(tmp_path.glob("*full*"))
