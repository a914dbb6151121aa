"""Where actors with GPUs run: shares of what the cluster has, and placement groups for replicas of several GPUs.

Called by `launch.start`, before any actor is, and by `ray_processes.py`, which owns a replica's group for one life of
it. Nothing here waits for a group: an actor that is created in one waits by itself. A group also ends with the actor
that made it.
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

ROUNDED_UP = 1 + 1e-5
"""Shares are given with so many digits: 0.333333 of three GPUs is one."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a rollout actor is created with, and the placement group behind it if there is one."""

    options: dict[str, Any]
    group: Any = field(default=None)

    def free(self) -> None:
        """Give the GPUs back. Whoever still runs there is killed."""
        if self.group is not None:
            remove_placement_group(self.group)


def place(plan: Plan, name: str | None = None) -> Place:
    """For one life of a replica. Returns at once: the actor's creation waits for the GPUs. `name`: of what lies set
    aside, which then outlives the process that set it aside, for `found_place`."""
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
    """What `place` set aside under a name in an earlier process."""
    try:
        return Place({}, get_placement_group(name))
    except ValueError:
        return Place({})


def free_places(launch: str) -> None:
    """Give back whatever is set aside under the names of a launch. Whoever still runs there is killed. Blocks."""
    for entry in placement_group_table().values():
        if entry["name"].startswith(f"{launch}/") and entry["state"] != "REMOVED":
            found_place(entry["name"]).free()


def beside_the_run(gpus: float = 0.0) -> dict[str, Any]:
    """Options of an actor that is to be on this process' node, where the run's directory is. One that needs GPUs may
    be elsewhere, should they be there."""
    here = ray.get_runtime_context().get_node_id()
    return {"num_gpus": gpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=gpus > 0)}


def shortfall(plan: Plan, replicas: int) -> str:
    """Why the cluster, were nothing else in it, could not hold so many replicas; nothing if it could."""
    if not plan.rollout_gpus:
        return ""
    nodes = node_gpus()
    room = _room(plan, nodes)
    if room >= replicas:
        return ""
    have = ", ".join(f"{gpus:g}" for gpus in nodes) or "none"
    where = "" if plan.rollout_spread else " on one node"
    return (
        f"each needs {plan.rollout_gpus:g} GPUs{where}, {replicas * plan.rollout_gpus:g} in all; "
        f"the nodes have {have}: room for {room} of {replicas}"
    )


def node_gpus() -> list[float]:
    """GPUs of each node that has some, the largest first."""
    nodes = [float(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return sorted((gpus for gpus in nodes if gpus), reverse=True)


def room_now(plan: Plan) -> int:
    """How many replicas the cluster, were nothing else in it, could hold, all of them where they need no GPUs."""
    return _room(plan, node_gpus()) if plan.rollout_gpus else len(plan.lives())


def _room(plan: Plan, nodes: list[float]) -> int:
    each = plan.rollout_gpus
    return int(sum(nodes) // each) if plan.rollout_spread else sum(int(gpus * ROUNDED_UP // each) for gpus in nodes)


def with_gpus(plan: Plan) -> Plan:
    """Share the cluster's GPUs out, evenly and at most one to an actor; a plan that says otherwise stands.

    Replicas of several GPUs come first, then the weights store; the trainer has one of what is left.
    Raises: `ConfigError` where the transport, or replicas of several GPUs, need more than there are.
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
            log.warning("the replicas take all GPUs: the trainer has none")
        return dataclasses.replace(plan, trainer_gpus=left, scorer_gpus=left if scorers else 0.0)
    if not gpus or plan.rollout_gpus or plan.trainer_gpus:
        return plan
    if any(plan.pool_shares):
        return dataclasses.replace(plan, **_by_pool(plan, gpus))
    share = part_of(gpus, replicas + 1 + scorers)
    return dataclasses.replace(plan, rollout_gpus=share, trainer_gpus=share, scorer_gpus=share if scorers else 0.0)


def _with_ranks(plan: Plan, nodes: list[float], store: float, scorers: int) -> Plan:
    """The ranks of a trainer have their GPUs on one node; replicas and scorers share what is left."""
    trainer = plan.trainer_gpus or float(plan.trainer_ranks)
    if trainer > max(nodes):
        law = f"its ranks need {trainer:g} GPUs on one node; the largest node has {max(nodes):g}"
        raise ConfigError("trainer.ranks", plan.trainer_ranks, law, f"use at most {max(nodes):g}")
    replicas = len(plan.lives())
    left = sum(nodes) - store - trainer - replicas * plan.rollout_gpus
    if left < 0:
        law = f"its ranks leave {left + replicas * plan.rollout_gpus:g} GPUs to {replicas} replicas"
        raise ConfigError("trainer.ranks", plan.trainer_ranks, law, "use fewer ranks, or fewer replicas")
    sharing = scorers + (0 if plan.rollout_gpus else replicas)
    share = part_of(left, sharing) if sharing else 0.0
    return dataclasses.replace(
        plan, trainer_gpus=trainer, rollout_gpus=plan.rollout_gpus or share, scorer_gpus=share if scorers else 0.0
    )


def part_of(gpus: float, actors: int) -> float:
    """GPUs of each of so many actors: 1, 1/2, 1/4, …, or 0 where there are none. Other parts would not fill whole GPUs:
    2/3 fits into each of two once, and the third actor would wait forever."""
    return 2.0 ** min(0, floor(log2(gpus / actors * ROUNDED_UP))) if gpus > 0 else 0.0


def _by_pool(plan: Plan, gpus: float) -> dict[str, Any]:
    """GPUs of each kind of actor, by the shares of the pools they stand in; actors of one pool have equal parts of it,
    and the smallest part is that of all of their kind. (Tested with nodes that say that they have GPUs.)"""
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
