"""Prompts that are longer than the model's context: refused, dropped or cut, and always the same ones."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import save_chat_model, tokens, write_rows
from transformers import AutoTokenizer

from engine.cli import main
from engine.config import Config
from engine.config.inputs import check_inputs
from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.plans.configured_plan import plan_of
from engine.plans.rollouts import make_rollout
from engine.protocols import GroupWork

CONTEXT = 64
FRAME = 19
"""Tokens of a chat around the user's text: `<|im_start|>user\\n`, `<|im_end|>\\n`, `<|im_start|>assistant\\n`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("model"), "chatml", context=CONTEXT)


def configured(model: str, folder: Path, lengths: list[int], held_out: list[int], **data: Any) -> Config:
    """A run on texts of so many letters."""
    files = {"path": lengths, "validation_path": held_out}
    rows = {
        name: write_rows(folder / f"{name}.jsonl", *({"prompt": "a" * n, "answer": "4"} for n in of))
        for name, of in files.items()
    }
    return parse_config(
        {
            "run": {"dir": str(folder / "runs"), "seed": 3},
            "model": {"path": model},
            "data": rows | data,
            "reward": {"function": "engine.tasks.rewards:exact_match"},
            "scheduler": {"train_batch_size": 2, "policy_mini_batch_size": 2, "samples_per_prompt": 2},
            "rollout": {"max_tokens": 4, "device": "cpu", "replicas": 1, "slots": 2},
        }
    )


FITS = CONTEXT - 1 - FRAME
"""Letters of the longest prompt that leaves room for a token of response."""


def test_overlong_prompts_are_refused_by_row_and_number(model: str, tmp_path: Path) -> None:
    config = configured(model, tmp_path, [5, FITS + 1, FITS, FITS + 9], [5])
    law = rf"data\.path .*row 1 has {CONTEXT} tokens; 2 of 4 prompts of data\.path have more than {CONTEXT - 1} tokens"
    with pytest.raises(
        ConfigError, match=rf"{law} .*context of {CONTEXT}\); set data\.overlong to drop or truncate_left"
    ):
        plan_of(config, tmp_path / "run")
    config = configured(model, tmp_path, [5], [5, FITS + 1])
    with pytest.raises(ConfigError, match=r"data\.validation_path .*row 1 has 64 tokens"):
        plan_of(config, tmp_path / "run")
    plan_of(configured(model, tmp_path, [5, FITS], [FITS]), tmp_path / "run")


@pytest.mark.parametrize(
    ("lengths", "held_out", "setting", "said"),
    [
        ([5, FITS + 1], [5], "run.seed=3", "data.overlong"),
        ([5], [FITS + 1], "run.seed=3", "data.overlong"),
        ([5], [5], "agent.function=no_such_module:talk", "agent.function"),
    ],
)
def test_a_refused_run_leaves_no_directory(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], lengths: Any, held_out: Any, setting: str, said: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(configured(model, tmp_path, lengths, held_out).dump_yaml(), encoding="utf-8")
    assert main(["run", str(path), "--plain", "--set", "metrics.port=0", "--set", setting]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_dropped_prompts_are_never_drawn_and_a_resume_draws_the_same(model: str, tmp_path: Path) -> None:
    config = configured(model, tmp_path, [5, FITS + 1, 7, FITS + 2, 9], [FITS + 1, 6], overlong="drop")
    messages: list[str] = []
    drawn = []
    for _ in range(2):
        plan = plan_of(config, tmp_path / "run", lambda share, text: messages.append(text))
        assert plan.make_prompts is not None
        prompts = plan.make_prompts()
        assert prompts.draw(0, 99) == (3, True)
        drawn.append([prompts.prompt(group).row for group in range(3)])
        assert [(prompt.row, prompt.text) for prompt in plan.held_out] == [(1, "a" * 6)]
        assert plan.limits.validation is not None and plan.limits.validation.rows == 1
        assert plan.limits.validation.dropped == 1, "its response counts as wrong"
    assert drawn[0] == drawn[1] and sorted(drawn[0]) == [0, 2, 4]
    assert (
        messages[:2] == messages[2:]
        and "data.overlong drop: 2 of 5 prompts of data.path have more than 63 tokens" in messages[0]
    )
    with pytest.raises(ConfigError, match=r"data\.overlong is 'drop': leaves no prompt: 1 of 1 prompts of data\.path"):
        plan_of(configured(model, tmp_path, [99], [5], overlong="drop"), tmp_path / "run")


def test_cut_prompts_leave_room_for_the_response_and_are_shown(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(model, tmp_path, [99, 5], [5], overlong="truncate_left", system_prompt="Add.")
    messages: list[str] = []
    plan = plan_of(config, tmp_path / "run", lambda share, text: messages.append(text))
    limit = "60 tokens (the 4 tokens of a response less than the context of 64)"
    assert f"truncate_left: 1 of 2 prompts of data.path have more than {limit} and are cut" in messages[0]
    assert plan.make_prompts is not None and plan.make_rollout.func is make_rollout  # type: ignore[attr-defined]
    prompts = plan.make_prompts()
    long = next(prompt for prompt in map(prompts.prompt, range(2)) if prompt.row == 0)

    async def sampled() -> Any:
        generator = plan.make_rollout(0).generator
        generated = await generator.generate(GroupWork(group=0, attempt=1, prompt=long, samples=2))
        await generator.close()
        return generated.group

    first = asyncio.run(sampled()).trajectories[0]
    frame = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nLETTERS<|im_end|>\n<|im_start|>assistant\n"
    left = 60 - len(tokens(AutoTokenizer.from_pretrained(model), frame.replace("LETTERS", "")))
    cut = frame.replace("LETTERS", "a" * left)
    assert first.prompt_ids == tokens(AutoTokenizer.from_pretrained(model), cut)
    assert len(first.token_ids) == 4 or first.finish_reason == "stop"
    path = tmp_path / "mine.yaml"
    path.write_text(config.dump_yaml(), encoding="utf-8")
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "the first prompt of data.path is these 60 tokens, cut from " in said and "a" * left in said
    assert "a" * (left + 1) not in said
    for refuse in (
        lambda config: plan_of(config, tmp_path / "run"),
        lambda config: [*check_inputs(config, rehearse=True)],
    ):
        with pytest.raises(ConfigError, match=r"data.path .*row 0: it cannot be cut to 60 tokens: its system message"):
            refuse(configured(model, tmp_path, [99, 5], [5], overlong="truncate_left", system_prompt="Add." * 20))


def test_a_limit_of_prompts_alone(model: str, tmp_path: Path) -> None:
    config = configured(model, tmp_path, [5, 11], [5], max_prompt_tokens=FRAME + 10)
    with pytest.raises(
        ConfigError, match=r"row 1 has 30 tokens; 1 of 2 .* more than 29 tokens \(data.max_prompt_tokens\)"
    ):
        plan_of(config, tmp_path / "run")
