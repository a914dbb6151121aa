"""Runs on a cluster of declared GPUs, in a process of their own: what became of its placement groups."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group_table
from ray_plans import Quick, check_record, plan

from engine.actors.launch import start
from engine.runtime.plan import Rollout

GPUS = 5


def connect() -> None:
    """Ray takes the number of GPUs as it is told."""
    ray.init(
        address="local", num_cpus=2, num_gpus=GPUS, include_dashboard=False, log_to_driver=False,
        object_store_memory=100 << 20,
    )  # fmt: skip


def placed(directory: Path, deadly: int, replica: int) -> Rollout:
    """Writes down what the actor was given."""
    context = ray.get_runtime_context()
    group = context.get_placement_group_id()
    life = len(list(directory.glob(f"given-{replica}-*")))
    (directory / f"given-{replica}-{life}").write_text(f"{group} {len(ray.get_gpu_ids())}")
    return Rollout(generator=Quick(deadly if life == 0 else -1))


@dataclass(frozen=True)
class Story:
    """A run's end, its groups in the order of replica and life, and what is left of them."""

    outcome: str
    given: dict[str, tuple[str, int]]
    shapes: dict[str, tuple[str, tuple[float, ...]]]
    """By group: strategy, GPUs of each bundle."""
    states: set[str]
    free: float


def carried_out(directory: Path, deadly: int = -1, **changes: Any) -> Story:
    before = set(placement_group_table())
    made = plan(directory, make_rollout=partial(placed, directory, deadly), **changes)
    with start(made) as run:
        outcome = run.wait().outcome
    check_record(directory)
    table = {key: row for key, row in placement_group_table().items() if key not in before}
    files = sorted(directory.glob("given-*"))
    given = {path.name: (path.read_text().split()[0], int(path.read_text().split()[1])) for path in files}
    shapes = {
        key: (row["strategy"], tuple(bundle["GPU"] for bundle in row["bundles"].values())) for key, row in table.items()
    }
    states = {row["state"] for row in table.values()}
    return Story(outcome, given, shapes, states, until_free())


def until_free() -> float:
    """Ray gives back what dead actors had in its own time."""
    for _ in range(200):
        free = float(ray.available_resources().get("GPU", 0))
        if free == GPUS:
            break
        ray.get(ray.remote(num_cpus=1)(lambda: None).remote())
    return free
