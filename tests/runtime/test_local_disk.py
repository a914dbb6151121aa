"""A disk that is full: the run says so and stops, nothing is lost, and with more room it continues."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray_plans import Mortal, Quick, check_record, events_of, plan, restore_mortal
from small_disk import SmallDisk, small_disk

from engine.events import CheckpointFailed, CheckpointSaved, GroupFailed
from engine.protocols import GroupWork
from engine.runtime.local import response, run_plan
from engine.storage.durable_trajectories import StorePolicy
from engine.trajectory import Trajectory
from engine.workers.plan import Plan

STEPS = 10


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 120) as made:
        yield made


class Wordy(Quick):
    """Each trajectory is said in a few thousand letters."""

    async def sample(self, work: GroupWork, weights: object, version: int) -> list[Trajectory]:
        return [replace(response([1], reward=float(i), version=version), text="la" * 2000) for i in range(work.samples)]


def wordy(run_dir: Path, **changes: object) -> Plan:
    """Forty groups of 8 KB, of which the first checkpoint lets go sixteen at once."""
    given = plan(run_dir)
    limits = replace(given.limits, checkpoint_every=4, keeps_batches=True)
    made: Plan = replace(
        plan(run_dir, lambda replica: Wordy()), limits=limits, make_trainer=lambda: Mortal(run_dir, ()),
        restore_trainer=restore_mortal, store_policy=StorePolicy(segment_bytes=16 << 10),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def check_finished(run_dir: Path) -> None:
    scheduler = check_record(run_dir)
    assert scheduler.state.training.steps_trained == STEPS and scheduler.state.groups.ledger.drawn == 40
    assert not events_of(run_dir, GroupFailed), "a full disk is nobody's failure"


def test_a_store_over_its_bound_stops_the_run_and_a_higher_one_lets_it_go_on(tmp_path: Path) -> None:
    bounded = wordy(tmp_path, store_policy=StorePolicy(segment_bytes=16 << 10, max_bytes=80 << 10))
    status = run_plan(bounded)
    assert status.outcome == "stopped"
    assert "can no longer store data" in status.reason and "durability.max_bytes are used up" in status.reason
    assert run_plan(replace(bounded, resume=True, store_policy=StorePolicy())).outcome == "finished"
    check_finished(tmp_path)


class Large(Mortal):
    """Its first checkpoints find no room."""

    def save(self, directory: str, step: int) -> None:
        super().save(directory, step)
        Path(directory, "weights").write_bytes(bytes(1 << 20 if step < 8 else 10))


def test_a_checkpoint_that_finds_no_room_leaves_nothing_behind_and_the_run_goes_on(
    disk: SmallDisk, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(disk.place)
    large = wordy(tmp_path / "run", make_trainer=lambda: Large(tmp_path, ()))
    status = run_plan(large)
    assert status.outcome == "finished", status.reason
    (failed,) = events_of(tmp_path / "run", CheckpointFailed)
    assert failed.steps == 4 and "No space left" in failed.reason
    assert [event.steps for event in events_of(tmp_path / "run", CheckpointSaved)] == [8, 10]
    assert sorted(path.name for path in disk.place.iterdir()) == ["step-000008", "step-000010"]
