"""The section environment: what is refused before a run, and what `engine check` says of an environment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer, save_chat_model, save_model, write_rows
from transformers import AutoTokenizer

from engine import cli
from engine.config.inputs import check_inputs
from engine.config.loading import parse_config
from engine.environments import Environment, StepResult, ToolCall, Turn
from engine.errors import ConfigError
from engine.plans.configured_plan import plan_of
from engine.rollout.agents.tool_calls import ParsedCall
from engine.trajectory import Prompt


class Task(Environment):
    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    @property
    def tools(self) -> Sequence[Any]:
        return [self.add]

    def add(self, a: int, b: int) -> int:
        """The sum."""
        return a + b

    def reset(self, prompt: Prompt, seed: int) -> Any:
        if self.fault:
            raise ValueError(self.fault)
        return None

    def step(self, turn: Turn) -> StepResult:
        return StepResult(reward=1.0, done=True)


class Toolbox(Task):
    def tools(self) -> Sequence[Any]:  # type: ignore[override]
        return [self.add]


def number() -> int:
    return 3


def shouted(text: str) -> tuple[str, list[ParsedCall]]:
    """A parser of one's own."""
    return (text, []) if not text.isupper() else ("", [ParsedCall(text.lower(), "{}")])


NAME = f"{__name__}:Task"


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "models"
    folder.mkdir()
    return {family: save_chat_model(folder / family, family) for family in ("chatml", "base")}


def configured(folder: Path, model: str, **changes: Any) -> Any:
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "code_dir": str(Path(__file__).parent)},
        "model": {"path": model},
        "data": {"path": write_rows(folder / "rows.jsonl", {"prompt": "add 1 and 2"})},
        "environment": {"class_name": NAME},
        "scheduler": {"train_batch_size": 2, "policy_mini_batch_size": 2, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 4, "device": "cpu", "replicas": 1, "slots": 2},
    }
    for name, fields in changes.items():
        tree[name] = tree.get(name, {}) | fields
    return parse_config(tree)


def test_check_begins_an_episode_and_says_what_the_model_does_not_see(models: dict[str, str], tmp_path: Path) -> None:
    lines = list(check_inputs(configured(tmp_path, models["chatml"]), rehearse=True))
    assert f"ok: environment.class_name {NAME} begins an episode with 1 message and the tools add" in lines
    assert not any("does not write the tools" in line for line in lines)
    silent = AutoTokenizer.from_pretrained(models["chatml"])
    silent.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    silent.save_pretrained(models["chatml"])
    lines = list(check_inputs(configured(tmp_path, models["chatml"])))
    assert any(line.startswith("note: the chat template of") and "does not write the tools" in line for line in lines)
    assert plan_of(configured(tmp_path, models["chatml"]), tmp_path / "run").make_gateway is None


class Asking(Task):
    """Ends with the second answer."""

    def step(self, turn: Turn) -> StepResult:
        if self.fault_of_step and turn.number == 1:
            raise ValueError(self.fault_of_step)
        return StepResult(messages="and then?", reward=1.0, done=turn.number == 2)

    def __init__(self, fault_of_step: str = "") -> None:
        super().__init__()
        self.fault_of_step = fault_of_step


CALLING = """\
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role != 'tool' or RESULTS -%}{{- m.content -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}<tool_call>{{- c.function | tojson -}}</tool_call>{%- endfor -%}
{{- '<|im_end|>\n' -}}{%- endfor -%}{{- '<|im_start|>assistant\n' if add_generation_prompt -}}"""


@pytest.mark.parametrize(
    ("results", "environment", "outcome"),
    [
        ("true", {}, "of a scripted model, and the model reads its second turn"),
        ("true", {"class_name": NAME}, "of a scripted model, and ends the episode"),
        ("false", {}, "the chat template leaves out the text of message 3 (tool)"),
        ("true", {"arguments": {"fault_of_step": "no such state"}}, "note: environment.class_name"),
    ],
)
def test_check_plays_a_turn_and_reads_the_second_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], results: str, environment: dict[str, Any], outcome: str
) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = CALLING.replace("RESULTS", results)
    config = configured(
        tmp_path,
        save_model(tmp_path / "model", tokenizer),
        environment={"class_name": f"{__name__}:Asking"} | environment,
    )
    file = tmp_path / "run.yaml"
    file.write_text(config.dump_yaml(), encoding="utf-8")
    code = cli.main(["check", str(file)])
    said = capsys.readouterr()
    assert outcome in said.out + said.err and (code == 0) == ("leaves out" not in outcome)
    assert ("step raised ValueError: no such state" in said.out) == ("arguments" in environment)
    assert '<tool_call>{"name": "add", "arguments": {"a": "test", "b": "test"}}</tool_call>' in said.out + said.err


@pytest.mark.parametrize(
    ("environment", "story"),
    [
        ({"class_name": f"{__name__}:Tusk"}, f"module '{__name__}' has no attribute 'Tusk'; did you mean Task?"),
        ({"class_name": f"{__name__}:shouted"}, "shouted cannot be called with these arguments: .*parameters are text"),
        ({"class_name": f"{__name__}:number"}, "number returned int, not an engine.environments.Environment"),
        ({"class_name": f"{__name__}:Toolbox"}, "Toolbox.tools is a method, not a property; put @property before"),
        ({"class_name": f"{__name__}:ToolCall"}, "is a type, not a class derived from"),
        ({"arguments": {"speed": 1}}, "Task cannot be called with these arguments: .*its parameters are fault"),
        ({"arguments": {"fault": "no server"}}, "on prompt row 0: reset raised ValueError: no server"),
        ({"tool_parser": f"{__name__}:missing"}, f"module '{__name__}' has no attribute 'missing'"),
        ({"tool_parser": "hermse"}, "environment.tool_parser"),
    ],
)
def test_an_environment_that_cannot_play_is_refused_before_the_run(
    models: dict[str, str], tmp_path: Path, environment: dict[str, Any], story: str
) -> None:
    for check in (lambda config: list(check_inputs(config)), lambda config: plan_of(config, tmp_path / "run")):
        with pytest.raises(ConfigError, match=story):
            check(configured(tmp_path, models["chatml"], environment=environment))


def test_an_environment_needs_a_chat_template(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template: messages cannot be rendered"):
        list(check_inputs(configured(tmp_path, models["base"])))


def test_a_parser_of_ones_own_is_used(models: dict[str, str], tmp_path: Path) -> None:
    from engine.config.episodes import settings_of

    config = configured(tmp_path, models["chatml"], environment={"tool_parser": f"{__name__}:shouted"})
    assert settings_of(config).parser("ADD") == ("", [ParsedCall("add", "{}")])
    assert ToolCall(id="1", name="add", arguments={}).answer("3")["content"] == "3"
