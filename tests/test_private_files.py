"""What a run writes is for its user alone, whatever the umask, also where an earlier engine left it open."""

import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine import Limits, Session
from engine.actors.detached_actors import RunLog, note_launch, prepare_process
from engine.errors import ConfigError, RecordHeld
from engine.metrics.address_files import FILE, FOLDER, announce
from engine.metrics.journal import Journal, keep_rows
from engine.record import Header, Recorder
from engine.record.files import RecordLock, is_locked, make_run_private, write_private
from engine.storage import run_directory
from engine.storage.checkpoints import save_checkpoint
from engine.storage.durable_trajectories import DurableStore
from engine.storage.samples import SampleFiles

UMASKS = [0o000, 0o022, 0o277, 0o777]


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


class Saving:
    """A trainer that writes as a library does: with whatever mode the umask leaves."""

    def save(self, path: str, steps: int) -> None:
        (Path(path) / "deep").mkdir()
        (Path(path) / "deep" / "model.bin").write_bytes(b"weights")


def fill(run: Path) -> None:
    """Everything that the engine itself writes into a run's directory."""
    recorder = Recorder(run / "schedule", Header(run="a", limits={}, policies={}))
    recorder.close()
    store = DurableStore(run / "trajectories")
    store.close()
    journal = Journal(run / "metrics.jsonl")
    journal.write({"step": 0})
    journal.close()
    keep_rows(run / "metrics.jsonl", lambda row: True)
    saving: Any = Saving()
    save_checkpoint(saving, run / "checkpoints", 1)
    SampleFiles(run / "samples").write_step(0, [])
    note_launch(run, "launch")
    announce([run / FILE], "127.0.0.1:1", "a")


def open_to_others(run: Path) -> list[str]:
    """What is not 0700 or 0600."""
    found = []
    for path in (run, *run.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            found.append(f"{path.relative_to(run)} {mode:o}")
    return sorted(found)


def test_a_new_run_is_for_its_user_alone(tmp_path: Path, umask: None) -> None:
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs").chmod(0o755)
    run = run_directory.create(tmp_path / "runs", "a", config_yaml="a: 1\n").path
    fill(run)
    assert open_to_others(run) == []
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755, "what is the user's stays"


def test_an_empty_directory_becomes_the_users_alone(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    chosen.mkdir(mode=0o755)
    run_directory.create(tmp_path / "runs", "a", config_yaml="a: 1\n", chosen=chosen)
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700


@pytest.mark.parametrize("start", ["engine run", "a session"])
def test_a_project_keeps_its_modes(tmp_path: Path, start: str) -> None:
    project = tmp_path / "project"
    theirs = [project, *(project / name for name in ("logs", "logs/mine", "wandb"))]
    for path in theirs:
        path.mkdir()
        path.chmod(0o755)
    if start == "engine run":
        with pytest.raises(ConfigError, match=r"--run-dir '.*project' is not empty: it has logs; a run needs a new or"):
            run_directory.create(tmp_path / "runs", "a", config_yaml="a: 1\n", chosen=project)
        assert not (project / "schedule").exists()
    else:
        Session(Limits(train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1), directory=project).close()
        assert stat.S_IMODE((project / "schedule").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in theirs} == {0o755}


def test_a_run_that_others_could_read_is_closed_as_its_scheduler_begins(tmp_path: Path, umask: None) -> None:
    run = tmp_path / "run"
    old = os.umask(0)
    run.mkdir()
    fill(run)
    for path in (run, *run.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("x")
    elsewhere.chmod(0o644)
    (run / "checkpoints" / "link").symlink_to(elsewhere)
    os.umask(old)
    logger = logging.getLogger("engine")
    before = logger.level, logger.propagate, logger.handlers[:]
    try:
        prepare_process("scheduler", run, private=True)
        logging.getLogger("engine.test").info("hello")
        (run / "tensorboard").mkdir()
        (run / "tensorboard" / "events").write_text("by a library")
    finally:
        for handler in set(logger.handlers) - set(before[2]):
            handler.close()
        logger.level, logger.propagate, logger.handlers = before
    (run / "checkpoints" / "link").unlink()
    assert open_to_others(run) == []
    assert (run / "logs" / "scheduler.log").read_text()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644, "a link leads to what is not the run's"


def test_another_process_keeps_its_umask_but_may_use_what_it_makes(tmp_path: Path, umask: None) -> None:
    now = os.umask(0)
    os.umask(now)
    logger = logging.getLogger("engine")
    before = logger.level, logger.propagate, logger.handlers[:]
    try:
        prepare_process("rollout", tmp_path / "run")
    finally:
        logger.level, logger.propagate, logger.handlers = before
    after = os.umask(0)
    os.umask(after)
    assert after == now & 0o077


def test_a_log_has_at_most_two_files_of_16_mib(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "trainer.log")
    for number in range(3):
        log.emit(logging.LogRecord("engine", logging.INFO, "", 0, f"{number} {'x' * (9 << 20)}", None, None))
    log.close()
    found = {path.name: path.read_text()[0] for path in tmp_path.iterdir()}
    assert found == {"trainer.log": "2", "trainer.log.1": "1"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_log_that_cannot_be_written_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    log = RunLog(tmp_path / "file" / "trainer.log")
    log.emit(logging.LogRecord("engine", logging.INFO, "", 0, "said", None, None))
    assert capsys.readouterr().err == "said\n"


def test_where_a_run_is_scraped_may_be_read_by_prometheus(tmp_path: Path, umask: None) -> None:
    shared = tmp_path / FOLDER / "a.json"
    announce([tmp_path / "run" / FILE, shared], "127.0.0.1:1", "a")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (shared.parent, shared)] == [0o755, 0o644]
    assert open_to_others(tmp_path / "run") == []


def test_a_device_that_is_written_keeps_its_mode() -> None:
    """As `engine report --out /dev/null` of root."""
    ends = os.openpty()
    path = Path(os.ttyname(ends[1]))
    path.chmod(0o622)
    write_private(path, "a report")
    assert stat.S_IMODE(path.stat().st_mode) == 0o622 and os.read(ends[0], 100) == b"a report"
    for end in ends:
        os.close(end)


def test_looking_at_a_record_changes_no_mode(tmp_path: Path) -> None:
    schedule = tmp_path / "schedule"
    schedule.mkdir()
    schedule.chmod(0o750)
    RecordLock(schedule).release()
    assert stat.S_IMODE(schedule.stat().st_mode) == 0o750


def test_looking_at_a_lock_refuses_no_process_that_takes_it(tmp_path: Path) -> None:
    over, seen = threading.Event(), set[bool | None]()

    def look() -> None:
        while not over.is_set():
            seen.add(is_locked(tmp_path))

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(2000):
            RecordLock(tmp_path).release()
        lock = RecordLock(tmp_path)
        with pytest.raises(RecordHeld, match="another process is writing this record"):
            RecordLock(tmp_path)
        assert is_locked(tmp_path) is True
        lock.release()
        assert is_locked(tmp_path) is False
    finally:
        over.set()
        for thread in looking:
            thread.join()
    assert seen and None not in seen


def test_a_look_that_is_interrupted_for_a_while_refuses_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a process may not run for tens of milliseconds, between any two of its instructions."""
    looks = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    tries = count(1)

    def release_late() -> None:
        if next(tries) == 30_000:  # about 0.1 s
            os.close(looks)

    monkeypatch.setattr(os, "sched_yield", release_late)
    RecordLock(tmp_path).release()


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert isinstance(make_run_private(tmp_path / "file" / "run"), OSError)
