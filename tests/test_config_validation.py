"""The validation section: what it makes of itself for the scheduler, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from engine.config.check import check_config
from engine.config.inputs import check_inputs
from engine.config.loading import load_config, parse_config
from engine.config.validation import validation_sets
from engine.errors import ConfigError
from engine.states.limits import ValidationLimits, ValidationSet

OWN_MODEL: dict[str, Any] = {
    "model": {"path": "somewhere"},
    "data": {"path": "rows.jsonl", "validation_path": "held_out.jsonl"},
    "reward": {"function": "my_rewards:score"},
}


def config(**sections: Any) -> Any:
    return parse_config({"model": {"make": "arithmetic"}, "rollout": {"replicas": 3}, **sections})


def test_the_scheduler_knows_what_is_measured() -> None:
    assert config().limits.validation == ValidationLimits(
        rows=128, rows_per_slot=8, sets=(ValidationSet(name="held_out", prompts=128),)
    )
    asked = {"every": 5, "at_start": False, "placement": "own", "replicas": 2, "conflict": "cancel", "prompts": 9}
    assert config(validation=asked).limits.validation == ValidationLimits(
        rows=9,
        rows_per_slot=8,
        every=5,
        at_start=False,
        replicas=2,
        own_from=3,
        conflict="cancel",
        sets=(ValidationSet(name="held_out", prompts=9),),
    )


def test_nothing_is_measured_where_there_is_no_time_or_nothing_held_out() -> None:
    assert config(validation={"at_start": False, "at_end": False}).limits.validation is None
    without = {**OWN_MODEL, "data": {"path": "rows.jsonl"}}
    assert parse_config(without).limits.validation is None
    assert parse_config(OWN_MODEL).limits.validation is not None


def test_a_check_says_that_one_replica_is_kept_from_new_weights() -> None:
    alone = config(rollout={"replicas": 1}, validation={"every": 2})
    assert any("validation.conflict hold" in line for line in check_config(alone))
    assert not any("validation.conflict" in line for line in check_config(config(validation={"every": 2})))
    assert not any("validation.conflict" in line for line in check_config(config(rollout={"replicas": 1})))


SETS = [{"name": "a"}, {"name": "b", "path": "b.jsonl", "samples_per_prompt": 4, "k": [1, 4], "prompts": 9}]


def test_sets_become_rows_one_for_each_response() -> None:
    limits = config(validation={"sets": SETS, "prompts": 5}).limits.validation
    assert limits == ValidationLimits(
        rows=5 + 9 * 4,
        rows_per_slot=8,
        sets=(
            ValidationSet(name="a", prompts=5),
            ValidationSet(name="b", prompts=9, samples=4, k=(1, 4), majority=True),
        ),
    )
    only = {**OWN_MODEL, "data": {"path": "rows.jsonl"}, "validation": {"sets": [SETS[1]]}}
    assert parse_config(only).limits.validation is not None


def test_a_set_takes_what_it_does_not_say_from_the_run() -> None:
    made = config(
        rollout={
            "replicas": 3,
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 99,
            "allow_truncated_sampling": True,
        },
        validation={"sets": [*SETS, {"name": "c", "temperature": 0.2, "max_tokens": 7, "answer": "none", "k": [1]}]},
    )
    ways = {one.name: one.way for one in validation_sets(made.validation, made.rollout, made.reward)}
    assert ways == {"a": (0.0, 1.0, 99, None), "b": (0.7, 0.9, 99, None), "c": (0.2, 0.9, 7, None)}
    assert [one.majority for one in made.limits.validation.measured_sets] == [False, True, False]


def test_a_set_may_truncate_sampling_although_training_may_not() -> None:
    made = config(validation={"sets": [{"name": "a", "samples_per_prompt": 4, "top_p": 0.9}]})
    [only] = validation_sets(made.validation, made.rollout, made.reward)
    assert (only.top_p, made.rollout.top_p) == (0.9, 1.0)


def test_paths_of_sets_are_relative_to_the_file(tmp_path: Path) -> None:
    text = "model: {make: arithmetic}\nvalidation: {sets: [{name: b, path: b.jsonl}]}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml").validation.sets[0].path == str(tmp_path / "b.jsonl")


def test_the_files_and_functions_of_sets_are_checked(tmp_path: Path) -> None:
    def check(**one: Any) -> None:
        list(check_inputs(config(validation={"sets": [{"name": "b", "samples_per_prompt": 2, **one}]})))

    with pytest.raises(ConfigError, match=r"validation\.sets\.0\.path .*does not exist"):
        check(path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"validation\.sets\.0\.reward .*no module named"):
        check(reward="no_such_module:score")
    with pytest.raises(ConfigError, match=r"validation\.sets\.0\.answer .*no module named"):
        check(answer="no_such_module:extract")
