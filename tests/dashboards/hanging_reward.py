"""A reward that hangs on request: where a prompt names a pipe and the pipe is there, until somebody writes to it.

Otherwise it takes a fifth of a second, so that the run leaves the processors to Prometheus.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.tasks.arithmetic import reward
from engine.trajectory import Prompt, Trajectory


def score(prompt: Prompt, trajectory: Trajectory) -> float:
    threading.Event().wait(0.2)
    pipe = prompt.fields["pipe"]
    if pipe and os.path.exists(pipe):
        with open(pipe) as waiting:
            waiting.read()
    return reward(prompt, trajectory)


@contextmanager
def hanging(pipe: Path) -> Iterator[None]:
    """Let the reward of every prompt that names the pipe hang."""
    os.mkfifo(pipe)
    try:
        yield
    finally:
        freed = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # whoever waits to read continues, and meets the end
        os.close(freed)
        pipe.unlink()
