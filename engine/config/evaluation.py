"""The configuration of `engine evaluate`: a run's configuration without the fields that only training needs.

Called by the CLI. The same file can be used for a run and an evaluation. A file for evaluations alone needs neither a
model nor training prompts.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.config.loading import load_config
from engine.config.schema import Config
from engine.errors import ConfigError

WITHOUT_TRAINING: dict[str, Any] = {
    "model.checkpoint_path": None,
    "model.checkpoint_optimizer": False,
    "model.warm_start.path": None,
    "pools": [],
    "rollout.allow_truncated_sampling": True,
    "rollout.replicas": 1,
    "rollout.transport": "object_store",
    "trainer.checkpoint_every": 0,
    "trainer.keep_best": None,
    "trainer.lora": None,
    "trainer.reference_path": None,
    "trainer.ranks": 1,
    "trainer.nodes": 1,
    "validation.at_start": True,
    "validation.every": 0,
    "validation.at_end": False,
    "validation.placement": "shared",
    "validation.replicas": 1,
}
"""Values that an evaluation gives to the fields that only training needs."""


def load_evaluation(path: str, overrides: Sequence[str], model: str) -> Config:
    """Read the configuration of an evaluation of `model`, a directory or hub name. With `model.make`, only the replicas
    use `model`.

    Raises: `ConfigError` for a wrong configuration, or one that cannot be evaluated in one process.
    """
    config = load_config(path, overrides, partial(_without_training, model=model, path=path))
    if not config.held_out:
        law = "required by engine evaluate: there are no validation prompts"
        raise ConfigError("data.validation_path", None, law, "set it to a file, or set validation.sets")
    if config.rollout.served:
        law = "cannot be used by engine evaluate: the servers would have to load the model"
        raise ConfigError("rollout.backend", config.rollout.backend, law, "use torch or vllm")
    if config.agent.on_gateway:
        law = "cannot be used by engine evaluate: the gateway of agents needs a run"
        raise ConfigError("agent", "a gateway", law, "use agent.rollout, or measure it during a run")
    return config


def _without_training(tree: dict[str, Any], *, model: str, path: str) -> None:
    """Edit the plain data in place. Sections that are not mappings stay as they are: validation refuses them later."""
    for field, value in WITHOUT_TRAINING.items():
        _put(tree, field, value)
    of_model = tree.get("model")
    if isinstance(of_model, dict) and of_model.get("make") is not None:
        return
    _put(tree, "model.path", model)
    data = tree.get("data")
    if data is None or (isinstance(data, dict) and data.get("path") is None and not data.get("sources")):
        _put(tree, "data.path", str(Path(path).resolve()))  # required, but no training prompt is read


def _put(tree: dict[str, Any], field: str, value: Any) -> None:
    section, _, last = field.rpartition(".")
    inner = tree
    for key in section.split(".") if section else ():
        if inner.get(key) is None:
            inner[key] = {}
        inner = inner[key]
        if not isinstance(inner, dict):
            return
    inner[last] = value
