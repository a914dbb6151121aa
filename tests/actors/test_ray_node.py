"""What the launcher does about Ray's own processes on its node, with other processes in their place and without Ray."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_plans import plan

from engine.actors.launch import Launched, RunHandle
from engine.actors.launcher_watch import GCS, RAYLET, RayNode, separate_sessions
from engine.errors import RayProcessEnded

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Silent:
    """Stands where Ray's handle of a scheduler and its references do: an actor whose answers never come."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __getattr__(self, name: str) -> "Silent":
        return self

    def remote(self, *arguments: object) -> "Silent":
        return self

    def future(self) -> "Future[Any]":
        self.asked.set()
        return Future()


@contextmanager
def sleeper(**options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_what_ray_starts_is_in_no_session_of_the_launcher_and_all_else_is() -> None:
    def as_ray_does() -> None:
        """Ray starts each of its processes with a function that runs before exec."""

    with separate_sessions(), sleeper(preexec_fn=as_ray_does) as apart:
        assert os.getsid(apart.pid) == apart.pid
        assert os.getpgid(apart.pid) == apart.pid
    with sleeper(preexec_fn=as_ray_does) as beside:
        assert os.getsid(beside.pid) == os.getsid(0)
        assert os.getpgid(beside.pid) == os.getpgid(0)


@pytest.mark.parametrize("name", [RAYLET, GCS])
def test_a_run_whose_ray_ends_on_this_node_says_so_and_how_to_resume_it(tmp_path: Path, name: str) -> None:
    """Ray itself lets the launcher wait without end."""
    run_dir = tmp_path / "a run"
    with sleeper() as process:
        scheduler, node = Silent(), RayNode(own=False, run_dir=run_dir, processes={name: process.pid})
        run = RunHandle(plan(run_dir), Launched(actor=scheduler, launch="", metrics_url=None), node)
        killer = threading.Thread(target=lambda: (scheduler.asked.wait(), process.kill()))
        killer.start()
        story = f"the Ray process on this node ({name}) ended; the run can be resumed with `engine resume '{run_dir}'`"
        with pytest.raises(RayProcessEnded) as raised:
            run.wait()
        assert str(raised.value) == story
        with pytest.raises(RayProcessEnded):
            run.drain("enough")
        assert node.takes_orders == (name != GCS)
        killer.join()


def test_a_run_does_not_begin_again_where_ray_has_ended(tmp_path: Path) -> None:
    with sleeper() as process:
        node = RayNode(own=False, run_dir=None, processes={RAYLET: process.pid})
        run = RunHandle(plan(tmp_path), Launched(actor=Silent(), launch="", metrics_url=None), node)
        process.kill()
        process.wait()
        with pytest.raises(RayProcessEnded, match="cannot be resumed"):
            run._relaunch_run("the scheduler is gone", recorded=False)


def test_an_answer_is_what_came_before_ray_ended() -> None:
    class Answered(Silent):
        def future(self) -> "Future[Any]":
            future = super().future()
            future.set_result("done")
            return future

    with sleeper() as process:
        node = RayNode(own=False, run_dir=None, processes={RAYLET: process.pid})
        assert node.answer(Answered()) == "done"
        process.kill()
        process.wait()
        assert node.answer(Answered()) == "done"
        node.close()
        node.require_ray()
