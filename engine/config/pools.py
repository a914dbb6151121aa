"""The laws of `pools`: which tasks may share hardware, and what each pool gets of it.

Called by `schema.Config`, which builds `Limits.pools` from it. Tasks that share a pool take turns on it. A task that no
pool names stays where it is without pools: scoring in the trainer, reward and validation in the replicas.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from engine.config.sections import PoolSection, Sections
from engine.errors import ConfigError, choice
from engine.ids import ReplicaId
from engine.states.limits import REWARDING, TASKS, TRAINER_TASKS, AddedState, Limits, Pool

TOLERANCE = 1e-6


def check_pools(config: Sections) -> None:
    """Raises: `ConfigError` for pools with which no run is possible."""
    pools = config.pools
    if not pools:
        return
    _check_names(pools)
    _check_homes(pools)
    _check_shares(pools)
    for place, pool in _placed(pools):
        if pool.replicas is not None and "rollout" not in pool.tasks and pool.tasks != ["validation"]:
            law = "only a pool with rollout, or with validation alone, has replicas"
            raise ConfigError(f"{place}.replicas", pool.replicas, law, "remove it")
        if pool.slots is not None and pool.tasks != ["reward"]:
            law = "only a pool with reward alone has slots"
            raise ConfigError(f"{place}.slots", pool.slots, law, "remove it")
        if pool.tasks == ["reward"] and not config.reward.assigned and config.model.make != "arithmetic":
            law = "the agents or the environment compute the reward, so this pool would do nothing"
            raise ConfigError(
                f"{place}.tasks", pool.tasks, law, "set reward.function, or move reward to a pool with rollout"
            )
        if pool.tasks == ["validation"] and not _measures(config):
            law = "the run has no validation prompts, or never validates"
            fix = "remove the pool, or set data.validation_path and validation"
            raise ConfigError(f"{place}.tasks", pool.tasks, law, fix)
    _check_replicas(config)


def settle_pools(config: Sections) -> Sections:
    """The sections with the threads that were left open, from the pools' shares, and with validation's own replicas.

    Raises: `ConfigError` if the validation section and a pool disagree.
    """
    sections: dict[str, Any] = {}
    rollout, trainer, cores = config.rollout, config.trainer, os.cpu_count() or 1
    if not rollout.threads:
        standing = replicas_of_pools(config)
        pools = zip(config.pools, standing, strict=True)
        shares = [pool.share * cores / len(replicas) for pool, replicas in pools if replicas and pool.share]
        sections["rollout"] = rollout.model_copy(update={"threads": max(1, int(min(shares, default=1)))})
    if not trainer.threads:
        share = next((pool.share for pool in config.pools if "train" in pool.tasks), None)
        if share is not None:
            sections["trainer"] = trainer.model_copy(update={"threads": max(1, int(share * cores))})
    own = next((pool for pool in config.pools if pool.tasks == ["validation"]), None)
    if own is not None:
        sections["validation"] = _own_validation(config, own)
    return config.model_copy(update=sections)


def limit_pools(config: Sections) -> tuple[Pool, ...]:
    """The pools for the scheduler: every task of the run is in a pool, and replicas are numbered."""
    if not config.pools:
        return ()
    named = {task for pool in config.pools for task in pool.tasks}
    own = ["validation"] if config.validation.placement == "own" else []
    rollouts = config.rollout.replicas
    validators = tuple(range(rollouts, rollouts + config.validation.replicas))
    left = {"train": [task for task in TRAINER_TASKS if task not in named], "rollout": []}
    left["rollout"] = [task for task in ("reward", "validation") if task not in [*named, *own]]
    pools = []
    for pool, replicas in zip(config.pools, replicas_of_pools(config), strict=True):
        tasks = list(pool.tasks)
        for home in [home for home in left if home in tasks]:
            tasks += left.pop(home)
        standing = validators if pool.tasks == ["validation"] else replicas
        pools.append(Pool(tasks=tuple(task for task in TASKS if task in tasks), replicas=standing))
    if own and "validation" not in named and _measures(config):
        pools.append(Pool(tasks=("validation",), replicas=validators))
    return tuple(pools)


def rewarding(config: Sections) -> tuple[AddedState, ...]:
    """The state in which groups are rewarded, if `reward` has a pool of its own."""
    alone = (pool for pool in config.pools if pool.tasks == ["reward"])
    return tuple(AddedState(name=REWARDING, concurrency=pool.slots or config.rollout.slots) for pool in alone)


def replicas_of_pools(config: Sections) -> list[tuple[ReplicaId, ...]]:
    """The replicas in each pool, numbered in the pools' order."""
    standing: list[tuple[ReplicaId, ...]] = []
    first = 0
    for pool in config.pools:
        count = (pool.replicas or config.rollout.replicas) if "rollout" in pool.tasks else 0
        standing.append(tuple(range(first, first + count)))
        first += count
    return standing


