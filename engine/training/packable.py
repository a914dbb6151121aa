"""Which models can compute packed rows, as far as their `config.json` says.

Read by `engine check`, and by `packed_attention` before it tries the loaded model. Imports nothing heavy.
"""

from collections.abc import Mapping
from typing import Any

PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose attention is a function of queries, keys, values and a window."""
RECURRENT = ("mamba", "ssm_", "conv", "linear_attn", "linear_conv", "linear_key", "recurrent", "rwkv", "time_mix")
"""Prefixes of fields that only models have whose layers carry a state from token to token."""
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that change with the length of the longest row."""


def why_padded(config: Mapping[str, Any]) -> str | None:
    """Why a model's configuration forbids packed rows, to follow the model's name; None if it allows them."""
    text = config.get("text_config") or config
    given = {name: value for name, value in text.items() if value not in (None, False, 0, [], {})}
    if others := sorted(set(given.get("layer_types", ())) - PACKED_LAYERS):
        return f"has layers of type {', '.join(others)}"
    if recurrent := sorted(name for name in given if name.startswith(RECURRENT)):
        return f"has layers that carry a state from token to token ({recurrent[0]} in its config.json)"
    if "attention_chunk_size" in given:
        return "attends in chunks (attention_chunk_size in its config.json)"
    if "attn_logit_softcapping" in given:
        return "caps its attention scores (attn_logit_softcapping in its config.json)"
    if "alibi" in given:
        return "biases attention by distance (alibi in its config.json)"
    for name in ("rope_scaling", "rope_parameters"):
        for kind in _rope_types(given.get(name)):
            if kind in LENGTH_DEPENDENT:
                return f"has position embeddings that depend on the longest row ({name} of type {kind})"
    return None


def _rope_types(rope: Any) -> list[Any]:
    """The types for all layers, or for each kind of layer."""
    if not isinstance(rope, Mapping):
        return []
    nested = [kind for value in rope.values() for kind in _rope_types(value)]
    return [rope.get("rope_type", rope.get("type")), *nested]
