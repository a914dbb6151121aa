"""What a resumed run continues from: its record, its newest checkpoint, and what the trajectory store holds."""

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
from ray_plans import Mortal, events_of, plan, restore_mortal

from engine.errors import ConfigError, RecordError, RunDamaged, RunFinished
from engine.events import PrefixStored, RunInterrupted, StepTrained
from engine.metrics.journal import line_of
from engine.record import read, replay
from engine.record.segment_log import Index, store_index
from engine.runtime.local import response
from engine.runtime.run_history import RunHistory, history_of
from engine.states.group import Group
from engine.states.machine import Phase
from engine.states.state import State
from engine.storage.checkpoints import checkpoint_path, save_checkpoint
from engine.storage.durable_trajectories import DurableStore
from engine.storage.group_codec import pack_group
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.plan import Plan, Resumption
from tests.core.added_states import CHECKING, WEIGHING
from tests.core.test_recovery import busy, world
from tests.killed_writers import leave_open

SAVED, TRAINED = 2, 3
NOBODYS = 39
"""A group that was to be let go when the processes ended."""


class Scene:
    """The directory of a run whose processes have ended: three steps trained, two of them in a checkpoint, a batch
    formed, a group ready, others running."""

    def __init__(self, run_dir: Path) -> None:
        made = self.made = busy()
        self.state: State = made.scheduler.state
        (self.ready, *_) = self.state.groups.ready
        (formed,) = self.state.training.formed_steps
        self.formed = formed.groups
        self.trained = self.state.checkpoints.stored_batches[SAVED]
        self.running = [
            group.id
            for group in self.state.groups.live.values()
            if self.state.groups.phase_of(group.state) is Phase.RUNNING
        ]
        self.plan: Plan = replace(plan(run_dir), restore_trainer=restore_mortal)
        self.directory = run_dir / "trajectories"
        (run_dir / "schedule").mkdir(parents=True)
        self.write_record()
        for steps in (1, SAVED):
            trainer = Mortal(run_dir, ())
            trainer.steps = steps
            save_checkpoint(trainer, run_dir / "checkpoints", steps)
        rows = [{"step": step, "optimizer_steps": 2} for step in range(TRAINED - 1)]
        (run_dir / "metrics.jsonl").write_bytes(b"".join(map(line_of, rows)))

    def write_record(self) -> None:
        path = self.directory.parent / "schedule" / "00000000.seg"
        path.write_bytes(self.made.recorder.to_bytes())
        store_index(path.parent, Index([None]))

    def keep_prefix(self, group: Group) -> None:
        """One is recorded as stored, with tokens of its replica's version."""
        replica = self.state.replicas.of_group(group.id)
        assert replica is not None
        event = PrefixStored(
            group=group.id, attempt=group.attempt, replica=replica.id, life=replica.life, tokens=2,
            oldest_version=replica.version, newest_version=replica.version,
        )  # fmt: skip
        self.made.driver.deliver(event)
        self.write_record()

    def fill(self, without: Collection[int] = (), attempt: Callable[[int], int] = lambda attempt: attempt) -> None:
        """What the store held; `attempt` says what became of that of the ready group."""
        store = DurableStore(self.directory)
        for group in (*self.trained, *self.formed, self.ready, NOBODYS):
            if group not in without:
                live = self.state.groups.live.get(group)
                kept = 1 if live is None else attempt(live.attempt) if group == self.ready else live.attempt
                store.put(group, kept, pack_group(group_of(group)))
        store.close()

    def history(self, **changes: object) -> RunHistory:
        history = history_of(replace(self.plan, **changes))  # type: ignore[arg-type]
        history.lock.release()
        return history

    def held(self) -> set[int]:
        store = DurableStore(self.directory, fresh=False)
        store.close()
        return set(store.attempts)


def group_of(group: int, finish_reason: str = "stop", version: int = 0) -> TrajectoryGroup:
    made = replace(response([1, 2], reward=1.0, version=version), finish_reason=finish_reason)
    return TrajectoryGroup(group=group, prompt=Prompt(row=group, text="?"), trajectories=[made])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "run")


def test_where_all_is_there_the_steps_since_the_checkpoint_are_trained_again(scene: Scene) -> None:
    scene.fill()
    history = scene.history()
    event = history.event(replicas=1)
    assert event.kept and (event.steps, event.missing, event.consumed) == (TRAINED, (), ())
    assert history.restore.checkpoint == str(checkpoint_path(scene.directory.parent / "checkpoints", SAVED))
    assert (history.restore.steps, history.restore.reaches, history.restore.optimizer_steps) == (SAVED, TRAINED, SAVED)
    (redo,) = history.restore.redo
    assert (redo.step, redo.groups, len(redo.staleness)) == (SAVED, scene.trained, 2)
    assert redo.reports, "what the trainer said of it was not written down"
    assert scene.held() == {*scene.trained, *scene.formed, scene.ready}, "what nobody wants any more is let go"
    assert "1 step is trained again" in str(history)


