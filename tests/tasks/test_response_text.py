"""Tokens become text for code: markers that are special tokens stay, only the token that ended a response goes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import FAMILIES, Family, made, save_model, tokens
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from engine.config.loading import parse_config
from engine.config.prompts import stop_ids_of, text_ends_of
from engine.plans.configured_plan import plan_of
from engine.protocols import GroupWork
from engine.tasks.response_text import text_of_response, text_of_tokens
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup

MARKERS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"]
FAMILY = FAMILIES["chatml"]
TOKENIZER = made(Family(template=FAMILY.template, special=[*FAMILY.special, *MARKERS], eos=FAMILY.eos))
TEXT_END, TURN_END = TOKENIZER.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
PIECES = st.lists(
    st.sampled_from([*MARKERS, "4", " .", "é", "<|endoftext|>", "<|im_end|>", "<|im_start|>"]), max_size=9
)


@given(pieces=PIECES)
def test_the_text_of_a_response_is_that_of_all_its_tokens_but_its_end(pieces: list[str]) -> None:
    ids, whole = tokens(TOKENIZER, "".join(pieces)), "".join(pieces)
    assert text_of_tokens(TOKENIZER, ids) == whole
    end = next((end for end in ("<|endoftext|>", "<|im_end|>") if whole.endswith(end)), "")
    assert text_of_response(TOKENIZER, ids, {TEXT_END, TURN_END}) == whole.removesuffix(end)


def test_no_space_before_punctuation_is_lost() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1, "unk": 2}, unk_token="unk"))
    cleaning = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    assert cleaning.decode([0, 1]) == "a?" and text_of_tokens(cleaning, [0, 1]) == "a ?"


def configured(folder: Path, **rollout: Any) -> Any:
    model = save_model(folder / "model", TOKENIZER)
    GenerationConfig(eos_token_id=[TEXT_END, TOKENIZER.get_vocab()["#"]]).save_pretrained(model)
    (folder / "rows.jsonl").write_text('{"prompt": "2+2?"}\n', encoding="utf-8")
    section = {"max_tokens": 4, "device": "cpu", "replicas": 1, "slots": 2} | rollout
    return parse_config(
        {
            "run": {"dir": str(folder / "runs")},
            "model": {"path": model},
            "data": {"path": str(folder / "rows.jsonl")},
            "reward": {"function": f"{__name__}:answered"},
            "scheduler": {"train_batch_size": 2, "policy_mini_batch_size": 2, "samples_per_prompt": 2},
            "rollout": section,
        }
    )


def answered(prompt: Prompt, trajectory: Trajectory) -> float:
    return float(trajectory.text == "<think>so</think><answer>4</answer>")


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_end|>", "#", ""])
def test_the_reward_of_a_run_reads_markers_and_no_end(tmp_path: Path, end: str) -> None:
    ids = tokens(TOKENIZER, f"<think>so</think><answer>4</answer>{end}")
    trajectories = [
        Trajectory(
            prompt_ids=[1], token_ids=ids, logprobs=[0.0] * len(ids), loss_mask=[1] * len(ids),
            spans=[Span(0, len(ids), 0)], finish_reason="stop",
        )
    ]  # fmt: skip
    group = TrajectoryGroup(group=0, prompt=Prompt(row=0, text="2+2?"), trajectories=trajectories)
    generator: Any = plan_of(configured(tmp_path), tmp_path / "run").make_rollout(0).generator
    asked = GroupWork(group=0, attempt=1, prompt=group.prompt, samples=1)

    async def score() -> None:
        await generator.way_of(asked).grader.score(group)
        await generator.close()

    asyncio.run(score())
    assert trajectories[0].reward == 1.0


def test_an_ordinary_stop_token_that_the_user_names_is_part_of_the_text(tmp_path: Path) -> None:
    config = configured(tmp_path, stop=["x", "<think>"])
    stops = stop_ids_of(config, TOKENIZER, config.model.path)
    special, ordinary = TOKENIZER.convert_tokens_to_ids(["<think>", "x"])
    hidden = text_ends_of(config, TOKENIZER, config.model.path)
    assert hidden == {*stops} - {ordinary} and special in hidden and TOKENIZER.get_vocab()["#"] in hidden
