"""How the launcher watches the scheduler, without Ray: a silent process is killed, and no other."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from engine.actors.failures import Pulse
from engine.actors.launcher_watch import RAYLET, RayNode, SchedulerWatch
from engine.runtime.stacks import stacks_file

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
ANSWERS = """
import signal, sys
from pathlib import Path

def asked(*_):
    print("asked", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1]).open("a").write("stacks")

signal.signal(signal.SIGUSR1, asked)
print("up", flush=True)
while True:
    signal.pause()
"""
LAUNCH = "run-0123"
QUICK = Pulse(every_s=0.01, missed=3)


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


class Handle:
    """Stands where Ray's handle of the scheduler does: beats are answered by these in order, and then no more."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = [*answers]
        self.asked = threading.Event()
        """It has been asked once more than it has answers."""
        self.last: Future[int] = Future()
        self.beat = SimpleNamespace(remote=self._beat)

    def _beat(self) -> Any:
        future: Future[int] = Future()
        self.last = future
        if not self.answers:
            self.asked.set()
        elif isinstance(answer := self.answers.pop(0), Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return SimpleNamespace(future=lambda: future)


class Watched(SchedulerWatch):
    """A watch over a process that this one started, as Ray's raylet starts a scheduler's."""

    def __init__(self, handle: Handle, process: int, run_dir: Path | None, pulse: Pulse = QUICK, **ray: int) -> None:
        self.said: list[str] = []
        self.reported = threading.Event()
        node = RayNode(own=False, run_dir=None, processes=ray or {RAYLET: os.getpid()})
        super().__init__(handle, process, pulse, node, run_dir, LAUNCH, self._tell)

    def _tell(self, line: str) -> None:
        self.said.append(line)
        self.reported.set()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """While it asks once. The check ends with the answer, as Ray gives it from the next process, or with this."""
        checked = threading.Thread(target=self.check)
        checked.start()
        yield
        self.stop()
        checked.join()


def test_a_silent_scheduler_is_killed_and_the_user_sees_where_its_stacks_are(tmp_path: Path) -> None:
    file = stacks_file(tmp_path, "scheduler")
    with running(SLEEP) as process:
        os.kill(process.pid, signal.SIGSTOP)
        watch = Watched(Handle(), process.pid, tmp_path)
        with watch.checking():
            assert process.wait() == -signal.SIGKILL
            assert watch.reported.wait(60)
    (line,) = watch.said
    assert line.startswith(f"the scheduler (process {process.pid}) gave no sign of life for 0.03 s and was killed; ")
    assert str(file) in line and line == watch.killed
    assert f"process {process.pid}" in file.read_text()


def test_a_scheduler_without_a_directory_is_killed_too() -> None:
    with running(SLEEP) as process:
        watch = Watched(Handle(), process.pid, None)
        with watch.checking():
            assert process.wait() == -signal.SIGKILL
            assert watch.reported.wait(60)
    (line,) = watch.said
    assert "and was killed; state S (sleeping)" in line


def test_the_process_that_answered_last_is_the_one_that_is_killed() -> None:
    with running(SLEEP) as first, running(SLEEP) as second:
        watch = Watched(Handle(second.pid), first.pid, None)
        assert watch.check()
        with watch.checking():
            assert second.wait() == -signal.SIGKILL
        assert first.poll() is None


def test_a_scheduler_that_hangs_before_its_first_answer_is_known_by_what_it_wrote(tmp_path: Path) -> None:
    announce = f"from engine.actors.launcher_watch import *; announce_process(Path({str(tmp_path)!r}), {LAUNCH!r})"
    with running(SLEEP) as first:
        watch = Watched(Handle(), first.pid, tmp_path)
        first.kill()
        first.wait()
        with running(f"{announce}; {SLEEP}") as second, watch.checking():
            assert second.wait() == -signal.SIGKILL
            assert watch.reported.wait(60)
    (line,) = watch.said
    assert f"process {second.pid}" in line


def test_what_a_scheduler_of_another_launch_wrote_is_not_believed(tmp_path: Path) -> None:
    announce = "from engine.actors.launcher_watch import *; announce_process(Path(sys.argv[1]), 'another')"
    with running(SLEEP) as own, running(f"import sys; {announce}; {SLEEP}", str(tmp_path)) as other:
        watch = Watched(Handle(), own.pid, tmp_path)
        with watch.checking():
            assert own.wait() == -signal.SIGKILL
        assert other.poll() is None


def test_while_ray_restarts_a_scheduler_nothing_is_killed() -> None:
    with running(SLEEP) as first, running(SLEEP) as second:
        handle = Handle()
        watch = Watched(handle, first.pid, None)
        first.kill()
        first.wait()
        with watch.checking():
            assert handle.asked.wait(60)
            for _ in range(3):
                watch._end_silent(handle.last)
            handle.last.set_result(second.pid)
        assert second.poll() is None
        assert watch._pid == second.pid
    assert watch.said == []


def test_a_scheduler_that_is_gone_for_good_is_left_alone() -> None:
    with running(SLEEP) as process:
        watch = Watched(Handle(ActorDiedError()), process.pid, None)
        assert not watch.check()
        assert process.poll() is None
    assert watch.said == []


def test_a_scheduler_that_answers_while_its_stacks_are_written_is_not_killed(tmp_path: Path) -> None:
    handle = Handle()
    (tmp_path / "logs").mkdir()
    with running(ANSWERS, str(stacks_file(tmp_path, "scheduler"))) as process:

        def answer() -> None:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "asked\n"
            handle.last.set_result(process.pid)
            process.stdin.write("continue\n")
            process.stdin.flush()

        answering = threading.Thread(target=answer)
        answering.start()
        watch = Watched(handle, process.pid, tmp_path)
        assert watch.check()
        answering.join()
        assert process.poll() is None
    assert watch.said == [] and watch.killed == ""


def test_nothing_is_killed_once_ray_has_ended_on_this_node() -> None:
    with running(SLEEP) as process, running(SLEEP) as raylet:
        handle = Handle()
        watch = Watched(handle, process.pid, None, raylet=os.getpid(), gcs_server=raylet.pid)
        raylet.kill()
        raylet.wait()
        watch._end_silent(handle.last)
        assert process.poll() is None
    assert watch.said == []


def test_a_process_of_that_number_that_ray_did_not_start_is_not_signaled() -> None:
    """The scheduler may count processes in another PID namespace."""
    with running(SLEEP) as raylet:
        node = RayNode(own=False, run_dir=None, processes={RAYLET: raylet.pid})
        assert not node.started(os.getpid()) and not node.started(1) and not node.started(1 << 22)
        assert node.started(raylet.pid)
    with running(SLEEP) as worker:
        assert RayNode(own=False, run_dir=None, processes={RAYLET: os.getpid()}).started(worker.pid)
        assert not RayNode(own=False, run_dir=None, processes={}).started(worker.pid)


def thread_of(watch: SchedulerWatch) -> threading.Thread | None:
    return watch._thread


def test_a_watch_asks_until_it_is_stopped_whatever_it_waits_for() -> None:
    with running(SLEEP) as process:
        handle = Handle(*[process.pid] * 3)
        watch = Watched(handle, process.pid, None, Pulse(every_s=0.01, missed=10**6))
        watch.begin()
        assert handle.asked.wait(60)
        thread = thread_of(watch)
        watch.stop()
        assert thread is not None and not thread.is_alive()
        assert process.poll() is None


def test_a_watch_that_nobody_holds_ends() -> None:
    with running(SLEEP) as process:
        watch = Watched(Handle(*[process.pid] * 10**6), process.pid, None)
        watch.begin()
        thread = thread_of(watch)
        del watch
        gc.collect()
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(("every_s", "process"), [(0.0, os.getpid()), (0.01, 0)], ids=["never", "no process"])
def test_no_heartbeat_or_no_process_is_no_watch(every_s: float, process: int) -> None:
    watch = Watched(Handle(), process, None, Pulse(every_s=every_s, missed=3))
    watch.begin()
    assert thread_of(watch) is None
    watch.stop()
