"""Several data sources in a configuration: what is refused, what `engine check` prints, and what a run is given."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import save_chat_model, write_rows

from engine.api import configured
from engine.cli import main
from engine.config.inputs import check_inputs
from engine.config.loading import load_config, parse_config
from engine.config.resumption import resumed
from engine.errors import ConfigError
from engine.plans.configured_plan import plan_of
from engine.plans.run_inputs import inputs_of, make_prompts
from engine.runtime.prompt_sources import MixedPrompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chatml", "chatml")


def tree(model: str, folder: Path, **data: Any) -> dict[str, dict[str, Any]]:
    """Two sources of four and two rows; `data` replaces fields of the section."""
    for name, rows in (("math", 4), ("code", 2)):
        write_rows(
            folder / f"{name}.jsonl",
            *({"prompt": f"{name} {row}?", "answer": "4", "rate": row / 4} for row in range(rows)),
        )
    sources = [{"name": name, "path": str(folder / f"{name}.jsonl")} for name in ("math", "code")]
    return {
        "run": {"dir": str(folder / "runs")},
        "model": {"path": model},
        "data": {"sources": sources} | data,
        "reward": {"function": "engine.tasks.rewards:exact_match"},
        "scheduler": {"train_batch_size": 2, "policy_mini_batch_size": 2, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 4, "device": "cpu", "replicas": 1, "slots": 2},
    }


def changed(made: dict[str, dict[str, Any]], index: int, **fields: Any) -> dict[str, dict[str, Any]]:
    made["data"]["sources"][index] |= fields
    return made


STAGES = [{"weights": {"math": 1.0}, "until": 3}, {"weights": {"math": 1, "code": 1}}]
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "line": ('{"prompt": "a"}\n{"prompt": ', {}, r"data\.sources\.code .*code\.jsonl'.*line 2 cannot be read as JSON"),
    "field": (
        '{"promt": "a"}\n',
        {},
        r"data\.sources\.code.*line 1 has neither 'prompt' nor.*'promt'; did you mean promt\?",
    ),
    "column": (
        '{"question": "a"}\n',
        {"columns": {"qestion": "prompt"}},
        r"no column 'qestion'.*did you mean question",
    ),
    "rate": (
        '{"prompt": "a", "rate": "high"}\n',
        {"pass_rate": {"column": "rate", "min": 0.1}},
        r"data\.sources\.code\.pass_rate\.column.*row 0 has no number under this name \(it is 'high'\)",
    ),
    "no rate": (
        '{"prompt": "a", "rates": 0.5}\n',
        {"pass_rate": {"column": "rate", "min": 0.1}},
        r"there is no such column\); did you mean rates\?",
    ),
    "none left": (
        '{"prompt": "a", "rate": 0.5}\n',
        {"pass_rate": {"column": "rate", "min": 0.6}},
        r"data\.sources\.code\.pass_rate.*leaves no row of the 1 of",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_source_is_refused_by_check_and_at_the_start(model: str, tmp_path: Path, case: str) -> None:
    text, source, said = BROKEN[case]
    config = parse_config(changed(tree(model, tmp_path), 1, **source))
    (tmp_path / "code.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(check_inputs(config))
    with pytest.raises(ConfigError, match=said):
        plan_of(config, tmp_path / "run")


def test_check_exits_with_2_for_a_weight_of_zero(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(changed(tree(model, tmp_path), 0, weight=0)))
    assert main(["check", str(file)]) == 2
    assert "data.sources.0.weight is 0, but must be" in capsys.readouterr().err


def test_check_prints_rows_weights_and_shares(model: str, tmp_path: Path) -> None:
    made = changed(changed(tree(model, tmp_path), 0, weight=1.0), 1, weight=3.0)
    made["data"]["sources"][0]["pass_rate"] = {"column": "rate", "min": 0.25}
    lines = list(check_inputs(parse_config(made), rehearse=True))
    assert "ok: source math: 3 rows, 1 left out by 0.25 <= rate, weight 1, expected share 25.0%" in lines
    assert "ok: source code: 2 rows, weight 3, expected share 75.0%" in lines
    assert any(line.startswith("note: source code is read 1.9 times in 5 draws") for line in lines)
    assert any(line.startswith("ok: the first prompt of data.sources.code is these") for line in lines)
    del made["data"]["sources"][0]["weight"], made["data"]["sources"][1]["weight"]
    made["data"]["curriculum"] = {"stages": STAGES}
    lines = list(check_inputs(parse_config(made)))
    assert any("source code" in line and "expected share 0.0% -> 50.0%" in line for line in lines)


def test_a_run_draws_from_its_sources(model: str, tmp_path: Path) -> None:
    config = parse_config(changed(tree(model, tmp_path), 0, pass_rate={"column": "rate", "max": 0.4}))
    prompts = plan_of(config, tmp_path / "run").make_prompts()
    assert type(prompts) is MixedPrompts and not prompts.learns and prompts.draw(0, 9) == (4, True)
    drawn = [(prompts.prompt(group).source, prompts.prompt(group).row) for group in range(4)]
    assert sorted(drawn) == [("code", 0), ("code", 1), ("math", 0), ("math", 1)]
    assert prompts.figures()["math"] == {"drawn": 2, "dropped": 2, "rested": 0}
    for learns in ({"curriculum": {"stages": STAGES}}, {}):
        made = tree(model, tmp_path, **learns)
        config = parse_config(made if learns else changed(made, 0, pass_rate={"max": 0.4}))
        prompts = make_prompts(config, inputs_of(config), tmp_path)
        assert type(prompts) is MixedPrompts and prompts.learns


@pytest.mark.parametrize("field", ["data.curriculum", "data.sources"])
def test_a_resumed_run_keeps_its_sources(model: str, tmp_path: Path, field: str) -> None:
    """The record depends on them: other weights would give its groups other rows."""
    (tmp_path / "config.yaml").write_text(json.dumps(tree(model, tmp_path)))
    recorded = load_config(tmp_path / "config.yaml").model_dump(mode="json")
    made = tree(model, tmp_path, curriculum={"stages": STAGES})
    if field == "data.sources":
        made = changed(changed(tree(model, tmp_path), 0, weight=1.0), 1, weight=2.0)
    (tmp_path / "config.yaml").write_text(json.dumps(made))
    with pytest.raises(ConfigError, match=rf"{field}.*the run began with it"):
        resumed(tmp_path / "config.yaml", recorded)


def test_paths_of_sources_are_relative_to_the_file(model: str, tmp_path: Path) -> None:
    made = tree(model, tmp_path)
    made["data"]["sources"][0]["path"], made["data"]["sources"][1]["path"] = "math.jsonl", ["code.jsonl", "more/*.csv"]
    (tmp_path / "config.yaml").write_text(json.dumps(made))
    first, second = load_config(tmp_path / "config.yaml").data.sources
    assert first.path == str(tmp_path / "math.jsonl")
    assert second.path == [str(tmp_path / "code.jsonl"), str(tmp_path / "more/*.csv")]


def test_train_takes_lists_of_paths_and_sources(model: str, tmp_path: Path) -> None:
    made = tree(model, tmp_path)
    settings = {
        f"{section}.{name}": value
        for section in ("run", "scheduler", "rollout")
        for name, value in made[section].items()
    }
    paths = [tmp_path / "math.jsonl", tmp_path / "code.jsonl"]
    config, _ = configured(model, paths, "engine.tasks.rewards:exact_match", settings=settings)
    assert config.data.path == [str(path) for path in paths]
    settings["data.sources"] = made["data"]["sources"]
    config, _ = configured(model, None, "engine.tasks.rewards:exact_match", settings=settings)
    assert [source.name for source in config.data.sources] == ["math", "code"]