def test_a_step_whose_row_is_there_is_not_reported_again_unless_it_is_under_way(scene: Scene) -> None:
    scene.fill()
    path = scene.directory.parent / "metrics.jsonl"
    rows = [{"step": step, "optimizer_steps": 2} for step in range(TRAINED + 1)]
    path.write_bytes(b"".join(map(line_of, rows)))
    (redo,) = scene.history().restore.redo
    assert not redo.reports
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(TRAINED))


@pytest.mark.parametrize("how", ["gone", "of an attempt before", "unfinished"])
def test_a_ready_group_that_is_not_there_as_it_was_is_missing(scene: Scene, how: str) -> None:
    if how == "of an attempt before":
        scene.fill(attempt=lambda attempt: attempt - 1)
    else:
        scene.fill(without=[scene.ready])
    if how == "unfinished":
        store = DurableStore(scene.directory, fresh=False)
        store.put(scene.ready, scene.state.groups.live[scene.ready].attempt, pack_group(group_of(scene.ready, "")))
        store.close()
    history = scene.history()
    assert history.missing == (scene.ready,) == history.event(replicas=1).missing


@pytest.mark.parametrize("whose", ["trained", "formed"])
def test_a_run_with_an_incomplete_batch_branches_only_with_force_from(scene: Scene, whose: str) -> None:
    lost = getattr(scene, whose)[0]
    scene.fill(without=[lost])
    before = {path.name: path.read_bytes() for path in scene.directory.iterdir()}
    with pytest.raises(RunDamaged, match=rf"{scene.directory} lacks group {lost} .*--force-from step-000002"):
        scene.history()
    history = scene.history(resumption=Resumption(force_from="step-000002"))
    event = history.event(replicas=1)
    assert not event.kept and event.steps == SAVED and set(event.consumed) == set(scene.trained)
    assert scene.held() == set()
    aside = scene.directory.parent / ".trajectories-left-1"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before, "moved, not touched"
    assert "set aside: .trajectories-left-1" in str(history)


@pytest.mark.parametrize("later", [0, 1])
def test_a_prefix_of_weights_that_the_record_does_not_know_of_begins_again(scene: Scene, later: int) -> None:
    """A power cut may take the publication from the record: another version will have its number."""
    scene.fill()
    group = scene.state.groups.live[scene.running[0]]
    scene.keep_prefix(group)
    store = DurableStore(scene.directory, fresh=False)
    prefix = group_of(group.id, "", version=scene.state.training.latest_version + later)
    store.put(group.id, group.attempt, pack_group(prefix))
    store.close()
    history = scene.history()
    assert history.missing == (group.id,) * later == history.event(replicas=1).missing


def test_a_formed_batch_of_another_attempt_is_not_the_one_that_was_recorded(scene: Scene) -> None:
    other = scene.formed[0]
    scene.fill(without=[other])
    store = DurableStore(scene.directory, fresh=False)
    store.put(other, scene.state.groups.live[other].attempt - 1, pack_group(group_of(other)))
    store.close()
    with pytest.raises(RunDamaged, match=f"lacks group {other} of the batch for train step {TRAINED}"):
        scene.history()


@pytest.mark.parametrize("saved", [SAVED, TRAINED + 1])
def test_a_trained_unfinished_step_is_trained_again_only_if_no_checkpoint_has_it(scene: Scene, saved: int) -> None:
    (formed,) = scene.state.training.formed_steps
    scene.made.driver.deliver(StepTrained(step=formed.id, attempt=formed.attempt))
    scene.write_record()
    assert formed in scene.state.training.formed_steps and not scene.state.groups.live.keys() & set(scene.formed)
    scene.fill(without=() if saved == SAVED else [*scene.trained, *scene.formed])
    trainer = Mortal(scene.directory.parent, ())
    trainer.steps = saved
    save_checkpoint(trainer, scene.directory.parent / "checkpoints", saved)
    history = scene.history()
    assert history.event(replicas=1).kept
    assert [redo.step for redo in history.restore.redo] == list(range(saved, TRAINED + 1))


def test_a_torn_end_is_reported_and_what_it_held_is_missing(scene: Scene) -> None:
    scene.fill(without=[scene.ready, NOBODYS])
    store = DurableStore(scene.directory, fresh=False)
    store.put(scene.ready, scene.state.groups.live[scene.ready].attempt, pack_group(group_of(scene.ready)))
    store.close()
    path = leave_open(scene.directory)
    path.write_bytes(path.read_bytes()[:-5])
    history = scene.history()
    assert history.missing == (scene.ready,) and f"cut: {path}: torn after byte" in str(history)


