"""What `RunMetrics` counts, against runs whose times are known exactly."""

import json
import math
import pickle
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from steady_world import FOREVER, GROUP_TOKENS, SteadyWorld, steady_world

from engine import events as e
from engine.metrics.collector import FunctionTotals, RunMetrics
from engine.metrics.counts import TOGETHER, Histogram, ReplicaCounts
from engine.metrics.export import registry
from engine.metrics.idle import IdleTime
from engine.metrics.journal import Journal, StepRows, line_of, rows_in, validation_rows
from engine.metrics.names import ROLLOUT_IDLE_CAUSES, TRAINER_IDLE_CAUSES
from engine.metrics.status import read_status
from engine.record import Header, MemoryRecorder, read, recover
from engine.record.checked_lines import object_of
from engine.record.frames import Tick
from engine.record.snapshots import restore
from engine.simulation.simulated_models import row_reward
from engine.simulation.world import Faults
from engine.states.causes import TRAINING, WAITING_FOR_STRAGGLERS
from engine.states.limits import AddedState, Limits, Pool, ValidationLimits
from engine.states.machine import entered
from engine.states.timeouts import Timeouts
from tests.core.added_states import CHECKING
from tests.core.core_rig import state_of
from tests.core.scripted import Scripted


def rows_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_bytes().splitlines()
    assert [json.loads(line, parse_constant=refuse).keys() - {"crc32"} for line in lines] == [
        object_of(line).keys() for line in lines
    ]
    return [object_of(line) for line in lines]


# -- the journal -------------------------------------------------------------------------------------------------------


def test_a_line_per_train_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    world = steady_world(steps=4, journal=Journal(path)).to_the_end()
    rows = rows_of(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    wanted = {
        "step", "version", "groups", "reward_mean", "accuracy", "loss", "staleness_min", "staleness_mean",
        "staleness_max", "tokens", "elapsed_s", "seconds", "groups_aborted", "groups_resumed", "groups_filtered",
        "groups_failed",
    }  # fmt: skip
    for row in rows:
        assert wanted <= set(row)
        assert row["groups"] == 2 and row["tokens"] == 2 * GROUP_TOKENS
        assert row["staleness_min"] <= row["staleness_mean"] <= row["staleness_max"] <= 1
        assert row["seconds"]["training"] == world.setting.train_s
        assert row["seconds"]["publishing"] == world.setting.sync_s
        assert row["seconds"]["total"] == pytest.approx(sum(row["seconds"].values()) - row["seconds"]["total"])
        assert row["loss"] == 0.5 / (row["step"] + 1)
        assert row["trainer_seconds"] == {"pack": 0.1}
    assert sum(row["seconds"]["total"] for row in rows) == pytest.approx(world.time)
    assert rows[0]["reward_mean"] == pytest.approx((0.5 / 16 + 1.5 / 16) / 2), "groups 0 and 1, both of replica 0"


def test_figures_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steady_world(steps=1, journal=Journal(path)).run()
    (row,) = rows_of(path)
    assert row["ess"] is None
    journal = Journal(tmp_path / "more.jsonl")
    journal.write({"a": math.inf, "b": [math.nan, 1.0], "c": {"d": -math.inf, 2: (1, None, True)}})
    journal.close()
    assert rows_of(tmp_path / "more.jsonl") == [{"a": None, "b": [None, 1.0], "c": {"d": None, "2": [1, None, True]}}]


def test_a_row_with_any_changed_bit_is_none() -> None:
    line = line_of({"step": 3, "reward_mean": 0.5, "sets": {"math": {"pass@4": None}}})
    assert [*rows_in([line])] == [{"step": 3, "reward_mean": 0.5, "sets": {"math": {"pass@4": None}}}]
    for place in range(len(line)):
        for bit in range(8):
            changed = line[:place] + bytes([line[place] ^ 1 << bit]) + line[place + 1 :]
            assert not [*rows_in([changed])], changed


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    world = steady_world(steps=None, journal=Journal(path))
    world.until(lambda state: len(world.metrics.rewards) == 2)
    assert len(rows_of(path)) == 2


def test_a_torn_line_of_an_earlier_life_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line_of({"step": 0}) + b'{"step": 1, "rew')
    journal = Journal(path)
    journal.write({"step": 1})
    journal.close()
    assert rows_of(path) == [{"step": 0}, {"step": 1}]


def test_steps_that_the_trainer_never_reports_are_written_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steady_world(steps=3, journal=Journal(path), reports=False).run()
    rows = rows_of(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["loss"] is None for row in rows)


