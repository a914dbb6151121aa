"""Figures have one bound each: in a configuration, in `Limits`, and where they are set while a run is running."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from engine.config.schema import Config
from engine.control.requests import changes
from engine.errors import ConfigError
from engine.policies import PolicySet
from engine.scheduling.settings import FIGURES
from engine.states.limits import Limits

LARGEST = 2**63 - 1
"""Of 64 bits: what is larger has no place in a record or in a state's hash."""
VALUES = (
    "-1", "0", "0.05", "0.5", "1", "1.5", "2", "1000", "1001", "10000", "10001", "86400", "86401", "1000000", "1000001",
    "1000000000", "1000000001", "1e6", str(2**40 + 1), str(2**63), "9" * 190, "inf", "nan", "null", "true", "many",
)  # fmt: skip
REWARD_S = 0.1


def config_takes(path: str, value: str) -> bool:
    section, key = path.split(".")
    tree: dict[str, Any] = {"model": {"make": "arithmetic"}, "reward": {"timeout_s": REWARD_S}}
    tree[section] = {key: yaml.safe_load(value) if value not in ("inf", "nan", "1e6") else float(value)}
    try:
        Config.model_validate(tree)
    except (ConfigError, ValidationError):
        return False
    return True


def set_takes(path: str, value: str) -> bool:
    limits = Config.model_validate({"model": {"make": "arithmetic"}}).limits
    try:
        changes([(path, value)], limits, PolicySet.from_names({}), REWARD_S)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("path", [path for path in FIGURES if path != "scheduler.max_concurrent_groups"])
def test_a_live_setting_may_be_what_the_configuration_may_be(path: str) -> None:
    taken = {value: config_takes(path, value) for value in VALUES if not is_k_law(path, value)}
    assert {value: set_takes(path, value) for value in taken} == taken
    assert any(taken.values())
    assert not taken["9" * 190]


def is_k_law(path: str, value: str) -> bool:
    """Whether a lower S alone breaks the law on K, which a configuration that says nothing of K lowers with it."""
    return path == "scheduler.max_staleness_steps" and value == "0"


def test_k_that_is_set_fits_the_law_and_64_bits() -> None:
    path = "scheduler.max_concurrent_groups"
    assert config_takes(path, "16") and set_takes(path, "16")
    assert not any(config_takes(path, value) or set_takes(path, value) for value in ("17", str(2**63), "9" * 190))


def test_limits_of_a_library_user_and_of_a_record_have_the_same_bounds() -> None:
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4}
    with pytest.raises(
        ConfigError, match=r"scheduler.max_drops is 1000001, but must be a whole number from 0 to 1000000"
    ):
        Limits(**figures, max_drops=1_000_001)
    with pytest.raises(ConfigError, match=r"scheduler.deadline_timeout_s is 0.0, but must be a number above 0"):
        Limits(**figures, deadline_timeout_s=0.0)
    with pytest.raises(ConfigError, match=r"scheduler.train_batch_size is True, but must be a whole number from 1 to"):
        Limits(**{**figures, "train_batch_size": True})
    with pytest.raises(ConfigError, match=r"rollout.straggler_factor is nan, .*, or null"):
        Limits(**figures, straggler_factor=float("nan"))
    with pytest.raises(ConfigError, match=r"run.max_steps"):
        Limits.from_plain({**figures, "max_steps": 2**63})


def whole_numbers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a configuration that holds one, with its part of the schema."""
    definitions = Config.model_json_schema()["$defs"]
    for name, definition in definitions.items():
        for key, node in definition.get("properties", {}).items():
            for option in node.get("anyOf", [node]):
                if option.get("type") == "integer":
                    yield f"{name}.{key}", option


def test_every_whole_number_of_a_configuration_fits_64_bits() -> None:
    found = dict(whole_numbers())
    assert len(found) > 40 and any(path.endswith("max_steps") for path in found)
    loose = [
        path
        for path, node in found.items()
        if node.get("maximum", node.get("exclusiveMaximum", LARGEST + 1)) > LARGEST
        or node.get("minimum", node.get("exclusiveMinimum", -LARGEST - 2)) < -LARGEST - 1
    ]
    assert not loose
