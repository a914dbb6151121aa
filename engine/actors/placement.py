"""Assigns GPUs to actors: shares of the cluster's GPUs, and placement groups for replicas with several GPUs.

`launch.start` calls it before it creates actors. `ray_processes.py` also calls it, and owns the placement group of each
replica incarnation. No function here waits for a placement group; the actor that is created in one waits. Without a
name, a group ends with the actor that created it.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from math import floor, log2
from typing import Any

import ray
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from engine.actors.transports import transport_of
from engine.errors import ConfigError
from engine.hardware import gpus_of_their_own
from engine.runtime.plan import Plan

log = logging.getLogger(__name__)

ROUNDING = 1 + 1e-5
"""Tolerance for rounded shares: three shares of 0.333333 GPUs count as one GPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """The Ray options of a rollout actor, and its placement group if it has one."""

    options: dict[str, Any]
    group: Any = field(default=None)

    def free(self) -> None:
        """Remove the placement group, which frees its GPUs. Ray kills the actors that still run in it."""
        if self.group is not None:
            remove_placement_group(self.group)


def place(plan: Plan, name: str | None = None) -> Place:
    """The place of one replica incarnation. Returns at once; the creation of the actor waits for the GPUs. With `name`,
    the placement group is detached, so it survives this process and `found_place` finds it."""
    if plan.rollout_gpus <= 1:
        return Place({"num_gpus": plan.rollout_gpus, "scheduling_strategy": "SPREAD"})
    gpus = int(plan.rollout_gpus)
    bundles = [{"GPU": 1.0}] * gpus if plan.rollout_spread else [{"GPU": float(gpus)}]
    kept = {} if name is None else {"name": name, "lifetime": "detached"}
    group = placement_group(bundles, strategy="PACK" if plan.rollout_spread else "STRICT_PACK", **kept)
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    # Over several nodes vLLM's own Ray workers take the GPUs, one each, and the actor that starts them has none.
    return Place({"num_gpus": 0 if plan.rollout_spread else gpus, "scheduling_strategy": strategy}, group)


def found_place(name: str) -> Place:
    """The placement group that `place` created with this name in an earlier process; without a group if there is
    none."""
    try:
        return Place({}, get_placement_group(name))
    except ValueError:
        return Place({})


def free_places(launch: str) -> None:
    """Remove all placement groups of a launch. Ray kills the actors that still run in them. Blocks."""
    for entry in placement_group_table().values():
        if entry["name"].startswith(f"{launch}/") and entry["state"] != "REMOVED":
            found_place(entry["name"]).free()


def on_this_node(gpus: float = 0.0) -> dict[str, Any]:
    """Ray options of an actor on this process's node, where the run's directory is. An actor with GPUs may run on
    another node if this one has none."""
    here = ray.get_runtime_context().get_node_id()
    return {"num_gpus": gpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=gpus > 0)}


def shortfall(plan: Plan, replicas: int) -> str:
    """Why this number of replicas does not fit into the empty cluster; an empty string if it does."""
    if not plan.rollout_gpus:
        return ""
    nodes = node_gpus()
    room = _room(plan, nodes)
    if room >= replicas:
        return ""
    have = ", ".join(f"{gpus:g}" for gpus in nodes) or "none"
    where = "" if plan.rollout_spread else " on one node"
    return (
        f"each needs {plan.rollout_gpus:g} GPUs{where}, {replicas * plan.rollout_gpus:g} in total; "
        f"the nodes have {have}: room for {room} of {replicas}"
    )


