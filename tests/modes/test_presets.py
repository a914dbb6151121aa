"""Short real runs of the presets in `configs/`, in one process, whose records are what their modes are defined to be.

Every preset, with every layout and mode that its comment lists, runs in simulated worlds (`test_modes_in_worlds.py`).
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import Config, load_config
from engine.plans.configured_plan import plan_of
from engine.runtime.local import run_plan
from tests.actors.ray_plans import SMALLEST, check_record
from tests.modes import definitions
from tests.modes.course import Course, course_of

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
BATCH = 4
STEPS = 6

SMALL = [
    *(f"model.arithmetic.{name}={value}" for name, value in SMALLEST.items()),
    "run.seed=3",
    f"run.max_steps={STEPS}",
    f"scheduler.train_batch_size={BATCH}",
    "scheduler.samples_per_prompt=2",
    "rollout.max_tokens=150",
    "rollout.slots=2",
    "trainer.learning_rate=1e-3",
    "trainer.checkpoint_every=0",
    "trainer.overlong_cache_tokens=149",
    "validation.at_start=false",
    "validation.every=0",
    "validation.prompts=4",
]
"""What makes any preset quick: the smallest model and batches of four. Length alone makes advantages, for its answers
are all wrong; validation holds no replica on the way."""

SIZES = {
    "sync": [],
    "one_step_off": [f"scheduler.max_concurrent_groups={BATCH}"],
    "generate_ahead": ["scheduler.policy_mini_batch_size=2", f"scheduler.max_concurrent_groups={BATCH}"],
    "fully_async": [f"scheduler.max_concurrent_groups={2 * BATCH}"],
    "fully_async_minibatches": [
        "scheduler.policy_mini_batch_size=1",
        f"scheduler.max_concurrent_groups={3 * BATCH // 2}",
    ],
    "partial_rollout": ["rollout.slots=4", f"scheduler.max_concurrent_groups={4 * BATCH}"],
    "stream": [],
}
"""What follows from batches of four, by preset."""


def variants(preset: str) -> dict[str, list[str]]:
    """Overrides that a preset's comment lists, by the words before them: `#   NAME: --set a.b=c --set ...`."""
    text = (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8")
    found = re.findall(r"^#\s+([a-z][a-z -]*): +(--set .*)$", text, re.MULTILINE)
    return {name: [word for word in shlex.split(sets) if word != "--set"] for name, sets in found}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


def configured(preset: str, made: Path, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{preset}.yaml", [*SMALL, *SIZES[preset], f"run.dir={made}", *overrides])


def run(preset: str, made: Path, *overrides: str) -> tuple[Course, Path]:
    """The course of a short run to its end, checked against every law and replayed; and where it is."""
    run_dir = made / f"{preset}-{len(list(made.iterdir()))}"
    run_dir.mkdir()
    config = configured(preset, made, *overrides)
    result = run_plan(plan_of(config, run_dir))
    assert (result.outcome, result.steps) == ("finished", config.run.max_steps), result.reason
    assert result.validations and result.validations[-1]["steps"] == result.steps, "the last step is validated"
    check_record(run_dir)
    course = course_of(run_dir)
    assert not course.history.failures
    for step, row in course.steps.items():
        assert list(row.staleness) == course.staleness(step), "the order says what the tokens say"
    return course, run_dir


def test_sync(made: Path) -> None:
    course, _ = run("sync", made)
    definitions.is_synchronous(course)
    sleeps = [sync for sync in course.history.syncs if (sync.mode, sync.outcome) == ("sleep", "done")]
    assert len(sleeps) == 2 * STEPS, "both replicas sleep for every step"


def test_one_step_off(made: Path) -> None:
    course, _ = run("one_step_off", made)
    definitions.is_one_step_off(course)


LAYOUTS = ["two halves", "separate reference", "all separate"]
"""dots.rl's task groups, by the names that the preset's comment gives to them."""


def test_every_layout_that_the_preset_lists_is_tested() -> None:
    assert list(variants("generate_ahead")) == LAYOUTS
    shipped = configured("generate_ahead", CONFIGS)
    assert configured("generate_ahead", CONFIGS, *variants("generate_ahead")["separate reference"]) == shipped


def test_generate_ahead(made: Path) -> None:
    course, _ = run("generate_ahead", made, *variants("generate_ahead")["all separate"])
    definitions.is_generate_ahead(course, ahead=2)
    assert {(step, task) for _, _, step, task in course.scored} == {
        (step, task) for step in range(STEPS) for task in ("old_logprobs", "ref_logprobs")
    }


def test_partial_rollout(made: Path) -> None:
    course, _ = run("partial_rollout", made)
    definitions.is_partial_rollout(course, staleness=3, most=4 * BATCH)


def test_fully_async_minibatches(made: Path) -> None:
    course, run_dir = run("fully_async_minibatches", made)
    definitions.is_fully_async(course, staleness=1)
    definitions.is_stream(course, steps=1, ahead=8)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["optimizer_steps"] for row in lines if "step" in row] == [4] * STEPS


STREAMS: dict[str, Callable[[Course], None]] = {
    "on-policy pipeline": definitions.is_synchronous,
    "stream off-policy": lambda course: definitions.is_stream(course, steps=4, ahead=16),
    "async stream": lambda course: definitions.is_stream(course, steps=4, ahead=20),
    "async stream with partial rollout": lambda course: definitions.is_stream(course, steps=4, ahead=20),
}
"""verl's four modes, by the name that the preset's comment gives to each."""


def test_every_mode_that_the_stream_preset_lists_is_tested() -> None:
    assert set(variants("stream")) == set(STREAMS)
    shipped = configured("stream", CONFIGS)
    assert configured("stream", CONFIGS, *variants("stream")["async stream with partial rollout"]) == shipped


def test_every_preset_is_tested() -> None:
    others = {"quickstart", "vllm_cpu", "environment", "gpu_1", "gpu_2", "gpu_8"}  # their models take a minute to make
    assert {path.stem for path in CONFIGS.glob("*.yaml")} - others == set(SIZES)


def test_stream(made: Path) -> None:
    course, _ = run("stream", made, "run.max_steps=9")
    STREAMS["async stream with partial rollout"](course)
    assert max(course.every_staleness()) <= configured("stream", made).scheduler.max_staleness_steps
