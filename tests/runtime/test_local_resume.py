"""A run in one process is resumed, watched and controlled like one over Ray."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from embedded_run import FIGURES, PROMPTS, Quick, Saving, options
from small_disk import small_disk

import engine.runtime.local
from engine.cli import main
from engine.cli.top import ask
from engine.control.address_file import place_of
from engine.errors import ConfigError, RecordError, RunDamaged, RunFailed, RunFinished
from engine.events import DrainRequested, ProcessLost, ReplicasWanted, RunResumed, SettingChanged, StepTrained
from engine.inspect.history_reader import read_history
from engine.metrics.address_files import address_of
from engine.metrics.history_log import FILE, RecordHistory
from engine.protocols import Batch, GroupWork
from engine.record import read, replay
from engine.record.files import RecordLock
from engine.runtime.local import RunResult, SimpleTrainer, response
from engine.states.limits import Limits
from engine.storage.checkpoints import list_checkpoints
from engine.storage.samples import SampleFiles
from engine.trajectory import Trajectory

ONCE = list(range(PROMPTS))


def killed_at(step: int, run_dir: Path, trajectories: str = "disk") -> None:
    """Run the program until it kills itself."""
    program = [sys.executable, str(Path(__file__).parent / "embedded_run.py"), str(run_dir), str(step), trajectories]
    assert subprocess.run(program, check=False, timeout=120).returncode == -signal.SIGKILL


def resumed(run_dir: Path, **others: Any) -> tuple[RunResult, Saving]:
    trainer = Saving()
    return engine.runtime.local.run(**options(run_dir, trainer, resume=True, **others)), trainer


def trained_in(run_dir: Path) -> list[int]:
    return [event.step for event in read(run_dir / "schedule").events() if isinstance(event, StepTrained)]


@pytest.mark.parametrize("step", [0, 2, 7], ids=["at once", "before a checkpoint", "behind one"])
def test_a_killed_run_is_resumed_and_loses_nothing(tmp_path: Path, step: int) -> None:
    killed_at(step, tmp_path)
    result, trainer = resumed(tmp_path)
    assert result.outcome == "finished" and sorted(trainer.groups) == ONCE, "each prompt is trained on once"
    source = "step-000006" if step == 7 else "the initial weights"
    assert result.resumed.startswith(f"resumed from {source}, after ")
    assert trained_in(tmp_path) == list(range(PROMPTS // 4)), "steps behind the checkpoint come from the record"
    assert replay(read(tmp_path / "schedule")).identical
    assert RecordHistory(read(tmp_path / "schedule"), tmp_path / FILE).position == result.events
    history = read_history(tmp_path)
    (tmp_path / FILE).unlink()
    assert read_history(tmp_path) == history, "deleting the history log changes no answer"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(PROMPTS // 4))
    kept = [(row["step"], row["group"], row["sample"]) for row in SampleFiles(tmp_path / "samples").rows("train")]
    assert {step for step, _, _ in kept} == set(range(PROMPTS // 4)) and len(kept) == len(set(kept))


def test_groups_whose_trajectories_were_in_memory_are_generated_again(tmp_path: Path) -> None:
    killed_at(8, tmp_path, trajectories="memory")
    result, trainer = resumed(tmp_path, trajectories="memory")
    assert result.outcome == "finished" and sorted(trainer.groups) == ONCE
    assert trained_in(tmp_path) == [*range(8), *range(6, PROMPTS // 4)], "from the checkpoint after six steps"
    assert not (tmp_path / "trajectories").exists()


def test_a_run_goes_back_to_an_older_checkpoint_on_request(tmp_path: Path) -> None:
    killed_at(7, tmp_path)
    with pytest.raises(ConfigError, match=r"--force-from 'step-000004' .*use one of: step-000003, step-000006"):
        resumed(tmp_path, force_from="step-000004")
    result, trainer = resumed(tmp_path, force_from="step-000003")
    assert result.outcome == "finished" and result.resumed.startswith("resumed from step-000003")
    assert sorted(trainer.groups) == ONCE
    assert trained_in(tmp_path) == [*range(7), *range(3, PROMPTS // 4)]
    assert (tmp_path / "checkpoints" / ".step-000006-left-1").exists(), "it is put aside, not deleted"
    later = SampleFiles(tmp_path / ".samples-left-1").numbers("train")
    assert later == list(range(7)), "so are samples of steps that are trained anew"
    assert SampleFiles(tmp_path / "samples").numbers("train") == list(range(PROMPTS // 4))


def test_a_finished_run_cannot_be_resumed_and_another_is_refused_by_name(tmp_path: Path) -> None:
    killed_at(7, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"limits\.max_staleness_steps.*was 2 when the run in .* began"):
        resumed(tmp_path, limits=Limits(**{**FIGURES, "max_staleness_steps": 3, "max_concurrent_groups": 12}))
    with pytest.raises(ConfigError, match=r"policies.*are not the policies that"):
        resumed(tmp_path, policies={"admission": "whole-batches"})
    lock = RecordLock(tmp_path / "schedule")
    with pytest.raises(RecordError, match="another process is writing this record"):
        resumed(tmp_path)
    lock.release()
    with pytest.raises(ConfigError, match="trajectories is 'Disk', but must be disk or memory"):
        resumed(tmp_path, trajectories="Disk")
    with pytest.raises(ConfigError, match=r"trainer.*load"):
        engine.runtime.local.run(**options(tmp_path, Forgetful(), resume=True))
    (newest,) = [path for steps, path in list_checkpoints(tmp_path / "checkpoints") if steps == 6]
    shutil.move(newest, tmp_path / "elsewhere")
    with pytest.raises(RunDamaged, match=r"step-000006.*is missing"):
        resumed(tmp_path)
    shutil.move(tmp_path / "elsewhere", newest)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before, "nothing is touched"
    assert resumed(tmp_path)[0].outcome == "finished"
    with pytest.raises(ConfigError, match="has finished"):
        resumed(tmp_path)
    with pytest.raises(ConfigError, match="run_dir"):
        engine.runtime.local.run(**{**options(tmp_path, Saving(), resume=True), "run_dir": None})


def test_a_finished_run_trains_more_steps_on_request(tmp_path: Path) -> None:
    def steps(most: int) -> dict[str, Any]:
        return {"limits": Limits(**{**FIGURES, "max_steps": most})}

    first = Saving()
    assert engine.runtime.local.run(**options(tmp_path, first, **steps(4))).steps == 4
    for most in (4, 3):
        with pytest.raises(
            RunFinished, match=r"has finished \(4 train steps\); to train more steps, .* larger run.max"
        ):
            resumed(tmp_path, **steps(most))
    result, second = resumed(tmp_path, **steps(7))
    assert (result.outcome, result.steps) == ("finished", 7)
    assert result.resumed.startswith("resumed from step-000004")
    assert len(second.groups) == len(set(second.groups)) == 7 * 4 and second.groups[: 4 * 4] == first.groups
    assert trained_in(tmp_path) == list(range(7)) and replay(read(tmp_path / "schedule")).identical
    result, _ = resumed(tmp_path, **steps(8))
    assert result.steps == 8, "and again"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(8))


class Forgetful(SimpleTrainer):
    """Saves, and cannot load."""

    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return None

    def save(self, directory: str, step: int) -> None: ...


def test_a_running_run_is_watched_scaled_set_drained_and_resumed_as_it_was_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Telling(Saving):
        def train(self, batch: Batch) -> dict[str, float]:
            if batch.step == 4:
                (place,) = tmp_path.glob("endpoint.json")
                (target,) = json.loads(place.read_text())[0]["targets"]
                with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as page:
                    seen.append(page.read().decode())
                seen.append(place_of(tmp_path, "it").token)
                assert main(["scale", str(tmp_path), "--replicas", "3"]) == 0
                bounds = ["scheduler.max_staleness_steps=3", "scheduler.max_concurrent_groups=16"]
                assert main(["set", str(tmp_path), *bounds]) == 0
                assert main(["set", str(tmp_path), "scheduler.max_concurrent_groups=99"]) == 2
                for command in ("waits", "drain"):
                    assert main([command, str(tmp_path)]) == 0
            return super().train(batch)

    result = engine.runtime.local.run(**options(tmp_path, Telling(), metrics_port=0, control_port=0))
    assert (result.outcome, result.reason) == ("stopped", "asked by engine drain")
    assert 5 <= result.steps < PROMPTS // 4
    page, token = seen
    assert "engine_train_steps_total 4.0" in page
    said = capsys.readouterr()
    assert "3 replicas are wanted; K = 12 leaves some of their 18 slots empty" in said.out
    assert "train" in said.out and "the run drains" in said.out
    assert "scheduler.max_concurrent_groups is 99" in said.err
    assert not [*tmp_path.glob("control.json"), *tmp_path.glob("endpoint.json")], "nobody listens any more"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert written == [], "the token stood in control.json alone"
    first: list[list[int]] = []

    class Looking(Saving):
        def train(self, batch: Batch) -> dict[str, float]:
            if batch.step == 12:
                first.append([row["step"] for row in ask(address_of(tmp_path, ""), "").first])
            return super().train(batch)

    trainer = Looking()
    engine.runtime.local.run(**options(tmp_path, trainer, resume=True, metrics_port=0))
    assert sorted(trainer.groups) == ONCE
    assert first == [[*range(8)]], "health checks know the first steps of the run"
    asked = (ReplicasWanted, SettingChanged, DrainRequested, RunResumed)
    kinds = [type(event) for event in events(tmp_path) if isinstance(event, asked)]
    assert kinds == [ReplicasWanted, SettingChanged, SettingChanged, DrainRequested, RunResumed, ReplicasWanted]
    assert {event.replicas for event in events(tmp_path) if isinstance(event, ReplicasWanted)} == {3}


def test_a_full_disk_stops_the_run_and_more_room_lets_it_go_on(tmp_path: Path) -> None:
    class Wordy(Quick):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            await asyncio.sleep(0)
            return [replace(response([1], reward=float(i), version=version), text="la" * 2000) for i in range(2)]

    with small_disk(tmp_path / "disk", 120) as disk:
        run_dir = disk.place / "run"
        given = {"generators": lambda replica: Wordy()}
        result = engine.runtime.local.run(**options(run_dir, Saving(), **given))
        assert result.outcome == "stopped" and "No space left on device" in result.reason
        disk.grow(4096)
        assert sorted(resumed(run_dir, **given)[1].groups) == ONCE
        assert not [one for one in events(run_dir) if isinstance(one, ProcessLost) and one.kind != "trajectory store"]


def events(run_dir: Path) -> list[Any]:
    return list(read(run_dir / "schedule").events())


def test_a_launch_that_fails_closes_what_was_loaded_and_says_why(tmp_path: Path) -> None:
    made, closed = list[int](), list[int]()

    class Closing(Quick):
        def __init__(self, replica: int) -> None:
            super().__init__()
            if replica == 1:
                raise ValueError("no memory")
            self.replica = replica
            made.append(replica)

        async def close(self) -> None:
            closed.append(self.replica)

    with pytest.raises(RunFailed, match="replica 1 could not be started: ValueError: no memory"):
        engine.runtime.local.run(**options(tmp_path, Saving(), generators=Closing, replicas=3))
    assert sorted(closed) == made
    engine.runtime.local.run(**options(tmp_path, Saving()))


def test_a_run_whose_directory_is_deleted_stops_and_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    class Deleting(Saving):
        def train(self, batch: Batch) -> dict[str, float]:
            if batch.step == 1:
                shutil.rmtree(run_dir)
            assert batch.step < 4, "it is noticed at once"
            return super().train(batch)

    with pytest.raises(RunDamaged, match=rf"{run_dir}/schedule was deleted or moved during the run"):
        engine.runtime.local.run(**options(run_dir, Deleting()))


@pytest.mark.parametrize("hangs", ["draw", "train", "train, and is interrupted"])
def test_a_call_that_never_returns_ends_the_run_and_its_process(tmp_path: Path, hangs: str) -> None:
    program = f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from embedded_run import *
from engine.runtime.prompt_sources import listed
from engine.states.timeouts import Timeouts
class Prompts:
    def __init__(self): self.listed = listed(["a"] * 64)
    def draw(self, first, count): return ask("draw", first > 8) or self.listed.draw(first, count)
    def prompt(self, group): return self.listed.prompt(group)
class Hangs(Saving):
    def train(self, batch): return ask("train", batch.step == 2) or super().train(batch)
def ask(who, now):
    if now and {hangs!r}.endswith("interrupted"): os.kill(os.getpid(), signal.SIGINT)
    while now and {hangs!r}.startswith(who): threading.Event().wait()
engine.runtime.local.local_processes.CLOSE_S = 0.2
limit = {{}} if {hangs!r}.endswith("interrupted") else {{"{hangs}_s": 0.2}}
limits = Limits(**FIGURES, timeouts=Timeouts.every(None, **limit, cut_s=0.2))
try:
    result = engine.runtime.local.run(**options(Path({str(tmp_path)!r}), Hangs(), prompts=Prompts(), limits=limits))
    print(result.reason)
except (Exception, KeyboardInterrupt) as error:
    print(repr(error))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    said = "KeyboardInterrupt" if "interrupted" in hangs else f"exceeded its time limit of 0.2 s (timeouts.{hangs}_s)"
    assert said in ended.stdout
