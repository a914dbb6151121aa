"""Processes that are lost, start and stop: what metrics, the status, `engine top` and `engine waits` say of them."""

import pytest
from steady_world import SteadyWorld, steady_world

from engine import events as e
from engine.inspect.story import summarize, summary_lines
from engine.metrics.export import registry
from engine.metrics.status import read_status
from engine.metrics.waits import waits
from engine.states.limits import AddedState, Limits
from tests.core.core_rig import state_of

LIMITS = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, checkpoint_every=2, keeps_batches=True,
    added_states=(AddedState(name="rewarding", concurrency=2),),
)  # fmt: skip

START_S = 1000.0


def trained(steps: int) -> SteadyWorld:
    """A run whose processes take long to start again, once so many steps are trained."""
    return SteadyWorld(LIMITS, start_s=START_S).until(lambda state: state.training.steps_trained == steps)


def lose(world: SteadyWorld, kind: str, index: int = 0, **others: object) -> None:
    process = world.scheduler.state.find_process(kind, index)
    life = 1 if process is None else process.life
    lost = e.ProcessLost(kind=kind, index=index, life=life, reason="killed", **others)  # type: ignore[arg-type]
    world.tell(lost)


def replicas(world: SteadyWorld) -> dict[str, float]:
    """The replicas by state that are not 0."""
    (family,) = [f for f in registry(world.metrics).collect() if f.name == "engine_replicas"]
    return {sample.labels["state"]: sample.value for sample in family.samples if sample.value}


def said(world: SteadyWorld) -> list[str]:
    return [wait.sentence(world.time) for wait in waits(world.scheduler.state)]


def test_a_replica_that_is_down_has_the_state_of_its_process() -> None:
    world = trained(2)
    own = registry(world.metrics)
    assert replicas(world) == {"ready": 2}
    lose(world, "replica", 1)
    assert replicas(world) == {"ready": 1, "starting": 1}
    assert own.get_sample_value("engine_replica_state", {"replica": "1", "state": "starting"}) == 1
    assert read_status(world.metrics).replica_states == {0: "ready", 1: "starting"}
    assert read_status(world.metrics).replicas_lost == 1
    lose(world, "replica", 1, final=True)
    assert replicas(world) == {"ready": 1, "gone": 1}
    assert (read_status(world.metrics).replicas_lost, read_status(world.metrics).replicas_wanted) == (1, 2)
    assert own.get_sample_value("engine_process_deaths_total", {"kind": "replica"}) == 2


def test_a_replica_that_starts_for_the_first_time_is_not_lost() -> None:
    world = SteadyWorld(LIMITS).until(lambda state: bool(state.facts.started))
    assert (read_status(world.metrics).replicas_lost, replicas(world)) == (0, {"starting": 2})


def test_a_replica_that_was_let_go_is_neither_lost_nor_counted() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 2)
    world.tell(e.ReplicasWanted(replicas=1))
    world.until(lambda state: state.replicas.by_id[1].process.state == "gone")
    assert replicas(world).keys() & {"starting", "stopping", "gone"} == set() and sum(replicas(world).values()) == 1
    status, own = read_status(world.metrics), registry(world.metrics)
    assert (list(status.replica_states), status.replicas_lost, status.replicas_wanted) == ([0], 0, 1)
    assert own.get_sample_value("engine_processes", {"kind": "replica", "state": "gone"}) == 0
    assert own.get_sample_value("engine_process_deaths_total", {"kind": "replica"}) == 0
    assert world.metrics.retries["replica_lost"] == 0


def test_a_restarting_trainer_is_counted_and_shown_with_the_steps_it_repeats() -> None:
    world = trained(3)
    world.tell(e.CheckpointSaved(steps=2))
    lose(world, "trainer")
    own = registry(world.metrics)
    assert own.get_sample_value("engine_processes", {"kind": "trainer", "state": "starting"}) == 1
    assert own.get_sample_value("engine_process_deaths_total", {"kind": "trainer"}) == 1
    assert own.get_sample_value("engine_retries_total", {"cause": "process_lost"}) == 1
    text = "restarting from the checkpoint after 2 train steps and training 1 step again"
    assert f"the trainer has been {text} for 0 s (until ProcessUp or ProcessLost)" in said(world)
    status = read_status(world.metrics)
    assert (status.trainer_now, status.last_failure) == (f"the trainer is {text}", "trainer: killed")
    world.tell(e.ProcessWaits(kind="trainer", index=0, life=2, reason="1 GPU"))
    assert f"the trainer has been {text} for 0 s: the cluster has no room for it: 1 GPU (until" in "\n".join(
        said(world)
    )


def test_the_time_in_which_a_trainer_restarts_is_idle_by_its_own_name() -> None:
    world = trained(3)
    lose(world, "trainer")
    busy = sum(world.metrics.idle.sums.trainer_busy_s.values())
    world.until(lambda state: state.process("trainer", 0).state == "up")
    again_s = world.setting.train_s  # step 2, which is not in the checkpoint of 2 steps
    assert world.metrics.idle.sums.trainer_idle_s["restarting"] == pytest.approx(START_S + again_s)
    assert sum(world.metrics.idle.sums.trainer_busy_s.values()) == busy


@pytest.mark.parametrize(
    ("kind", "index", "words"),
    [
        ("replica", 1, "replica 1 has been restarting for 0 s"),
        ("added states", 0, "the process of the added states has been restarting for "),
    ],
)
def test_processes_that_restart_are_shown_by_readable_names(kind: str, index: int, words: str) -> None:
    world = trained(2)
    lose(world, kind, index)
    assert words in "\n".join(said(world))


def test_the_summary_of_a_state_tells_its_processes() -> None:
    world = trained(2)
    lose(world, "trainer")
    lose(world, "replica", 1)
    world.tell(e.ProcessWaits(kind="replica", index=1, life=2, reason="4 CPUs"))
    lines = "\n".join(summary_lines(summarize(world.scheduler.state)))
    assert "processes added states up, life 1; " in lines
    assert "; trainer starting, life 2, ended 1 time without progress\n" in lines
    assert "replica 1: starting, life 2" in lines and "waits for room: 4 CPUs" in lines


def test_a_process_that_is_lost_after_the_run_has_ended_is_not_counted() -> None:
    world = trained(2)
    world.tell(e.StopRequested(reason="enough"))
    before = state_of(world.scheduler)
    lose(world, "gateway")
    assert world.scheduler.state.find_process("gateway", 0) is None and state_of(world.scheduler) == before
    assert sum(world.metrics.deaths.values()) == 0