def test_a_damaged_store_is_refused_with_a_remedy_and_force_from_works_without_it(scene: Scene) -> None:
    scene.fill()
    (path,) = scene.directory.glob("*.seg")
    whole = path.read_bytes()
    path.write_bytes(whole[:64] + bytes([whole[64] ^ 1]) + whole[65:])
    with pytest.raises(RecordError, match=rf"{path}: at byte 24: .*--force-from step-000002"):
        scene.history()
    with pytest.raises(
        ConfigError, match=r"--force-from 'step-000003' .*use one of: step-000001, step-000002, initial"
    ):
        scene.history(resumption=Resumption(force_from="step-000003"))
    history = scene.history(resumption=Resumption(force_from="step-000001"))
    assert history.restore.steps == 1 and not history.event(replicas=1).kept and scene.held() == set()
    aside = scene.directory.parent / "checkpoints" / ".step-000002-left-1"
    assert (aside / "steps").read_text() == "2", "the newer one is put aside, not touched"


def test_trajectories_are_put_aside_where_the_run_goes_on_without_them(scene: Scene) -> None:
    """Their groups begin again, and count their attempts from 1 again."""
    scene.fill()
    assert not scene.history(trajectories="memory").event(replicas=1).kept
    assert not scene.directory.exists() and scene.held() == set()


def test_a_group_that_an_added_state_works_on_keeps_its_tokens(tmp_path: Path) -> None:
    made = world(added_states=(WEIGHING, CHECKING))
    while not made.scheduler.state.groups.state_queues.out:
        assert made.act()
    (group,) = made.scheduler.state.orders.open["state"]
    run_dir = tmp_path / "run"
    (run_dir / "schedule").mkdir(parents=True)
    (run_dir / "schedule" / "00000000.seg").write_bytes(made.recorder.to_bytes())
    store_index(run_dir / "schedule", Index([None]))
    store = DurableStore(run_dir / "trajectories")
    store.put(group, made.scheduler.state.groups.live[group].attempt - 1, pack_group(group_of(group)))
    store.close()
    history = history_of(plan(run_dir))
    history.lock.release()
    assert history.missing is not None and group not in history.missing


def test_what_the_record_does_not_know_of_yet_is_let_go(scene: Scene) -> None:
    """A power cut may take more of the record than of the store: the next attempt would not replace a later one."""
    scene.fill()
    running = scene.running[0]
    store = DurableStore(scene.directory, fresh=False)
    store.put(running, scene.state.groups.live[running].attempt + 2, pack_group(group_of(running)))
    store.put(scene.ready, scene.state.groups.live[scene.ready].attempt + 1, pack_group(group_of(scene.ready)))
    store.close()
    history = scene.history()
    assert history.missing == (scene.ready,)
    assert scene.held() == {*scene.trained, *scene.formed}


def test_an_interruption_is_recorded_and_the_record_decides_if_the_run_restarts(scene: Scene) -> None:
    def interrupted(number: int) -> RunHistory:
        return scene.history(
            resumption=Resumption(again=True, interrupted=RunInterrupted(reason=f"launch {number} failed", launch=True))
        )

    scene.fill()

    for number in range(5):
        history = interrupted(number)
        assert history.recovered.scheduler.state.ending.restarts == number + 1
        assert history.event(1, again=True).again and history.recovered.end.torn is None
    with pytest.raises(RunFinished, match="launch 5 failed; the run restarted 5 times without a train step"):
        interrupted(5)
    assert replay(read(scene.directory.parent / "schedule")).divergence is None
    reasons = [event.reason for event in events_of(scene.directory.parent, RunInterrupted)]
    assert reasons == [f"launch {number} failed" for number in range(6)]
    assert scene.history().event(1).again is False, "a user may resume it"


def test_an_interruption_of_a_run_that_begins_again_already_is_not_recorded(scene: Scene) -> None:
    scene.fill()
    died = RunInterrupted(reason="the scheduler died")
    for _ in range(2):
        assert (
            scene.history(resumption=Resumption(again=True, interrupted=died)).recovered.scheduler.state.ending.restarts
            == 1
        )
    assert len(events_of(scene.directory.parent, RunInterrupted)) == 1


def test_a_torn_end_is_cut_once_when_an_interruption_is_recorded_behind_it(scene: Scene) -> None:
    scene.fill()
    path = scene.directory.parent / "schedule" / "00000000.seg"
    path.write_bytes(path.read_bytes()[:-3])
    history = scene.history(resumption=Resumption(again=True, interrupted=RunInterrupted(reason="the scheduler died")))
    assert history.recovered.torn is None and history.recovered.scheduler.state.ending.restarts == 1
    assert replay(read(path.parent)).divergence is None
