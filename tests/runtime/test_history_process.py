"""The process that fills the history cache while a run goes: in a run, when it fails, and when it is killed."""

import asyncio
import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from embedded_run import FIGURES, PROMPTS, Quick, Saving

from engine.cli.keep_history import run_when_idle
from engine.inspect.history_cache import HistoryCache
from engine.inspect.history_reader import _stretches, read_history
from engine.protocols import Batch
from engine.record import Header, Recorder, read
from engine.runtime import history_process
from engine.runtime.history_process import HistoryProcess
from engine.runtime.local.run import LocalRun
from engine.runtime.prompt_sources import listed
from engine.states.limits import Limits
from engine.workers.plan import Plan, Rollout

EVERY, LAST = 40, PROMPTS // 4 - 1


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_process, "STRETCH_EVENTS", EVERY)


def finish(process: HistoryProcess) -> int:
    """Let the process read everything up to its mark, and end. Returns its exit code."""
    child = process._process
    assert child is not None and child.stdin is not None
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), child.stdin.fileno())
    return child.wait(120)


def test_a_run_leaves_a_cache_that_equals_a_replay(tmp_path: Path) -> None:
    runs: list[LocalRun] = []

    class Waiting(Saving):
        def train(self, batch: Batch) -> dict[str, float]:
            process = runs[0].parts._history
            assert process is not None
            assert batch.step < LAST or finish(process) == 0
            return super().train(batch)

    plan = Plan(
        limits=Limits(**FIGURES), samples=2, make_rollout=lambda replica: Rollout(generator=Quick()), replicas=2,
        make_trainer=Waiting, make_prompts=lambda: listed([f"question {n}" for n in range(PROMPTS)]),
        run_dir=tmp_path, snapshot_every=EVERY,
    )  # fmt: skip

    async def to_end() -> None:
        runs.append(LocalRun(replace(plan, limits=replace(plan.limits, run_restarts=0)), lambda replica: True))
        assert (await runs[0].to_end()).steps == LAST + 1

    asyncio.run(to_end())
    record = read(tmp_path / "schedule")
    stretches = _stretches(record, EVERY)
    assert len(stretches) >= 5 and all(map(HistoryCache(record).holds, stretches[:-3])), "all but the end"
    history = read_history(tmp_path, EVERY)
    for path in (tmp_path / "history-cache").iterdir():
        path.unlink()
    assert read_history(tmp_path, EVERY) == history


def record_of_one_stretch(directory: Path, **policies: str) -> Recorder:
    limits = Limits(**FIGURES)
    recorder = Recorder(directory / "schedule", Header(run="r", limits=limits.to_plain(), policies=policies))
    recorder.newest_snapshot = EVERY
    return recorder


def test_a_failure_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = record_of_one_stretch(tmp_path)
    process = HistoryProcess(recorder)
    (tmp_path / "schedule" / "index.json").write_text("damaged")
    process.wake()
    assert process._process is not None and process._process.wait(120) == 1
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.newest_snapshot += EVERY
            process.wake()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the record cannot be read while the run goes: engine.errors.RunDamaged: ")
    assert process._process is None, "no other one is started"
    recorder.close()


def test_it_takes_only_time_that_no_other_process_wants() -> None:
    policies: list[int] = []

    def in_a_thread() -> None:
        run_when_idle()
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_IDLE] != [os.sched_getscheduler(0)], "of that thread alone"


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    recorder = record_of_one_stretch(tmp_path)
    process = HistoryProcess(recorder)
    process.close()
    process.wake()
    child: Any = process._process
    process.close()
    assert child.returncode == -signal.SIGKILL
    recorder.close()