def test_a_report_after_the_step_is_finished_still_reaches_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    world = steady_world(steps=None, journal=Journal(path), reports=False)
    world.until(lambda state: state.training.latest_version == 1)
    assert rows_of(path) == []
    world.metrics.report(0, {"loss": 2.0, "accuracy": 0.25, "step": 99})
    (row,) = rows_of(path)
    assert (row["step"], row["loss"], row["accuracy"]) == (0, 2.0, 0.25)


def test_accuracy_is_the_trainers_and_never_that_on_held_out_prompts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    world = steady_world(steps=3, journal=Journal(path), reports=False)
    world.metrics.validated(0, 0.5)
    world.metrics.report(0, {"accuracy": 0.25})
    world.metrics.report(1, {})
    world.run()
    assert [row["accuracy"] for row in rows_of(path)] == [0.25, None, None]


def test_groups_aborted_and_resumed_are_those_since_the_line_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    world = steady_world(steps=4, journal=Journal(path), mode="abort", lengths=lambda group: 1 + group % 3)
    world.run()
    rows = rows_of(path)
    assert sum(row["groups_aborted"] for row in rows) > 0
    moves = world.scheduler.state.moves
    assert sum(row["groups_aborted"] for row in rows) == entered(moves, "group", "aborted")
    assert sum(row["groups_resumed"] for row in rows) == entered(moves, "group", "resumed")


# -- idle time ---------------------------------------------------------------------------------------------------------


def test_slot_time_is_busy_or_idle_by_one_cause_to_the_second() -> None:
    world = steady_world(steps=6, lengths=lambda group: 1 + group % 3).to_the_end()
    idle = world.metrics.idle
    assert tuple(idle.sums.idle_s) == ROLLOUT_IDLE_CAUSES and tuple(idle.sums.trainer_idle_s) == TRAINER_IDLE_CAUSES
    slot_seconds = idle.sums.busy_s + sum(idle.sums.idle_s.values())
    assert slot_seconds == pytest.approx(world.time * world.setting.replicas * world.setting.slots)
    trainer_seconds = sum(idle.sums.trainer_busy_s.values()) + sum(idle.sums.trainer_idle_s.values())
    assert trainer_seconds == pytest.approx(world.time)
    assert idle.sums.trainer_busy_s["training"] == pytest.approx(6 * world.setting.train_s)
    assert idle.sums.trainer_idle_s["publishing"] == pytest.approx(6 * world.setting.sync_s)


def test_synchronous_training_waits_for_groups_and_the_rollout_for_staleness() -> None:
    world = steady_world(stale=0, batch=2, workers=2, steps=4, replicas=1, slots=2).to_the_end()
    idle, train_s, sync_s = world.metrics.idle, world.setting.train_s, world.setting.sync_s
    assert idle.sums.trainer_idle_s["waiting_for_groups"] == pytest.approx(4 * 1.0 + 3 * 3 * sync_s)
    assert idle.sums.busy_s == pytest.approx(4 * 2 * 1.0)
    assert idle.sums.idle_s["staleness_bound"] == pytest.approx(3 * 2 * (train_s + 2 * sync_s)), "train, publish, stage"
    assert idle.sums.idle_s["weight_sync"] == pytest.approx(3 * 2 * 2 * sync_s), "pause, install"
    assert idle.sums.idle_s["run_ending"] == pytest.approx(2 * (train_s + sync_s))


def test_slots_whose_pool_trains_idle_for_it() -> None:
    together = (Pool(tasks=("rollout", "train"), replicas=(0,)),)
    world = steady_world(batch=2, workers=4, steps=4, replicas=1, slots=4, sync_s=0.0, pools=together).to_the_end()
    idle = world.metrics.idle
    assert idle.sums.idle_s["pool"] == pytest.approx(4 * 4 * world.setting.train_s)
    slot_seconds = idle.sums.busy_s + sum(idle.sums.idle_s.values())
    assert slot_seconds == pytest.approx(world.time * 4)


