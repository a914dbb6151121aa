"""What interrupts a run or changes it, as its metrics tell it; and figures that are counted many at once."""

import pytest
from steady_world import SteadyWorld, steady_world

from engine import events as e
from engine.metrics.collector import RunMetrics
from engine.metrics.export import ExternalFigures, registry
from engine.metrics.names import REPLICA_GROUPS, ROLLOUT_IDLE_CAUSES
from engine.metrics.status import read_status
from engine.record import Header, MemoryRecorder, read, recover
from engine.record.frames import Tick
from engine.simulation.world import Faults
from engine.states.limits import Limits
from engine.states.state import State
from engine.states.timeouts import Timeouts


def test_a_drain_is_reported_and_is_the_named_cause_of_idle_slots_and_trainer() -> None:
    """Until its replicas are paused, two slots sample and two idle, and so does the trainer."""
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=2, checkpoint_every=100, sync_mode="abort"
    )
    world = SteadyWorld(limits).until(lambda state: state.training.steps_trained == 2)
    world.until(lambda state: {(r.state, r.version) for r in state.replicas.by_id.values()} == {("ready", 2)})
    world.tell(e.DrainRequested(reason="a user asked"))
    status = read_status(world.metrics, world.time + 3.0)
    assert (status.draining, status.draining_s, status.silent_s) == ("a user asked", 3.0, 3.0)
    waits = "replica 0 has been parking its groups before it leaves for 0 s"
    assert status.rollout_now.startswith(f"the run is draining: {waits}")
    assert world.metrics.requests(e.DrainRequested) == 1
    state, idle = world.scheduler.state, world.metrics.idle
    asked = world.time
    world.to_the_end()
    assert read_status(world.metrics).outcome == "stopped" and world.time == asked + world.setting.sync_s
    assert status.checkpoint_steps == 0 and state.checkpoints.newest == state.training.steps_trained == 2
    assert idle.sums.idle_s["draining"] == pytest.approx(world.setting.sync_s * 2)
    assert idle.sums.trainer_idle_s["draining"] == pytest.approx(world.setting.sync_s)
    assert sum(idle.sums.idle_s.values()) + idle.sums.busy_s == pytest.approx(world.time * 4)


def test_wanted_replicas_and_settings_are_reported_as_they_are_now() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 2)
    own = registry(world.metrics)
    assert own.get_sample_value("engine_replicas_wanted") == 2
    assert own.get_sample_value("engine_max_concurrent_groups") == 4
    world.tell(e.ReplicasWanted(replicas=3))
    world.tell(e.SettingChanged(setting="scheduler.max_concurrent_groups", value="3"))
    assert own.get_sample_value("engine_replicas_wanted") == 3
    assert own.get_sample_value("engine_max_concurrent_groups") == 3
    for request in ("replicas_wanted", "setting"):
        assert own.get_sample_value("engine_requests_total", {"request": request}) == 1
    assert read_status(world.metrics).settings == {"scheduler.max_concurrent_groups": "3"}


def test_the_age_of_the_newest_checkpoint_and_what_it_leaves_out() -> None:
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, checkpoint_every=2, keeps_batches=True
    )
    world = SteadyWorld(limits).until(lambda state: state.training.steps_trained == 2)
    own = registry(world.metrics, ExternalFigures(now=lambda: world.time + 1.0))
    assert own.get_sample_value("engine_checkpoint_every_steps") == 2
    assert own.get_sample_value("engine_checkpoint_steps") == 0
    assert own.get_sample_value("engine_batches_kept_steps") == 2
    world.until(lambda state: own.get_sample_value("engine_checkpoint_steps") == 2)
    assert own.get_sample_value("engine_batches_kept_steps") == 0
    assert own.get_sample_value("engine_checkpoint_age_seconds") == own.get_sample_value("engine_silence_seconds") == 1


def test_attempts_that_take_too_long_are_counted_as_parked() -> None:
    """The time that its replica takes to pause and to install version 1 is not the group's."""
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, timeouts=Timeouts(group_s=3.0))
    world = SteadyWorld(limits, lengths=lambda group: 99 if group == 2 else 1)
    world.until(lambda state: sum(world.metrics.parked.values()) > 0)
    limit_s, check_s = 3.0, 3.0 / 20
    assert 0 <= world.time - limit_s - 2 * world.setting.sync_s <= check_s
    assert world.metrics.parked == {"timeout": 1, "moved": 0}


def attempts_failed(metrics: RunMetrics) -> list[float | None]:
    """By replica."""
    own = registry(metrics)
    ends = [{"replica": str(replica), "end": "failed"} for replica in metrics.state.replicas.by_id]
    return [own.get_sample_value(REPLICA_GROUPS.name, end) for end in ends]


