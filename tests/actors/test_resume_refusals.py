"""A resume that finds something missing names it and changes nothing; only `--force-from` continues with less, and it
puts aside what it gives up."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ray_plans import Mortal, plan, restore_mortal
from test_run_recovery import SAVED, TRAINED, Scene

from engine.errors import RecordError, RunDamaged
from engine.metrics.journal import line_of
from engine.record.segment_log import Index, seal_of, store_index
from engine.runtime.run_history import history_of
from engine.storage.checkpoints import checkpoint_path, save_checkpoint
from engine.storage.durable_trajectories import DurableStore
from engine.workers.plan import Resumption
from tests.core.test_recovery import until_trained, world
from tests.killed_writers import leave_open


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path / "run")
    made.fill()
    return made


def everything(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and directory of a run: its inode and what it holds."""
    return {
        str(path.relative_to(run_dir)): (path.lstat().st_ino, path.read_bytes() if path.is_file() else b"")
        for path in sorted(run_dir.rglob("*"))
    }


def refused(scene: Scene, said: str) -> RecordError:
    run_dir = scene.directory.parent
    before = everything(run_dir)
    with pytest.raises(RecordError, match=said) as caught:
        scene.history()
    assert everything(run_dir) == before, "nothing on the disk is changed"
    return caught.value


def checkpoints(scene: Scene) -> Path:
    return scene.directory.parent / "checkpoints"


def lose_directory(scene: Scene) -> None:
    shutil.rmtree(checkpoints(scene))


def lose_contents(scene: Scene) -> None:
    lose_directory(scene)
    checkpoints(scene).mkdir()


def lose_newest(scene: Scene) -> None:
    shutil.rmtree(checkpoint_path(checkpoints(scene), SAVED))


@pytest.mark.parametrize(
    ("lose", "left"), [(lose_directory, "initial"), (lose_contents, "initial"), (lose_newest, "step-000001")]
)
def test_a_checkpoint_that_was_saved_and_is_not_there_is_named(
    scene: Scene, lose: Callable[[Scene], None], left: str
) -> None:
    lose(scene)
    said = refused(scene, f"step-00000{SAVED} is missing, but the record says that it was saved.*--force-from {left}")
    assert isinstance(said, RunDamaged)
    history = scene.history(resumption=Resumption(force_from=left))
    assert history.restore.steps == (0 if left == "initial" else 1) and not history.event(replicas=1).kept


def test_in_memory_a_checkpoint_that_is_not_there_is_named_too(scene: Scene) -> None:
    scene.plan = replace(scene.plan, trajectories="memory")
    lose_contents(scene)
    refused(scene, f"step-00000{SAVED} is missing")


def test_an_older_checkpoint_that_is_missing_is_reported_and_not_needed(tmp_path: Path) -> None:
    """Whoever needs room may remove it: nothing is lost by it."""
    made = world()
    until_trained(made, 5)
    assert made.trainer.saved == [2, 4]
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule" / "00000000.seg").write_bytes(made.recorder.to_bytes())
    store_index(tmp_path / "schedule", Index([None]))
    trainer = Mortal(tmp_path, ())
    for steps in (2, 4):
        trainer.steps = steps
        save_checkpoint(trainer, tmp_path / "checkpoints", steps)
    chosen = replace(plan(tmp_path), restore_trainer=restore_mortal, trajectories="memory")
    for sentence in ("resumed from step-000004, after", "step-000002 was saved and is missing, but it is not needed"):
        history = history_of(chosen)
        history.lock.release()
        assert sentence in str(history) and history.restore.steps == 4
        shutil.rmtree(checkpoint_path(tmp_path / "checkpoints", 2), ignore_errors=True)


def test_newest_segments_of_the_record_that_are_missing_are_named(scene: Scene) -> None:
    schedule = scene.directory.parent / "schedule"
    store_index(schedule, Index([seal_of(schedule / "00000000.seg"), None]))
    refused(scene, f"{schedule / '00000001.seg'} is missing, but index.json lists it")
    assert scene.history(resumption=Resumption(force_from="step-000002")).restore.steps == SAVED


