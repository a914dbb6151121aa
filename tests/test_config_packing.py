"""What `engine check` says of packed rows, from a model's `config.json` alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.inputs import packing_line
from engine.config.loading import parse_config
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.training.packable import why_padded


def config(**trainer: Any) -> Config:
    return parse_config({"model": {"make": "arithmetic"}, "trainer": trainer})


def written(directory: Path, **fields: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    return directory


def test_the_line_says_how_rows_are_laid_out(tmp_path: Path) -> None:
    plain = written(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert "packed without padding" in packing_line(config(), plain)
    assert "saves 15 %" in packing_line(config(), plain)
    assert "each prompt is computed once" in packing_line(config(shared_prompts="on"), plain)
    assert "no prompt is shared" in packing_line(config(shared_prompts="off"), plain)
    assert "padded to the longest" in packing_line(config(packing="off"), plain)


def test_the_line_says_what_computes_attention(tmp_path: Path) -> None:
    plain = written(tmp_path)
    gpu: dict[str, Any] = {"device": "cuda"}
    assert "by torch.nn.attention.varlen" in packing_line(config(**gpu), plain)
    assert "by sdpa" in packing_line(config(**gpu, attention="sdpa"), plain)
    assert "by sdpa" in packing_line(config(**gpu, bf16="off"), plain)
    assert "by sdpa" in packing_line(config(device="cpu"), plain)


@pytest.mark.parametrize("impossible", [{"packing": "off"}, {"device": "cpu"}, {"bf16": "off"}])
def test_an_attention_that_cannot_be_computed_is_refused(impossible: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.attention is 'varlen'.*for example auto"):
        config(attention="varlen", **impossible)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
        ({"text_config": {"layer_types": ["chunked_attention"]}}, "layers of type chunked_attention"),
        ({"conv_kernel": 4}, "conv_kernel"),
        ({"attention_chunk_size": 8192}, "in chunks"),
        ({"attn_logit_softcapping": 50.0}, "caps its attention scores"),
        ({"alibi": True}, "by distance"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_parameters of type longrope"),
    ],
)
def test_a_model_whose_rows_cannot_be_packed_is_named_and_refused(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    directory = written(tmp_path, **fields)
    line = packing_line(config(), directory)
    assert line.startswith("note: ") and reason in line
    for field, value in (("packing", "on"), ("shared_prompts", "on"), ("attention", "varlen")):
        with pytest.raises(ConfigError, match=rf"trainer\.{field}.*use auto"):
            packing_line(config(**{field: value}), directory)


def test_what_a_field_says_of_nothing_does_not_count() -> None:
    assert why_padded({"attn_logit_softcapping": None, "alibi": False, "layer_types": ["sliding_attention"]}) is None


def test_sharing_needs_packed_rows_and_determinism_refuses_them() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.shared_prompts is 'on'.*packing is off"):
        config(packing="off", shared_prompts="on")
    fixed = parse_config({"model": {"make": "arithmetic"}, "rollout": {"deterministic": True}})
    assert fixed.trainer.packing == "off"
    with pytest.raises(ConfigError, match=r"trainer\.compile is True.*deterministic"):
        parse_config(
            {"model": {"make": "arithmetic"}, "rollout": {"deterministic": True}, "trainer": {"compile": True}}
        )
    with pytest.raises(ConfigError, match=r"trainer\.packing is 'on'.*deterministic"):
        parse_config(
            {"model": {"make": "arithmetic"}, "rollout": {"deterministic": True}, "trainer": {"packing": "on"}}
        )