def node_gpus() -> list[float]:
    """The numbers of GPUs of the nodes with GPUs, largest first."""
    nodes = [float(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return sorted((gpus for gpus in nodes if gpus), reverse=True)


def room_now(plan: Plan) -> int:
    """The number of replicas that fit into the empty cluster; all of them if they need no GPUs."""
    return _room(plan, node_gpus()) if plan.rollout_gpus else len(plan.lives())


def _room(plan: Plan, nodes: list[float]) -> int:
    each = plan.rollout_gpus
    return int(sum(nodes) // each) if plan.rollout_spread else sum(int(gpus * ROUNDING // each) for gpus in nodes)


def with_gpus(plan: Plan) -> Plan:
    """Divide the cluster's GPUs evenly among the actors, at most one per actor, unless the plan assigns them.

    Replicas with several GPUs come first, then the weights store. The trainer gets at most one of the others.
    Raises: `ConfigError` if the transport, the trainer's ranks, or replicas with several GPUs need more than exist.
    """
    nodes, replicas = node_gpus(), len(plan.lives())
    store, gpus = transport_of(plan).store_gpus, sum(nodes)
    several = plan.rollout_gpus if plan.rollout_gpus > 1 else 0.0
    scorers = len(plan.limits.scorers())
    needed, who = gpus_of_their_own(replicas, int(several or 1), scorers)
    if store and gpus < needed:
        law = f"{who}; there are {gpus:g}"
        raise ConfigError("rollout.transport_backend", "nccl", law, "use gloo")
    if plan.trainer_ranks > 1 and gpus:
        return _with_ranks(plan, nodes, store, scorers)
    lacking = shortfall(plan, replicas) if several else ""
    if lacking:
        room = _room(plan, nodes)
        fix = f"use {room}" if room else "fewer GPUs for a replica (tensor_parallel_size, rollout.gpus)"
        raise ConfigError("rollout.replicas", replicas, lacking, fix)
    gpus -= store
    if several and not plan.trainer_gpus:
        left = part_of(int(gpus - replicas * several), 1 + scorers)
        if not left:
            log.warning("the replicas use all GPUs, so the trainer has none")
        return dataclasses.replace(plan, trainer_gpus=left, scorer_gpus=left if scorers else 0.0)
    if not gpus or plan.rollout_gpus or plan.trainer_gpus:
        return plan
    if any(plan.pool_shares):
        return dataclasses.replace(plan, **_by_pool(plan, gpus))
    share = part_of(gpus, replicas + 1 + scorers)
    return dataclasses.replace(plan, rollout_gpus=share, trainer_gpus=share, scorer_gpus=share if scorers else 0.0)


def _with_ranks(plan: Plan, nodes: list[float], store: float, scorers: int) -> Plan:
    """Give the trainer's ranks GPUs on one node. Replicas and scorers share the other GPUs."""
    trainer = plan.trainer_gpus or float(plan.trainer_ranks)
    if trainer > max(nodes):
        law = f"its ranks need {trainer:g} GPUs on one node; the largest node has {max(nodes):g}"
        raise ConfigError("trainer.ranks", plan.trainer_ranks, law, f"use at most {max(nodes):g}")
    replicas = len(plan.lives())
    left = sum(nodes) - store - trainer - replicas * plan.rollout_gpus
    if left < 0:
        law = f"its ranks leave {left + replicas * plan.rollout_gpus:g} GPUs for {replicas} replicas"
        raise ConfigError("trainer.ranks", plan.trainer_ranks, law, "use fewer ranks, or fewer replicas")
    sharing = scorers + (0 if plan.rollout_gpus else replicas)
    share = part_of(left, sharing) if sharing else 0.0
    return dataclasses.replace(
        plan, trainer_gpus=trainer, rollout_gpus=plan.rollout_gpus or share, scorer_gpus=share if scorers else 0.0
    )


def part_of(gpus: float, actors: int) -> float:
    """GPUs per actor: 1, 1/2, 1/4, …, or 0 if there are no GPUs. Other parts would not fill whole GPUs: with 2/3 each,
    two GPUs have room for one actor each, and a third actor would never start."""
    return 2.0 ** min(0, floor(log2(gpus / actors * ROUNDING))) if gpus > 0 else 0.0


def _by_pool(plan: Plan, gpus: float) -> dict[str, Any]:
    """GPUs per actor of each kind, from the shares of the pools. The actors of a pool have equal parts of its share.
    All actors of a kind get the smallest part of that kind."""
    parts: dict[str, list[float]] = {"rollout_gpus": [], "trainer_gpus": [], "scorer_gpus": []}
    limits = plan.limits
    for pool, share in zip(limits.pools, plan.pool_shares, strict=False):
        replicas = len(pool.replicas)
        scores = "train" not in pool.tasks and any(task in pool.tasks for task in limits.scoring_tasks)
        standing = {"rollout_gpus": replicas, "trainer_gpus": int("train" in pool.tasks), "scorer_gpus": int(scores)}
        actors = sum(standing.values())
        for name, count in standing.items():
            if count:
                parts[name].append(part_of(gpus * share, actors))
    return {name: min(each) for name, each in parts.items() if each}
