"""`Supervisor`: lives of processes as they are ordered, watched, reported and taken over, without Ray."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handles import RayOfHandles, Scene, played, settled, without_place
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayError
from ray_plans import Mortal, plan, restore_mortal

from engine.actors import placement
from engine.commands import Command, SaveCheckpoint, ScoreBatch, StartGroup, TrainStep
from engine.errors import ConfigError, EngineError
from engine.events import (
    CheckpointDamaged,
    CheckpointSaved,
    Event,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    ReplicaPaused,
    ReplicasWanted,
    RunStarted,
)
from engine.gpu_request import GpuRequest
from engine.runtime.stacks import register_stacks, stacks_file
from engine.runtime.wire import unpack_orders
from engine.states.limits import Pool
from engine.states.process import GATEWAY, REPLICA, SCORER, TRAINER, TRAJECTORY_STORE, WEIGHTS_STORE
from engine.storage.checkpoints import checkpoint_path, save_checkpoint
from engine.workers.plan import Liveness, Redo, Restore

PATIENT = Liveness(heartbeat_s=0.01, missed_beats=10_000)
ENDED = "it ended while there was no scheduler"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> RayOfHandles:
    return RayOfHandles(monkeypatch)


def is_up(replica: int, life: int = 1) -> ProcessUp:
    return ProcessUp(kind=REPLICA, index=replica, life=life, slots=6)


# starting


@pytest.mark.parametrize(
    ("spread", "strategy", "bundles", "own"), [(False, "STRICT_PACK", [2.0], 2), (True, "PACK", [1.0, 1.0], 0)]
)
def test_a_replica_of_several_gpus_has_them_in_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: bool, strategy: str, bundles: list[float], own: int
) -> None:
    """Over several nodes each GPU is for a worker that Ray starts, and none for the actor."""
    made: list[tuple[str, list[float]]] = []

    def note(given: list[dict[str, float]], strategy: str) -> Any:
        made.append((strategy, [bundle["GPU"] for bundle in given]))
        return SimpleNamespace(name="")

    monkeypatch.setattr(placement, "placement_group", note)
    placed = placement.place(plan(tmp_path, gpus=GpuRequest(replica_gpus=2.0, spread=spread)), 0, None)
    assert made == [(strategy, bundles)] and placed.options["num_gpus"] == own


@played
async def test_a_trainer_without_room_says_that_it_waits(tmp_path: Path, cluster: RayOfHandles) -> None:
    cluster.gpus, cluster.up_at_once = 1.0, False
    scene = Scene(tmp_path, cluster, gpus=GpuRequest(trainer_gpus=2.0), liveness=PATIENT)
    await scene.begin(TRAINER, 0, 2)
    (waits,) = scene.events
    assert isinstance(waits, ProcessWaits) and (waits.kind, waits.life) == (TRAINER, 2)
    assert waits.reason == "it needs 2 GPUs on one node; the nodes have 1"
    cluster.gpus = 2.0
    await scene.hears(ProcessWaits, 2)
    assert isinstance(scene.events[1], ProcessWaits) and scene.events[1].reason == "", "there is room now"
    scene.handle("trainer/2").opens.set()
    await scene.hears(ProcessUp)


def on_a_dead_node() -> ActorDiedError:
    """How Ray says that it placed an actor on a node that had died."""
    said = "The actor died because its node has died. Node Id: ab"
    return ActorDiedError(ActorDiedErrorContext(actor_id=b"a" * 16, error_message=said, never_started=True))


@pytest.mark.parametrize(("kind", "source"), [(REPLICA, "rollout-0"), (TRAINER, "trainer")])
@played
async def test_an_actor_that_ray_placed_on_a_dead_node_is_placed_again(
    tmp_path: Path, cluster: RayOfHandles, kind: str, source: str
) -> None:
    scene = Scene(tmp_path, cluster)
    cluster.up_at_once = False
    refused = await scene.begin(kind, 0, 1)
    order = StartGroup(group=1, attempt=1, replica=0, life=1, admitted_version=0, cause=0)
    scene.send(kind, 0, order)
    refused.failure = on_a_dead_node()
    refused.opens.set()
    await settled()
    again = scene.handle(f"{source}/1")
    assert again is not refused and again.opened_with == refused.opened_with
    assert again.orders == refused.orders == [order]
    again.opens.set()
    await settled()
    assert scene.lost == [] and again.watchers == 1
    scene.stop(kind, 0, 1)
    await settled()
    assert again.over.is_set() and not refused.over.is_set()


@played
async def test_a_stopped_actor_is_not_placed_again(tmp_path: Path, cluster: RayOfHandles) -> None:
    scene = Scene(tmp_path, cluster)
    cluster.up_at_once = False
    stopped = await scene.begin(REPLICA, 0, 1)
    stopped.failure = on_a_dead_node()
    scene.stop(REPLICA, 0, 1)
    await settled()
    assert scene.handle("rollout-0/1") is stopped and len(scene.lost) == 1


POOL = Pool(tasks=("rollout", "reward", "train", "validation"), replicas=(0, 1))


@pytest.mark.parametrize(
    ("gpus", "ranks", "pools", "begun"),
    [(0.5, 1, (), [(0, 0), (1, 0)]), (1.0, 1, (), [(1, 1), (1, 1)]), (1.0, 2, (POOL,), [(0, 0), (1, 1)])],
)
@played
async def test_the_trainer_loads_before_replicas_that_share_its_gpu(
    tmp_path: Path, cluster: RayOfHandles, gpus: float, ranks: int, pools: tuple[Pool, ...],
    begun: list[tuple[int, int]],
) -> None:  # fmt: skip
    """`begun`: starts of each replica before and after that of the trainer. Two on one GPU start one after another."""
    cluster.up_at_once = False
    limits = replace(plan(tmp_path).limits, pools=pools)
    request = GpuRequest(replica_gpus=gpus, trainer_gpus=gpus * ranks, ranks=ranks)
    scene = Scene(tmp_path, cluster, replicas=2, limits=limits, gpus=request)
    opening = asyncio.ensure_future(scene.supervisor.open())
    await settled()
    replicas, trainer = [scene.handle("rollout-0/1"), scene.handle("rollout-1/1")], scene.handle("trainer/1")
    assert len(trainer.opened_with) == 1 and tuple(len(replica.opened_with) for replica in replicas) == begun[0]
    trainer.opens.set()
    await settled()
    assert tuple(len(replica.opened_with) for replica in replicas) == begun[1] and not opening.done()
    for replica in replicas:
        replica.opens.set()
    await opening


def test_a_cluster_refuses_replicas_that_share_gpus_of_ranks_but_do_not_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "node_gpus", lambda: [2.0])
    shared = plan(tmp_path, replicas=2, limits=replace(plan(tmp_path).limits, pools=(POOL,)), gpus=GpuRequest(ranks=2))
    assert placement.with_gpus(shared)[0].guests == (0, 1)
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        placement.with_gpus(replace(shared, gpus=GpuRequest(ranks=2, sleeps=False)))


@pytest.mark.parametrize("kind", [REPLICA, TRAINER])
@played
async def test_an_actor_that_cannot_be_made_is_a_life_that_is_lost(
    tmp_path: Path, cluster: RayOfHandles, kind: str
) -> None:
    """It is no exception of whoever orders: that would end the run. What else was ordered is carried out before."""
    source = "rollout-0" if kind == REPLICA else "trainer"
    cluster.refuses = f"{source}/1"
    scene = Scene(tmp_path, cluster, gpus=GpuRequest(replica_gpus=2.0))
    scene.start(kind, 0, 1)
    assert scene.events == []
    await settled()
    (lost,) = scene.events
    assert isinstance(lost, ProcessLost) and lost.published == (0 if kind == TRAINER else -1)
    assert scene.lost == [(source, 1, "it could not be started: ValueError: no node has such a resource")]
    assert cluster.set_aside == [], "what the actor was to have is given back"
    await scene.begin(kind, 0, 2)
    assert [*cluster.handles] == [f"{source}/2"]


@played
async def test_a_trainer_that_cannot_be_brought_anywhere_is_lost_for_good(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    scene = Scene(tmp_path, cluster)
    scene.start(TRAINER, 0, 2, steps=4)
    await settled()
    (lost,) = scene.events
    assert isinstance(lost, ProcessLost) and lost.final and "cannot restore a trainer" in lost.reason
    assert not cluster.handles


@played
async def test_a_replica_without_room_says_that_it_waits_and_joins_when_there_is_some(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    cluster.gpus = 1.0
    scene = Scene(tmp_path, cluster, gpus=GpuRequest(replica_gpus=1.0), liveness=PATIENT)
    await scene.begin(REPLICA, 0, 1)
    cluster.up_at_once = False
    await scene.begin(REPLICA, 1, 1)
    (waits,) = scene.events
    assert isinstance(waits, ProcessWaits) and (waits.index, waits.life) == (1, 1)
    assert "room for 1 of 2" in waits.reason
    cluster.gpus = 2.0
    await scene.hears(ProcessWaits, 2)
    assert isinstance(scene.events[1], ProcessWaits) and scene.events[1].reason == "", "there is room now"
    late = scene.handle("rollout-1/1")
    assert (late.joins, late.watchers) == (0, 0), "nothing is asked of it that it cannot answer"
    late.opens.set()
    await settled()
    assert (late.joins, late.watchers) == (1, 1) and len(scene.events) == 2


# orders


@played
async def test_orders_that_follow_from_a_report_are_its_answer(tmp_path: Path, cluster: RayOfHandles) -> None:
    """They need no call. The process puts them in order with those that were sent before and after."""
    scene = Scene(tmp_path, cluster)
    handle = await scene.begin(REPLICA, 0, 1)
    sender = scene.processes.reporting("rollout-0", 1)
    assert sender is not None and scene.processes.reporting("rollout-0", 2) is None

    def order(group: int) -> Command:
        given = StartGroup(group=group, attempt=1, replica=0, life=1, cause=0)
        scene.send(REPLICA, 0, given)
        return given

    before = order(0)
    sender.hold()
    answered = order(1)
    ((epoch, number, packed),) = sender.held()
    assert (epoch, number, [given.command for given in unpack_orders(packed)]) == (0, 2, [answered])
    after = order(2)
    assert handle.orders == [before, after] and sender.held() == []


@played
async def test_orders_of_a_trainer_and_of_a_scorer_that_are_not_up_reach_them_in_order(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    cluster.up_at_once = False
    scene = Scene(tmp_path, cluster)
    train = TrainStep(step=0, attempt=1, groups=(9,), staleness=(0,), cause=0)
    save = SaveCheckpoint(steps=1, number=3, cause=0)
    score = ScoreBatch(step=0, attempt=1, task="values", groups=(9,), cause=0)
    scene.start(TRAINER, 0, 2)
    scene.start(SCORER, 1, 2)
    for kind, index, order in ((TRAINER, 0, train), (SCORER, 1, score), (TRAINER, 0, save)):
        scene.send(kind, index, order)
        await settled()
    assert scene.handle("trainer/2").orders == [train, save]
    assert scene.handle("scorer-1/2").orders == [score]


@pytest.mark.parametrize("there", [True, False])
@played
async def test_weights_are_handed_over_by_the_trainer_that_there_is(
    tmp_path: Path, cluster: RayOfHandles, there: bool
) -> None:
    scene = Scene(tmp_path, cluster)
    if not there:
        with pytest.raises(EngineError, match="no trainer is running"):
            await scene.supervisor.hand_over(4)
        return
    scene.start(TRAINER, 0, 1)
    await scene.supervisor.hand_over(4)
    assert scene.handle("trainer/1").handed_over == 4


# the launch


@pytest.mark.parametrize("fails", ["before the run begins", "after it began", "never"])
@played
async def test_a_run_begins_with_enough_replicas_and_hears_of_a_late_one_after_it_began(
    tmp_path: Path, cluster: RayOfHandles, fails: str
) -> None:
    cluster.gpus, cluster.up_at_once = 2.0, False
    scene = Scene(tmp_path, cluster, gpus=GpuRequest(replica_gpus=1.0), replicas=3)
    opening = asyncio.ensure_future(scene.supervisor.open())
    await settled()
    assert [*cluster.handles] == ["rollout-0/1", "rollout-1/1", "rollout-2/1", "trainer/1"]
    late = scene.handle("rollout-2/1")
    late.failure = RuntimeError("no memory") if fails != "never" else None
    for name in ("rollout-0/1", "rollout-1/1"):
        scene.handle(name).opens.set()
    if fails == "before the run begins":
        await settled()
        late.opens.set()
    await settled()
    assert not opening.done(), "the trainer is not up yet"
    scene.handle("trainer/1").opens.set()
    await opening
    for replica in range(3):
        scene.start(REPLICA, replica, 1)
    scene.supervisor.begin()
    await settled()
    late.opens.set()
    await settled()
    waited = [event.index for event in scene.events if isinstance(event, ProcessWaits)]
    assert waited == ([] if fails == "before the run begins" else [2]), "those that are up wait for nothing"
    lost = ("rollout-2", 1, "it could not be started: RuntimeError: no memory")
    assert scene.lost == ([] if fails == "never" else [lost])
    asked = [len(handle.opened_with) for handle in cluster.handles.values()]
    watched = [handle.watchers for handle in cluster.handles.values()]
    assert asked == [1, 1, 1, 1] and watched == [1, 1, int(fails == "never"), 1]
    await scene.supervisor.close()


@played
async def test_a_launch_ends_with_the_first_failure_while_too_few_are_up(tmp_path: Path, cluster: RayOfHandles) -> None:
    scene = Scene(tmp_path, cluster)
    cluster.up_at_once = False
    opening = asyncio.ensure_future(scene.supervisor.open())
    await settled()
    scene.handle("trainer/1").opens.set()
    scene.handle("rollout-0/1").failure = RayError("no memory")
    scene.handle("rollout-0/1").opens.set()
    with pytest.raises(EngineError, match="no memory"):
        await opening
    await scene.supervisor.close()
    assert sorted(cluster.killed) == sorted(cluster.handles)


@played
async def test_a_run_hears_of_its_gateway_and_what_the_launch_brought_up_is_watched(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    scene = Scene(tmp_path, cluster, gateway=True)
    await scene.supervisor.open(Restore(steps=4))
    scene.supervisor.begin()
    await settled()
    assert scene.events == [ProcessUp(kind=GATEWAY, index=0, life=1)]
    assert [one.watchers for one in (*scene.stores, scene.handle("trainer/1"))] == [1] * 4
    assert scene.handle("trainer/1").opened_with == [(Restore(steps=4),)]
    scene.handle("trainer/1").die()
    await settled()
    assert scene.lost == [("trainer", 1, "RayError: it died")]


# another process of the scheduler

STARTED = (RunStarted(replicas=1), is_up(0))
COMING = (*STARTED, ReplicasWanted(replicas=2))
"""Life 1 of replica 1 is ordered."""
CALLED_OFF = (*COMING, ReplicasWanted(replicas=1))
"""It is to be stopped before it is up."""
LET_GO = (*COMING, is_up(1), ReplicasWanted(replicas=1), ReplicaPaused(replica=1, life=1, attempt=1))
"""It is to be stopped after it was."""
REPLACED = (*COMING, is_up(1), ProcessLost(kind=REPLICA, index=1, life=1, reason="it died"))
"""Life 2 is ordered."""
TRAINER_GONE = (*STARTED, ProcessLost(kind=TRAINER, index=0, life=1, reason="it died", published=0))


@pytest.mark.parametrize(
    ("events", "living", "silent", "killed", "made", "lost"),
    [
        (STARTED, ["rollout-0/1", "trainer/1"], [], [], [], []),
        (STARTED, ["trainer/1"], [], [], [], [("rollout-0", 1, ENDED)]),
        (STARTED, ["rollout-0/1"], [], [], [], [("trainer", 1, ENDED)]),
        (
            STARTED, ["rollout-0/1", "trainer/1"], ["rollout-0", "trainer"], ["rollout-0/1", "trainer/1"], [],
            [("rollout-0", 1, "it is silent"), ("trainer", 1, "it is silent")],
        ),
        (COMING, ["rollout-0/1", "trainer/1", "rollout-1/1"], [], [], [], []),
        (COMING, ["rollout-0/1", "trainer/1"], [], [], ["rollout-1/1"], []),
        (CALLED_OFF, ["rollout-0/1", "trainer/1", "rollout-1/1"], [], ["rollout-1/1"], [],
         [("rollout-1", 1, "1 replicas are wanted")]),
        (CALLED_OFF, ["rollout-0/1", "trainer/1"], [], [], [], [("rollout-1", 1, "1 replicas are wanted")]),
        (LET_GO, ["rollout-0/1", "trainer/1", "rollout-1/1"], [], ["rollout-1/1"], [],
         [("rollout-1", 1, "1 replicas are wanted")]),
        (REPLACED, ["rollout-0/1", "trainer/1", "rollout-1/1"], [], ["rollout-1/1"], ["rollout-1/2"], []),
        (REPLACED, ["rollout-0/1", "trainer/1", "rollout-1/1", "rollout-1/2"], [], ["rollout-1/1"], [], []),
        (STARTED, ["rollout-0/1", "rollout-0/2", "trainer/1", "rollout-7/1"], [], ["rollout-0/2", "rollout-7/1"], [],
         []),
        (TRAINER_GONE, ["rollout-0/1"], [], [], ["trainer/2"], []),
        (TRAINER_GONE, ["rollout-0/1", "trainer/1", "trainer/2"], [], ["trainer/1"], [], []),
    ],
    ids=[
        "up", "a replica gone", "the trainer gone", "silent", "starting", "never begun", "called off",
        "called off and gone", "let go", "replaced", "replaced and begun", "unlisted", "the next trainer",
        "the next trainer begun",
    ],
)  # fmt: skip
@played
async def test_another_process_takes_over_what_the_state_lists_and_reports_what_is_gone(
    tmp_path: Path,
    cluster: RayOfHandles,
    events: Sequence[Event],
    living: list[str],
    silent: list[str],
    killed: list[str],
    made: list[str],
    lost: list[tuple[str, int, str]],
) -> None:
    cluster.set_aside += [name for name in living if name.startswith("rollout")]
    scene = Scene(tmp_path, cluster, events, living, silent, gpus=GpuRequest(replica_gpus=2.0))
    scene.take_over()
    await settled()
    assert sorted(cluster.killed) == sorted(killed)
    assert [name for name in cluster.handles if name not in living] == made
    assert sorted(scene.lost) == sorted(lost)
    there = [name for name in cluster.handles if name not in killed]
    assert [scene.handle(name).watchers for name in there] == [1] * len(there)
    assert sorted(cluster.set_aside) == sorted(name for name in there if name.startswith("rollout"))
    assert [store.watchers for store in scene.stores] == [1, 1, 0]


@pytest.mark.parametrize("up", [True, False], ids=["up and not heard of", "not up"])
@played
async def test_a_starting_life_taken_over_gets_orders_at_once_and_is_watched_once_up(
    tmp_path: Path, cluster: RayOfHandles, up: bool
) -> None:
    cluster.up_at_once = up
    scene = Scene(tmp_path, cluster, COMING, ["rollout-0/1", "rollout-1/1", "trainer/1"])
    second = scene.handle("rollout-1/1")
    scene.take_over()
    order = StartGroup(group=1, attempt=1, replica=1, life=1, cause=0)
    scene.send(REPLICA, 1, order)
    assert second.orders == [order]
    await settled()
    assert (second.watchers, second.joins) == (int(up), int(up))
    assert not scene.handle("rollout-0/1").opened_with, "what is up is not brought up"
    second.opens.set()
    await settled()
    assert (second.watchers, second.joins, scene.events) == (1, 1, [])


@pytest.mark.parametrize("known", [True, False])
@played
async def test_a_gateway_is_watched_after_a_takeover_whether_or_not_the_record_knows_of_it(
    tmp_path: Path, cluster: RayOfHandles, known: bool
) -> None:
    """The process before may have ended between the start of the run and the report that the gateway is up."""
    up = ProcessUp(kind=GATEWAY, index=0, life=1)
    events = (*STARTED, up) if known else STARTED
    scene = Scene(tmp_path, cluster, events, ["rollout-0/1", "trainer/1"], gateway=True)
    scene.take_over()
    await settled()
    assert scene.events == ([] if known else [up])
    scene.stores[2].die()
    await settled()
    assert scene.lost == [("gateway", 1, "RayError: it died")]


# what is lost

OLDER, NEWEST = 2, 4
CHECKPOINTS = (*STARTED, CheckpointSaved(steps=OLDER), CheckpointSaved(steps=NEWEST))


def saved(run_dir: Path, *damaged: int) -> None:
    for steps in (OLDER, NEWEST):
        trainer = Mortal(run_dir, ())
        trainer.steps = steps
        save_checkpoint(trainer, run_dir / "checkpoints", steps)
    for steps in damaged:
        (checkpoint_path(run_dir / "checkpoints", steps) / "steps").write_text("5")


def with_checkpoints(scene: Scene) -> Scene:
    for steps in (OLDER, NEWEST):
        scene.scheduler.state.checkpoints.save(steps)
    return scene


@pytest.mark.parametrize("damaged", [[], [NEWEST], [NEWEST, OLDER], [OLDER]], ids=str)
@played
async def test_unusable_checkpoints_are_put_aside_and_reported_before_the_trainers_loss(
    tmp_path: Path, cluster: RayOfHandles, damaged: list[int]
) -> None:
    saved(tmp_path, *damaged)
    scene = with_checkpoints(Scene(tmp_path, cluster, restore_trainer=restore_mortal))
    scene.newest = lambda: asyncio.sleep(0, 3)
    await scene.begin(TRAINER, 0, 1)
    scene.handle("trainer/1").die()
    await settled()
    *reports, lost = scene.events[1:]
    passed_over = damaged if NEWEST in damaged else []
    assert [event.steps for event in reports if isinstance(event, CheckpointDamaged)] == passed_over
    assert len(reports) == len(passed_over)
    assert all("has changed since it was written" in event.reason for event in reports)  # type: ignore[attr-defined]
    assert isinstance(lost, ProcessLost) and (lost.published, lost.final) == (3, False)
    left = {steps for steps in (OLDER, NEWEST) if checkpoint_path(tmp_path / "checkpoints", steps).exists()}
    assert left == {OLDER, NEWEST} - {*passed_over}, "the next of that name is written anew"


@played
async def test_a_checkpoint_that_is_not_there_any_more_is_damaged_too(tmp_path: Path, cluster: RayOfHandles) -> None:
    """As where the scheduler's process ended between putting it aside and reporting it."""
    scene = with_checkpoints(Scene(tmp_path, cluster, CHECKPOINTS, ["rollout-0/1"]))
    scene.take_over()
    await settled()
    assert [type(event) for event in scene.events] == [CheckpointDamaged, CheckpointDamaged, ProcessLost]


