"""`engine.train` and `engine.resume`: their arguments, and a reward that is a function of the caller."""

import dataclasses
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
from chat_tokenizers import save_chat_model

import engine
from engine.actors.detached_actors import PackedPlan
from engine.api import TrainedRun, configured, resumption
from engine.cli import main
from engine.config.inputs import check_inputs
from engine.metrics.journal import line_of
from engine.plans.configured_plan import plan_of
from engine.protocols.named_code import name_of
from engine.runtime.local import run_plan
from engine.storage import run_directory
from engine.tasks.rewards import exact_match
from engine.workers.plan import Resumption

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
SMALL: dict[str, Any] = {
    "scheduler.train_batch_size": 2,
    "scheduler.samples_per_prompt": 2,
    "rollout.slots": 2,
    "rollout.replicas": 1,
    "rollout.max_tokens": 4,
    "trainer.threads": 1,
    "metrics.port": 0,
    "control.enabled": False,
}


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_chat_model(tmp_path / "model", "chatml", context=64)


def made_reward(value: float) -> Callable[[engine.Prompt, engine.Trajectory], float]:
    """A function that no other process can import."""

    def always(prompt: engine.Prompt, trajectory: engine.Trajectory) -> float:
        assert prompt.fields["answer"]
        return value

    return always


def test_the_reward_may_be_a_function_that_cannot_be_imported(model: str, tmp_path: Path) -> None:
    config, local = configured(model, iter(ROWS), made_reward(0.25), None, ROWS[:1], 2, SMALL)
    assert config.reward.function == "test_api:made_reward.locals.always"
    assert (config.run.max_steps, config.run.epochs, config.run.code_dir) == (2, None, str(tmp_path))
    assert "ok: data.path has 4 prompts" in [*check_inputs(config, local=local)]
    sent = PackedPlan.of(plan_of(config, tmp_path / "run", local=local)).unpack()
    assert run_plan(sent).steps == 2

    run = TrainedRun(tmp_path / "run", "finished")
    assert [(row["step"], row["reward_mean"]) for row in run.steps] == [(0, 0.25), (1, 0.25)]
    assert [row["reward_mean"] for row in run.validations] == [0.25, 0.25], "of the initial and the last weights"
    assert {row["reward"] for row in run.samples()} == {0.25} and {row["step"] for row in run.samples()} == {0, 1}
    assert {row["kind"] for row in run.samples(validation=True)} == {"validation"}
    assert run.model_path is not None and (run.model_path / "model.safetensors").is_file()


def test_a_run_with_a_function_of_a_script_resumes_with_that_function(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "trainer.checkpoint_every": 1}
    config, local = configured(model, ROWS, made_reward(0.25), None, None, 1, settings)
    directory = run_directory.create("runs", "mine", config_yaml=config.dump_yaml())
    assert run_plan(plan_of(config, directory.path, local=local)).steps == 1

    assert main(["resume", "latest", "--set", "run.max_steps=2"]) == 2
    said = capsys.readouterr().err
    assert "cannot be imported" in said and "engine.resume(RUN, reward=FUNCTION)" in said
    for wrong in (exact_match, "engine.tasks.rewards:exact_match", lambda prompt: 1, {"right": exact_match}):
        with pytest.raises(engine.ConfigError, match="is not the function or class that the run began with"):
            engine.resume("latest", wrong)
    with pytest.raises(engine.ConfigError, match=r"run\.seed is 7"):
        engine.resume("latest", made_reward(0.5), **{"run.seed": 7})

    again, changed, local = resumption(directory, made_reward(0.5), None, {"run.max_steps": 2})
    plan = plan_of(again, directory.path, local=local)
    assert run_plan(dataclasses.replace(plan, resume=True, resumption=Resumption(settings=tuple(changed)))).steps == 2
    assert [row["reward_mean"] for row in TrainedRun(directory.path, "finished").steps] == [0.25, 0.5]


def test_an_importable_reward_goes_by_its_name_so_that_the_run_can_be_resumed(model: str) -> None:
    config, local = configured(model, ROWS, exact_match)
    assert (config.reward.function, local) == ("engine.tasks.rewards:exact_match", {})
    assert config.run.epochs == 1, "one pass"
    assert configured(model, ROWS, "my_rewards:score")[0].reward.function == "my_rewards:score"
    again = configured(model, ROWS, exact_match)[0].data.path
    assert again == config.data.path and again is not None
    assert stat.S_IMODE(Path(again).stat().st_mode) == 0o600


def test_metrics_are_a_data_frame_where_pandas_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": 0, "loss": 2.0}, {"validation": 0, "steps": 0}, {"step": 1, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(line_of, rows)))
    run = TrainedRun(tmp_path, "finished")
    assert run.steps == [rows[0], rows[2]] and run.validations == [rows[1]]
    assert list(run.metrics["loss"]) == [2.0, 1.0]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        _ = run.metrics