def test_slots_whose_groups_wait_for_rewards_idle_for_these() -> None:
    """Each group is generated in 1 s; its reward takes 9 s, and one is computed at a time."""
    limits = Limits(
        train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, max_steps=2, timeouts=Timeouts.every(None),
        added_states=(AddedState(name="rewarding", concurrency=1),),
    )  # fmt: skip
    world = SteadyWorld(limits, replicas=1, slots=4, state_s=9.0)
    world.until(
        lambda state: state.groups.state_queues.out == 1 and state.groups.state_queues.groups_at("generated") == 3
    )
    status = read_status(world.metrics)
    assert status.admission_limit == "reward" and "slots free: their groups wait for rewards" in status.rollout_now
    assert status.calls_now == "3 groups wait for state rewarding"
    world.to_the_end()
    idle = world.metrics.idle
    assert idle.sums.idle_s["reward"] == pytest.approx(2 * 4 * 4 * 9.0)
    slot_seconds = idle.sums.busy_s + sum(idle.sums.idle_s.values())
    assert slot_seconds == pytest.approx(world.time * 4)


def test_groups_that_hold_the_places_of_k_while_rewards_run_idle_for_these() -> None:
    run = Scripted(samples=2, slots=4, train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=3)
    idle = IdleTime(run.state)
    assert run.running() == [0, 1, 2]
    for group in (0, 1):
        run.end_trajectories(group, 2)
    idle.measure()
    assert (idle.admission_limit, idle.busy, idle.split["free"]) == ("reward", 1, 3)
    idle.at = 10.0
    assert {cause: s for cause, s in idle.sums.idle_s.items() if s} == {"reward": 20.0, "worker_bound": 10.0}


def test_a_training_trainer_holds_the_bound_not_the_rewards() -> None:
    run = Scripted(samples=2, slots=4, train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)
    run.finish(0, 1)
    for group in (2, 3):
        run.end_trajectories(group, 2)
    idle = IdleTime(run.state)
    idle.measure()
    assert idle.trainer is TRAINING and idle.admission_limit == "staleness_bound"


def test_slots_whose_groups_wait_for_agents_idle_for_these() -> None:
    world = steady_world(lengths=lambda group: FOREVER).until(lambda state: state.groups.ledger.running == 4)
    idle, began = world.metrics.idle, world.time
    calls = {"function": "agent mine", "at_once": 2, "setting": "rollout.slots", "queued": 0, "running_s": 0.0}

    def report(groups: int) -> None:
        life = {"kind": "replica", "index": 0, "life": 1}
        world.tell(e.CallsMeasured(**life, **calls, groups=groups, calls=1, seconds=3.0))

    report(2)
    status = read_status(world.metrics)
    assert status.calls_now.startswith("2 groups wait for agent mine: 3 s a call, 2 at once; raise ")
    assert status.rollout_now == "every slot is busy: 4 groups generating, 2 in agents"
    assert idle.split == {"busy": 4, "frozen": 0, "free": 0}
    world.run_for(10.0)
    report(0)
    assert idle.sums.idle_s["agent"] == pytest.approx(20.0) and world.time == began + 10.0
    world.run_for(10.0)
    assert idle.sums.idle_s["agent"] == pytest.approx(20.0) and read_status(world.metrics).calls_now == ""
    report(2)
    world.tell(e.ProcessLost(kind="replica", index=0, life=1, reason="gone"))
    assert idle.in_agents == 0, "its life has ended"


def test_figures_of_calls_and_caches_are_counted_and_change_nothing() -> None:
    world = steady_world(lengths=lambda group: FOREVER).until(lambda state: state.groups.ledger.running == 4)
    before = world.metrics.changes
    for life in (1, 0):  # a report, and one of a life that has ended
        world.tell(e.CacheMeasured(kind="replica", index=0, life=life, used=0.5))
    figures = {"kind": "replica", "index": 0, "life": 1, "function": "reward slow", "at_once": 4}
    more = {**figures, "groups": 2, "setting": "", "seconds": 6.0, "running_s": 0.0, "held_s": 0.5}
    for calls in (1, 3):
        world.tell(e.CallsMeasured(**more, queued=calls, calls=calls))
    world.run_for(10.0)
    world.tell(e.CallsMeasured(**{**more, "seconds": 0.0}, queued=0, calls=0))
    totals = FunctionTotals(4, 12.0, "reward", setting="", at_once=4, queued=3, held_s=1.5, watched_s=10.0)
    assert world.metrics.changes == before and world.metrics.calls == {"reward slow": totals}
    assert read_status(world.metrics).slowest == {"reward": "reward slow, 3 s a call"}
    read = registry(world.metrics).get_sample_value
    cache = read("engine_replica_cache_used_ratio", {"replica": "0"})
    assert cache == 0.5 and read("engine_replica_limit_groups", {"replica": "0"}) == 2
    labels = {"function": "reward slow"}
    assert read("engine_function_calls_total", labels) == 4 and read("engine_function_waiting_groups", labels) == 2
    assert read("engine_function_call_seconds_total", labels) == 12.0


