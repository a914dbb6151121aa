"""The validation section: what it makes of itself for the scheduler, and what it refuses."""

from typing import Any

import pytest

from engine.config.check import check_config
from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.states.limits import ValidationLimits

OWN_MODEL: dict[str, Any] = {
    "model": {"path": "somewhere"},
    "data": {"path": "rows.jsonl", "validation_path": "held_out.jsonl"},
    "reward": {"function": "my_rewards:score"},
}


def config(**sections: Any) -> Any:
    return parse_config({"model": {"make": "arithmetic"}, "rollout": {"replicas": 3}, **sections})


def test_the_scheduler_is_told_what_is_measured() -> None:
    assert config().limits().validation == ValidationLimits(rows=128, rows_per_slot=8)
    asked = {"every": 5, "at_start": False, "placement": "own", "replicas": 2, "conflict": "cancel", "prompts": 9}
    assert config(validation=asked).limits().validation == ValidationLimits(
        rows=9, rows_per_slot=8, every=5, at_start=False, replicas=2, own_from=3, conflict="cancel"
    )


def test_nothing_is_measured_where_there_is_no_time_or_nothing_held_out() -> None:
    assert config(validation={"at_start": False, "at_end": False}).limits().validation is None
    without = {**OWN_MODEL, "data": {"path": "rows.jsonl"}}
    assert parse_config(without).limits().validation is None
    assert parse_config(OWN_MODEL).limits().validation is not None


@pytest.mark.parametrize(
    ("sections", "field", "fix"),
    [
        ({"validation": {"replicas": 4}}, "validation.replicas", "use 3"),
        ({**OWN_MODEL, "data": {"path": "rows.jsonl"}, "validation": {"every": 2}}, "validation.every", "or use 0"),
        ({**OWN_MODEL, "reward": {}, "validation": {"at_start": True}}, "reward.function", "set it"),
        (
            {
                "rollout": {"backend": "openai", "urls": ["http://127.0.0.1:1"], "weights_dir": "/tmp"},
                "validation": {"placement": "own"},
            },
            "validation.placement",
            "use shared",
        ),
        ({"validation": {"conflict": "wait"}}, "validation.conflict", ""),
        ({"validation": {"every": -1}}, "validation.every", ""),
    ],
)
def test_what_cannot_be_measured_is_refused(sections: dict[str, Any], field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert field in str(caught.value)
    assert fix in str(caught.value)


def test_a_check_says_that_one_replica_is_kept_from_new_weights() -> None:
    alone = config(rollout={"replicas": 1}, validation={"every": 2})
    assert any("validation.conflict hold" in line for line in check_config(alone))
    assert not any("validation.conflict" in line for line in check_config(config(validation={"every": 2})))
    assert not any("validation.conflict" in line for line in check_config(config(rollout={"replicas": 1})))