@pytest.mark.parametrize("kept", [True, False])
def test_after_a_resume_groups_count_in_the_line_of_weights_that_goes_on(kept: bool) -> None:
    """Half of the groups fail, so that both kinds of ends are undone."""
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, checkpoint_every=2, data_attempts=1
    )
    recorder = MemoryRecorder(Header(run="again", limits=limits.to_plain()))
    world = SteadyWorld(limits, recorder=recorder, faults=Faults(fail_data=0.5))
    world.until(lambda state: state.training.steps_trained == 5)
    before = world.metrics.groups.by_final_state()
    assert before["consumed"] == 10 and before["failed"] > 2
    attempts = attempts_failed(world.metrics)
    assert sum(filter(None, attempts)) == before["failed"]

    recovered = recover(read(recorder))
    metrics = RunMetrics(recovered.scheduler)
    assert metrics.groups.by_final_state() == before
    event = recovered.resume_without_loss(replicas=2) if kept else recovered.resume_from_checkpoint(steps=2, replicas=2)
    e.stamp(event, recovered.events, recovered.at)
    metrics.observe(Tick(0, (event,), recovered.scheduler.tick((event,))))
    ended, state = metrics.groups.by_final_state(), recovered.scheduler.state
    assert ended["consumed"] == state.groups.ledger.consumed == (10 if kept else 4)
    assert sum(ended.values()) - ended["consumed"] == state.groups.ledger.released
    assert (ended["failed"] < before["failed"]) is not kept
    assert attempts_failed(metrics) == attempts, "no resume undoes an attempt"
    assert read_status(metrics).groups_ended == ended
    records = list(state.groups.live.values())
    assert metrics.groups.by_state() == {
        name: sum(group.state == name for group in records) for name in metrics.groups.by_state()
    }
    assert state.recoveries == {"resumed": int(kept), "branched": int(not kept), "scheduler": 0}
    assert read_status(metrics).checkpoint_steps == (4 if kept else 2)


@pytest.mark.parametrize("snapshot_every", [0, 1, 7])
def test_recoveries_and_a_drain_outlive_the_process_that_saw_them(snapshot_every: int) -> None:
    """The next process knows of them by the record: of those before its newest snapshot, and of those behind it."""
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, checkpoint_every=100)
    recorder = MemoryRecorder(Header(run="again", limits=limits.to_plain()))
    world = SteadyWorld(limits, recorder=recorder, snapshot_every=snapshot_every)
    world.until(lambda state: state.training.steps_trained == 2)
    world.tell(e.SchedulerRecovered())
    world.until(lambda state: state.training.steps_trained == 4)
    world.tell(e.SchedulerRecovered())
    world.tell(e.DrainRequested(reason="a user asked"))
    asked = world.time
    for _ in range(8):  # so that the newest snapshot of those that are often has the drain in it
        world.tell(e.SchedulerRecovered())
    at = asked + 5.0

    recovered = recover(read(recorder))
    assert (recovered.began_at is not None) == bool(snapshot_every)
    metrics = RunMetrics(recovered.scheduler)
    event = e.SchedulerRecovered()
    e.stamp(event, recovered.events, at)
    metrics.observe(Tick(0, (event,), recovered.scheduler.tick((event,))))
    assert recovered.scheduler.state.recoveries == {"resumed": 0, "branched": 0, "scheduler": 11}
    assert read_status(metrics, at).draining_s == 5.0


def test_idle_time_read_between_events_never_goes_back_and_adds_up() -> None:
    world = steady_world(steps=12, replicas=3, slots=3, workers=6, stale=2, lengths=lambda group: 1 + group % 4)
    last = dict.fromkeys(ROLLOUT_IDLE_CAUSES, 0.0)
    busy_s, busy, since = 0.0, 0, 0.0

    def look() -> None:
        nonlocal busy_s, busy, since
        idle = world.metrics.idle
        for cause, seconds in idle.sums.idle_s.items():
            assert seconds >= last[cause] - 1e-12, cause
            last[cause] = seconds
        busy_s, since = busy_s + busy * (idle.at - since), idle.at
        replicas = world.scheduler.state.replicas
        busy = sum(replicas.occupied(one) for one in replicas.by_id.values() if one.state != "installing")
        assert idle.sums.busy_s == pytest.approx(busy_s)
        assert busy_s + sum(idle.sums.idle_s.values()) == pytest.approx(idle.at * 9)

    world.to_the_end(look)
    assert busy_s > 20


def test_the_oldest_group_is_one_that_is_in_no_batch() -> None:
    world = steady_world(
        steps=None, batch=80, stale=2, workers=240, slots=120, lengths=lambda group: 1 + (group * 7) % 5
    )
    own, oldest = registry(world.metrics), []

    def look(state: State) -> bool:
        if world.metrics.events.total() % 7:
            return False
        groups = [g for g in state.groups.live.values() if g.state not in ("queued", "batched")]
        wanted = world.time - min((g.started_at for g in groups), default=world.time)
        oldest.append(wanted)
        assert own.get_sample_value("engine_oldest_group_age_seconds") == pytest.approx(wanted)
        return state.training.steps_trained >= 5

    world.until(look)
    assert max(oldest) > 2


@pytest.mark.parametrize(("how", "age_s"), [("resumed", 3.0), ("by another scheduler", 5.0)])
def test_a_run_that_goes_on_is_not_taken_for_one_that_stands_since_it_began(how: str, age_s: float) -> None:
    """Its process knows nothing of earlier steps and checkpoints: their ages count from where it continued."""
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, checkpoint_every=2)
    recorder = MemoryRecorder(Header(run="again", limits=limits.to_plain()))
    world = SteadyWorld(limits, recorder=recorder)
    world.until(lambda state: state.training.steps_trained == 5)
    recovered = recover(read(recorder))
    metrics = RunMetrics(recovered.scheduler)
    event: e.Event = recovered.resume_from_checkpoint(steps=5, replicas=2)
    if how != "resumed":
        metrics.finish_replay()
        event = e.SchedulerRecovered()
    e.stamp(event, recovered.events, recovered.at + 2.0)
    metrics.observe(Tick(0, (event,), recovered.scheduler.tick((event,))))
    own = registry(metrics, ExternalFigures(now=lambda: recovered.at + 5.0))
    assert own.get_sample_value("engine_step_age_seconds") == age_s
    assert own.get_sample_value("engine_checkpoint_age_seconds") == age_s
    assert read_status(metrics, recovered.at + 5.0).checkpoint_age_s == age_s
