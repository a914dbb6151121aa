"""A run on a cluster of several nodes, in a process of its own: one node is taken away, and another one comes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray_plans import check_record, events_of, paced, plan

from engine.actors.launch import RunHandle, start
from engine.events import GroupGenerated, ProcessLost, ProcessUp
from engine.metrics.status import Status
from engine.runtime.plan import Rollout
from engine.runtime.prompt_sources import listed


def noted(directory: Path, replica: int) -> Rollout:
    """Writes down which node each life of a replica is on."""
    life = len(list(directory.glob(f"node-{replica}-*")))
    (directory / f"node-{replica}-{life}").write_text(ray.get_runtime_context().get_node_id())
    return Rollout(generator=paced(replica))


def until(run: RunHandle, directory: Path, kind: type[Any], count: int) -> Status:
    """Until the record has so many events of a kind."""
    for status in run.updates():
        if len(events_of(directory, kind)) >= count:
            return status
    raise AssertionError(f"the run ended before there were {count} {kind.__name__}")


def lose_a_node(directory: Path) -> dict[str, Any]:
    """Two nodes with room for one replica each; the second is removed, then a third is added."""
    node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**{name: value for name, value in node.items() if name != "include_dashboard"})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        many = plan(
            directory, make_rollout=partial(noted, directory), rollout_gpus=1.0,
            make_prompts=lambda: listed([f"question {n}" for n in range(100_000)]),
        )  # fmt: skip
        many = replace(many, limits=replace(many.limits, replica_restarts=3))
        head = ray.get_runtime_context().get_node_id()
        with start(many) as run:
            until(run, directory, ProcessUp, 2)
            first = {path.name: path.read_text() for path in directory.glob("node-*")}
            at_home = [actor["node_id"] for actor in _actors() if "Rollout" not in actor["class_name"]]
            cluster.remove_node(second, allow_graceful=False)
            until(run, directory, ProcessLost, 1)
            generated = len(events_of(directory, GroupGenerated))
            until(run, directory, GroupGenerated, generated + 40)
            joined = len(events_of(directory, ProcessUp))
            third = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 << 20)
            until(run, directory, ProcessUp, 3)
            run.stop("enough")
            status = run.wait()
        check_record(directory)
        return {
            "outcome": status.outcome, "nodes": set(first.values()), "head": head, "at_home": set(at_home),
            "joined_before": joined, "third": third.node_id,
            "last": max(directory.glob("node-*-1")).read_text(),
            "lost": [(event.kind, event.final, event.reason) for event in events_of(directory, ProcessLost)],
        }  # fmt: skip
    finally:
        ray.shutdown()
        cluster.shutdown()


def _actors() -> list[dict[str, Any]]:
    """Of the whole cluster, which has no dashboard to ask."""
    from ray._private.state import actors

    living = [one for one in actors().values() if one["State"] == "ALIVE"]
    return [{"node_id": one["Address"]["NodeID"], "class_name": one["ActorClassName"]} for one in living]