def threads_of_scorers(config: Sections, scorers: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """CPU threads of each scorer, by its pool's share; without shares, as many as the trainer has."""
    cores = os.cpu_count() or 1
    shares = {task: pool.share for pool in config.pools for task in pool.tasks}
    given = [shares.get(tasks[0]) for tasks in scorers]
    return tuple(config.trainer.threads if share is None else max(1, int(share * cores)) for share in given)


def layout(config: Sections, limits: Limits) -> Iterator[str]:
    """The lines of `engine check` on the pools, one for each."""
    needed = {"rollout", "reward", "train", *limits.scoring_tasks}
    shares = [pool.share for pool in config.pools]
    for number, pool in enumerate(limits.pools):
        share = shares[number] if number < len(shares) else None
        parts = [f"{share:.0%} of the threads" if share is not None else ""]
        parts += [f"replicas {pool.replicas[0]} to {pool.replicas[-1]}" if pool.replicas else ""]
        if pool.tasks == ("reward",):
            parts.append(f"{config.pools[number].slots or config.rollout.slots} groups at once")
        turns = "its tasks take turns, and its replicas sleep meanwhile" if pool.shared else ""
        named = config.pools[number].tasks if number < len(config.pools) else []
        idle = [task for task in pool.tasks if task in named and task in TRAINER_TASKS and task not in needed]
        parts += [turns, f"nothing asks for {' and '.join(idle)}" if idle else ""]
        yield "; ".join([f"pool {number}: {', '.join(pool.tasks)}", *filter(None, parts)])


def surprises(config: Sections) -> Iterator[str]:
    """The notes of `engine check` on the pools."""
    rollout = config.rollout
    shared = any(pool.shared for pool in limit_pools(config))
    if shared and rollout.backend == "vllm" and not rollout.engine_args.get("enable_sleep_mode"):
        yield "rollout.engine_args without enable_sleep_mode: replicas keep their memory while their pool trains"


def _measures(config: Sections) -> bool:
    v = config.validation
    return config.held_out and bool(v.at_start or v.every or v.at_end)


def _placed(pools: Sequence[PoolSection]) -> list[tuple[str, PoolSection]]:
    return [(f"pools.{number}", pool) for number, pool in enumerate(pools)]


def _check_names(pools: Sequence[PoolSection]) -> None:
    for place, pool in _placed(pools):
        for task in pool.tasks:
            if task not in TASKS:
                raise ConfigError(f"{place}.tasks", task, "is not a task", choice(task, TASKS))
        if len(set(pool.tasks)) < len(pool.tasks):
            fix = f"use {list(dict.fromkeys(pool.tasks))}"
            raise ConfigError(f"{place}.tasks", pool.tasks, "names a task twice", fix)


def _check_homes(pools: Sequence[PoolSection]) -> None:
    for place, pool in _placed(pools):
        for task in ("reward", "validation"):
            if task in pool.tasks and len(pool.tasks) > 1 and "rollout" not in pool.tasks:
                law = f"{task} must share a pool with rollout or have a pool of its own"
                raise ConfigError(
                    f"{place}.tasks", pool.tasks, law, f"add rollout, put {task} into a pool of its own, or remove it"
                )
    named = [task for pool in pools for task in pool.tasks]
    if "rollout" not in named:
        raise ConfigError("pools", named, "rollout is in no pool", "add a pool with the task rollout")


def _check_shares(pools: Sequence[PoolSection]) -> None:
    shares = [pool.share for pool in pools]
    given = [share for share in shares if share is not None]
    if given and len(given) < len(shares):
        law = "other pools have a share"
        raise ConfigError(f"pools.{shares.index(None)}.share", None, law, "give every pool a share, or none")
    if given and abs(sum(given) - 1) > TOLERANCE:
        fix = ", ".join(f"{share / sum(given):.4g}" for share in given)
        raise ConfigError("pools.share", given, f"must add up to 1, not to {sum(given):g}", f"use {fix}")


def _check_replicas(config: Sections) -> None:
    wanted, rolling = config.rollout.replicas, [pool for pool in config.pools if "rollout" in pool.tasks]
    for place, pool in _placed(config.pools):
        if len(rolling) > 1 and "rollout" in pool.tasks and pool.replicas is None:
            law = f"required if {len(rolling)} pools share rollout.replicas = {wanted}"
            raise ConfigError(f"{place}.replicas", None, law, f"for example {max(1, wanted // len(rolling))}")
    standing = sum(pool.replicas or wanted for pool in rolling)
    if standing != wanted:
        law = f"the replicas of the pools with rollout add up to {standing}"
        raise ConfigError("rollout.replicas", wanted, law, f"use {standing}, or change the pools")


def _own_validation(config: Sections, own: PoolSection) -> Any:
    """The validation section that results from validation's own pool. Raises: `ConfigError` if they disagree."""
    section, given = config.validation, config.validation.model_fields_set
    if "placement" in given and section.placement != "own":
        law = "validation has a pool of its own"
        raise ConfigError("validation.placement", section.placement, law, "use own, or remove it")
    if "replicas" in given and own.replicas not in (None, section.replicas):
        law = f"validation's own pool has {own.replicas} replicas"
        raise ConfigError("validation.replicas", section.replicas, law, f"use {own.replicas}, or remove it")
    return section.model_copy(update={"placement": "own", "replicas": own.replicas or section.replicas})
