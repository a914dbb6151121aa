"""Runs on a cluster of declared GPUs, in a process of their own: what became of its placement groups."""

import os
import re
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from forked_workers import forked_workers
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_plans import PROMPTS, Counter, Quick, check_record, limited, plan, restore_counter

from engine.actors.launch import start
from engine.actors.rank_hosts import RankNodes
from engine.gpu_request import GpuRequest
from engine.runtime.prompt_sources import listed
from engine.runtime.stacks import can_answer
from engine.states.limits import Pool
from engine.workers.plan import Rollout

NODES = (4, 2)
"""GPUs of each node."""
GPUS = sum(NODES)


def connect() -> None:
    """Ray believes the number of GPUs that it is given."""
    cluster = Cluster()
    with forked_workers():
        for gpus in NODES:
            cluster.add_node(num_cpus=1, num_gpus=gpus, object_store_memory=100 << 20, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)


def placed(directory: Path, deadly: int, replica: int) -> Rollout:
    """Writes down what the actor was given."""
    context = ray.get_runtime_context()
    group = context.get_placement_group_id()
    life = len(list(directory.glob(f"given-{replica}-*")))
    (directory / f"given-{replica}-{life}").write_text(f"{group} {len(ray.get_gpu_ids())}")
    note_visible(directory, "replica")
    return Rollout(generator=Quick(deadly if life == 0 else -1))


def note_visible(directory: Path, process: str) -> None:
    """Write down which GPUs CUDA would see in this process."""
    (directory / f"sees-{process}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


def hold(gpus: int, node: str) -> Any:
    """Another program that has GPUs of a node until it ends."""

    class Holder:
        """Defined here, because Ray's workers cannot import this module."""

        def ready(self) -> None:
            pass

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    made = ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy=where)(Holder).remote()
    ray.get(made.ready.remote())
    return made


def note_place(directory: Path, process: str) -> None:
    """Write down the node of this process, and the GPUs that Ray gave it."""
    node = ray.get_runtime_context().get_node_id()
    (directory / f"place-{process}").write_text(f"{node} {len(ray.get_gpu_ids())}")


def reserved_first(directory: Path) -> tuple[list[str], dict[str, tuple[str, int]], float]:
    """A run on two nodes with two free GPUs each. Its trainer needs both GPUs of one node, and dies once. Another
    program holds one GPU of each node, and frees one each time the start reports a wait. Returns what the start says,
    the node and GPUs of each process, and the GPUs that are free after the run."""

    def rollout(replica: int) -> Rollout:
        note_place(directory, f"replica-{replica}")
        return Rollout(generator=Quick())

    def trainer() -> Counter:
        note_place(directory, "trainer")
        return Counter(2, str(directory / "died"))

    wide, narrow = sorted(ray.nodes(), key=lambda node: -node["Resources"]["GPU"])
    kept = hold(NODES[0] - 2, wide["NodeID"])
    others = [hold(1, node["NodeID"]) for node in (wide, narrow)]
    said: list[str] = []

    def show(share: float, text: str) -> None:
        said.append(text)
        if "GPUs free" in text:
            ray.kill(others.pop())

    made = plan(
        directory, make_rollout=rollout, make_trainer=trainer, restore_trainer=restore_counter,
        gpus=GpuRequest(ranks=2),
    )  # fmt: skip
    with start(made, show) as run:
        assert run.wait().outcome == "finished"
    assert (directory / "died").exists(), "the next trainer ran on the same GPUs"
    ray.kill(kept)
    written = {path.name.removeprefix("place-"): path.read_text().split() for path in directory.glob("place-*")}
    return said, {process: (node, int(gpus)) for process, (node, gpus) in written.items()}, until_free()


def in_turns(directory: Path) -> tuple[str, dict[str, tuple[str, int]], dict[str, str], float]:
    """A run whose trainer has a rank for each of the four GPUs of a node, in one pool with two replicas. The trainer
    and a replica die once. The outcome; the node and GPUs of each process; the GPUs that each sees; and the GPUs that
    are free after the run."""

    def rollout(replica: int) -> Rollout:
        note_place(directory, f"replica-{replica}")
        note_visible(directory, f"replica-{replica}")
        lived = directory / f"lived-{replica}"
        deadly = 3 if replica == 0 and not lived.exists() else -1
        lived.touch()
        return Rollout(generator=Quick(deadly))

    def trainer() -> Counter:
        note_place(directory, "trainer")
        note_visible(directory, "trainer")
        return Counter(2, str(directory / "died"))

    made = plan(
        directory, make_rollout=rollout, make_trainer=trainer, restore_trainer=restore_counter,
        gpus=GpuRequest(ranks=NODES[0]),
    )  # fmt: skip
    pool = Pool(tasks=("rollout", "reward", "old_logprobs", "ref_logprobs", "train", "validation"), replicas=(0, 1))
    with start(limited(made, pools=(pool,))) as run:
        outcome = run.wait().outcome
    check_record(directory)
    written = {path.name.removeprefix("place-"): path.read_text().split() for path in directory.glob("place-*")}
    places = {process: (node, int(gpus)) for process, (node, gpus) in written.items()}
    visible = {path.name.removeprefix("sees-"): path.read_text() for path in directory.glob("sees-*")}
    return outcome, places, visible, until_free()


