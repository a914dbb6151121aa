"""How GPUs are divided among the processes of a run, on made-up nodes: every process gets what the page says, or the
run is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from engine.config.check import check_gpus, gpu_notes
from engine.config.gpus import GpuDivision, GpuNeeds, divide_gpus, needs_of, room_for_replicas, shortfall
from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.states.limits import Limits, Pool

APART = Limits(
    train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, scoring_tasks=("ref_logprobs",),
    pools=(
        Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",)), Pool(tasks=("rollout",), replicas=(0, 1)),
    ),
)  # fmt: skip
PLAIN = replace(APART, pools=(), scoring_tasks=())


def needs(limits: Limits = PLAIN, **given: Any) -> GpuNeeds:
    return GpuNeeds(limits=limits, **{"replicas": 2, "sleeps": True, **given})


def parts(division: GpuDivision) -> tuple[float, float, float]:
    return division.replica, division.trainer, division.scorer


def refused(needs: GpuNeeds, nodes: list[float]) -> str:
    with pytest.raises(ConfigError) as caught:
        divide_gpus(needs, nodes)
    return str(caught.value)


# -- without numbers and shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "replicas", "part"), [(2.0, 2, 0.5), (3.0, 2, 1.0), (1.0, 2, 0.25), (5.0, 6, 0.5), (8.0, 1, 1.0)]
)
def test_equal_parts_fill_whole_gpus(gpus: float, replicas: int, part: float) -> None:
    assert parts(divide_gpus(needs(replicas=replicas), [gpus])) == (part, part, 0.0)
    assert gpus * int(1 / part) >= replicas + 1, "each process can be placed"


def test_without_gpus_nothing_is_divided() -> None:
    assert divide_gpus(needs(ranks=4), []) == GpuDivision()


def test_a_process_that_asks_for_a_gpu_is_refused_if_no_node_has_one() -> None:
    assert refused(needs(replica_gpus=1.0, trainer_gpus=4.0, ranks=2), []).startswith(
        "trainer.gpus_per_rank is 2: no node has a GPU; use 0, or join a cluster"
    )
    fix = "no node has a GPU; use 0, or join a cluster with GPUs (cluster.address)"
    assert refused(needs(replica_gpus=0.5, ranks=2), []) == f"rollout.gpus is 0.5: {fix}"
    shared = replace(PLAIN, pools=(Pool(tasks=("rollout", "train"), replicas=(0, 1)),))
    assert refused(needs(shared, replica_gpus=1.0, ranks=2), [0.0]) == f"rollout.gpus is 1: {fix}"


def test_processes_on_the_cpu_take_no_gpu() -> None:
    assert parts(divide_gpus(needs(samples_on_gpus=False), [1.0])) == (0.0, 1.0, 0.0)
    assert parts(divide_gpus(needs(APART, trains_on_gpus=False, ranks=4), [1.0])) == (0.5, 0.0, 0.0)


def test_the_trainer_and_scorers_share_what_replicas_with_a_number_leave() -> None:
    assert parts(divide_gpus(needs(replica_gpus=2.0), [5.0])) == (2.0, 1.0, 0.0)
    assert parts(divide_gpus(needs(replica_gpus=0.5, replicas=1), [1.0])) == (0.5, 0.5, 0.0)
    assert parts(divide_gpus(needs(replica_gpus=0.75), [2.0])) == (0.75, 0.25, 0.0), "a quarter of either GPU is left"
    three = replace(APART, scoring_tasks=("ref_logprobs", "old_logprobs"), pools=(
        *APART.pools[:2], Pool(tasks=("old_logprobs",)), Pool(tasks=("rollout",), replicas=(0, 1)),
    ))  # fmt: skip
    assert parts(divide_gpus(needs(three, replica_gpus=2.0), [6.0])) == (2.0, 0.5, 0.5), "three on two"
    assert refused(needs(replica_gpus=5.0, replicas=1), [5.0]).startswith(
        "rollout.replicas is 1: the replicas use all GPUs, so the trainer has none; use fewer, fewer GPUs for "
    )


# -- ranks and replicas of several GPUs --------------------------------------------------------------------------------


def test_ranks_have_a_gpu_each_on_one_node_and_the_rest_is_shared() -> None:
    assert parts(divide_gpus(needs(ranks=4), [8.0])) == (1.0, 4.0, 0.0)
    assert parts(divide_gpus(needs(ranks=4, trainer_gpus=2.0, replica_gpus=3.0), [8.0])) == (3.0, 2.0, 0.0)
    assert "trainer.ranks is 4: its ranks leave 4 GPUs for 2 replicas of 3 GPUs; use fewer ranks" in refused(
        needs(ranks=4, replica_gpus=3.0), [8.0]
    )
    assert "need 9 GPUs on one node; the largest node has 8; use at most 8" in refused(needs(ranks=9), [8.0, 8.0])
    assert "its ranks reserve 8 GPUs, and none is left for the other processes; use fewer" in refused(
        needs(ranks=8), [8.0]
    )


def test_the_trainer_gets_a_whole_node_and_replicas_the_other() -> None:
    two = needs(ranks=8, replicas=8)
    assert divide_gpus(two, [8.0, 8.0]) == GpuDivision(replica=1.0, trainer=8.0)
    settled = replace(two, replica_gpus=1.0, trainer_gpus=8.0)
    assert room_for_replicas(settled, [8.0, 8.0]) == 8
    assert shortfall(settled, 9, [8.0, 8.0]) == (
        "each needs 1 GPU on one node, 9 in total; the nodes have 8, 8, of which the trainer needs 8: room for 8 of 9"
    )


def test_ranks_of_several_nodes_have_equally_many_gpus_on_each() -> None:
    apart = needs(ranks=16, trainer_nodes=2, replicas=8)
    assert divide_gpus(apart, [8.0, 8.0, 8.0]) == GpuDivision(replica=1.0, trainer=16.0)
    assert room_for_replicas(replace(apart, replica_gpus=1.0, trainer_gpus=16.0), [8.0, 8.0, 8.0]) == 8
    without_replicas = replace(apart, samples_on_gpus=False)
    assert divide_gpus(without_replicas, [8.0, 8.0]) == GpuDivision(trainer=16.0)
    beside = needs(ranks=8, trainer_nodes=2, replicas=8)
    assert divide_gpus(beside, [8.0, 8.0]) == GpuDivision(replica=1.0, trainer=8.0), "four on each node"
    assert room_for_replicas(replace(beside, replica_gpus=2.0, trainer_gpus=6.0), [8.0, 8.0]) == 4, "5 are left on each"


def test_ranks_that_do_not_fit_on_their_nodes_are_refused_with_numbers_that_would() -> None:
    assert refused(needs(ranks=16), [8.0, 8.0, 8.0]) == (
        "trainer.ranks is 16: its ranks need 16 GPUs on one node; the largest node has 8; use at most 8, or "
        "trainer.nodes: 2"
    )
    assert refused(needs(ranks=24, trainer_nodes=2), [8.0, 8.0, 4.0]) == (
        "trainer.ranks is 24: its ranks need 12 GPUs on each of 2 nodes (trainer.nodes); the nodes have 8, 8, 4; use "
        "at most 16"
    )
    assert "the nodes have 8; use trainer.nodes: 1" in refused(needs(ranks=8, trainer_nodes=2), [8.0])


def test_several_nodes_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tree = {"model": {"make": "arithmetic"}, "trainer": {"device": "cpu", "ranks": 4, "nodes": 2}}
    with pytest.raises(ConfigError, match=r"^trainer\.nodes is 2: a run that joins no cluster has one node; use 1, or"):
        check_gpus(parse_config(tree), 0)
    check_gpus(parse_config({**tree, "cluster": {"address": "10.0.0.1:6379"}}), 0)
    for changes, said in (
        ({"ranks": 5}, r"^trainer\.ranks is 5, but must be a multiple of trainer\.nodes = 2: .*; use 6"),
        ({"nodes": 1, "hybrid_sharding": True}, r"^trainer\.hybrid_sharding is True: needs several nodes"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_config({**tree, "trainer": {**tree["trainer"], **changes}})


def test_the_trainer_takes_the_node_that_costs_the_fewest_replicas() -> None:
    assert room_for_replicas(needs(trainer_gpus=3.0, replica_gpus=2.0), [5.0, 4.0]) == 3, (
        "1 on the first, 2 on the other"
    )
    assert room_for_replicas(needs(trainer_gpus=4.0, replica_gpus=8.0), [8.0, 4.0]) == 1


def test_replicas_that_can_never_be_placed_are_refused_with_the_numbers() -> None:
    law = "each needs 2 GPUs on one node, 6 in total; the nodes have 3, 3: room for 2 of 3; use 2"
    assert refused(needs(replicas=3, replica_gpus=2.0), [3.0, 3.0]) == f"rollout.replicas is 3: {law}"
    assert "have 3, 3: room for 0 of 1; use fewer GPUs for a replica" in refused(
        needs(replicas=1, replica_gpus=8.0), [3.0, 3.0]
    )
    spread = needs(replica_gpus=2.0, spread=True)
    assert shortfall(spread, 3, [3.0, 3.0]) == ""
    assert shortfall(spread, 4, [3.0, 3.0]) == "each needs 2 GPUs, 8 in total; the nodes have 3, 3: room for 3 of 4"


SHARED = replace(PLAIN, pools=(Pool(tasks=("rollout", "train"), replicas=(0, 1)),))
LENDING = replace(
    PLAIN, pools=(Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("rollout", "train"), replicas=(2, 3)))
)


def test_ranks_share_all_gpus_of_their_nodes_with_the_replicas_of_their_pool() -> None:
    assert parts(divide_gpus(needs(SHARED, ranks=4), [4.0])) == (1.0, 4.0, 0.0)
    assert parts(divide_gpus(needs(SHARED, ranks=4, replica_gpus=2.0), [4.0])) == (2.0, 4.0, 0.0)
    assert divide_gpus(needs(SHARED, ranks=4), [4.0]).notes == (
        "2 of the 4 GPUs of the trainer's ranks have no replica: raise the number of replicas of their pool, or "
        "tensor_parallel_size",
    )
    twice = replace(SHARED, pools=(replace(SHARED.pools[0], replicas=tuple(range(8))),))
    assert parts(divide_gpus(needs(twice, replicas=8, ranks=4), [4.0])) == (0.5, 4.0, 0.0)
    assert parts(divide_gpus(needs(twice, replicas=8, ranks=8, trainer_nodes=2), [4.0, 4.0])) == (1.0, 8.0, 0.0)
    assert parts(divide_gpus(needs(SHARED, ranks=4, shares=(1.0,)), [4.0])) == (1.0, 4.0, 0.0)
    lent = needs(LENDING, replicas=4, ranks=2)
    assert parts(divide_gpus(lent, [2.0, 2.0])) == (1.0, 2.0, 0.0), "each pool has one of the nodes"
    assert shortfall(replace(lent, replica_gpus=1.0, trainer_gpus=2.0), 4, [2.0, 2.0]) == ""
    assert "room for 2 of 4" in shortfall(replace(lent, replica_gpus=1.0, trainer_gpus=2.0), 4, [2.0])
    assert room_for_replicas(replace(lent, replica_gpus=1.0, trainer_gpus=2.0), [1.0]) == 1, "no room for the ranks"


@pytest.mark.parametrize(
    ("changes", "nodes", "words"),
    [
        (
            {}, [8.0],
            "its ranks use 4 of the 8 GPUs of a node, but ranks that share GPUs with replicas (pools) must use every "
            "GPU of a node; use 8, or set trainer.gpus_per_rank: 2, or give rollout a pool of its own",
        ),
        ({"ranks": 2, "trainer_gpus": 4.0}, [8.0], "; use 4, or set trainer.gpus_per_rank: 4, or give"),
        (
            {"sleeps": False}, [4.0],
            "rollout.engine_args.enable_sleep_mode is False: replicas share the GPUs of the trainer's ranks (pools), "
            "and vLLM frees no memory without its sleep mode; use true",
        ),
        ({"spread": True, "replica_gpus": 2.0}, [4.0], "so each must be on one node; use mp"),
        (
            {"replica_gpus": 4.0}, [4.0],
            "2 of them share the 4 GPUs of the trainer's ranks (pools), and each needs 4 GPUs on one node: room for 1",
        ),
        ({"sends_by_gpu": True}, [4.0, 4.0], "but replicas share those of the trainer's ranks; use gloo"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_share_their_gpus_are_refused(
    changes: dict[str, Any], nodes: list[float], words: str
) -> None:
    assert words in refused(needs(SHARED, **{"ranks": 4, **changes}), nodes)


# -- the GPUs of one process may not be those of another ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "wanted"), [(1.0, "the trainer and the weights store"), (0.0, "replica and the trainer")]
)
def test_weights_that_go_from_gpu_to_gpu_need_all_processes_apart(store: float, wanted: str) -> None:
    sending, least = needs(sends_by_gpu=True, store_gpus=store), 3 + store
    assert parts(divide_gpus(sending, [least])) == (1.0, 1.0, 0.0)
    assert f"{wanted} need separate GPUs, {least:g} in all; there are {least - 1:g}; use gloo" in refused(
        sending, [least - 1]
    )


def test_a_trainer_without_a_gpu_cannot_send_from_one() -> None:
    assert "no GPU to send weights from" in refused(needs(sends_by_gpu=True, trains_on_gpus=False), [4.0])


# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "shares", "given"),
    [
        (2.0, (0.25, 0.125, 0.625), (0.5, 0.5, 0.25)),
        (4.0, (0.25, 0.25, 0.5), (1.0, 1.0, 1.0)),
        (2.0, (), (0.5, 0.5, 0.5)),
        (3.0, (0.333333, 0.333333, 0.333334), (0.5, 1.0, 1.0)),
    ],
)
def test_each_pool_has_its_share(gpus: float, shares: tuple[float, ...], given: tuple[float, ...]) -> None:
    assert divide_gpus(needs(APART, shares=shares), [gpus]) == GpuDivision(
        replica=given[0], trainer=given[1], scorer=given[2]
    )


def test_replicas_and_trainer_of_one_pool_have_equal_parts() -> None:
    shared = replace(APART, pools=(Pool(tasks=("rollout", "ref_logprobs", "train"), replicas=(0, 1)),))
    assert parts(divide_gpus(needs(shared, shares=(1.0,)), [3.0])) == (1.0, 1.0, 0.0)


def test_ranks_and_large_replicas_fill_the_share_of_their_pool() -> None:
    halves = replace(PLAIN, pools=(Pool(tasks=("train",)), Pool(tasks=("rollout",), replicas=(0, 1))))
    full = needs(halves, ranks=4, replica_gpus=2.0, shares=(0.5, 0.5))
    assert divide_gpus(full, [8.0]) == GpuDivision(replica=2.0, trainer=4.0)
    assert refused(replace(full, shares=(0.25, 0.75)), [8.0]) == (
        "pools.0.share 0.25 is 2 of 8 GPUs, but the trainer's ranks need 4; raise it, or use fewer GPUs for a process"
    )


def test_gpus_of_a_share_that_nothing_uses_are_named() -> None:
    assert divide_gpus(needs(APART, shares=(0.5, 0.25, 0.25)), [8.0]).notes == (
        "pool 0 has 4 GPUs by its share, and leaves 3 of them idle: raise trainer.ranks",
        "pool 1 has 2 GPUs by its share, and leaves 1 of them idle: a scorer uses one GPU, so lower the share",
    )
    assert divide_gpus(needs(APART, shares=(0.125, 0.125, 0.75)), [8.0]).notes == (
        "pool 2 has 6 GPUs by its share, and leaves 4 of them idle: raise its replicas, or tensor_parallel_size",
    )


# -- what a user sees --------------------------------------------------------------------------------------------------


def config(**sections: Any) -> Any:
    return parse_config({"model": {"make": "arithmetic"}, **sections})


def test_idle_gpus_are_named_with_the_settings_that_use_them() -> None:
    assert gpu_notes(config(), 8, False) == (
        "5 of 8 GPUs stay idle: raise rollout.replicas to at most 7, or raise trainer.ranks",
    )
    assert gpu_notes(config(), 4, False)[0].startswith("1 of 4 GPUs stays idle: ")
    assert gpu_notes(config(), 3, False) == gpu_notes(config(), None, False) == gpu_notes(config(), 0, False) == ()
    with pytest.raises(ConfigError, match=r"rollout\.gpus is 1: no node has a GPU"):
        gpu_notes(config(rollout={"gpus": 1}), 0, False)
    assert gpu_notes(config(cluster={"address": "auto"}), 8, False) == (), "other nodes count, too"
    served = {"backend": "openai", "urls": ["http://one", "http://two"], "weights_dir": "w"}
    assert gpu_notes(config(rollout=served), 8, False) == ("7 of 8 GPUs stay idle: raise trainer.ranks",)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"rollout": {"device": "cpu"}}, {"samples_on_gpus": False}),
        ({"rollout": {"device": "cpu", "gpus": 1}}, {"samples_on_gpus": True, "replica_gpus": 1.0}),
        ({"trainer": {"device": "cpu", "ranks": 2}}, {"trains_on_gpus": False, "ranks": 1, "trainer_gpus": 0.0}),
        ({"trainer": {"gpus_per_rank": 1, "ranks": 2}}, {"trainer_gpus": 2.0, "ranks": 2}),
        (
            {"rollout": {"backend": "vllm", "engine_args": {"tensor_parallel_size": 2}}},
            {"replica_gpus": 2.0, "spread": False},
        ),
        (
            {"rollout": {"transport": "distributed", "transport_backend": "nccl"}},
            {"sends_by_gpu": True, "store_gpus": 1.0},
        ),
        (
            {"rollout": {"backend": "vllm", "transport": "vllm", "transport_backend": "nccl"}},
            {"sends_by_gpu": True, "store_gpus": 0.0},
        ),
    ],
)
def test_the_needs_of_a_configuration(sections: dict[str, Any], expected: dict[str, Any]) -> None:
    found = needs_of(config(**sections), vllm_for_cpu=False)
    assert {name: getattr(found, name) for name in expected} == expected


def test_vllm_for_cpus_needs_no_gpus() -> None:
    found = needs_of(config(rollout={"backend": "vllm"}), vllm_for_cpu=True)
    assert (found.samples_on_gpus, found.replica_gpus) == (False, 0.0)
