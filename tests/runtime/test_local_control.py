"""A run in one process that waits for what never comes: it says so, and a drain that takes too long stops it."""

import asyncio
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_plans import Counter, Quick, check_record, plan

from engine.control.client import tell
from engine.control.requests import Drain, Look
from engine.protocols import Batch, GroupWork
from engine.runtime.local import run_plan
from engine.trajectory import Trajectory
from engine.workers.plan import ServerAddress


class Silences(logging.Handler):
    """What the run says of its silence while the trainer works. On a busy machine, it may be silent before that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = threading.Event()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("nothing has changed for ") and "the trainer has been training step 0" in message:
            self.said.append(message)
            self.first.set()


def test_a_silent_run_says_what_it_waits_for_and_an_overlong_drain_becomes_a_stop(tmp_path: Path) -> None:
    silences, closed = Silences(), threading.Event()
    answers: list[dict[str, Any]] = []

    class Hanging(Quick):
        """Answers for the first batch alone."""

        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            if work.group >= 4:
                await asyncio.Event().wait()
            return await super().sample(work, weights, version)

        async def close(self) -> None:
            closed.set()

    class Stuck(Counter):
        """Asks the run to drain, and never ends its first step before the run has ended."""

        def train(self, batch: Batch) -> dict[str, float]:
            silences.first.wait(60)
            answers.extend([tell(tmp_path, "it", Look()), tell(tmp_path, "it", Drain(reason="spot"))])
            closed.wait(60)
            return {}

    mine = plan(tmp_path, lambda replica: Hanging(), make_trainer=Stuck, control=ServerAddress(), silence_s=0.1)
    logging.getLogger("engine").addHandler(silences)
    try:
        result = run_plan(replace(mine, limits=replace(mine.limits, drain_s=0.2)))
    finally:
        logging.getLogger("engine").removeHandler(silences)
    assert "the trainer has been training step 0 on 4 groups for " in silences.said[0]
    assert re.search(r"replica [01] has been generating groups \d+, \d+.*, the oldest for \d+ s", silences.said[0])
    assert "for 0.2 s at most" in answers[1]["done"]
    for answer in answers:
        assert answer["waits"][0].startswith("the trainer has been training step 0 on 4 groups")
    assert (result.outcome, result.reason) == ("stopped", "the drain exceeded durability.drain_s = 0.2")
    assert check_record(tmp_path).state.training.steps_trained == 0
