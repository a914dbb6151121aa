"""Assigns GPUs to actors: parts of the cluster's GPUs, and placement groups for the trainer and for replicas with
several GPUs.

`launch.start` calls it before it creates actors. The scheduler actor reserves the trainer's group before it creates any
other process with GPUs. `ray_processes.py` owns the group of each life of a replica; the actor that is created in one
waits for it. A group that is not detached ends with the actor that created it.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from engine.actors.transports import transport_of
from engine.errors import ConfigError, counted
from engine.ids import ReplicaId
from engine.workers.plan import Plan

if TYPE_CHECKING:
    from engine.config.gpus import GpuNeeds


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """The Ray options of a rollout actor, and its placement group if it has one."""

    options: dict[str, Any]
    group: Any = field(default=None)

    def free(self) -> None:
        """Remove the placement group, which frees its GPUs. Ray kills the actors that still run in it."""
        if self.group is not None:
            remove_placement_group(self.group)


def place(plan: Plan, replica: ReplicaId, trainer_group: Any, name: str | None = None) -> ActorPlacement:
    """The place of one life of a replica. Returns at once; the creation of the actor waits for the GPUs. With `name`,
    the placement group is detached, so it survives this process and `found_place` finds it. Replicas that share the
    GPUs of the trainer's ranks are in `trainer_group`."""
    if replica in plan.guests:
        strategy = PlacementGroupSchedulingStrategy(trainer_group)
        return ActorPlacement({"num_gpus": plan.gpus.replica_gpus, "scheduling_strategy": strategy})
    if plan.gpus.replica_gpus <= 1:
        return ActorPlacement({"num_gpus": plan.gpus.replica_gpus, "scheduling_strategy": "SPREAD"})
    gpus = int(plan.gpus.replica_gpus)
    bundles = [{"GPU": 1.0}] * gpus if plan.gpus.spread else [{"GPU": float(gpus)}]
    kept = {} if name is None else {"name": name, "lifetime": "detached"}
    group = placement_group(bundles, strategy="PACK" if plan.gpus.spread else "STRICT_PACK", **kept)
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    # Over several nodes vLLM's own Ray workers take the GPUs, one each, and the actor that starts them has none.
    return ActorPlacement({"num_gpus": 0 if plan.gpus.spread else gpus, "scheduling_strategy": strategy}, group)


NODE_CPU = 0.001
"""CPUs that a trainer without GPUs reserves on each of several nodes, because a bundle cannot be empty."""


def reserve_trainer(plan: Plan, name: str, detached: bool) -> Any:
    """A placement group with the trainer's GPUs: on this node if it has them, or a bundle on each of the trainer's
    nodes. None if the trainer has one node and no GPUs. Returns at once: `trainer_waits` waits for the GPUs. Every
    life of the trainer runs in the group, so nothing else can take its GPUs. `detached`: the group survives this
    process, and `found_place` finds it by its name."""
    each = trainer_gpus_of_node(plan)
    lifetime = "detached" if detached else None
    if plan.gpus.trainer_nodes > 1:
        bundle = {"GPU": each} if each else {"CPU": NODE_CPU}
        return placement_group(
            [bundle] * plan.gpus.trainer_nodes, strategy="STRICT_SPREAD", name=name, lifetime=lifetime
        )
    if not each:
        return None
    here = ray.get_runtime_context().get_node_id()
    return placement_group(
        [{"GPU": each}], strategy="STRICT_PACK", name=name, lifetime=lifetime, _soft_target_node_id=here
    )


def trainer_gpus_of_node(plan: Plan) -> float:
    """The trainer's GPUs on each of its nodes."""
    return plan.gpus.trainer_gpus / plan.gpus.trainer_nodes


def trainer_takes(plan: Plan) -> float:
    """GPUs that Ray gives to the trainer's actor on each node. If replicas share them, Ray gives them to the replicas,
    and the trainer sees all GPUs of its nodes: `config.gpus` makes sure that these are its own."""
    return 0.0 if plan.guests else trainer_gpus_of_node(plan)


def trainer_waits(plan: Plan, group: Any, timeout_s: float) -> str:
    """What the trainer still waits for after `timeout_s`; empty once its GPUs are reserved. Blocks."""
    if group is None or group.wait(timeout_s):
        return ""
    state = f": {_free_text(free_gpus())}" if plan.gpus.trainer_gpus else ""
    return f"the trainer waits for {_trainer_place(plan)}{state}"


def replicas_wait(plan: Plan) -> str:
    """What replicas that are about to start will wait for, because other programs use the GPUs; empty if nothing."""
    from engine.config.gpus import ROUNDING, gpus_text

    needed, free = plan.gpus.replica_gpus * (len(plan.lives()) - len(plan.guests)), free_gpus()
    return f"the replicas wait for {gpus_text(needed)}: {_free_text(free)}" if needed > free * ROUNDING else ""


