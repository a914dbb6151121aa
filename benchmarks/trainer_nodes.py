"""One optimizer step of a trainer on several Ray nodes, against a trainer of one rank: their gradients.

    python benchmarks/trainer_nodes.py [--nodes 3] [--ranks 3] [--hybrid] [--address HOST:PORT] [--groups 4]
        [--samples 4] [--prompt 64] [--tokens 256] [--micro 2048] [--gradients] [--small]

Starts the nodes on this machine, or joins the cluster at `--address`. All ranks use gloo and one thread each. The model
has 300 M random parameters (`--small`: 8 M). Prints the largest gradient, the largest difference, and the seconds of
the second step of one rank, of the ranks as processes of one machine, and of the ranks on their nodes. Gradients are
those that AdamW has in its first moments after the first step, without clipping; those of several ranks went through a
checkpoint. On one machine the seconds show only what messages between nodes cost.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed.checkpoint as dcp
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.checkpoint import HuggingFaceStorageReader
from trainer import make_batch, make_model

from engine.actors.detached_actors import PackedPlan
from engine.actors.placement import NODE_CPU
from engine.actors.rank_hosts import RankNodes
from engine.training.model_checkpoint import optimizer_tensors
from engine.training.model_trainer import ModelTrainer
from engine.training.ranked_trainer import RankedTrainer
from engine.training.trainer_settings import TrainerSettings

BETA = 0.9


def settings_of(given: argparse.Namespace, ranks: int) -> TrainerSettings:
    """Settings of a step whose ratios are 1, so that every trajectory has a gradient."""
    return TrainerSettings(
        device="cpu", learning_rate=1e-6, betas=(BETA, 0.999), max_grad_norm=0.0, old_policy="proximal", rollback=False,
        activation_checkpointing=True, micro_batch_tokens=given.micro, threads=ranks, ranks=ranks,
        hybrid_sharding=given.hybrid and ranks > 1,
    )  # fmt: skip


def two_steps(trainer: Any, given: argparse.Namespace, after_first: Any) -> float:
    """Train two steps. Returns the seconds of the second; the first one also allocates the moments."""
    batches = [make_batch(step, given.groups, given.samples, given.prompt, given.tokens, 0) for step in range(2)]
    trainer.train(batches[0])
    after_first(trainer)
    began = time.perf_counter()
    trainer.train(batches[1])
    return time.perf_counter() - began


def on_one_rank(path: str, given: argparse.Namespace) -> tuple[float, dict[str, torch.Tensor]]:
    gradients = {}

    def note(trainer: ModelTrainer) -> None:
        for name, value in optimizer_tensors(trainer.model, trainer.optimizer).items():
            if name.startswith("exp_avg/"):
                gradients[name] = value / (1 - BETA)

    return two_steps(ModelTrainer(path, settings_of(given, 1)), given, note), gradients


def on_one_machine(path: str, given: argparse.Namespace) -> float:
    trainer = RankedTrainer(path, settings_of(given, given.ranks))
    try:
        return two_steps(trainer, given, lambda trainer: None)
    finally:
        trainer.close()


def on_nodes(path: str, given: argparse.Namespace, saved: str) -> tuple[float, bool, int]:
    """The seconds of a step, whether the ranks then began again with published weights, and the number of nodes. Leaves
    a checkpoint after the first step."""
    group = placement_group([{"CPU": NODE_CPU}] * given.nodes, strategy="STRICT_SPREAD")
    packed = PackedPlan(os.getcwd(), tuple(sys.path), b"", "", 0.0, None)

    def train() -> tuple[float, bool]:
        packed.enter()
        trainer = RankedTrainer(path, settings_of(given, given.ranks), nodes=RankNodes(packed, given.nodes, 0.0))
        try:
            begin = {name: value.clone() for name, value in trainer.weights().items()}
            seconds = two_steps(trainer, given, lambda trainer: trainer.save(saved, 1))
            trainer.start_from(begin, 0)
            return seconds, all(torch.equal(begin[name], value) for name, value in trainer.weights().items())
        finally:
            trainer.close()

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    task = ray.remote(train).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
    seconds, restored = ray.get(task.remote())
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"].values()
    return seconds, restored, len(set(nodes))


def saved_gradients(checkpoint: str, names: list[str]) -> dict[str, torch.Tensor]:
    reader = HuggingFaceStorageReader(str(Path(checkpoint) / "optimizer"))
    entries = reader.read_metadata().state_dict_metadata
    found = {name: torch.zeros(entries[name].size) for name in names}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return {name: value / (1 - BETA) for name, value in found.items()}


def join(given: argparse.Namespace) -> None:
    if given.address is not None:
        ray.init(address=given.address, log_to_driver=False)
        return
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster()
    for _ in range(given.nodes):
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--address")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--micro", type=int, default=2048)
    parser.add_argument("--gradients", action="store_true", help="do not measure the ranks of one machine")
    parser.add_argument("--small", action="store_true", help="use a model of 8 M parameters")
    given = parser.parse_args()
    join(given)
    with tempfile.TemporaryDirectory(prefix="trainer-nodes-") as directory:
        path, saved = f"{directory}/model", f"{directory}/saved"
        parameters = make_model(Path(path), given.small)
        apart, restored, nodes = on_nodes(path, given, saved)
        alone, gradients = on_one_rank(path, given)
        others = saved_gradients(saved, list(gradients))
        differences = {name: float((others[name] - value).abs().max()) for name, value in gradients.items()}
        together = 0.0 if given.gradients else on_one_machine(path, given)
    print(
        json.dumps({
            "parameters": parameters, "ranks": given.ranks, "nodes": nodes, "hybrid": given.hybrid,
            "restored": restored,
            "largest_gradient": max(float(value.abs().max()) for value in gradients.values()),
            "largest_difference": max(differences.values()),
            "seconds_one_rank": round(alone, 2), "seconds_one_machine": round(together, 2),
            "seconds_nodes": round(apart, 2),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
