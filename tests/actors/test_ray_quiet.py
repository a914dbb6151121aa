"""What Ray says on the terminal of whoever launched a run: nothing of calls that are made again after its
scheduler died, nor of the end. And that actors in a cluster of the run's own do not give way to other programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.actors.launch import NICENESS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROGRAM = """
import io, os, signal, sys, threading
sys.path.append({here!r})
from pathlib import Path
import psutil, ray
from ray._private.utils import publish_error_to_driver
from ray_plans import paced, plan
from engine.actors.launch import connect, start

class Heard(io.StringIO):
    def write(self, text):
        sys.__stdout__.write(text)
        if "that was all" in text:
            over.set()
        return len(text)

def actors():
    return [p for p in psutil.Process().children(recursive=True) if "Actor" in " ".join(p.cmdline()[:1])]

over = threading.Event()
sys.stdout = Heard()
connect()
with start(plan(Path({run_dir!r}), paced)) as run:
    started = actors()
    assert {{process.nice() for process in started}} == {{psutil.Process().nice()}}
    for process in started:
        if "SchedulerAct" in process.cmdline()[0]:
            process.kill()
    assert run.wait().outcome == "finished"
psutil.wait_procs(started, timeout=60)
publish_error_to_driver("over", "that was all", ray._private.worker.global_worker.gcs_client)
over.wait(60)
"""


def test_no_call_that_is_made_again_is_news(tmp_path: Path) -> None:
    program = PROGRAM.format(here=str(Path(__file__).parent), run_dir=str(tmp_path / "run"))
    others = {name: value for name, value in os.environ.items() if name != NICENESS}
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=240, env=others)
    assert done.returncode == 0 and "that was all" in done.stdout, done.stdout
    assert "will be retried" not in done.stdout