def ranks_apart(directory: Path) -> tuple[list[str], dict[str, tuple[str, int]], tuple[str, list[float]], float]:
    """A run whose trainer has four ranks on two nodes. The GPUs that a rank of the other node sees; the node and GPUs
    of each process; the strategy and the bundles of the trainer's group; and the GPUs that are free after the run."""

    def rollout(replica: int) -> Rollout:
        note_place(directory, f"replica-{replica}")
        return Rollout(generator=Quick())

    def trainer(nodes: RankNodes) -> Counter:
        note_place(directory, "trainer")
        (other,) = nodes.start(2)
        ray.get(other._actor.drop.remote())  # then it has started its ranks
        node = psutil.Process(ray.get(other._actor.__ray_call__.remote(lambda _: os.getpid())))
        ranks = [one for one in node.children() if "engine.training.rank_process" in one.cmdline()]
        while not all(can_answer(rank.pid) for rank in ranks):  # they have just been started
            ray.get(other._actor.__ray_ready__.remote())
        environment = ranks[0].environ()
        assert environment["PYTORCH_ALLOC_CONF"] == os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        (directory / "sees").write_text(environment["CUDA_VISIBLE_DEVICES"])
        ray.get(nodes.dump_stacks())
        said = (directory / "logs" / "trainer-node-1.stacks").read_text()
        answers = re.findall(r"rank_process.py\", line \d+ in main", said)
        assert len(answers) == 2, "both ranks have written their stacks"
        relays = [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
        del other
        for relay in relays:
            relay.join(timeout=60)
        assert len(relays) == 2 and not any(relay.is_alive() for relay in relays), "they end with their links"
        return Counter()

    before = set(placement_group_table())
    with start(
        plan(directory, make_rollout=rollout, make_trainer=trainer, gpus=GpuRequest(ranks=4, trainer_nodes=2))
    ) as run:
        assert run.wait().outcome == "finished"
    row = next(row for key, row in placement_group_table().items() if key not in before)
    written = {path.name.removeprefix("place-"): path.read_text().split() for path in directory.glob("place-*")}
    places = {process: (node, int(gpus)) for process, (node, gpus) in written.items()}
    shape = row["strategy"], [bundle["GPU"] for bundle in row["bundles"].values()]
    return (directory / "sees").read_text().split(","), places, shape, until_free()


@dataclass(frozen=True)
class Story:
    """A run's end, its groups in the order of replica and life, and what is left of them."""

    outcome: str
    given: dict[str, tuple[str, int]]
    shapes: dict[str, tuple[str, tuple[float, ...]]]
    """By group: strategy, GPUs of each bundle."""
    states: set[str]
    free: float
    visible: dict[str, str]
    """The GPUs that a process of each kind sees."""


def carried_out(directory: Path, deadly: int = -1, **changes: Any) -> Story:
    def trainer() -> Counter:
        note_visible(directory, "trainer")
        return Counter()

    def prompts() -> Any:
        note_visible(directory, "scheduler")
        return listed([f"question {n}" for n in range(PROMPTS)])

    before = set(placement_group_table())
    rollout = partial(placed, directory, deadly)
    made = plan(directory, make_rollout=rollout, make_trainer=trainer, make_prompts=prompts, **changes)
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
    visible = {path.name.removeprefix("sees-"): path.read_text() for path in directory.glob("sees-*")}
    return Story(outcome, given, shapes, states, until_free(), visible)


def until_free() -> float:
    """Ray gives back what dead actors had in its own time."""
    for _ in range(200):
        free = float(ray.available_resources().get("GPU", 0))
        if free == GPUS:
            break
        ray.get(ray.remote(num_cpus=1)(lambda: None).remote())
    return free
