"""Runs on a cluster of declared GPUs, in a process of their own: what became of its placement groups."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from ray_plans import PROMPTS, Counter, Quick, check_record, plan, restore_counter

from engine.actors.launch import start
from engine.runtime.plan import Rollout
from engine.runtime.prompt_sources import listed

GPUS = 5


def connect() -> None:
    """Ray believes the number of GPUs that it is given."""
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


def note_visible(directory: Path, process: str) -> None:
    """Write down which GPUs CUDA would see in this process."""
    (directory / f"sees-{process}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


def visible_gpus(directory: Path) -> dict[str, str]:
    """What the processes of a run see whose replica has every GPU, by process."""

    def rollout(replica: int) -> Rollout:
        note_visible(directory, "replica")
        return Rollout(generator=Quick())

    def trainer() -> Counter:
        note_visible(directory, "trainer")
        return Counter()

    def prompts() -> Any:
        note_visible(directory, "scheduler")
        return listed([f"question {n}" for n in range(PROMPTS)])

    made = plan(
        directory,
        make_rollout=rollout,
        make_trainer=trainer,
        make_prompts=prompts,
        replicas=1,
        rollout_gpus=float(GPUS),
        trains_on_gpus=False,
    )
    with start(made) as run:
        run.wait()
    return {path.name.removeprefix("sees-"): path.read_text() for path in directory.glob("sees-*")}


def held_up(directory: Path) -> tuple[list[str], float]:
    """What a start says while another program has the GPUs that the trainer needs, which ends once that is said; and
    the GPUs that are free after the run."""

    class Holder:
        """Defined here, because Ray's workers cannot import this module."""

        def ready(self) -> None:
            pass

    holder = ray.remote(num_cpus=0, num_gpus=GPUS - 1)(Holder).remote()
    ray.get(holder.ready.remote())
    said: list[str] = []

    def show(share: float, text: str) -> None:
        said.append(text)
        if "waits" in text:
            ray.kill(holder)

    dies_once = partial(Counter, 2, str(directory / "died"))
    made = plan(
        directory, make_trainer=dies_once, restore_trainer=restore_counter, trainer_gpus=2.0, samples_on_gpus=False
    )
    with start(made, show) as run:
        assert run.wait().outcome == "finished"
    assert (directory / "died").exists(), "the next trainer ran on the same GPUs"
    return said, until_free()


def note_place(directory: Path, process: str) -> None:
    """Write down the node of this process, and the GPUs that Ray gave it."""
    node = ray.get_runtime_context().get_node_id()
    (directory / f"place-{process}").write_text(f"{node} {len(ray.get_gpu_ids())}")


def reserved_first(directory: Path) -> tuple[str, dict[str, tuple[str, int]]]:
    """The end of a run on two nodes of two GPUs whose trainer needs one, and the node and GPUs of each process."""

    def rollout(replica: int) -> Rollout:
        note_place(directory, f"replica-{replica}")
        return Rollout(generator=Quick())

    def trainer() -> Counter:
        note_place(directory, "trainer")
        return Counter()

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=100 << 20, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with start(plan(directory, make_rollout=rollout, make_trainer=trainer, trainer_ranks=2)) as run:
            outcome = run.wait().outcome
    finally:
        ray.shutdown()
        cluster.shutdown()
    written = {path.name.removeprefix("place-"): path.read_text().split() for path in directory.glob("place-*")}
    return outcome, {process: (node, int(gpus)) for process, (node, gpus) in written.items()}


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
    table = {
        key: row
        for key, row in placement_group_table().items()
        if key not in before and not row["name"].endswith("/trainer")
    }
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
