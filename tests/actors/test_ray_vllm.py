"""Training runs through Ray whose replicas hold vLLM and get weights by vLLM's own transfer. An engine is lost in the
middle of generating, and the trainer in the middle of sending."""

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from gate import Gate, gated
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_plans import check_record, events_of
from transformers import Qwen2Config
from vllm_arguments import ENGINE_ARGS, require_vllm

from engine.actors.launch import RunHandle, start
from engine.commands import ResumeGroup, StartGroup
from engine.config.loading import parse_config
from engine.events import GroupGenerated, PrefixStored, ProcessLost, SyncFailed, WeightsInstalled
from engine.ids import GroupId, ReplicaId
from engine.plans.configured_plan import plan_of
from engine.record import read
from engine.rollout.vllm.engine_args import all_engine_args
from engine.states.process import TRAINER

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]
require_vllm()

STEPS, BATCH, SAMPLES, EVERY = 3, 4, 4, 10


def tree(made: Path, gate: Path) -> dict[str, Any]:
    """A model hardly trained, so that its responses are of any length; heads of 32, as vLLM on a CPU wants them."""
    arithmetic = {"train_prompts": 200, "validation_prompts": 4, "warmup_steps": 12, "layers": 4, "heads": 2}
    return {
        "run": {"dir": str(made), "max_steps": STEPS, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": arithmetic},
        "scheduler": {"train_batch_size": BATCH, "samples_per_prompt": SAMPLES, "max_staleness_steps": 0},
        "rollout": {
            "backend": "vllm", "replicas": 2, "slots": 6, "max_tokens": 150, "transport": "vllm",
            "engine_args": ENGINE_ARGS | gated(gate),
        },
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
        "validation": {"at_start": False, "at_end": False},
        "durability": {"prefix_every_tokens": EVERY},
    }  # fmt: skip


def first_stored(run: RunHandle, run_dir: Path) -> tuple[ReplicaId, GroupId]:
    """The replica and the group of the first stored prefix. The replica that is up first may get all groups."""
    for _ in run.updates():
        for stored in events_of(run_dir, PrefixStored):
            return stored.replica, stored.group
    pytest.fail("no prefix was stored")


def engine_process(run_dir: Path, replica: int) -> psutil.Process:
    """The process of this replica's engine: it writes the replica's log."""
    log = str(run_dir / f"logs/rollout-{replica}.vllm.log")
    engines = (process for process in psutil.process_iter() if "EngineCor" in process.name())
    (found,) = (engine for engine in engines if log in {file.path for file in engine.open_files()})
    return found


def test_groups_of_a_killed_vllm_process_go_on_elsewhere_from_stored_prefixes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    gate = Gate(tmp_path / "gate")
    gate.hold(EVERY)
    planned = plan_of(parse_config(tree(tmp_path, tmp_path / "gate")), run_dir)
    limits = replace(planned.limits, replica_restarts=0)  # another engine would take longer to start than the run
    with start(replace(planned, limits=limits)) as run:
        replica, killed = first_stored(run, run_dir)
        engine_process(run_dir, replica).kill()
        gate.open()
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason

    scheduler = check_record(run_dir)
    assert scheduler.state.training.steps_trained == STEPS

    lost, *others = events_of(run_dir, ProcessLost)
    until = min((other.id for other in others), default=math.inf)  # a slow machine may lose another one
    assert (lost.index, lost.life) == (replica, 1) and "vLLM" in lost.reason
    said = (run_dir / f"logs/rollout-{replica}.vllm.log").read_text()
    assert "samples with model runner V1" in said, "Triton, which V2 needs, is not on CPUs"
    stored = {e.group: e for e in events_of(run_dir, PrefixStored) if e.replica == replica and e.id < lost.id}
    assert killed in stored
    orders = [
        command
        for tick in read(run_dir / "schedule").ticks()
        for command in tick.commands
        # Its groups fail before its process is lost, or with it.
        if stored[killed].id < command.cause < until
        and isinstance(command, StartGroup | ResumeGroup)
        and command.attempt > 1
    ]
    again = {command.group: command for command in orders}
    resumed = {group: order for group, order in again.items() if isinstance(order, ResumeGroup) and group in stored}
    assert killed in resumed
    assert all(isinstance(order, ResumeGroup) == (group in stored) for group, order in again.items())
    installed = {event.version for event in events_of(run_dir, WeightsInstalled)}
    assert installed >= set(range(1, STEPS)), "no step without the version before it"
    logs = [path.read_text() for path in (run_dir / "logs").glob("rollout-?.log")]
    assert not any("taken from the weights store" in text for text in logs), "the trainer sends every version"
    ended = {e.group: e for e in events_of(run_dir, GroupGenerated)}
    assert set(resumed) & set(ended), "what was resumed has ended"
    assert all(ended[group].tokens >= stored[group].tokens for group in resumed if group in ended)


def deadly_trainer(make: Callable[[], Any], marker: Path) -> Any:
    """A trainer whose process is killed, once, after it has sent the first message of a version."""
    from engine.rollout.vllm.gloo_transfer import GlooGroup

    broadcast = GlooGroup.broadcast

    def broadcast_and_die(self: GlooGroup, flat: Any) -> None:
        broadcast(self, flat)
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    GlooGroup.broadcast = broadcast_and_die  # type: ignore[method-assign]
    return make()


@pytest.mark.long
def test_a_version_whose_sender_is_killed_comes_from_the_store_in_the_same_install(tmp_path: Path) -> None:
    run_dir, marker = tmp_path / "run", tmp_path / "killed"
    run_dir.mkdir()
    settings = tree(tmp_path, tmp_path / "gate")
    settings["rollout"] |= {"replicas": 1, "bucket_mb": 1}
    settings["model"]["arithmetic"]["layers"] = 8  # for more than one message
    Gate(tmp_path / "gate").open()
    planned = plan_of(parse_config(settings), run_dir)
    with start(replace(planned, make_trainer=partial(deadly_trainer, planned.make_trainer, marker))) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    assert marker.exists()

    check_record(run_dir)
    (lost,) = events_of(run_dir, ProcessLost)
    assert lost.kind == TRAINER
    assert not events_of(run_dir, SyncFailed)
    assert [event.version for event in events_of(run_dir, WeightsInstalled)][: STEPS - 1] == [*range(1, STEPS)]
    log = (run_dir / "logs/rollout-0.log").read_text()
    assert log.count("version 1 is taken from the weights store") == log.count("is taken from the weights store") == 1


def test_several_workers_in_a_placement_group_do_not_wait_for_its_gpus_again(tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    def chosen(choices: list[dict[str, Any]]) -> list[Any]:
        from vllm import AsyncEngineArgs

        made = (AsyncEngineArgs(**arguments).create_engine_config() for arguments in choices)
        return [config.parallel_config.distributed_executor_backend for config in made]

    Qwen2Config(architectures=["Qwen2ForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    ours = all_engine_args(str(tmp_path), 8, 0, {"tensor_parallel_size": 2, "dtype": "float32"})
    alone = {name: value for name, value in ours.items() if name != "distributed_executor_backend"}
    group = placement_group([{"CPU": 1}])
    where = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    try:
        assert ray.get(chosen.options(scheduling_strategy=where).remote([ours, alone])) == ["mp", "ray"]
    finally:
        remove_placement_group(group)
