"""The supervised warm start: the model learns written answers before the run, once, on one rank or several."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import ForkServer, starts_of
from transformers import AutoModelForCausalLM

from engine import cli
from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.plans.run_inputs import inputs_of
from engine.tasks.quickstart import Prepared, Quickstart, prepare
from engine.tasks.warm_start import RECIPE

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(autouse=True)
def forked(server: ForkServer) -> Iterator[None]:
    """The process in which the model learns starts in a moment."""
    with starts_of(server):
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The smallest model, hardly trained."""
    tiny = Quickstart(layers=1, hidden_size=16, heads=2, train_prompts=8, validation_prompts=4, warmup_steps=5)
    return prepare(tmp_path_factory.mktemp("made"), tiny)


ROWS = [{"prompt": f"{number}+1=", "answer": f"{number + 1}"} for number in range(10, 26)]


def configured(made: Prepared, folder: Path, rows: Any = ROWS, **changes: Any) -> Any:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = {"path": str(path), "epochs": 20, "batch_size": 5, "learning_rate": 1e-2, **changes.pop("start", {})}
    return parse_config(
        {
            "run": {"dir": str(folder / "runs"), "seed": 1},
            "model": {"path": made.model_path, "warm_start": start},
            "data": {"path": made.training_path},
            "reward": {"function": made.reward},
            "trainer": {"threads": 1, "kl_loss_coef": 0.1, **changes},
        }
    )


def description(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(model).parent / "complete.json").read_text())
    return found


def test_the_model_learns_the_answers_once(made: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    config = configured(made, tmp_path)
    model = inputs_of(config, lambda done, text: said.append(text)).model
    measured = description(model)
    assert measured["steps"] == 20 * 4, "16 answers, 5 a step"
    assert measured["last_loss"] < 0.5 * measured["first_loss"]
    assert said[-1].startswith("warm start done: loss ")
    assert not (Path(model) / "optimizer").exists()
    before = AutoModelForCausalLM.from_pretrained(made.model_path).state_dict()
    after = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)

    said.clear()
    assert inputs_of(config, lambda done, text: said.append(text)).model == model and not said, "found, not made"
    other = configured(made, tmp_path, rows=ROWS[:4], start={"epochs": 1, "path": str(tmp_path / "ans*.jsonl")})
    assert inputs_of(other).model != model and RECIPE == 2


def test_an_adapter_learns_the_answers_and_is_merged_in_the_type_of_the_model(made: Prepared, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(made.model_path, model)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    config = configured(replace(made, model_path=str(model)), tmp_path, lora={"rank": 4})
    learned = inputs_of(config).model
    measured = description(learned)
    assert measured["last_loss"] < 0.9 * measured["first_loss"]
    assert not (Path(learned) / "adapter_config.json").exists() and (Path(learned) / "tokenizer.json").is_file()
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, learned))
    assert after.dtype == torch.bfloat16
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert changed and all("_proj" in name for name in changed), "only what the adapter reaches"
    whole = configured(replace(made, model_path=str(model)), tmp_path)
    assert inputs_of(whole).model != learned, "without an adapter it is another model"


def test_ranks_learn_the_same(made: Prepared, tmp_path: Path) -> None:
    weights = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        start = {"epochs": 1, "learning_rate": 1e-3}
        config = configured(made, tmp_path / str(ranks), start=start, ranks=ranks, adam_eps=1e-6)
        weights.append(AutoModelForCausalLM.from_pretrained(inputs_of(config).model).state_dict())
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])


@pytest.mark.parametrize(
    ("rows", "law"),
    [
        ([*ROWS[:2], {"prompt": "1+1=", "anser": "2"}], "model.warm_start.answer_field.*row 2 .*did you mean anser"),
        ([{"prompt": "1+1=", "answer": None}], "model.warm_start.answer_field.*row 0 .*has no text.* name the column"),
        ([{"prompt": "1+1=", "answer": 5}], "path is .*: row 0: answer is 5, but must be text that is not empty$"),
        ([*ROWS[:2], {"prompt": "1+1=", "answer": ""}], "row 2: answer is '', but must be text that is not empty$"),
    ],
)
def test_a_row_without_an_answer_is_named_before_the_run(
    made: Prepared, tmp_path: Path, rows: Any, law: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(made, tmp_path, rows=rows)
    with pytest.raises(ConfigError, match=law):
        inputs_of(config)
    (tmp_path / "run.yaml").write_text(config.dump_yaml())
    assert cli.main(["check", str(tmp_path / "run.yaml")]) == 2
    assert re.search(law, capsys.readouterr().err.strip())


def test_a_row_that_is_too_long_is_named(made: Prepared, tmp_path: Path) -> None:
    config = configured(made, tmp_path, rows=[ROWS[0], {"prompt": "1+1=", "answer": "2" * 600}])
    with pytest.raises(ConfigError, match=r"row 1 has 604 tokens, but the model takes 512"):
        inputs_of(config)
    assert not list((tmp_path / "runs" / ".made").glob("warm-start-*"))


def test_a_made_model_has_had_its_warm_start() -> None:
    with pytest.raises(ConfigError, match=r"model\.warm_start\.path"):
        parse_config({"model": {"make": "arithmetic", "warm_start": {"path": "answers.jsonl"}}})


def test_the_launching_process_makes_no_trainer(
    made: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep a CUDA context, and with it a part of a GPU, for the whole run."""

    def refuse(*given: Any, **settings: Any) -> None:
        raise AssertionError("a trainer in the launching process")

    monkeypatch.setattr("engine.training.model_trainer.ModelTrainer.__init__", refuse)
    config = configured(made, tmp_path, rows=ROWS[:5], start={"epochs": 1})
    assert description(inputs_of(config).model)["steps"] == 1