def test_data_may_be_a_data_frame(model: str) -> None:
    columns = {"prompt": ["1+1=", "2+2="], "answer": ["2", None], "n": [1, 2], "tags": [numpy.array([1, 2]), []]}
    config, _ = configured(model, pandas.DataFrame(columns), exact_match)
    path = config.data.path
    assert isinstance(path, str)
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == [
        {"prompt": "1+1=", "answer": "2", "n": 1, "tags": [1, 2]},
        {"prompt": "2+2=", "answer": None, "n": 2, "tags": []},
    ]


def test_nan_in_a_row_is_a_missing_value_as_in_a_data_frame(model: str) -> None:
    config, _ = configured(model, [{"prompt": "1+1=", "answer": "2", "pass_rate": float("nan")}], exact_match)
    assert isinstance(config.data.path, str)
    assert json.loads(Path(config.data.path).read_text()) == {"prompt": "1+1=", "answer": "2", "pass_rate": None}


def test_every_form_of_a_reward_may_be_local(model: str, tmp_path: Path) -> None:
    def trl(completions: list[str], **columns: Any) -> list[float]:
        assert columns["answer"] == [ROWS[0]["answer"]] * len(completions) or len({*columns["answer"]}) > 1
        return [1.0] * len(completions)

    def whole(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(answer)

    def brief(prompt: engine.Prompt, trajectory: engine.Trajectory, most: float) -> float:
        return most

    forms: list[tuple[Any, dict[str, Any], float, dict[str, float] | None]] = [
        (trl, {}, 1.0, None),
        (whole, {}, 0.5, None),
        ([trl, whole], {}, 1.5, {"trl": 1.0, "whole": 0.5}),
        (
            {"all": trl, "half": (whole, 2), "brief": {"function": brief, "arguments": {"most": 4.0}, "weight": -1.0}},
            {}, -2.0, {"all": 1.0, "half": 0.5, "brief": 4.0},
        ),
        (None, {"reward.functions": [{"name": "a", "function": whole, "weight": 3.0}]}, 1.5, {"a": 0.5}),
    ]  # fmt: skip
    for number, (reward, settings, total, parts) in enumerate(forms):
        config, local = configured(model, ROWS, reward, settings={**SMALL, **settings}, max_steps=1)
        list(check_inputs(config, rehearse=True, local=local))
        run_dir = tmp_path / f"run-{number}"
        sent = PackedPlan.of(plan_of(config, run_dir, local=local)).unpack()
        assert run_plan(sent).steps == 1
        for row in TrainedRun(run_dir, "finished").samples():
            assert (row["reward"], row["reward_parts"]) == (total, parts)


def test_a_validation_set_may_have_a_reward_in_any_form(model: str, tmp_path: Path) -> None:
    def trl(completions: list[str], **columns: Any) -> list[float]:
        return [2.0] * len(completions)

    settings = {**SMALL, "validation.sets": [{"name": "a", "reward": trl}]}
    config, local = configured(model, ROWS, exact_match, None, ROWS[:2], 1, settings)
    list(check_inputs(config, rehearse=True, local=local))
    run_plan(PackedPlan.of(plan_of(config, tmp_path / "run", local=local)).unpack())
    assert [row["reward_mean"] for row in TrainedRun(tmp_path / "run", "finished").validations] == [2.0, 2.0]


@pytest.mark.parametrize("form", ["class", "function"])
def test_the_environment_may_be_local(model: str, tmp_path: Path, form: str) -> None:
    class Guess(engine.Environment):
        def __init__(self, question: str = "2+3=") -> None:
            self.question = question

        def reset(self, prompt: engine.Prompt, seed: int) -> str:
            return self.question

    def make() -> engine.Environment:
        return Guess("2+3=")

    environment, name = (Guess, "Guess") if form == "class" else (make, "make")
    settings = {**SMALL, "trainer.checkpoint_every": 1}
    config, local = configured(model, ROWS, made_reward(0.75), environment, None, 1, settings)
    assert config.environment.class_name == f"test_api:test_the_environment_may_be_local.locals.{name}"
    assert any("begins an episode" in line for line in check_inputs(config, local=local))
    directory = run_directory.create("runs", "mine", config_yaml=config.dump_yaml())
    assert run_plan(PackedPlan.of(plan_of(config, directory.path, local=local)).unpack()).steps == 1
    samples = TrainedRun(directory.path, "finished").samples()
    assert {(row["reward"], row["figures"]["turns"]) for row in samples} == {(0.75, 1.0)}
    with pytest.raises(engine.ConfigError, match=r"cannot be imported.*environment=CLASS"):
        list(check_inputs(config, local={"reward.function": made_reward(0.75)}))
    again = resumption(directory, local["reward.function"], environment, {"run.max_steps": 2})
    assert again[2] == local and again[0].run.max_steps == 2


def test_a_resume_takes_every_function_that_the_run_began_with(model: str) -> None:
    async def play(client: Any, prompt: engine.Prompt) -> float:
        await client.sample(prompt.text)
        return 1.0

    async def other(client: Any, prompt: engine.Prompt) -> float:
        return 0.0

    settings = {**SMALL, "agent.rollout": play, "trainer.checkpoint_every": 1}
    config, local = configured(model, ROWS, None, None, None, 1, settings)
    directory = run_directory.create("runs", "mine", config_yaml=config.dump_yaml())
    assert run_plan(plan_of(config, directory.path, local=local)).steps == 1
    again, _, found = resumption(directory, None, None, {"agent.rollout": play, "run.max_steps": 2})
    assert found == local == {"agent.rollout": play} and again.run.max_steps == 2
    with pytest.raises(engine.ConfigError, match=r"agent\.rollout .* is not the function or class that the run began"):
        resumption(directory, None, None, {"agent.rollout": other})
    with pytest.raises(engine.ConfigError, match=r"engine\.resume\(RUN, \*\*\{'agent\.rollout': FUNCTION\}\)"):
        plan_of(again, directory.path)


def test_a_function_of_a_script_is_not_importable() -> None:
    def score(prompt: engine.Prompt, trajectory: engine.Trajectory) -> float:
        return 1.0

    score.__module__, score.__qualname__ = "__main__", "score"
    assert name_of(score) == ("__main__:score", False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no reward": ({"reward": None}, "reward.function is not set: required with model.path"),
    "a lambda without a name": ({"reward": [lambda prompt, trajectory: 1.0]}, "give a mapping from names to functions"),
    "one name twice": ({"reward": [exact_match, "mine:exact_match"]}, "reward.functions.1.name .* must be unique"),
    "no weight": ({"reward": {"a": (exact_match, 0)}}, r"reward.functions.0.weight .* must not be 0"),
    "a weight that is no number": ({"reward": {"a": (exact_match, "x")}}, r"reward.functions.0.weight is 'x'"),
    "a function in a tuple": ({"reward": {"a": (exact_match,)}}, r"must be a function and its weight"),
    "no model": ({"model": None}, "model is null, but must be a text or a path"),
    "reward and rewards": (
        {"settings": {"reward.functions": [{"name": "a", "function": exact_match}]}},
        "reward.function .* cannot be set together with reward.functions",
    ),
    "a reward that is a number": ({"reward": 1.0}, "reward is 1.0, but must be a function.*; pass the function itself"),
    "no rows": ({"data": [1]}, r"data\[0\] is 1, but must be a dictionary"),
    "one row": ({"data": {"prompt": "x"}}, "data is .*'prompt'.*, but must be a list of rows"),
    "a number of rows": ({"validation_data": 5}, "validation_data is 5, but must be a list of rows"),
    "a value that JSON lacks": (
        {"data": [*ROWS, {"prompt": "1+1=", "score": {1}}]},
        rf"data\[{len(ROWS)}\]\['score'\] \{{1\}} is not a JSON value",
    ),
    "twice": (
        {"max_steps": 2, "settings": {"run.max_steps": 3}},
        "run.max_steps 3 is also an argument of engine.train",
    ),
    "no dot": (
        {"settings": {"learning_rate": 1e-6}},
        "learning_rate 1e-06 is neither an argument .*; did you mean trainer.learning_rate?",
    ),
    "almost an argument": ({"settings": {"max_step": 5}}, "max_step 5 is neither .*; did you mean max_steps?"),
    "a section": ({"settings": {"scheduler": {"sync_every": 1}}}, r"scheduler .*; for example \*\*\{'scheduler.train"),
    "a value and a section": (
        {"settings": {"rollout.engine_args": 1, "rollout.engine_args.seed": 2}},
        "engine_args is given as a value too; give only one of them",
    ),
    "a function as an argument": (
        {"environment": "m:E", "settings": {"environment.arguments": {"play": print}}},
        "environment.arguments.play 'builtins:print' is a function or a class, which cannot be an argument",
    ),
    "unknown": ({"settings": {"run.max_stepz": 4}}, "run.max_stepz is 4: unknown key; did you mean run.max_steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_used_are_refused(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(engine.ConfigError, match=message):
        configured(**{"model": "model", "data": "rows.jsonl", "reward": exact_match, **given})


def test_refused_arguments_leave_no_files(model: str, tmp_path: Path) -> None:
    for settings in ({"trainer.learning_rate": -1.0}, {"rollout.stop": ["no such token"]}):
        with pytest.raises(engine.ConfigError):
            engine.train(model, ROWS, exact_match, **settings)  # type: ignore[arg-type]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_directory_that_is_no_path_is_refused(model: str) -> None:
    with pytest.raises(engine.ConfigError, match="run_dir is 5, but must be a text or a path"):
        engine.train(model, ROWS, exact_match, run_dir=5)  # type: ignore[arg-type]
    with pytest.raises(engine.ConfigError, match="run is null, but must be a text or a path"):
        engine.resume(None)  # type: ignore[arg-type]


def test_public_names_need_no_optional_package() -> None:
    code = "import sys, engine; [getattr(engine, n) for n in engine.__all__]; print({'ray', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(engine.__file__).parents[1], capture_output=True)
    assert (done.returncode, done.stdout.strip()) == (0, b"set()"), done.stderr
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = engine.trian
