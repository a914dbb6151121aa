"""Arguments of the embedding API that cannot be used are refused by name, before anything starts."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from session_loop import LIMITS
from test_local_runs import Counting, Steady, limits, run

from engine.errors import ConfigError
from engine.protocols import GroupWork
from engine.runtime.local import Session, run_async
from engine.runtime.local.arguments import RULES


def generate(work: GroupWork) -> int:
    return work.samples


async def generate_later(work: GroupWork) -> int:
    return work.samples


A_FUNCTION = "'the function generate', but must have the methods generate, abort, .* of engine.protocols.Generator"


class Silent(Counting):
    """It cannot publish."""

    weights = None  # type: ignore[assignment]


RUN: dict[str, tuple[dict[str, Any], str]] = {
    "samples": ({"samples": "2"}, "samples is '2', but must be a whole number"),
    "no bool": ({"slots": True}, "slots is True, but must be a whole number"),
    "no replica": ({"generators": lambda number: Steady(), "replicas": 0}, "replicas is 0, but must be at least 1"),
    "no generator": ({"generators": []}, "generators"),
    "no prompt": ({"prompts": []}, "at least one prompt"),
    "checkpoints in memory": ({"limits": limits(checkpoint_every=1)}, "checkpoints need a run_dir"),
    "replacements": ({"replacements": -1}, "replica_restarts is -1, but must be a whole number from 0"),
    "limits": ({"limits": None}, "limits is null, but must be an engine.Limits"),
    "a text that no record holds": (
        {"limits": limits(scoring_tasks=("\ud83d",))}, "limits .*cannot be recorded: .*half of a surrogate pair",
    ),
    "trainer": ({"trainer": None}, "trainer is null, but must have the methods train, weights of engine"),
    "a class of trainers": ({"trainer": Counting}, "trainer is 'the class Counting', .*give an object of the class"),
    "half a trainer": ({"trainer": Silent()}, "trainer .*; it lacks weights"),
    "a function that generates": (
        {"generators": generate}, "'the function generate' cannot make the generator of replica 0: AttributeError",
    ),
    "a function that makes another thing": ({"generators": str}, r"generators\(0\) is '0', .*it lacks generate"),
    "a coroutine function that generates": (
        {"generators": generate_later}, "is 'the function generate_later', but must be a list of generators, or",
    ),
    "a function of nothing": ({"generators": lambda: Steady()}, "or a function that makes one from a number"),
    "a list of functions": ({"generators": [generate]}, rf"generators\[0\] is {A_FUNCTION}"),
    "a class of generators": ({"generators": [Steady, Steady]}, r"generators\[0\] is 'the class Steady', .*Generator"),
    "one generator": ({"generators": Steady()}, "generators .* must be a list of generators, or a function"),
    "prompts": ({"prompts": 5}, "prompts is 5, .*it lacks draw, prompt"),
    "a text of prompts": ({"prompts": "abc"}, "prompts is 'abc', but must be a list"),
    "a prompt": ({"prompts": ["a", None]}, r"prompts\[1\] is null, but must be a text or an engine.Prompt"),
    "prefix_every_tokens": ({"prefix_every_tokens": -1}, "prefix_every_tokens is -1, but must be at least 0"),
    "policies": ({"policies": "fifo"}, "policies is 'fifo', but must be a mapping"),
    "a policy": ({"policies": {"filter": 5}}, r"policies\['filter'\] is 5, but must be a text"),
    "a policy's name": ({"policies": {"deadline": "trunkate"}}, "did you mean truncate"),
    "run_dir": ({"run_dir": 5}, "run_dir is 5, but must be a path"),
    "a path that no record holds": ({"run_dir": "run\ud83d"}, "run_dir is .*, but must be a path of valid Unicode"),
    "make_scorer": ({"make_scorer": 5}, "make_scorer is 5, but must be a function"),
    "works": ({"works": {"judge": 5}}, r"works\['judge'\] is 5, but must be a function"),
    "state_timeout_s": ({"state_timeout_s": 0}, "state_timeout_s is 0, but must be a number of seconds above 0"),
    "resume": ({"resume": "yes"}, "resume is 'yes', but must be True or False"),
    "trajectories": ({"trajectories": None}, "trajectories is null, but must be disk or memory"),
    "sample_policy": ({"sample_policy": {}}, "sample_policy is {}, but must be a SamplePolicy"),
    "metrics_port": ({"metrics_port": "80"}, "metrics_port is '80', but must be a port, or None"),
    "control_port": ({"control_port": 1 << 16}, "control_port is 65536, but must be a port, or None"),
}  # fmt: skip


@pytest.mark.parametrize("case", RUN)
def test_a_run_refuses_arguments_that_it_cannot_use(case: str) -> None:
    given, message = RUN[case]
    with pytest.raises(ConfigError, match=message):
        run(**given)


def test_a_trainer_needs_only_the_methods_that_the_run_calls(tmp_path: Path) -> None:
    class Small:
        train, weights, steps, groups, staleness = Counting.train, Counting.weights, 0, list[int](), list[int]()

    assert run(trainer=Small()).outcome == "finished"
    for more, method in (({"checkpoint_every": 1}, "save"), ({"scoring_tasks": ("ref_logprobs",)}, "score")):
        with pytest.raises(ConfigError, match=f"trainer .*; it lacks {method}"):
            run(trainer=Small(), limits=limits(**more), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


SESSION: dict[str, tuple[dict[str, Any], str]] = {
    "no replica": ({"replicas": 0}, "replicas is 0, but must be at least 1"),
    "directory": ({"directory": b"run"}, "directory is b'run', but must be a path"),
    "policies": ({"policies": {5: "fifo"}}, "a key of policies is 5, but must be a text"),
    "clock": ({"clock": None}, "clock is null, but must be a function without arguments that returns seconds"),
    "a time": ({"clock": lambda: "noon"}, r"clock\(\) is 'noon', but must be a finite number of seconds"),
}


@pytest.mark.parametrize("case", SESSION)
def test_a_session_refuses_arguments_and_leaves_no_record(case: str, tmp_path: Path) -> None:
    given, message = SESSION[case]
    with pytest.raises(ConfigError, match=message):
        Session(LIMITS, **{"directory": tmp_path / "run", **given})
    assert not (tmp_path / "run").exists()


RESUMED: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"steps": 0.0}, "steps is 0.0, but must be a whole number"),
    "a time": ({"clock": lambda: None}, r"clock\(\) is null, but must be a finite number of seconds"),
    "directory": ({"directory": None}, "directory is null, but must be a path"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resume_refuses_arguments_and_holds_no_lock(case: str, tmp_path: Path) -> None:
    given, message = RESUMED[case]
    with Session(LIMITS, directory=tmp_path) as session:
        session.begin()
    with pytest.raises(ConfigError, match=message):
        Session.resume(**{"directory": tmp_path, **given})
    Session.resume(tmp_path).close()


@pytest.mark.parametrize(
    ("field", "value", "law"),
    [
        ("timeouts", None, "is null, but must be a Timeouts"),
        ("validation", {"rows": 4}, "is {'rows': 4}, but must be a ValidationLimits"),
        ("pools", 5, "is 5, but must be a tuple of Pool"),
        ("added_states", ("judge",), r"is \('judge',\), but must be a tuple of AddedState"),
        ("scoring_tasks", "old_logprobs", "is 'old_logprobs', but must be a tuple of str"),
    ],
)
def test_limits_refuse_fields_of_other_types(field: str, value: Any, law: str) -> None:
    with pytest.raises(ConfigError, match=f"limits.{field} {law}"):
        replace(LIMITS, **{field: value})


@pytest.mark.parametrize("function", [run_async, Session.__init__, Session.resume])
def test_every_argument_has_a_rule(function: Callable[..., Any]) -> None:
    named = {*inspect.signature(function).parameters} - {"self", "settings"}
    assert named - {*RULES} <= {"replacements"}, "which limits.replica_restarts checks"
