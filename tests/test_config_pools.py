"""The pools section: every published layout, what the scheduler gets of it, and what it refuses."""

from typing import Any

import pytest

from engine.config import pools as pools_module
from engine.config.check import check_config
from engine.config.loading import parse_config
from engine.config.pools import surprises, threads_of_scorers
from engine.states.limits import AddedState, Pool

SCORES = {"kl_loss_coef": 0.1, "old_policy": "proximal", "epochs_per_batch": 2}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools_module.os, "cpu_count", lambda: 16)


def config(*pools: dict[str, Any], **sections: Any) -> Any:
    given: dict[str, Any] = {"model": {"make": "arithmetic"}, "trainer": SCORES, "pools": list(pools), **sections}
    return parse_config(given)


def pool(*tasks: str, **options: Any) -> dict[str, Any]:
    return {"tasks": list(tasks), **options}


TRAINERS = ("old_logprobs", "ref_logprobs", "train")


@pytest.mark.parametrize(
    ("pools", "built", "scorers", "threads"),
    [
        (
            [pool(*TRAINERS, share=0.5), pool("rollout", share=0.5)],
            [Pool(tasks=TRAINERS), Pool(tasks=("rollout", "reward", "validation"), replicas=(0, 1))],
            (),
            (4, 8, ()),
        ),
        (
            [pool("old_logprobs", "train", share=0.5), pool("ref_logprobs", share=0.25), pool("rollout", share=0.25)],
            [
                Pool(tasks=("old_logprobs", "train")),
                Pool(tasks=("ref_logprobs",)),
                Pool(tasks=("rollout", "reward", "validation"), replicas=(0, 1)),
            ],
            (("ref_logprobs",),),
            (2, 8, (4,)),
        ),
        (
            [pool(task, share=0.25) for task in (*TRAINERS, "rollout")],
            [
                *(Pool(tasks=(task,)) for task in TRAINERS),
                Pool(tasks=("rollout", "reward", "validation"), replicas=(0, 1)),
            ],
            (("old_logprobs",), ("ref_logprobs",)),
            (2, 4, (4, 4)),
        ),
        (
            [pool("rollout", *TRAINERS, share=1.0)],
            [Pool(tasks=("rollout", "reward", *TRAINERS, "validation"), replicas=(0, 1))],
            (),
            (8, 16, ()),
        ),
    ],
    ids=["two halves", "reference apart", "all apart", "colocated"],
)
def test_published_layouts(
    pools: list[Any], built: list[Pool], scorers: tuple[Any, ...], threads: tuple[int, int, tuple[int, ...]]
) -> None:
    made = config(*pools)
    limits = made.limits
    assert list(limits.pools) == built
    assert limits.scorers() == scorers
    assert limits.scored_apart == tuple(task for tasks in scorers for task in tasks)
    given = (made.rollout.threads, made.trainer.threads, threads_of_scorers(made, limits.scorers()))
    assert given == threads
    again = parse_config(made.model_dump(mode="json"))
    assert again == made and again.limits == limits


def test_without_pools_nothing_changes() -> None:
    made = config()
    assert made.limits.pools == () and made.limits.added_states == ()
    assert (made.rollout.threads, made.trainer.threads) == (1, 0)
    assert not [line for line in check_config(made) if "pool" in line.split(":")[1]]


def test_threads_that_are_given_stay_and_small_shares_are_one_thread() -> None:
    pools = [pool("rollout", share=0.01), pool("train", share=0.99)]
    assert config(*pools).rollout.threads == 1
    made = config(*pools, rollout={"threads": 3}, trainer={**SCORES, "threads": 2})
    assert (made.rollout.threads, made.trainer.threads) == (3, 2)


def test_replicas_stand_in_several_pools() -> None:
    made = config(
        pool("rollout", replicas=1, share=0.25), pool("rollout", "train", replicas=2, share=0.75),
        rollout={"replicas": 3},
    )  # fmt: skip
    first, shared = made.limits.pools
    assert (first.replicas, shared.replicas) == ((0,), (1, 2))
    assert shared.shared and not first.shared
    assert made.rollout.threads == 4, "the least that any pool allows"


def test_a_pool_of_validation_alone_is_validation_of_its_own() -> None:
    made = config(pool("rollout"), pool("train"), pool("validation", replicas=2))
    assert (made.validation.placement, made.validation.replicas) == ("own", 2)
    limits = made.limits
    assert list(limits.validators()) == [2, 3]
    assert limits.pools[2] == Pool(tasks=("validation",), replicas=(2, 3)) and "validation" not in limits.pools[0].tasks
    own = config(pool("rollout"), pool("train"), validation={"placement": "own"}).limits
    assert own.pools[-1] == Pool(tasks=("validation",), replicas=(2,)) and "validation" not in own.pools[0].tasks


def test_a_pool_of_reward_alone_is_a_state_of_its_own() -> None:
    made = config(pool("rollout"), pool("train"), pool("reward", slots=5))
    assert made.limits.added_states == (AddedState(name="rewarding", concurrency=5),)
    assert "reward" not in made.limits.pools[0].tasks
    assert config(pool("rollout"), pool("train"), pool("reward")).limits.added_states[0].concurrency == 8


def test_the_layout_is_reported() -> None:
    text = "\n".join(check_config(config(pool("rollout", *TRAINERS, share=0.5), pool("reward", slots=5, share=0.5))))
    assert "ok: pool 0: rollout, old_logprobs, ref_logprobs, train, validation; 50% of the threads" in text
    assert "replicas 0 to 1; its tasks take turns, and its replicas sleep meanwhile" in text
    assert "ok: pool 1: reward; 50% of the threads; 5 groups at once" in text
    idle = "\n".join(check_config(config(pool("rollout"), pool("train"), pool("ref_logprobs"), trainer={})))
    assert "nothing asks for ref_logprobs" in idle


def test_nothing_is_said_of_tasks_that_no_pool_names() -> None:
    lines = check_config(config(pool("rollout"), pool("train"), trainer={}))
    assert not [line for line in lines if "nothing asks for" in line]


@pytest.mark.parametrize(
    ("backend", "arguments", "tasks", "noted"),
    [
        ("vllm", {}, ("rollout", "train"), True),
        ("vllm", {"enable_sleep_mode": True}, ("rollout", "train"), False),
        ("vllm", {}, ("rollout",), False),
        ("torch", {}, ("rollout", "train"), False),
    ],
)
def test_replicas_that_keep_their_memory_while_others_have_the_pool_are_noted(
    backend: str, arguments: dict[str, Any], tasks: tuple[str, ...], noted: bool
) -> None:
    others = [] if "train" in tasks else [pool("train")]
    made = config(pool(*tasks), *others, rollout={"backend": backend, "engine_args": arguments})
    assert any("without enable_sleep_mode" in note for note in surprises(made)) == noted


def test_scheduler_options_of_the_published_modes_are_passed_on() -> None:
    asked = {"train_after_sync": True, "async_ratio": 0.5, "max_staleness_steps": 1}
    limits = config(pool("rollout"), pool("train"), scheduler=asked).limits
    assert (limits.train_after_sync, limits.async_ratio) == (True, 0.5)
    assert limits.max_concurrent_groups == 12, "as many as may be held: (1 + a)·B"