def free_gpus() -> float:
    """GPUs of the cluster that nothing uses."""
    return float(ray.available_resources().get("GPU", 0.0))


def _free_text(free: float) -> str:
    from engine.config.gpus import gpus_text

    return f"{free:g} of {gpus_text(sum(node_gpus()))} free"


def _trainer_place(plan: Plan) -> str:
    """What the trainer needs."""
    from engine.config.gpus import gpus_text

    nodes = "one node" if plan.gpus.trainer_nodes == 1 else f"each of {plan.gpus.trainer_nodes} nodes"
    return (
        f"{gpus_text(trainer_gpus_of_node(plan))} on {nodes}"
        if plan.gpus.trainer_gpus
        else f"{plan.gpus.trainer_nodes} nodes"
    )


def in_group(group: Any, gpus: float) -> dict[str, Any]:
    """Ray options of an actor in the first bundle of a placement group, or on this node if there is no group."""
    if group is None:
        return on_this_node()
    return {
        "num_gpus": gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }


def found_place(name: str) -> ActorPlacement:
    """The placement group that `place` created with this name in an earlier process; without a group if there is
    none."""
    try:
        return ActorPlacement({}, get_placement_group(name))
    except ValueError:
        return ActorPlacement({})


def free_places(launch: str) -> None:
    """Remove all placement groups of a launch, also of an earlier process, whose groups cannot be found by name: each
    has its own namespace. Ray kills the actors that still run in them. Blocks."""
    for number, entry in placement_group_table().items():
        if entry["name"].startswith(f"{launch}/") and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(number)))


def on_this_node(gpus: float = 0.0) -> dict[str, Any]:
    """Ray options of an actor on this process's node, where the run's directory is. An actor with GPUs may run on
    another node if this one has none."""
    here = ray.get_runtime_context().get_node_id()
    return {"num_gpus": gpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=gpus > 0)}


def shortfall(plan: Plan, replicas: int) -> str:
    """Why this number of replicas does not fit into the empty cluster; an empty string if it does."""
    from engine.config import gpus  # late: most actors do not load the configuration

    return gpus.shortfall(_needs(plan), replicas, node_gpus())


def trainer_shortfall(plan: Plan) -> str:
    """Why the trainer does not fit into the empty cluster; an empty string if it does."""
    nodes, each = node_gpus(), trainer_gpus_of_node(plan)
    fitting = sum(gpus >= each for gpus in nodes) if each else node_count()
    if fitting >= plan.gpus.trainer_nodes:
        return ""
    there = f"there {'is' if fitting == 1 else 'are'} {fitting}"
    have = f"the nodes have {', '.join(f'{gpus:g}' for gpus in nodes) or 'none'}" if each else there
    return f"it needs {_trainer_place(plan)}; {have}"


def node_gpus() -> list[float]:
    """The numbers of GPUs of the nodes with GPUs, largest first."""
    nodes = [float(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return sorted((gpus for gpus in nodes if gpus), reverse=True)


def node_count() -> int:
    """The number of nodes that can have ranks without GPUs."""
    return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())


def room_now(plan: Plan) -> int:
    """The number of replicas that fit into the empty cluster; all of them if they need no GPUs."""
    from engine.config.gpus import room_for_replicas

    return room_for_replicas(_needs(plan), node_gpus()) if plan.gpus.replica_gpus else len(plan.lives())


def with_gpus(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the GPUs of each process in this cluster, and notes on GPUs that stay idle.

    Raises: `ConfigError` as `config.gpus.divide_gpus`, or if there are too few nodes for the trainer.
    """
    from engine.config.gpus import divide_gpus

    if plan.gpus.trainer_nodes > 1 and (nodes := node_count()) < plan.gpus.trainer_nodes:
        fix = f"use at most {nodes}, or join a cluster of more nodes (cluster.address)"
        raise ConfigError("trainer.nodes", plan.gpus.trainer_nodes, f"the cluster has {counted(nodes, 'node')}", fix)
    given = divide_gpus(_needs(plan), node_gpus())
    gpus = dataclasses.replace(
        plan.gpus, replica_gpus=given.replica, trainer_gpus=given.trainer, scorer_gpus=given.scorer
    )
    return dataclasses.replace(plan, gpus=gpus), given.notes


def _needs(plan: Plan) -> "GpuNeeds":
    from engine.config.gpus import of_processes

    return of_processes(
        plan.gpus,
        limits=plan.limits,
        replicas=len(plan.lives()),
        sends_by_gpu=plan.transport is not None and plan.transport.backend == "nccl",
        store_gpus=transport_of(plan).store_gpus,
    )
