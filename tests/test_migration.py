"""The names of other systems: docs/MIGRATION.md, and the answer to a key that one of them has."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config.loading import fields, parse_config
from engine.config.migration import exact_hint, flags
from engine.errors import ConfigError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "MIGRATION.md"
SYSTEMS = ("TRL", "verl", "SkyRL", "prime-rl", "AReaL")


def blocks(system: str) -> tuple[str, dict[str, Any]]:
    """The code before, and the configuration after."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {system}\n")[2].partition("\n## ")[0]
    before, after = re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return before, yaml.safe_load(after)


def leaves(tree: Any, path: str = "") -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for name, inner in tree.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path


def flags_before(system: str) -> list[str]:
    before, _ = blocks(system)
    if system == "AReaL":
        return [*leaves(yaml.safe_load(before))]
    if system == "prime-rl":
        return [*leaves(tomllib.loads(before))]
    return re.findall(r"--(\w+)", before) if system == "TRL" else re.findall(r"([\w.]+)=", before)


def has_row(system: str, flag: str) -> bool:
    names = [row.theirs for row in flags()[system]]
    return flag in names or any(name.endswith(".*") and flag.startswith(name[:-1]) for name in names)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_migration_page_has_a_row_for_every_setting_of_its_example(system: str) -> None:
    flags = flags_before(system)
    assert len(flags) >= 12
    assert [flag for flag in flags if not has_row(system, flag)] == []


def test_verl_has_rows_for_the_flags_of_its_asynchronous_scripts_too() -> None:
    """Those that the example of the page lacks: one step off with Megatron, fully asynchronous."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    flags = [
        f"{actor}.megatron.grad_offload", f"{actor}.megatron.param_offload", f"{actor}.optim.clip_grad",
        f"{actor}.megatron.pipeline_model_parallel_size", f"{actor}.optim.lr_decay_steps",
        f"{actor}.optim.override_optimizer_config.optimizer_offload_fraction", f"{actor}.use_torch_compile",
        "actor_rollout_ref.ref.megatron.param_offload", "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
        "actor_rollout_ref.nccl_timeout", f"{rollout}.mode", f"{rollout}.max_model_len", f"{rollout}.free_cache_engine",
        f"{rollout}.engine_kwargs.vllm.disable_mm_preprocessor_cache", "data.filter_overlong_prompts_workers",
        "data.custom_cls.path", "reward_model.overlong_buffer.len", "rollout.total_rollout_steps",
        "trainer.log_val_generations", "trainer.rollout_data_dir",
    ]  # fmt: skip
    assert [flag for flag in flags if not has_row("verl", flag)] == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_configuration_after_a_migration_loads(system: str) -> None:
    config = parse_config(blocks(system)[1])
    assert config.scheduler.samples_per_prompt > 1


def test_every_field_that_replaces_another_system_s_exists() -> None:
    known = {name for name, _ in fields()} | {"pools"}
    assert [*flags()] == [*SYSTEMS]
    for rows in flags().values():
        assert len({row.theirs for row in rows}) == len(rows), "a name has one row"
        for row in rows:
            assert row.note or row.here, f"{row.theirs}: say why it has no counterpart"
            assert [name for name in row.here if name not in known and not name.startswith("engine ")] == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_generations": 8}, "did you mean scheduler.samples_per_prompt? (num_generations of TRL)"),
        ({"rollout": {"max_completion_length": 8}}, "did you mean rollout.max_tokens? (max_completion_length of TRL)"),
        ({"rollout": {"n": 8}}, "did you mean scheduler.samples_per_prompt? (actor_rollout_ref.rollout.n of verl)"),
        ({"trainer": {"save_freq": 8}}, "did you mean trainer.checkpoint_every? (trainer.save_freq of verl"),
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, "did you mean scheduler.samples_per_prompt?"),
        ({"trainer": {"critic_warmup": 0}}, "has no counterpart: there is no critic"),
        ({"actor_rollout_ref": {"actor": {"megatron": {"grad_offload": 1}}}}, "did you mean trainer.cpu_offload?"),
        ({"actor_rollout_ref": {"actor": {"megatron": {"seed": 1}}}}, "actor.megatron.* of verl has no counterpart"),
        ({"critic": {"strategy": "fsdp"}}, "critic.* of verl has no counterpart"),
        ({"trainer": {"lr": 1}}, "did you mean trainer.learning_rate? (actor_rollout_ref.actor.optim.lr of verl)"),
        ({"trainer": {"num_generations": 8}}, "did you mean scheduler.samples_per_prompt? (num_generations of TRL)"),
        ({"trainer": {"n": 8}}, "trainer.n is 8: unknown key; use one of "),
        ({"trainer": {"learning_rat": 1}}, "did you mean trainer.learning_rate?"),
    ],
)
def test_the_error_for_a_key_of_another_system_names_the_field(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as raised:
        parse_config({"model": {"make": "arithmetic"}, **setting})
    assert words in str(raised.value)


def test_no_name_of_another_system_hides_a_field_of_the_engine() -> None:
    assert [name for name, _ in fields() if exact_hint(name) and "did you mean" not in exact_hint(name)] == []
