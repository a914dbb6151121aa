"""The data section: how prompts become tokens, and what is refused before a run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer, save_chat_model, tokens, write_rows
from transformers import AutoTokenizer

from engine.config.inputs import check_inputs
from engine.config.loading import parse_config
from engine.config.prompts import stop_ids_of
from engine.errors import ConfigError
from engine.plans.configured_plan import plan_of
from engine.plans.rollouts import make_rollout
from engine.plans.run_inputs import inputs_of
from engine.protocols import GroupWork
from engine.tasks.dataset import Dataset

CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny model for each family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: save_chat_model(folder / family, family) for family in ("chatml", "base")}


def configured(path: str, folder: Path, *rows: Any, **changes: Any) -> Any:
    """A run on `rows`. `changes` of a section are merged into it."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs")},
        "model": {"path": path},
        "data": {"path": write_rows(folder / "rows.jsonl", *(rows or ({"prompt": "2+2?", "answer": "4"},)))},
        "reward": {"function": "engine.tasks.rewards:exact_match"},
        "scheduler": {"train_batch_size": 2, "policy_mini_batch_size": 2, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 4, "device": "cpu", "replicas": 1, "slots": 2},
    }
    for name, fields in changes.items():
        tree[name] = tree.get(name, {}) | fields
    return parse_config(tree)


def prompt_ids(config: Any) -> list[int]:
    """What the replica of a run gives to its sampler for the first row."""

    async def first() -> list[int]:
        rollout = make_rollout(config, inputs_of(config), 0)
        prompt = Dataset.load(config.data.path).prompt(0)
        generated = await rollout.generator.generate(GroupWork(group=0, attempt=1, prompt=prompt, samples=2))
        await rollout.generator.close()
        return generated.group.trajectories[1].prompt_ids

    return asyncio.run(first())


@pytest.mark.parametrize(
    ("family", "row", "data", "written"),
    [
        ("chatml", {"prompt": "2+2?"}, {}, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", {"messages": CHAT}, {}, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "chatml",
            {"prompt": "2+2?"},
            {"system_prompt": "Add.", "chat_template_kwargs": {"enable_thinking": False}},
            "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        ("chatml", {"prompt": "2+2?"}, {"chat": "never"}, "2+2?"),
        ("base", {"prompt": "2+2?"}, {}, "<s>2+2?"),
    ],
)
def test_a_replica_samples_after_these_tokens(
    models: dict[str, str], tmp_path: Path, family: str, row: Any, data: dict[str, Any], written: str
) -> None:
    config = configured(models[family], tmp_path, {**row, "answer": "4"}, data=data)
    assert prompt_ids(config) == tokens(AutoTokenizer.from_pretrained(models[family]), written)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            {"max_steps": 9},
            [
                "note: 3 prompts x 1 epoch = 2 train steps, fewer than run.max_steps 9, so the run ends early; "
                "set run.epochs: null to repeat the data"
            ],
        ),
        (
            {"max_steps": 9, "epochs": 5},
            ["note: 3 prompts x 5 epochs = 8 train steps, fewer than run.max_steps 9, so the run ends early; set "],
        ),
        ({"max_steps": 2}, []),
        (
            {"max_steps": 1, "epochs": None},
            ["note: run.max_steps 1 x scheduler.train_batch_size 2 = 2 prompts, so most of the 5 prompts are "],
        ),
        ({"max_steps": 9, "epochs": None}, []),
        ({}, []),
    ],
)
def test_data_that_the_train_steps_do_not_need_or_exceed_is_noted(
    models: dict[str, str], tmp_path: Path, run: dict[str, Any], said: list[str]
) -> None:
    rows = [{"prompt": text, "answer": "4"} for text in ("abcde" if run == {"max_steps": 1, "epochs": None} else "abc")]
    lines = [*check_inputs(configured(models["base"], tmp_path, *rows, run=run))]
    found = [line for line in lines if line.startswith("note: ")]
    assert len(found) == len(said) and all(line.startswith(words) for line, words in zip(found, said, strict=True))


REFUSED: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "messages": (
        "base",
        [{"messages": CHAT}],
        {},
        r"data\.path .*rows.jsonl' has lists of messages, but the tokenizer",
    ),
    "never": ("chatml", [{"messages": CHAT}], {"chat": "never"}, r"data\.chat is 'never': the prompts of data\.path"),
    "system prompt": ("base", [], {"system_prompt": "a"}, r"data\.system_prompt is 'a': needs a chat template"),
    "argument": (
        "chatml",
        [],
        {"chat_template_kwargs": {"enable_thinkng": False}},
        r"data\.chat_template_kwargs is 'enable_thinkng': .*does not read.*did you mean enable_thinking\?",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_template_cannot_take_is_refused_by_check_and_at_the_start(
    models: dict[str, str], tmp_path: Path, case: str
) -> None:
    family, rows, data, said = REFUSED[case]
    config = configured(models[family], tmp_path, *rows, data=data)
    with pytest.raises(ConfigError, match=said):
        list(check_inputs(config))
    with pytest.raises(ConfigError, match=said):
        plan_of(config, tmp_path / "run")


def test_a_response_ends_with_the_turn(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    known = tokenizer.get_vocab()
    eos, turn = known["<|endoftext|>"], known["<|im_end|>"]
    for given, ends in (
        ({}, (eos, turn)),
        ({"data": {"chat": "never"}}, (eos,)),
        ({"rollout": {"stop": ["a"]}}, (eos, turn, known["a"])),
    ):
        config = configured(str(tmp_path), tmp_path, **given)
        assert stop_ids_of(config, tokenizer, str(tmp_path)) == ends


def test_the_warm_start_reads_and_ends_answers_as_the_run_does(models: dict[str, str], tmp_path: Path) -> None:
    """A model that learned in the template answers in it, and ends its answer."""
    import torch
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": "ab", "answer": "x"}] * 32
    start = {"path": write_rows(tmp_path / "answers.jsonl", *rows), "epochs": 8, "batch_size": 4, "learning_rate": 3e-2}
    tokenizer = AutoTokenizer.from_pretrained(models["chatml"])
    written = tokens(tokenizer, "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n")
    config = configured(models["chatml"], tmp_path, model={"warm_start": start}, trainer={"threads": 1})
    model = AutoModelForCausalLM.from_pretrained(inputs_of(config).model)
    answer = model.generate(torch.tensor([written]), max_new_tokens=2, do_sample=False)[0, len(written) :].tolist()
    assert answer == tokens(tokenizer, "x<|im_end|>")
