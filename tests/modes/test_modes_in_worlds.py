"""The presets' own limits and policies in simulated worlds: what a mode is holds whatever the timing."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import load_config
from engine.schedule.frames import Header
from engine.schedule.recorder import MemoryRecorder
from engine.simulation.world import Faults, Setting, World
from tests.modes import definitions
from tests.modes.course import Course, course_of
from tests.modes.test_presets import CONFIGS, STREAMS, variants

STEPS = 8

TIMES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "latency_s": st.sampled_from([0.0, 0.1, 2.0]),
        "train_s": st.sampled_from([0.5, 5.0, 20.0, 100.0]),
        "sync_s": st.sampled_from([0.1, 2.0, 30.0]),
        "mean_tokens": st.sampled_from([5.0, 20.0, 60.0]),
    }
)
"""Whatever is slow beside whatever is quick."""

FAULTS = Faults(lose=0.1, duplicate=0.1, die=0.01, fail_group=0.03, fail_data=0.03, fail_sync=0.1, fail_trainer=0.05)


def course_in_world(
    preset: str, times: dict[str, float], *overrides: str, batch: int = 4, faults: Faults | None = None
) -> Course:
    """A preset in small, run to its end with every law checked: its limits, pools and policies as they are shipped."""
    small = [f"scheduler.train_batch_size={batch}", f"run.max_steps={STEPS}", "trainer.checkpoint_every=0"]
    config = load_config(CONFIGS / f"{preset}.yaml", [*small, "rollout.slots=2", *overrides])
    limits = replace(config.limits(), validation=None)
    recorder = MemoryRecorder(Header(run=preset, limits=limits.to_plain(), policies=config.policies().names))
    setting = Setting(
        limits=limits, replicas=config.rollout.replicas, slots=config.rollout.slots, prompts=batch * STEPS * 2,
        faults=faults or Faults(), **times,
    )  # fmt: skip
    outcome = World(setting, config.policies(), recorder).run()
    assert outcome.outcome == "finished" or faults, outcome
    return course_of(recorder)


@given(times=TIMES)
@settings(max_examples=25)
def test_fully_async(times: dict[str, float]) -> None:
    course = course_in_world("fully_async", times, "scheduler.max_concurrent_groups=4")
    definitions.is_fully_async(course, staleness=2)


def test_fully_async_trains_out_of_order() -> None:
    """Whichever is ready first: seeds are fixed here, and some of them have it."""
    times = {"train_s": 20.0, "mean_tokens": 60.0}
    orders = [course_in_world("fully_async", {**times, "seed": seed}, "scheduler.max_concurrent_groups=4").out_of_order
              for seed in range(5)]  # fmt: skip
    assert any(orders)


@given(times=TIMES, preset=st.sampled_from(["fully_async", "fully_async_minibatches"]))
@settings(max_examples=15)
def test_bounds_hold_under_faults(times: dict[str, float], preset: str) -> None:
    small = ["scheduler.policy_mini_batch_size=1", "scheduler.max_concurrent_groups=4"]
    course = course_in_world(preset, times, *small, faults=FAULTS)
    staleness = load_config(CONFIGS / f"{preset}.yaml").scheduler.max_staleness_steps
    assert max(course.every_staleness(), default=0) <= staleness


@given(times=TIMES, mode=st.sampled_from(sorted(STREAMS)))
@settings(max_examples=30)
def test_stream(times: dict[str, float], mode: str) -> None:
    STREAMS[mode](course_in_world("stream", times, *variants("stream")[mode]))
