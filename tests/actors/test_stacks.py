"""The stacks of a process that hangs, and what is written where a process cannot give any."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.actors.detached_actors import prepare_process
from engine.runtime.stacks import dump_stacks, register_stacks, stacks_file, writes_to

PROGRAM = """
import signal
import sys
from pathlib import Path
from engine.runtime.stacks import register_stacks

def decide_for_ever():
    print("up", flush=True)
    while True:
        pass

if sys.argv[1:]:
    register_stacks(Path(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, [int(number) for number in sys.argv[2:]])
decide_for_ever()
"""


@contextmanager
def endless_process(*file: Path, blocked: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
    """A Python process in an endless loop. With `file`, it has registered its stacks. Signals in `blocked` wait."""
    program = [sys.executable, "-c", PROGRAM, *map(str, file), *map(str, blocked)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def test_a_process_in_an_endless_loop_writes_where_it_loops_and_continues(tmp_path: Path) -> None:
    file = stacks_file(tmp_path, "scheduler")
    with endless_process(file) as process:
        assert dump_stacks(process.pid, file) == f"its stacks are in {file}"
        assert dump_stacks(process.pid, file) == f"its stacks are in {file}"
        assert process.poll() is None
    written = file.read_text()
    assert written.count("in decide_for_ever") == 2, "the file is appended to"
    assert written.count(f"process {process.pid}") == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_of_a_stopped_process_the_file_has_the_kernels_state(tmp_path: Path) -> None:
    file = stacks_file(tmp_path, "scheduler")
    with endless_process(file) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        said = dump_stacks(process.pid, file, patience_s=0.1)
    assert "T (stopped)" in said and str(file) in said and "\n" not in said
    assert f"process {process.pid}" in file.read_text() and "T (stopped)" in file.read_text()


def test_a_child_that_does_not_answer_leaves_time_for_the_next(tmp_path: Path) -> None:
    file = stacks_file(tmp_path, "trainer")
    register_stacks(file)
    with endless_process(file, blocked=[signal.SIGUSR1]) as first, endless_process(file) as second:
        dump_stacks(os.getpid(), file, patience_s=3.0)  # half of it for each
        _, silent, answer = file.read_text().split(f", started by process {os.getpid()},")
    assert f"process {first.pid}: it wrote no stacks" in silent
    assert f"process {second.pid}" in silent and "in decide_for_ever" in answer and "no stacks" not in answer


def test_a_process_that_has_registered_nothing_is_not_killed_by_the_question(tmp_path: Path) -> None:
    file = stacks_file(tmp_path, "scheduler")
    with endless_process() as process:
        said = dump_stacks(process.pid, file, patience_s=0.1)
        assert process.poll() is None
    assert "R (running)" in said and "R (running)" in file.read_text()


def test_a_process_that_has_ended_has_no_stacks(tmp_path: Path) -> None:
    with endless_process() as process:
        pass
    assert dump_stacks(process.pid, stacks_file(tmp_path, "scheduler")) == "it has ended"


def test_where_nothing_can_be_written_the_line_still_says_the_state(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a directory")
    with endless_process() as process:
        said = dump_stacks(process.pid, stacks_file(tmp_path, "scheduler"), patience_s=0.1)
        assert process.poll() is None
    assert "R (running)" in said and "cannot be written" in said


def test_a_process_is_known_by_the_file_that_it_has_registered(tmp_path: Path) -> None:
    """A process of another node may have the number of one of this node."""
    file = stacks_file(tmp_path, "rollout-0")
    with endless_process(file) as process:
        assert writes_to(process.pid, file) and not writes_to(process.pid, stacks_file(tmp_path, "rollout-1"))
    assert not writes_to(process.pid, file), "it has ended"


def test_a_process_that_cannot_open_its_file_starts_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").write_text("not a directory")
    register_stacks(stacks_file(tmp_path, "scheduler"))
    assert "scheduler.stacks" in caplog.text


def test_every_prepared_process_writes_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    logger = logging.getLogger("engine")
    for name, value in (("handlers", []), ("level", logger.level), ("propagate", True)):
        monkeypatch.setattr(logger, name, value)
    prepare_process("rollout-3", tmp_path)
    file = stacks_file(tmp_path, "rollout-3")
    assert dump_stacks(os.getpid(), file) == f"its stacks are in {file}"
    assert "test_every_prepared_process_writes_its_stacks" in file.read_text()