def test_a_deadline_that_binds_is_shown_as_waiting_for_stragglers() -> None:
    world = steady_world(batch=2, stale=1, workers=4, steps=8, lengths=lambda group: 20 if group == 1 else 1)
    seen: list[str] = []

    def straggling() -> None:
        if world.metrics.idle.trainer is WAITING_FOR_STRAGGLERS:
            seen.append(read_status(world.metrics).trainer_now)

    world.to_the_end(straggling)
    assert world.metrics.idle.sums.trainer_idle_s["waiting_for_stragglers"] > 0
    assert any("waits for 1 group due by step 1" in text for text in seen), seen


def test_used_up_prompts_idle_slots() -> None:
    world = steady_world(steps=None, prompts=5, replicas=2, slots=2).to_the_end()
    assert world.scheduler.state.groups.ledger.consumed == 5
    assert world.metrics.idle.sums.idle_s["no_prompts"] > 0


def test_weight_sync_is_timed_by_its_mode() -> None:
    """Without staleness, every slot idles from the pause of its replica until the new weights are installed."""
    world = steady_world(stale=0, workers=2, steps=4, sync_s=0.25).to_the_end()
    histogram = world.metrics.replicas.sync_s["keep"]
    assert histogram.read()[0][-1] == 2 * 3, "both replicas take every version but the last"
    assert histogram.read()[1] == pytest.approx(6 * (0.25 + 0.25))
    assert world.metrics.idle.sums.idle_s["weight_sync"] == pytest.approx(6 * 2 * 0.5)


@pytest.mark.parametrize("times", [1, TOGETHER])
def test_a_histogram_counts_each_value_up_to_its_bounds_once(times: int) -> None:
    histogram = Histogram((1.0, 2.0))
    for _ in range(times):
        histogram.observe([0.5, 3.0, 2.0], groups=[7, 8, 9])
        histogram.observe([1.0])
    assert histogram.read() == ((2 * times, 3 * times, 4 * times), 6.5 * times)
    assert histogram.examples == {2: (3.0, 8)}


# -- retries and stale echoes ------------------------------------------------------------------------------------------


