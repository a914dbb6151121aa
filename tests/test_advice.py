"""Advice: user code that the trainer waits for, else the settings that make the simulated run faster."""

import re
from dataclasses import replace
from typing import Any

import pytest
from steady_world import SteadyDice

from engine.cli.advice_line import may_have_gpus
from engine.events import CallsMeasured
from engine.inspect.counsel import bound_of, limited_slots
from engine.inspect.explanation import explain_run
from engine.inspect.history_reader import read_history
from engine.metrics.history import History
from engine.policies import PolicySet
from engine.protocols import SLOTS
from engine.record import Header, read
from engine.record.recorder import MemoryRecorder
from engine.simulation.advice import advise
from engine.simulation.schedule import recorded_schedule
from engine.simulation.world import Setting, World
from engine.states.limits import REWARDING, AddedState, Limits, Pool, ValidationLimits

LIMITS = Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=8)
QUICK: dict[str, Any] = {
    "replicas": 2,
    "slots": 6,
    "prompts": 60,
    "latency_s": 0.01,
    "max_tokens": 60,
    "sync_s": 0.5,
    "train_s": 5.0,
}
SYNCHRONOUS = replace(LIMITS, max_staleness_steps=0, max_concurrent_groups=4)
REWARDS = (AddedState(name=REWARDING, concurrency=1),)
ROWS = ValidationLimits(rows=12, every=1, at_start=False, at_end=False)


CALLS: dict[str, Any] = {
    "function": "rollout mine", "setting": SLOTS, "at_once": 12, "groups": 0, "queued": 0, "calls": 5, "seconds": 10.0,
}  # fmt: skip


def run(
    limits: Limits = LIMITS, policies: dict[str, str] | None = None, calls: dict[str, Any] | None = None, **setting: Any
) -> tuple[float, History]:
    """The seconds until the last train step of a simulated run without chance, and its history. `calls`: what each
    replica reports of its calls of the user's functions, every two seconds."""
    chosen = PolicySet.from_names(policies or {})
    recorder = MemoryRecorder(Header(run="r", limits=limits.to_plain(), policies=dict(chosen.names)))
    made = Setting(limits=limits, **{**QUICK, **setting})
    world = World(made, chosen, recorder, dice=SteadyDice(made))
    while calls and world.scheduler.state.ending.outcome is None:
        for replica in range(made.replicas):
            world.tell(CallsMeasured(kind="replica", index=replica, life=1, running_s=2.0, **{**CALLS, **calls}))
        world.run_for(2.0)
    if not calls:
        world.run()
    history = read_history(read(recorder))
    return history.trained[-1].finished_at, history


Change = tuple[str, Any, Limits, dict[str, Any], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "K": (
        "scheduler.max_concurrent_groups", 12,
        replace(LIMITS, max_concurrent_groups=4), {"max_concurrent_groups": 12}, {},
    ),
    "S": (
        "scheduler.max_staleness_steps", 2,
        SYNCHRONOUS, {"max_staleness_steps": 2, "max_concurrent_groups": 12}, {},
    ),
    "sync mode": (
        "rollout.sync_mode", "keep",
        replace(LIMITS, sync_mode="wait", max_staleness_steps=9, max_steps=20), {"sync_mode": "keep"},
        {"sync_s": 2.0, "prompts": 200, "train_s": 1.0, "mean_tokens": 30.0, "replicas": 1, "max_tokens": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_advice_makes_the_run_as_much_faster_as_it_says(name: str) -> None:
    setting, value, limits, changed, others = CHANGES[name]
    before, history = run(limits, **others)
    first = advise(history).advice[0]
    assert (first.setting, first.value, first.needs_gpus) == (setting, value, False)
    after, _ = run(replace(limits, **changed), **others)
    assert before / after == pytest.approx(first.faster, rel=0.25) and first.faster > 1.1
    assert f" × faster, simulated over {limits.max_steps} steps; " in first.text


def test_a_busy_trainer_needs_more_gpus_and_nothing_else() -> None:
    _, history = run(train_s=200.0)
    (only,) = advise(history).advice
    assert only.text.startswith("with more GPUs, raise trainer.ranks from 1 to 2: about 1.8 × faster, simulated over ")


SLOW = {"train_s": 1.0, "mean_tokens": 50.0}


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ({"groups": 6}, "rollout mine: let no call block the thread of the agents, and use one client for all"),
        ({"groups": 6, "function": "environment maze"}, "environment maze: let no call block the thread of the agents"),
        ({"held_s": 1.9}, "rollout mine: its coroutine blocks its thread 95 % of the time: use asyncio.to_thread for"),
    ],
)
def test_agents_that_the_trainer_waits_for_are_the_only_advice(calls: dict[str, Any], text: str) -> None:
    _, history = run(SYNCHRONOUS, calls=calls, **SLOW)
    counsel = advise(history)
    (line,) = counsel.lines
    assert re.fullmatch(
        r"the trainer waited \d\d % of the time for " + re.escape(text) + ".*; 2 s a call, 12 at once", line
    )
    assert counsel.causes == (line,) and not counsel.advice
    explained = str(explain_run(history, counsel=counsel))
    assert explained.index(line) < explained.index("the last group of a batch was generated")


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (None, "rewards, the trajectory store or an added state: raise reward.concurrency, or the concurrency of the"),
        ({"function": "judge big", "queued": 9}, "judge big: raise reward.concurrency; 2 s a call, 4 at once"),
        ({"function": "reward slow"}, "reward slow: make it faster; 2 s a call, 4 at once"),
    ],
)
def test_rewards_that_the_trainer_waits_for_are_the_only_advice(calls: dict[str, Any] | None, text: str) -> None:
    given = None if calls is None else {"setting": "reward.concurrency", "at_once": 4, **calls}
    _, history = run(replace(SYNCHRONOUS, added_states=REWARDS), calls=given, state_s=30.0, **SLOW)
    (line,) = advise(history).lines
    assert re.match(r"the trainer waited \d\d % of the time for " + re.escape(text), line)


