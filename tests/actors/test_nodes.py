"""Nodes that go and come, on Ray's own cluster of several nodes on this machine."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from node_runs import lose_a_node

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_replica_whose_node_is_lost_waits_for_another_node_at_no_cost(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        story = pool.submit(lose_a_node, tmp_path).result()
    assert story["outcome"] == "stopped"
    assert len(story["nodes"]) == 2, "one replica on each node"
    assert story["at_home"] == {story["head"]}, "scheduler, stores and trainer are where the run's directory is"
    # Until Ray knows that the node is gone, it may place the next life there: that life is lost, too.
    assert {(kind, final) for kind, final, _ in story["lost"]} == {("replica", False)}
    assert story["joined_before"] == 2, "there was no room for it, and nothing was given up"
    assert story["last"] == story["third"]