def test_retries_are_counted_by_cause_and_echoes_are_not() -> None:
    world = steady_world(steps=None).until(lambda state: state.groups.ledger.running == 4)
    group = next(iter(world.scheduler.state.groups.live.values()))
    replica = world.scheduler.state.orders.open["group"][group.id].command.replica
    failed = e.GroupFailed(
        group=group.id, attempt=group.attempt, replica=replica, life=1, cause="data", reason="bad reward"
    )
    echo = e.GroupFailed(
        group=group.id, attempt=group.attempt, replica=replica, life=1, cause="data", reason="bad reward"
    )
    world.tell(failed)
    world.tell(echo)
    world.tell(e.ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    assert world.metrics.retries["group_data"] == 1
    assert world.metrics.retries["replica_lost"] == 1
    assert world.scheduler.state.orders.facts.stale_echoes == 1
    assert world.metrics.idle.slots == 2


def test_tokens_of_a_stale_echo_are_not_counted() -> None:
    world = steady_world(steps=None)
    world.until(lambda state: world.metrics.generated.tokens == GROUP_TOKENS)
    generated = world.metrics.generated
    before = (generated.tokens, generated.response_tokens.read())
    world.tell(
        e.GroupGenerated(
            group=0, attempt=9, replica=0, life=1, tokens=5, oldest_version=0, newest_version=0, trainable=1,
            reward_mean=0.0, reward_spread=0.0,
        )
    )  # fmt: skip
    assert (generated.tokens, generated.response_tokens.read()) == before


# -- the status --------------------------------------------------------------------------------------------------------


def test_the_status_of_a_finished_run() -> None:
    world = steady_world(steps=4, sync_s=0.125).to_the_end()  # version 3 is installed before step 3 is trained
    world.metrics.validated(0, 0.25)
    world.metrics.validated(4, 0.75)
    status = read_status(world.metrics)
    assert (status.outcome, status.step, status.max_steps, status.eta_s) == ("finished", 4, 4, 0.0)
    assert (status.accuracy_first, status.accuracy) == (0.25, 0.75)
    assert status.reward_first is not None and status.reward is not None and status.reward_first < status.reward
    assert status.staleness_min == 0 and status.staleness_max == 1
    assert status.tokens_trained == 4 * 2 * GROUP_TOKENS
    assert status.replica_versions == {0: 3, 1: 3}
    assert len(status.recent) == 4
    assert 0 < status.rollout_idle_share < 1 and 0 < status.trainer_idle_share < 1
    assert pickle.loads(pickle.dumps(status)) == status or any(
        isinstance(value, float) and math.isnan(value) for row in status.recent for value in row.values()
    )


def test_the_status_before_anything_happened() -> None:
    status = read_status(steady_world().metrics)
    assert status.step == 0 and status.reward is None and status.eta_s is None and status.tokens_per_s == 0.0
    assert status.trainer_now == "the run is starting"
    assert status.rollout_now == "no replica is up"


def test_the_status_estimates_what_is_left_from_the_newest_steps() -> None:
    world = steady_world(steps=20).until(lambda state: state.training.latest_version == 10)
    finished = world.time
    left = read_status(world.metrics, finished).eta_s
    assert left is not None
    world.run()
    assert left == pytest.approx(world.time - finished, rel=0.35)
    assert read_status(world.metrics, world.time).tokens_per_s > 0


def test_sentences_say_what_happens_now() -> None:
    world = steady_world(steps=6, lengths=lambda group: 1 + group % 3)
    seen: set[str] = set()

    def look() -> None:
        status = read_status(world.metrics)
        seen.update((status.trainer_now, status.rollout_now))

    world.to_the_end(look)
    assert any(text.startswith("training step 0 on 2 groups") for text in seen)
    assert any(text.startswith("publishing version 1, after step 0") for text in seen)
    assert any("waits for 2 groups; 0 of 2 ready" in text for text in seen)
    assert any("taking new weights" in text for text in seen)
    assert any("every slot is busy: 4 groups generating" in text for text in seen)
    assert any("slots free: S = 1: no place before version" in text for text in seen)
    assert all(len(text) <= 68 for text in seen), "each fits a line of the live view"


# -- validations -------------------------------------------------------------------------------------------------------


def test_every_validation_is_a_line_with_the_version_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    wanted = ValidationLimits(rows=8, rows_per_slot=3, every=2)
    world = steady_world(steps=6, validation=wanted, journal=Journal(path)).to_the_end()
    world.metrics.close()
    lines = [row for row in rows_of(path) if "validation" in row]
    assert [(row["version"], row["steps"], row["outcome"]) for row in lines] == [
        (0, 0, "reported"), (2, 2, "reported"), (4, 4, "reported"), (6, 6, "reported"),
    ]  # fmt: skip
    accuracies = [fmean(row_reward(row, version) for row in range(8)) for version in (0, 2, 4, 6)]
    assert [row["accuracy"] for row in lines] == accuracies
    assert all(row["rows"] == row["measured"] == 8 and row["reason"] == "" for row in lines)
    assert all(row["seconds"]["running"] >= world.setting.measure_s for row in lines)
    status = read_status(world.metrics)
    assert (status.accuracy_first, status.accuracy_last) == (accuracies[0], accuracies[-1])
    assert list(status.validations) == lines
    assert world.metrics.rows_measured == 32 and world.metrics.validation_s.read()[0][-1] == 4
    assert world.metrics.validations_by_state() == {"queued": 0, "running": 0}


def test_slots_that_measure_are_busy_and_the_status_says_what_is_measured() -> None:
    world = steady_world(steps=4, validation=ValidationLimits(rows=8, rows_per_slot=2, every=1), slots=3)
    seen: set[str] = set()
    full: list[str] = []

    def look() -> None:
        status = read_status(world.metrics)
        seen.update((status.validation_now, status.trainer_now))
        replicas, free = world.scheduler.state.replicas.by_id.values(), world.scheduler.state.replicas
        taken = sum(r.slots - free.for_chunks(r) for r in replicas if r.state == "ready")
        full.extend([status.validation_now] if taken > status.slots_busy else [])

    world.to_the_end(look)
    assert not full
    assert "version 0: 0 of 8 rows, 3 slots measuring" in seen
    assert any(text.startswith("version 1: 0 of 8 rows, waits until replica 0 has it") for text in seen)
    assert "every step is trained; the run ends with its last validation" in seen
    assert "" in seen
    assert all(len(text) <= 68 for text in seen)


def test_a_run_that_goes_on_knows_its_validations_and_writes_nothing_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    wanted = ValidationLimits(rows=8, every=2)
    limits = steady_world(steps=4, validation=wanted).setting.limits
    recorder = MemoryRecorder(Header(run="again", limits=limits.to_plain()))
    world = steady_world(steps=4, validation=wanted, journal=Journal(path), recorder=recorder).to_the_end()
    before = rows_of(path)
    assert any("validation" in row for row in before)
    recovered = recover(read(recorder))
    metrics = RunMetrics(recovered.scheduler, Journal(path), validations=[*validation_rows(path)])
    metrics.close()
    assert rows_of(path) == before
    assert metrics.accuracies == world.metrics.accuracies
    assert read_status(world.metrics).validations and not read_status(metrics).validations, "they were shown already"


def test_a_step_that_was_trained_before_a_failover_waits_for_no_metrics(tmp_path: Path) -> None:
    """They were lost with the process, and so would be the row if the next process ended before the next step did."""
    limits = steady_world(steps=None).setting.limits
    recorder = MemoryRecorder(Header(run="again", limits=limits.to_plain()))
    world = steady_world(steps=None, recorder=recorder)
    world.until(lambda state: state.publishing)
    recovered, path = recover(read(recorder)), tmp_path / "metrics.jsonl"
    metrics = RunMetrics(recovered.scheduler, Journal(path))
    metrics.finish_replay()
    published = e.WeightsPublished(version=1, attempt=1)
    e.stamp(published, recovered.events, recovered.at)
    metrics.observe(Tick(0, (published,), recovered.scheduler.tick((published,))))
    assert [row["step"] for row in rows_of(path)] == [0]


def test_the_time_of_a_step_begins_when_it_is_added() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_batched == 1)
    added = world.time
    assert world.scheduler.state.training.steps[1].entered_at == added
    world.until(lambda state: state.training.steps_batched == 2)
    step = world.scheduler.state.training.steps[1]
    assert sum(step.seconds.values()) == pytest.approx(step.entered_at - added)