def test_a_record_that_ends_before_a_checkpoint_lacks_its_newest_events(scene: Scene) -> None:
    trainer = Mortal(scene.directory.parent, ())
    trainer.steps = TRAINED + 2
    save_checkpoint(trainer, checkpoints(scene), trainer.steps)
    newest = f"step-00000{TRAINED + 2}"
    refused(scene, f"ends after {TRAINED} train steps, but {newest} holds {TRAINED + 2}: the newest events are missing")
    history = scene.history(resumption=Resumption(force_from="step-000002"))
    assert history.restore.steps == SAVED
    assert (checkpoints(scene) / f".{newest}-left-1" / "steps").read_text() == str(TRAINED + 2)


@pytest.mark.parametrize("empty", [False, True])
def test_trajectories_that_are_not_there_are_named(scene: Scene, empty: bool) -> None:
    shutil.rmtree(scene.directory)
    if empty:
        scene.directory.mkdir()
    refused(scene, f"{scene.directory} {'holds no trajectories' if empty else 'is missing'}, but the record refers to")
    assert not scene.history(resumption=Resumption(force_from="step-000002")).event(replicas=1).kept


def test_a_store_with_a_torn_end_is_not_cut_before_all_is_found(scene: Scene) -> None:
    """The torn entry is the batch that is formed."""
    lost = scene.formed[-1]
    shutil.rmtree(scene.directory)
    scene.fill(without=[lost])
    store = DurableStore(scene.directory, fresh=False)
    store.put(lost, scene.state.groups.live[lost].attempt, b"x" * 400)
    store.close()
    path = leave_open(scene.directory)
    path.write_bytes(path.read_bytes()[:-5])
    refused(scene, f"lacks group {lost}")


@pytest.mark.parametrize("where", ["metrics.jsonl", "trajectories/00000000.seg", "checkpoints/step-000002/SHA256SUMS"])
@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(scene: Scene, where: str) -> None:
    path = scene.directory.parent / where
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Exception, match="is a FIFO, but must be a regular file"):
        scene.history()


def test_to_begin_anew_everything_is_put_aside(scene: Scene) -> None:
    run_dir = scene.directory.parent
    before = everything(run_dir)
    rows = (run_dir / "metrics.jsonl").read_text()
    history = scene.history(resumption=Resumption(force_from="initial"))
    assert history.restore.checkpoint is None and history.restore.steps == 0
    event = history.event(replicas=1)
    assert event.steps == 0 and not event.kept
    assert (run_dir / "metrics.jsonl").read_text() == ""
    assert (run_dir / ".metrics.jsonl-left-1").read_text() == rows
    after = everything(run_dir)
    for name, (inode, data) in before.items():
        if name.startswith(("checkpoints/step", "trajectories")):
            first, _, rest = name.removeprefix("checkpoints/").partition("/")
            prefix = "checkpoints/" if name.startswith("checkpoints/") else ""
            moved = f"{prefix}.{first}-left-1" + (f"/{rest}" if rest else "")
            assert after[moved] == (inode, data), f"{name} is where nobody takes it for the run's"
    summary = str(history)
    for name in (".step-000001-left-1", ".step-000002-left-1", ".trajectories-left-1", ".metrics.jsonl-left-1"):
        assert name in summary


def test_a_resume_that_sets_data_aside_deletes_what_earlier_ones_set_aside(scene: Scene) -> None:
    run_dir = scene.directory.parent
    for path in (run_dir / ".samples-left-1", run_dir / ".trajectories-left-3", checkpoints(scene) / ".step-9-left-1"):
        path.mkdir()
        (path / "file").write_text("large")
    (run_dir / ".metrics.jsonl-left-1").write_text("{}")

    def left() -> set[str]:
        return {path.name for path in (*run_dir.glob(".*-left-*"), *checkpoints(scene).glob(".*-left-*"))}

    before = left()
    assert scene.history().aside == () and left() == before, "nothing is set aside"
    aside = {path.name for path in scene.history(resumption=Resumption(force_from="step-000001")).aside}
    assert left() == aside and aside >= {".step-000002-left-1", ".trajectories-left-1"}


def test_rows_of_steps_that_the_record_does_not_know_are_copied_aside(scene: Scene) -> None:
    path = scene.directory.parent / "metrics.jsonl"
    path.write_bytes(b"".join(line_of({"step": step, "optimizer_steps": 2}) for step in range(TRAINED + 5)))
    whole = path.read_text()
    history = scene.history()
    assert history.event(replicas=1).kept
    assert len(path.read_text().splitlines()) == TRAINED
    assert (scene.directory.parent / ".metrics.jsonl-left-1").read_text() == whole
    assert ".metrics.jsonl-left-1" in str(history)
    assert scene.history().aside == (), "and once only"
