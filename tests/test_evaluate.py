"""`engine evaluate`: the figures of a model, what is written, and what is refused."""

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_tokenizers import save_chat_model, write_rows

from engine import cli
from engine.cli.evaluate import Subject, subject_of
from engine.config.evaluation import load_evaluation
from engine.metrics.intervals import estimates
from engine.metrics.journal import line_of
from engine.record import read, replay
from engine.states.limits import ValidationSet
from engine.states.validation_figures import Response, figures
from engine.storage.samples import FOLDER, VALIDATION, SampleFiles

Capture = pytest.CaptureFixture[str]
REWARDS = """\
def even(prompt, trajectory):
    return float(len(trajectory.token_ids) % 2 == 0)

def first_letter(prompt, trajectory):
    return trajectory.text[:1] or None

even.extract = first_letter
"""
SETS: list[dict[str, Any]] = [
    {"name": "greedy", "prompts": 3},
    {"name": "sampled", "path": "other.jsonl", "samples_per_prompt": 4, "k": [2, 4], "max_tokens": 5},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("models") / "base", "base", context=64)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration without a model and training prompts, and two files of validation prompts. An evaluation needs no
    Ray: nothing of the engine that uses it can be imported."""
    for name in {"engine.actors", *(name for name in sys.modules if name.startswith("engine.actors."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path("my_code.py").write_text(REWARDS)
    write_rows(Path("held_out.jsonl"), *({"prompt": f"{n}+1="} for n in range(5)))
    write_rows(Path("other.jsonl"), *({"prompt": f"{n}*2="} for n in range(3)))
    tree = {
        "data": {"validation_path": "held_out.jsonl"},
        "reward": {"function": "my_code:even"},
        "rollout": {"max_tokens": 8, "device": "cpu", "slots": 2},
        "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4},
        "validation": {"sets": SETS},
    }
    Path("eval.yaml").write_text(yaml.safe_dump(tree))
    yield tmp_path
    sys.modules.pop("my_code", None)


def refused(capsys: Capture, *arguments: str) -> str:
    assert cli.main(["evaluate", *arguments]) == 2
    return capsys.readouterr().err


def test_the_figures_are_those_of_the_responses_that_are_kept(model: str, project: Path, capsys: Capture) -> None:
    assert cli.main(["evaluate", model, "eval.yaml", "--to", "results", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    results = json.loads((project / "results/results.json").read_text())
    assert stat.S_IMODE((project / "results/results.json").stat().st_mode) == 0o600
    assert printed == {"command": "evaluate", "run": "results", **results}
    assert (printed["rows"], printed["measured"], printed["steps"]) == (3 + 3 * 4, 15, None)
    rows = list(SampleFiles(project / "results" / FOLDER).rows(VALIDATION))
    assert len(rows) == 15 and len(list((project / "results" / FOLDER).iterdir())) == 1
    letters: dict[str | None, int] = {None: 0}
    for name, prompts, samples, k in (("greedy", 3, 1, ()), ("sampled", 3, 4, (2, 4))):
        own = sorted((r for r in rows if r["validation_set"] == name), key=lambda r: (r["prompt_row"], r["sample"]))
        assert [(r["prompt_row"], r["sample"]) for r in own] == [(p, s) for p in range(prompts) for s in range(samples)]
        assert max(r["tokens"] for r in own) <= (8 if name == "greedy" else 5)
        assert all(r["answer"] is None for r in own) == (name == "greedy")
        said = {
            i: Response(r["reward"], letters.setdefault(r["answer"], len(letters)), r["reward"] >= 1.0)
            for i, r in enumerate(own)
        }
        one = ValidationSet(name=name, prompts=prompts, samples=samples, k=k, majority=bool(k))
        expected = {f.metric: (f.value, f.low, f.high) for f in estimates(figures([one], said))}
        of_set = printed["sets"][name]
        assert {
            metric: (of_set[metric], of_set[f"{metric}_low"], of_set[f"{metric}_high"]) for metric in expected
        } == expected
    assert replay(read(project / "results/schedule")).identical

    assert cli.main(["evaluate", model, "eval.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "15 of 15 responses" in shown and "pass@4" in shown and "evaluations/" in shown
    (again,) = (project / "evaluations").iterdir()
    repeated = SampleFiles(again / FOLDER).rows(VALIDATION)
    assert sorted(map(str, rows)) == sorted(map(str, repeated)) and len({row["response"] for row in rows}) > 3


def test_the_function_that_is_correct_decides_and_every_part_has_a_mean(
    model: str, project: Path, capsys: Capture
) -> None:
    """An untrained model whose responses are never right and always well formed; and one that is always right."""
    Path("my_code.py").write_text("""