def test_a_pause_in_which_a_replica_was_lost_is_not_counted() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 1)
    counts, state = ReplicaCounts(), world.scheduler.state
    replica = state.replicas.by_id[0]
    for trigger in ("pause", "lose", "revert"):
        counts.changed(replica, trigger, state)
        state.facts.now += 1.0
    assert not any(counts.pause_s.values())


def test_a_step_counts_the_setbacks_since_the_step_before_it_also_after_a_restore() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 2)
    world.scheduler.state.moves["group", "generating", "aborted"] = 7
    restored = restore(state_of(world.scheduler)).state
    for aborted, since in ((8, 8), (8, 0), (10, 2)):
        restored.moves["group", "generating", "aborted"] = aborted
        step = next(iter(restored.training.steps.values()))
        restored.training.next_step(step.id + 2, restored.facts.now)
        restored.training.finish(step, restored.count_setbacks())
        assert step.setbacks == {"aborted": since, "resumed": 0, "filtered": 0, "failed": 0}
    restored.moves["group", "generating", "aborted"] = 12
    restored.branch(0, (), ())
    assert restored.training.setbacks["aborted"] == 12, "those of undone steps do not count again"


# -- added states ------------------------------------------------------------------------------------------------------


def test_groups_in_added_states_are_counted_and_their_failures_reported() -> None:
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=4, added_states=(CHECKING,)
    )
    world = SteadyWorld(limits, faults=Faults(fail_state=0.5))
    in_state, live = [], []

    def look() -> None:
        counts = world.metrics.groups.by_state()
        in_state.append(counts["checking"])
        live.append(sum(counts.values()) - len(world.scheduler.state.groups.live))

    world.to_the_end(look)
    assert max(in_state) > 1 and set(live) == {0}
    status = read_status(world.metrics)
    assert status.failures["group_data"] > 0
    assert status.last_failure.endswith(", checking: fault")


def finish(rows: StepRows, steps: range) -> tuple[list[int], list[int]]:
    """The numbers of the steps in the first and in the newest rows."""
    for step in steps:
        rows.finished({"step": step})
    rows.flush()
    return [row["step"] for row in rows.first], [row["step"] for row in rows.recent]


def test_the_rows_of_the_first_steps_stay_beside_the_newest() -> None:
    assert finish(StepRows(lambda row: None), range(60)) == ([*range(8)], [*range(28, 60)])
    assert finish(StepRows(lambda row: None), range(3)) == ([0, 1, 2], [0, 1, 2])
    resumed = StepRows(lambda row: None, [{"step": step} for step in range(4)])
    assert finish(resumed, range(4, 44)) == ([*range(8)], [*range(12, 44)]), "resumed after four steps"
