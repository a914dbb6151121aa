"""Processes that hang: their run recovers within its limits, and their stacks are in `logs/`."""

import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray
from group_gate import Gate
from ray_plans import Counter as CountingTrainer
from ray_plans import check_record, events_of, paced, plan, restore_counter, slow
from test_ray_lives import trained, until_step
from test_ray_runs import wait_for_no_actors

from engine.actors.detached_actors import find_actors
from engine.actors.launch import RunHandle, start
from engine.events import ProcessLost, PublishFailed, RunResumed, SchedulerRecovered, StepFailed
from engine.protocols import Batch, Prompts
from engine.runtime.prompt_sources import listed
from engine.runtime.stacks import dump_stacks, stacks_file
from engine.states.limits import Limits, Pool
from engine.states.timeouts import KINDS, Timeouts
from engine.workers.plan import Liveness

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PROMPTS = 30 * 4
BEATS = Liveness(heartbeat_s=1.0, missed_beats=3)
SILENT = "gave no sign of life for 3 s and was killed; "


def slow_to_recover(marker: Path) -> Prompts:
    """The second time, this takes twice as long as a silent process is given."""
    if marker.exists():
        threading.Event().wait(6.0)
    marker.write_text("begun")
    return listed([f"question {n}" for n in range(PROMPTS)])


def write_all_stacks(run: RunHandle, run_dir: Path) -> None:
    living = find_actors(run._launched.launch)
    assert {source for source, _ in living} == {"rollout-0", "rollout-1", "trainer", "trajectories", "weights"}
    for (source, _), actor in living.items():
        file = stacks_file(run_dir, source)
        assert dump_stacks(ray.get(actor.beat.remote()).pid, file) == f"its stacks are in {file}"
        assert "most recent call first" in file.read_text()


def test_a_run_whose_scheduler_hangs_continues_and_says_where_its_stacks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    run_dir = tmp_path / "run"
    own = plan(run_dir, paced, make_prompts=partial(slow_to_recover, tmp_path / "begun"), liveness=BEATS)
    gate = Gate(tmp_path / "gate")
    extension = {"extensions": ["endless_policy"], "code_dir": str(Path(__file__).parent)}
    own = replace(
        own, make_rollout=gate.before(8 * 4, own.make_rollout), policies={"dispatch": "endless-once"},
        config={"run": extension},
    )  # fmt: skip
    with start(own) as run:
        run.note = said.append
        write_all_stacks(run, run_dir)
        gate.open()
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", PROMPTS // 4)
    (line,) = said
    assert len(events_of(run_dir, SchedulerRecovered)) == 1, "a scheduler that recovers is not silent"
    assert events_of(run_dir, ProcessLost, StepFailed, RunResumed) == []
    assert trained(run_dir) == Counter(range(PROMPTS))
    file = stacks_file(run_dir, "scheduler")
    assert SILENT in line and str(file) in line
    assert "endless_policy.py" in file.read_text()
    wait_for_no_actors()


class HangsOnce(CountingTrainer):
    """In its third step, on the thread that computes: its event loop stays free. Before that, it cannot hand over its
    weights once."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.own_marker = marker
        self.asked = 0

    def weights(self) -> int:
        self.asked += 1
        if self.asked == 3 and not self.own_marker.exists():
            raise RuntimeError("no room")
        return super().weights()

    def train(self, batch: Batch) -> dict[str, float]:
        if batch.step == 3 and not self.own_marker.exists():
            self.own_marker.write_text("hung")
            hang()
        return super().train(batch)


def hang(actor: object = None) -> None:
    threading.Event().wait()


def until_lost(run_dir: Path, run: RunHandle, kind: str) -> None:
    """Read the record after every update until it tells of a loss."""
    for _ in run.updates():
        if any(lost.kind == kind for lost in events_of(run_dir, ProcessLost)):
            return
    pytest.fail(f"the {kind} was never stopped")


def test_a_run_stops_what_hangs_and_not_what_waits_for_it(tmp_path: Path) -> None:
    """Without heartbeats: only limits find a process that hangs. A replica and a scorer hang on their event loops, the
    trainer on the thread that computes. The scorer asks for weights that it was not given."""
    steps = 5_000  # far more than are trained before the last of them hangs
    limits = Limits(
        train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=steps,
        scoring_tasks=("old_logprobs",), infrastructure_attempts=20,
        timeouts=Timeouts(**dict.fromkeys((f"{kind}_s" for kind in KINDS if kind != "start"), 4.0), cut_s=2.0),
        pools=(Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",))),
    )  # fmt: skip
    own = plan(
        tmp_path, slow, limits=limits, liveness=Liveness(heartbeat_s=0.0), make_scorer=lambda tasks: Zeros(),
        make_trainer=partial(HangsOnce, tmp_path / "trainer-hung"), restore_trainer=restore_counter,
        make_prompts=lambda: listed([f"question {n}" for n in range(steps * 4)]),
    )  # fmt: skip
    hanging = {"trainer": "trainer", "replica": "rollout-0", "scorer": "scorer-0"}
    with start(own) as run:
        until_lost(tmp_path, run, "trainer")
        for kind in ("replica", "scorer"):
            living = {source: actor for (source, _), actor in find_actors(run._launched.launch).items()}
            living[hanging[kind]].__ray_call__.remote(hang)
            until_lost(tmp_path, run, kind)
        reached = next(run.updates()).step
        until_step(run, reached + 2)
        run.stop("every hang was found")
        assert run.wait().outcome == "stopped"
    assert [lost.kind for lost in events_of(tmp_path, ProcessLost)] == [*hanging]
    for lost in events_of(tmp_path, ProcessLost):
        file = stacks_file(tmp_path, hanging[lost.kind])
        assert "exceeded its time limit of 4 s" in lost.reason and str(file) in lost.reason
        assert ("it does not answer" in lost.reason) == (lost.kind != "trainer"), lost.reason
        assert "in hang" in file.read_text()
    assert events_of(tmp_path, StepFailed, PublishFailed) == []
    check_record(tmp_path)
    wait_for_no_actors()


class Zeros:
    def load(self, weights: int) -> None: ...

    def score(self, batch: Batch, task: str) -> list[list[list[float]]]:
        return [[[0.0] * sum(t.loss_mask) for t in group.trajectories] for group in batch.groups]