def never(prompt, trajectory):
    return 0.0

def always(prompt, trajectory):
    return 1.0

def seldom(prompt, trajectory):
    return 0.25 if prompt.row == 0 else None
""")
    functions = [
        {"name": "acc", "function": "my_code:never"},
        {"name": "fmt", "function": "my_code:always", "weight": 0.5},
        {"name": "rare", "function": "my_code:seldom", "weight": 2.0},
    ]
    sets = [
        {"name": "both", "samples_per_prompt": 2, "max_tokens": 4},
        {"name": "alone", "reward": "fmt", "max_tokens": 4},
    ]

    def measured(correct: str) -> dict[str, Any]:
        settings = {"reward.functions": functions, "reward.correct": correct, "validation.sets": sets}
        given = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        done = cli.main(["evaluate", model, "eval.yaml", "--json", "--set=reward.function=null", *given])
        said = capsys.readouterr()
        assert done == 0, said.err
        found: dict[str, Any] = json.loads(said.out)
        return found

    wrong, right = measured("acc"), measured("fmt")
    assert (wrong["accuracy"], right["accuracy"]) == (pytest.approx(1 / 3), 1.0), "a set of its own reward is right"
    for found, value in ((wrong, 0.0), (right, 1.0)):
        both, alone = found["sets"]["both"], found["sets"]["alone"]
        assert [both[name] for name in ("avg@2", "pass@2")] == [value] * 2
        assert [both[f"reward_{name}"] for name in ("acc", "fmt", "rare")] == [0.0, 1.0, 0.25]
        assert both["reward_mean"] == pytest.approx(0.5 + 0.5 / 5)
        assert (alone["avg@1"], alone["reward_mean"]) == (1.0, 1.0) and "reward_fmt" not in alone
    assert "reward.correct 'acx' is not" in refused(
        capsys, model, "eval.yaml", "--set=reward.function=null", f"--set=reward.functions={json.dumps(functions)}",
        "--set=reward.correct=acx",
    )  # fmt: skip


def test_responses_that_fail_and_prompts_that_are_dropped_count_as_wrong(
    model: str, project: Path, capsys: Capture
) -> None:
    """Of six prompts, one is dropped, and the reward of two raises; the others are right."""
    Path("my_code.py").write_text("""
def odd(prompt, trajectory):
    if prompt.row % 2:
        raise ValueError("no verdict")
    return 1.0