@played
async def test_a_life_that_is_to_begin_later_is_brought_up_then_and_keeps_its_orders(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    scene = Scene(tmp_path, cluster)
    scene.start(TRAINER, 0, 1, delay_s=0.001)
    scene.start(TRAINER, 0, 1, delay_s=0.001)
    scene.start(SCORER, 0, 1, delay_s=3600.0)
    await scene.handle("trainer/1").asked.wait()
    await settled()
    assert [(event.kind, type(event)) for event in scene.events] == [(TRAINER, ProcessUp)]  # type: ignore[attr-defined]
    assert not scene.handle("scorer-0/1").opened_with
    scene.stop(SCORER, 0, 1)
    await settled()
    assert scene.lost == [("scorer-0", 1, "enough")]
    await scene.supervisor.close()


@played
async def test_the_loss_of_a_trainer_lists_completed_checkpoints_that_it_did_not_report(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    saved(tmp_path)
    scene = Scene(tmp_path, cluster)
    for steps in (OLDER, NEWEST, NEWEST + 1):
        scene.scheduler.state.orders.add(SaveCheckpoint(steps=steps, number=steps, cause=0))
    (checkpoint_path(tmp_path / "checkpoints", OLDER) / "steps").write_text("cut")
    scene.start(TRAINER, 0, 1)
    await settled()
    scene.handle("trainer/1").die()
    await settled()
    assert isinstance(scene.events[-1], ProcessLost) and scene.events[-1].saved == (NEWEST,)


@played
async def test_a_stop_of_a_trainer_that_has_died_waits_for_what_it_left(tmp_path: Path, cluster: RayOfHandles) -> None:
    """Its last checkpoint may take longer to check than an order may take."""
    answered = asyncio.Event()

    async def slow() -> int:
        await answered.wait()
        return 3

    scene = Scene(tmp_path, cluster)
    scene.newest = slow
    await scene.begin(TRAINER, 0, 1)
    scene.handle("trainer/1").die()
    await settled()
    scene.stop(TRAINER, 0, 1)
    await settled()
    answered.set()
    await settled()
    assert [event.published for event in scene.events if isinstance(event, ProcessLost)] == [3]


@pytest.mark.parametrize("how", ["silent", "dead"])
@played
async def test_a_weights_store_that_does_not_answer_has_nothing(
    tmp_path: Path, cluster: RayOfHandles, how: str
) -> None:
    async def dead() -> int:
        raise RayError("it died")

    async def silent() -> int:
        await asyncio.Event().wait()
        return 0

    scene = Scene(tmp_path, cluster, liveness=Liveness(heartbeat_s=0.005, missed_beats=2))
    scene.newest = silent if how == "silent" else dead
    scene.start(TRAINER, 0, 1)
    await scene.hears(ProcessLost)
    assert isinstance(scene.events[-1], ProcessLost) and scene.events[-1].published == -1


@pytest.mark.parametrize("says", ["it has ended", ""])
@pytest.mark.parametrize(("kind", "store"), [(TRAJECTORY_STORE, 0), (WEIGHTS_STORE, 1), (GATEWAY, 2)])
@played
async def test_a_store_that_says_that_it_is_full_is_lost_for_good_and_a_gateway_is_not(
    tmp_path: Path, cluster: RayOfHandles, kind: str, store: int, says: str
) -> None:
    scene = Scene(tmp_path, cluster, gateway=True)
    await scene.supervisor.open()
    scene.supervisor.begin()
    if says:
        scene.stores[store].end = says
    scene.stores[store].die()
    await settled()
    lost = scene.events[-1]
    full = bool(says) and kind != GATEWAY
    assert isinstance(lost, ProcessLost) and (lost.kind, lost.final) == (kind, full)
    said = "it can no longer store data: " if full else ""
    assert without_place(lost.reason) == said + (says or "RayError: it died")
    assert cluster.killed == [], "whoever has started it ends it"


@pytest.mark.parametrize("here", [True, False], ids=["on this node", "on another"])
@played
async def test_of_a_process_that_hangs_the_loss_names_its_stacks(
    tmp_path: Path, cluster: RayOfHandles, here: bool
) -> None:
    scene = Scene(tmp_path, cluster, liveness=Liveness(heartbeat_s=0.005, missed_beats=2))
    file = stacks_file(tmp_path, "rollout-0" if here else "rollout-1")
    register_stacks(file)
    cluster.pid = os.getpid()
    handle = await scene.begin(REPLICA, 0, 1)
    handle.pid = None
    await scene.hears(ProcessLost)
    where = f"; its stacks are in {file}" if here else ""
    assert scene.lost == [("rollout-0", 1, f"no sign of life for 0.01 s{where}")]
    assert cluster.killed == ["rollout-0/1"]


# races


@played
async def test_a_trainer_started_while_its_loss_is_investigated_keeps_its_checkpoint(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    saved(tmp_path, NEWEST)
    scene = with_checkpoints(Scene(tmp_path, cluster, restore_trainer=restore_mortal))
    found = asyncio.Event()

    async def newest() -> int:
        await found.wait()
        return 0

    scene.newest = newest
    await scene.begin(TRAINER, 0, 1)
    scene.handle("trainer/1").die()
    await settled()
    scene.start(TRAINER, 0, 2, steps=NEWEST)
    await settled()
    found.set()
    await settled()
    assert checkpoint_path(tmp_path / "checkpoints", NEWEST).exists()
    assert [(type(event), event.life) for event in scene.events] == [  # type: ignore[attr-defined]
        (ProcessUp, 1), (ProcessUp, 2), (ProcessLost, 1),
    ]  # fmt: skip
    assert cluster.killed == ["trainer/1"]


@pytest.mark.parametrize("when", ["as it starts", "as its loss is looked into"])
@played
async def test_nothing_is_reported_put_aside_or_started_once_everything_is_taken_down(
    tmp_path: Path, cluster: RayOfHandles, when: str
) -> None:
    saved(tmp_path, NEWEST)
    cluster.up_at_once = when != "as it starts"
    scene = with_checkpoints(Scene(tmp_path, cluster))
    found = asyncio.Event()

    async def newest() -> int:
        await found.wait()
        return 0

    scene.newest = newest
    await scene.begin(TRAINER, 0, 1)
    scene.handle("trainer/1").die()
    await (asyncio.sleep(0) if when == "as it starts" else settled())
    scene.supervisor.stop_watching()
    events_before = len(scene.events)
    found.set()
    scene.start(REPLICA, 0, 1)
    scene.stop(TRAINER, 0, 1)
    await settled()
    assert len(scene.events) == events_before and [*cluster.handles] == ["trainer/1"]
    assert checkpoint_path(tmp_path / "checkpoints", NEWEST).exists()


@played
async def test_running_generators_may_close_and_no_replica_without_a_node_is_waited_for(
    tmp_path: Path, cluster: RayOfHandles
) -> None:
    scene = Scene(tmp_path, cluster)
    await scene.begin(REPLICA, 0, 1)
    cluster.up_at_once = False
    await scene.begin(REPLICA, 1, 1)
    await scene.supervisor.close()
    assert [scene.handle(f"rollout-{replica}/1").closes for replica in (0, 1)] == [1, 0]
    assert sorted(cluster.killed) == ["rollout-0/1", "rollout-1/1"] and scene.events == []


# where a trainer begins


@played
async def test_a_trainer_begins_where_its_start_order_says(tmp_path: Path, cluster: RayOfHandles) -> None:
    scene = Scene(tmp_path, cluster, restore_trainer=restore_mortal)
    ended = scene.scheduler.state.checkpoints
    ended.tracks = True
    for step in range(6):
        ended.train(step, (step,), (0,))
    begins = ({}, {"steps": 4, "updates": 8, "redo": (4, 5), "number": 31}, {"steps": 6, "updates": 12, "version": 3})
    for life, beginning in enumerate((*begins, {"redo": (0,)}), 1):
        scene.start(TRAINER, 0, life, **beginning)  # type: ignore[arg-type]
        await settled()
    redo = [Redo(step=step, groups=(step,), staleness=(0,)) for step in range(6)]
    checkpoint = str(checkpoint_path(tmp_path / "checkpoints", 4))
    assert [scene.handle(f"trainer/{life}").opened_with for life in (1, 2, 3, 4)] == [
        [(None,)],
        [(Restore(steps=4, optimizer_steps=8, checkpoint=checkpoint, redo=(redo[4], redo[5]), order=31),)],
        [(Restore(steps=6, optimizer_steps=12, version=3),)],
        [(Restore(steps=0, optimizer_steps=0, redo=(redo[0],)),)],
    ]
