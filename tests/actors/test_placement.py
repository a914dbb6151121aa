"""Replicas of several GPUs, on a cluster that is configured to have them: groups made, used, given back."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from placed_runs import GPUS, NODES, carried_out, connect, in_turns, ranks_apart, reserved_first

from engine.gpu_request import GpuRequest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster_of_gpus() -> Iterator[ProcessPoolExecutor]:
    """A process with a cluster of its own; that of the other tests has no GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=connect) as pool:
        yield pool


def test_a_new_life_of_a_replica_gets_the_gpus_of_the_one_before(
    cluster_of_gpus: ProcessPoolExecutor, tmp_path: Path
) -> None:
    """Each actor sees the GPUs that it was given, and none if it needs none."""
    changes = {"replicas": 1, "gpus": GpuRequest(replica_gpus=4.0, trains_on_gpus=False)}
    story = cluster_of_gpus.submit(carried_out, tmp_path, deadly=3, **changes).result()
    assert story.outcome == "finished"
    lives = list(story.given.values())
    assert [gpus for _, gpus in lives] == [4, 4], "there are not enough for both at once"
    assert {group for group, _ in lives} == set(story.shapes) and len(story.shapes) == 2
    assert set(story.shapes.values()) == {("STRICT_PACK", (4.0,))}
    assert (story.states, story.free) == ({"REMOVED"}, GPUS)
    replica = story.visible.pop("replica").split(",")
    assert len(replica) == 4 and set(replica) < set(map(str, range(GPUS)))
    assert story.visible == {"scheduler": "", "trainer": ""}


def test_the_trainer_waits_for_a_node_and_gets_it_before_replicas_are_spread(
    cluster_of_gpus: ProcessPoolExecutor, tmp_path: Path
) -> None:
    said, places, free = cluster_of_gpus.submit(reserved_first, tmp_path).result()
    assert said[-2:] == [
        f"the trainer waits for 2 GPUs on one node: 2 of {GPUS} GPUs free",
        f"the replicas wait for 2 GPUs: 1 of {GPUS} GPUs free",
    ]
    assert {process: gpus for process, (_, gpus) in places.items()} == {"trainer": 2, "replica-0": 1, "replica-1": 1}
    nodes = {process: node for process, (node, _) in places.items()}
    assert nodes["replica-0"] == nodes["replica-1"] != nodes["trainer"]
    assert free == GPUS, "its group is freed at the end"


def test_ranks_of_two_nodes_have_two_gpus_on_each(cluster_of_gpus: ProcessPoolExecutor, tmp_path: Path) -> None:
    seen, places, shape, free = cluster_of_gpus.submit(ranks_apart, tmp_path).result()
    assert shape == ("STRICT_SPREAD", [2.0, 2.0])
    assert len(seen) == 2, "of the other node"
    assert {process: gpus for process, (_, gpus) in places.items()} == {"trainer": 2, "replica-0": 1, "replica-1": 1}
    assert free == GPUS, "the ranks of the other node end with the trainer"


def test_ranks_and_replicas_of_their_pool_have_the_same_gpus_in_later_lives_too(
    cluster_of_gpus: ProcessPoolExecutor, tmp_path: Path
) -> None:
    outcome, places, visible, free = cluster_of_gpus.submit(in_turns, tmp_path).result()
    assert outcome == "finished" and (tmp_path / "died").exists()
    assert len({node for node, _ in places.values()}) == 1
    assert {process: gpus for process, (_, gpus) in places.items()} == {"trainer": 0, "replica-0": 1, "replica-1": 1}
    own = [set(visible[f"replica-{replica}"].split(",")) for replica in (0, 1)]
    assert own[0].isdisjoint(own[1]) and own[0] | own[1] < set(map(str, range(NODES[0])))
    assert visible["trainer"] == "all", "those of its node"
    assert free == GPUS