""")
    write_rows(Path("held_out.jsonl"), *({"prompt": f"{n}+1=" + 99 * (n == 4) * "1"} for n in range(6)))
    sets = json.dumps([{"name": "a"}, {"name": "b", "samples_per_prompt": 2, "prompts": 4}])
    given = ["--set=reward.function=my_code:odd", f"--set=validation.sets={sets}", "--set=data.overlong=drop"]
    assert cli.main(["evaluate", model, "eval.yaml", "--to", "results", *given]) == 0
    shown = capsys.readouterr().out
    assert "warning: 8 of 14 validation responses (57%) failed and count as wrong: row 1: " in shown
    assert "no verdict" in shown and " 67 % " in shown and " 50 % " in shown
    results = json.loads((project / "results/results.json").read_text())
    assert (results["accuracy"], results["reward_mean"], results["rows"], results["measured"]) == (
        2 / 14 + 4 / 14,
        1,
        14,
        6,
    )
    found = {name: (one["prompts"], one["failed_share"], one["reward_mean"]) for name, one in results["sets"].items()}
    assert found == {"a": (6, pytest.approx(4 / 6), 1.0), "b": (4, 0.5, 1.0)}
    assert results["sets"]["a"]["avg@1"] == pytest.approx(2 / 6) and results["sets"]["b"]["pass@2"] == 0.5


def test_models_and_runs_that_are_not_there_are_refused(model: str, project: Path, capsys: Capture) -> None:
    assert "MODEL '/nowhere' is neither" in refused(capsys, "/nowhere", "eval.yaml")
    assert "MODEL 'nowhere' is neither" in refused(capsys, "nowhere", "eval.yaml")
    (project / "empty").mkdir()
    assert "has no config.json" in refused(capsys, "empty", "eval.yaml")
    assert "RUN 'nowhere' does not exist" in refused(capsys, "nowhere@step-3", "eval.yaml")
    checkpoints = project / "runs" / "mine" / "checkpoints"
    (checkpoints.parent / "schedule").mkdir(parents=True)
    assert "RUN 'mine' has no checkpoint; set trainer.checkpoint_every" in refused(capsys, "mine", "eval.yaml")
    (checkpoints.parent / "config.yaml").write_text("trainer:\n  checkpoint_every: 20\n")
    said = refused(capsys, "mine", "eval.yaml")
    assert "has no checkpoint yet; it writes one every 20 train steps; give the command again after that\n" in said
    (checkpoints / "step-000004").mkdir(parents=True)
    assert "nearest: step-4" in refused(capsys, "mine@step-3", "eval.yaml")
    assert "RUN@step-N" in refused(capsys, "mine@newest", "eval.yaml")
    (checkpoints / "step-000004" / "SHA256SUMS").write_text("")
    assert subject_of("mine").steps == subject_of("mine@step-4").steps == 4
    assert subject_of("mine").config == str(checkpoints.parent / "config.yaml")
    (checkpoints.parent / "config.yaml").write_text("trainer: {keep_best: {metric: accuracy}}")
    row = {"validation": 0, "steps": 4, "outcome": "reported", "accuracy": 0.5}
    (checkpoints.parent / "metrics.jsonl").write_bytes(line_of(row))
    assert subject_of("mine@best").steps == 4


def test_the_configuration_may_be_left_out_for_a_run_only(model: str, project: Path, capsys: Capture) -> None:
    assert "CONFIG is not set: required by engine evaluate" in refused(capsys, model)
    checkpoint = project / "runs" / "mine" / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "SHA256SUMS").write_text("")
    (project / "runs" / "mine" / "schedule").mkdir()
    (project / "runs" / "mine" / "config.yaml").write_text("own: 1")
    assert "unknown key" in refused(capsys, "mine"), "that of the run was read"


def test_a_hub_name_may_have_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert subject_of("gpt2") == Subject("gpt2", "gpt2")


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("rollout={backend: openai, urls: ['http://127.0.0.1:1'], weights_dir: w}", "rollout.backend"),
        ("agent.function=my_code:even", "agent"),
        ("validation.sets=[{name: a, path: none.jsonl}]", "validation.sets.0.path"),
        ("validation.sets=[{name: a, samples_per_prompt: 2, k: [3]}]", "validation.sets.0.k"),
        ("data.validation_path=null", "validation.sets.0.path"),
    ],
)
def test_configurations_that_no_evaluation_can_follow_are_refused(
    model: str, capsys: Capture, setting: str, field: str
) -> None:
    assert field in refused(capsys, model, "eval.yaml", "--set", setting)


def test_results_are_never_written_over_others(model: str, project: Path, capsys: Capture) -> None:
    (project / "results").mkdir()
    (project / "results" / "notes.txt").write_text("mine")
    assert "--to 'results' already has files" in refused(capsys, model, "eval.yaml", "--to", "results")
    assert "required by engine evaluate" in refused(
        capsys, model, "eval.yaml", "--set", "validation.sets=[]", "--set", "data.validation_path=null"
    )


def test_an_evaluation_may_truncate_sampling(project: Path) -> None:
    assert load_evaluation("eval.yaml", ("rollout.top_p=0.9",), "a-model").rollout.top_p == 0.9


def test_the_weights_that_the_run_of_the_file_begins_with_are_left_out(project: Path) -> None:
    begin = ("model.checkpoint_path=elsewhere/step-000002", "model.checkpoint_optimizer=true")
    of_model = load_evaluation("eval.yaml", begin, "a-model").model
    assert (of_model.path, of_model.checkpoint_path, of_model.checkpoint_optimizer) == ("a-model", None, False)
