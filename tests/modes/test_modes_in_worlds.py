"""The presets' own limits and policies in simulated worlds: what a mode is holds whatever the timing."""

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.record.frames import Header
from engine.record.recorder import MemoryRecorder
from engine.simulation.world import Faults, Setting
from engine.states.timeouts import Timeouts
from tests.judge.judged_world import JudgedWorld
from tests.modes import definitions
from tests.modes.course import Course, course_of
from tests.modes.test_presets import BATCH, CONFIGS, LAYOUTS, SIZES, STREAMS, configured, variants

STEPS = 8

TIMES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "latency_s": st.sampled_from([0.0, 0.1, 2.0]),
        "train_s": st.sampled_from([0.5, 5.0, 20.0, 100.0]),
        "sync_s": st.sampled_from([0.1, 2.0, 30.0]),
        "mean_tokens": st.sampled_from([5.0, 20.0, 60.0]),
        "tick_size": st.sampled_from([1, 64, 0]),
    }
)
"""Whatever is slow beside whatever is quick, with one event, up to 64 or a random number in each tick."""

FAULTS = Faults(lose=0.1, duplicate=0.1, die=0.01, fail_group=0.03, fail_data=0.03, fail_sync=0.1, fail_trainer=0.05)


def course_in_world(preset: str, times: dict[str, float], *overrides: str, faults: Faults | None = None) -> Course:
    """A preset in small, run to its end with every law checked: its limits, pools and policies as they are shipped."""
    config = configured(preset, CONFIGS, f"run.max_steps={STEPS}", *overrides)
    limits = replace(config.limits, validation=None, timeouts=Timeouts.every(None))
    recorder = MemoryRecorder(Header(run=preset, limits=limits.to_plain(), policies=config.policies().names))
    setting = Setting(
        limits=limits, replicas=config.rollout.replicas, slots=config.rollout.slots, prompts=BATCH * STEPS * 2,
        faults=faults or Faults(), **times,
    )  # fmt: skip
    outcome = JudgedWorld(setting, config.policies(), recorder).run()
    assert outcome.outcome == "finished" or faults, outcome
    return course_of(recorder)


@given(times=TIMES)
@settings(max_examples=15)
def test_sync(times: dict[str, float]) -> None:
    definitions.is_synchronous(course_in_world("sync", times))


@given(times=TIMES)
@settings(max_examples=20)
def test_one_step_off(times: dict[str, float]) -> None:
    definitions.is_one_step_off(course_in_world("one_step_off", times))


@given(times=TIMES, layout=st.sampled_from(LAYOUTS))
@settings(max_examples=20)
def test_generate_ahead(times: dict[str, float], layout: str) -> None:
    course = course_in_world("generate_ahead", times, *variants("generate_ahead")[layout])
    definitions.is_generate_ahead(course, ahead=2)


def test_generation_is_ahead_of_a_slow_trainer_by_as_many_batches_as_it_may() -> None:
    course = course_in_world("generate_ahead", {"seed": 1, "train_s": 200.0})
    assert max(definitions.steps_early(course)) == max(course.every_staleness()) == 2
    assert all(course.beside[step] for step in range(STEPS - 3))


@given(times=TIMES, staleness=st.sampled_from([2, 3]))
@settings(max_examples=20)
@example(times={"seed": 0, "train_s": 5.0, "mean_tokens": 20.0}, staleness=2)
def test_partial_rollout(times: dict[str, float], staleness: int) -> None:
    """With S = 2, the staleness bound leaves slots empty: fewer groups run than K allows, because others are ready."""
    most = (staleness + 1) * BATCH
    bounds = [f"scheduler.max_staleness_steps={staleness}", f"scheduler.max_concurrent_groups={most}"]
    course = course_in_world("partial_rollout", times, *bounds)
    definitions.is_partial_rollout(course, staleness=staleness, most=most)


def test_partial_rollout_goes_on_with_what_it_interrupted() -> None:
    times = {"train_s": 20.0, "mean_tokens": 60.0}
    for seed in range(3):
        course = course_in_world("partial_rollout", {**times, "seed": seed})
        assert definitions.interrupted(course)
        assert definitions.kept_busy(course, BATCH, staleness=3, most=4 * BATCH), "some bound always left slots empty"


@given(times=TIMES)
@settings(max_examples=20)
def test_fully_async(times: dict[str, float]) -> None:
    course = course_in_world("fully_async", times)
    definitions.is_fully_async(course, staleness=2)


def test_fully_async_trains_out_of_order() -> None:
    """Whichever is ready first: seeds are fixed here, and some of them have it."""
    times = {"train_s": 20.0, "mean_tokens": 60.0}
    orders = [course_in_world("fully_async", {**times, "seed": seed}).out_of_order
              for seed in range(5)]  # fmt: skip
    assert any(orders)


@given(times=TIMES, preset=st.sampled_from(sorted(SIZES)))
@settings(max_examples=20)
def test_bounds_hold_under_faults(times: dict[str, float], preset: str) -> None:
    course = course_in_world(preset, times, faults=FAULTS)
    staleness = configured(preset, CONFIGS).scheduler.max_staleness_steps
    assert max(course.every_staleness(), default=0) <= staleness


@given(times=TIMES, mode=st.sampled_from(sorted(STREAMS)))
@settings(max_examples=20)
def test_stream(times: dict[str, float], mode: str) -> None:
    overrides = variants("stream")[mode]
    course = course_in_world("stream", times, *overrides)
    STREAMS[mode](course)
    bound = configured("stream", CONFIGS, *overrides).scheduler.max_staleness_steps
    assert max(course.every_staleness()) <= bound
    assert not course.cut or mode == "async stream with partial rollout"
