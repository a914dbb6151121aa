"""The configuration of a run that is resumed: what it began with, but for the few fields that may change on the way."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.loading import load_config, parse_config
from engine.config.schema import Config
from engine.errors import ConfigError

FREE = (
    "metrics",
    "rollout.replicas",
    "rollout.threads",
    "trainer.threads",
    "trainer.keep_checkpoints",
    "trainer.keep_checkpoints_every",
    "durability",
)
"""Fields and sections on which nothing that was recorded depends."""


def resumed_config(path: Path, recorded: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """What `path` says now, with the overrides, held against what the run began with.

    Raises: `ConfigError` naming the first field that may not be another.
    """
    if not recorded:
        raise ConfigError("RUN", str(path.parent), "was not begun from a configuration: whoever began it can resume it")
    before, wished = parse_config(recorded), load_config(path, overrides)
    now = dict(_flat(wished.model_dump(mode="json")))
    numbered = bool(before.pools) or before.validation.placement == "own"  # which replica is whose was recorded
    free = [field for field in FREE if not (numbered and field == "rollout.replicas")]
    for field, value in _flat(before.model_dump(mode="json")):
        if now[field] != value and not any(field == one or field.startswith(f"{one}.") for one in free):
            law = f"was {value!r} when the run began, and what it recorded depends on it"
            raise ConfigError(field, now[field], law, f"{value!r}; to be changed are {', '.join(free)}")
    return wished


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and not (above == "rollout." and name == "engine_args"):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