@pytest.mark.parametrize(
    ("setting", "calls"),
    [
        ({"train_s": 60.0}, {"groups": 6}),  # the trainer waits for nothing
        (SLOW, {"held_s": 0.1}),  # calls that await, and for which no group waits
        (SLOW, {"held_s": 1.9, "at_once": 1}),  # there is nothing to block
        (SLOW, None),  # groups of random lengths, of which some are stragglers
    ],
)
def test_user_code_that_the_trainer_does_not_wait_for_is_no_cause(setting: Any, calls: Any) -> None:
    counsel = advise(run(calls=calls, **setting)[1])
    assert not counsel.causes and counsel.lines


def test_a_wait_below_5_percent_is_no_cause() -> None:
    """Beside rewards, which it waits for most, the trainer waits for agents a little, or less than that."""
    _, history = run(replace(SYNCHRONOUS, added_states=REWARDS), state_s=30.0, **SLOW)
    for share, causes in ((0.03, 1), (0.2, 2)):
        spans = [span._replace(idle_s=(("reward", 1 - share), ("agent", share)), busy_s=0.0) for span in history.idle]
        assert len(advise(replace(history, idle=tuple(spans))).causes) == causes


def test_more_gpus_are_advised_only_where_there_may_be_some() -> None:
    _, history = run(train_s=200.0)
    assert not advise(history, gpus=False).advice and advise(history, gpus=False).lines
    cpu = {"rollout": {"device": "cpu"}, "trainer": {"device": "cpu"}}
    assert not may_have_gpus({**cpu, "cluster": {"address": "auto"}})
    assert may_have_gpus({"cluster": {"address": "auto"}})


def test_slots_that_the_concurrency_policy_leaves_idle_are_named_and_not_simulated() -> None:
    """Twice the replicas would have as many slots that the policy leaves idle."""
    _, history = run(policies={"concurrency": "kv-cache"}, cache_tokens=40, train_s=1.0)
    *_, limited = advise(history).lines
    assert limited.endswith(
        "KV caches were full; give them more memory (rollout.engine_args), or lower rollout.max_tokens"
    )
    assert re.match(r"4\d % of slot time was idle because of scheduler.policies.concurrency: ", limited)
    custom = "8 % of slot time was idle because of scheduler.policies.concurrency: policy mine allowed no more groups"
    assert limited_slots(0.08, "mine").startswith(custom)


def test_a_balanced_run_has_nothing_to_gain() -> None:
    limits = replace(LIMITS, max_staleness_steps=8, max_concurrent_groups=36, max_steps=30)
    _, history = run(limits, replicas=1, slots=4, mean_tokens=30.0, max_tokens=10, train_s=8.3, sync_s=0.0, prompts=150)
    counsel = advise(history)
    assert not counsel.advice and counsel.lines[0].startswith(
        "no setting would make the run much faster: the trainer was busy 9"
    )
    assert bound_of({"waiting_for_stragglers": 0.8, "training": 0.2}, {"busy": 0.5}).startswith(
        "no advice: the trainer waited 80 % of the time for groups at their deadline; make groups finish sooner"
    )


def test_advice_names_k_where_it_must_follow_s() -> None:
    _, history = run(SYNCHRONOUS)
    assert " from 0 to 2 and scheduler.max_concurrent_groups from 4 to 12: " in advise(history).lines[0]
    follows = replace(history, config={"scheduler": {"max_concurrent_groups": 0}})  # the engine chooses K
    assert " from 0 to 2: " in advise(follows).lines[0]


def test_advice_starts_from_settings_that_were_changed_during_the_run() -> None:
    _, history = run(SYNCHRONOUS)
    changed = replace(history, settings=((9.0, "scheduler.max_staleness_steps", "5"),))
    assert recorded_schedule(changed).limits.max_staleness_steps == 5


def test_there_is_no_advice_before_three_steps() -> None:
    _, history = run(replace(LIMITS, max_steps=2))
    (line,) = advise(history).lines
    assert line.startswith("no advice: RUN 'r' has 2 finished train steps") and "let it train longer" in line


def test_a_trainer_and_replicas_that_take_turns_on_a_pool_are_simulated() -> None:
    _, history = run(replace(LIMITS, pools=(Pool(tasks=("rollout", "train"), replicas=(0, 1)),)))
    assert ", simulated over 8 steps; " in advise(history).lines[0]


def test_a_simulation_unlike_the_record_is_named_and_must_gain_more() -> None:
    _, history = run(SYNCHRONOUS)
    late = [step._replace(finished_at=step.finished_at + 15.0 * step.step) for step in history.steps]
    (line,) = advise(replace(history, steps=tuple(late))).lines
    assert re.search(r"simulated over 8 steps \(without the change, \d\d % too fast\); ", line)
    later = [step._replace(finished_at=step.finished_at + 150.0 * step.step) for step in history.steps]
    assert not advise(replace(history, steps=tuple(later))).advice


def test_the_work_is_bounded_and_what_was_not_simulated_is_named() -> None:
    _, history = run(SYNCHRONOUS)
    first, rest = advise(history, most_groups=200).lines
    assert first.startswith("raise scheduler.max_staleness_steps from 0 to 1")
    assert rest.startswith("not simulated, to save time: scheduler.max_staleness_steps, ") and "engine tune RUN" in rest
    (line,) = advise(history, most_groups=20).lines
    assert (
        line == "no advice: RUN 'r' has steps of 4 groups, which take too long to simulate here; use `engine tune RUN`"
    )
