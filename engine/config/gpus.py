"""Divides GPUs among the processes of a run. Pure: the GPUs of each node come in, numbers of GPUs come out.

`check.py` asks it about this machine, and `actors.placement` about the cluster. docs/HARDWARE.md has its rules.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import floor, log2
from typing import Any

from engine.config.rollout import RolloutSection
from engine.config.schema import Config
from engine.errors import ConfigError, counted
from engine.gpu_request import GpuRequest
from engine.rollout.vllm.engine_args import workers_of
from engine.states.limits import Limits, Pool

ROUNDING = 1 + 1e-5
"""Tolerance for rounded shares: three shares of 0.333333 GPUs count as one GPU."""


def gpus_text(gpus: float) -> str:
    """`1 GPU`, `0.5 GPUs`."""
    return f"{gpus:g} GPU{'s' * (gpus != 1)}"


# -- what a run needs, and what it gets --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeeds(GpuRequest):
    """The processes of a run, and the GPUs that each asks for."""

    limits: Limits
    replicas: int
    """Including those that only validate."""
    sends_by_gpu: bool = False
    """Whether weights go from GPU to GPU, so that processes must not share one."""
    store_gpus: float = 0.0

    @property
    def trainer_reserves(self) -> float:
        """GPUs that the trainer needs on its nodes; 0: a computed part."""
        return self.trainer_gpus or (float(self.ranks) if self.ranks > 1 and self.trains_on_gpus else 0.0)

    @property
    def reserves_of_node(self) -> float:
        """GPUs that the trainer needs on each of its nodes; 0: a computed part."""
        return self.trainer_reserves / self.trainer_nodes

    @property
    def guests(self) -> int:
        """Replicas on the GPUs that the trainer reserves: those of its pool, if it has several ranks."""
        on_gpus = self.trains_on_gpus and self.samples_on_gpus
        return len(self.limits.beside_trainer) if on_gpus and self.ranks > 1 else 0

    @property
    def apart(self) -> int:
        """Replicas on other GPUs."""
        return self.replicas - self.guests

    @property
    def scorers(self) -> int:
        return len(self.limits.scorers()) if self.trains_on_gpus else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDivision:
    """GPUs of each process of a kind. Below 1, it is a part of one GPU."""

    replica: float = 0.0
    trainer: float = 0.0
    scorer: float = 0.0
    notes: tuple[str, ...] = ()
    """GPUs that stay idle."""


def request_of(config: Config, vllm_for_cpu: bool) -> GpuRequest:
    """What a configuration asks for. `vllm_for_cpu`: vLLM is installed for CPUs."""
    rollout, trainer = config.rollout, config.trainer
    on_cpu = trainer.device == "cpu"
    return GpuRequest(
        sleeps=rollout.backend != "vllm" or bool(rollout.engine_args.get("enable_sleep_mode")),
        replica_gpus=replica_gpus(rollout, vllm_for_cpu),
        spread=rollout.engine_args.get("distributed_executor_backend") == "ray",
        samples_on_gpus=samples_on_gpus(rollout, vllm_for_cpu),
        trainer_gpus=float(trainer.ranks * trainer.gpus_per_rank),
        ranks=1 if on_cpu else trainer.ranks,
        trainer_nodes=trainer.nodes,
        trains_on_gpus=not on_cpu,
        shares=tuple(pool.share or 0.0 for pool in config.pools),
    )


def needs_of(config: Config, vllm_for_cpu: bool) -> GpuNeeds:
    """The same, with the processes of the run."""
    rollout, limits = config.rollout, config.limits
    return of_processes(
        request_of(config, vllm_for_cpu),
        limits=limits,
        replicas=rollout.replicas + len(limits.validators()),
        sends_by_gpu=rollout.transport != "object_store" and rollout.transport_backend == "nccl",
        store_gpus=float(rollout.transport == "distributed" and rollout.transport_backend == "nccl"),
    )


def of_processes(request: GpuRequest, **processes: Any) -> GpuNeeds:
    """What the processes of a run need. `processes`: the other fields of `GpuNeeds`."""
    return GpuNeeds(**{one.name: getattr(request, one.name) for one in fields(GpuRequest)}, **processes)


def replica_gpus(rollout: RolloutSection, vllm_for_cpu: bool) -> float:
    """GPUs that Ray reserves for a replica; 0: a computed part."""
    workers = workers_of(rollout.engine_args) if rollout.backend == "vllm" and not vllm_for_cpu else 1
    return rollout.gpus or (workers if workers > 1 else 0.0)


def samples_on_gpus(rollout: RolloutSection, vllm_for_cpu: bool) -> bool:
    """Whether replicas use GPUs. Those of servers only send requests."""
    if rollout.gpus > 0 or rollout.served:
        return rollout.gpus > 0
    return not vllm_for_cpu if rollout.backend == "vllm" else rollout.device != "cpu"


# -- the GPUs of the nodes ---------------------------------------------------------------------------------------------


class FreeGpus:
    """What is left of each GPU, by node."""

    def __init__(self, nodes: Iterable[float]) -> None:
        self.nodes = [[1.0] * int(gpus) for gpus in nodes]

    @property
    def whole(self) -> int:
        return sum(left == 1.0 for node in self.nodes for left in node)

    def room(self, each: float) -> int:
        """The number of processes that fit, each on one node; below 1, each on one GPU."""
        return sum(_room(node, each) for node in self.nodes)

    def place(self, processes: int, each: float) -> int:
        """Place processes while there is room. Returns the number of those that do not fit."""
        for node in self.nodes:
            while processes and _room(node, each):
                processes -= 1
                _take(node, each)
        return processes

    def place_apart(self, gpus: float, replica: float, nodes: int = 1) -> None:
        """Place one process on each of `nodes` nodes, or on fewer if not all fit. Chooses nodes where the processes
        cost the fewest replicas of `replica` GPUs."""
        fitting = [node for node in self.nodes if _room(node, gpus)]
        fitting.sort(key=lambda node: _room(node, replica) - _room(_after(node, gpus), replica))
        for node in fitting[:nodes]:
            _take(node, gpus)

    def merge(self) -> None:
        """Treat all nodes as one, for replicas whose GPUs may be on several."""
        self.nodes = [[left for node in self.nodes for left in node]]


def _room(node: Sequence[float], each: float) -> int:
    if each >= 1:
        return int(sum(left == 1.0 for left in node) // each)
    return sum(int(left * ROUNDING / each) for left in node)


def _take(node: list[float], each: float) -> None:
    if each < 1:
        index = min((index for index, left in enumerate(node) if left * ROUNDING >= each), key=node.__getitem__)
        node[index] = max(0.0, node[index] - each)
        return
    for _ in range(int(each)):
        node[node.index(1.0)] = 0.0


def _after(node: Sequence[float], each: float) -> list[float]:
    rest = list(node)
    _take(rest, each)
    return rest


def part_of(gpus: float, processes: int) -> float:
    """GPUs of each process: 1, 1/2, 1/4, …, or 0 if there are no GPUs. Other parts would not fill whole GPUs: with 2/3
    each, two GPUs have room for one process each, and a third process would never start."""
    return 2.0 ** min(0, floor(log2(gpus / processes * ROUNDING))) if gpus > 0 else 0.0


# -- the division ------------------------------------------------------------------------------------------------------


def divide_gpus(needs: GpuNeeds, nodes: Sequence[float]) -> GpuDivision:
    """The GPUs of each process. `nodes`: the number of GPUs of each node.

    Trainer and store are placed first, then replicas that ask for a number of GPUs. The others get equal parts of the
    rest, or of their pool's share. Replicas in the pool of several ranks get equal parts of the trainer's GPUs.
    Raises: `ConfigError` for processes that can never be placed, or would have no GPU.
    """
    gpus, trainer = sum(nodes), needs.trainer_reserves
    _require_separate(needs, gpus)
    fix = "use 0, or join a cluster with GPUs (cluster.address)"
    if not gpus and needs.trainer_gpus:
        each = int(needs.trainer_gpus / needs.ranks)
        raise ConfigError("trainer.gpus_per_rank", each, "no node has a GPU", fix)
    if not gpus and needs.replica_gpus:
        raise ConfigError("rollout.gpus", int(needs.replica_gpus) or needs.replica_gpus, "no node has a GPU", fix)
    if not gpus:
        return GpuDivision()
    _require_trainer(needs, nodes)
    _require_guests(needs, nodes)
    free = _after_reserved(needs, nodes)
    if any(needs.shares):
        division = _by_pool(needs, gpus - needs.store_gpus)
    else:
        part = _equal_part(needs, free)
        parts = [part] * bool(needs.apart) + [_guest_part(needs)] * bool(needs.guests)
        division = GpuDivision(
            replica=needs.replica_gpus or (min(parts, default=0.0) if needs.samples_on_gpus else 0.0),
            trainer=trainer or (part if needs.trains_on_gpus else 0.0),
            scorer=part if needs.scorers else 0.0,
        )
    settled = replace(needs, replica_gpus=division.replica, trainer_gpus=division.trainer)
    free = _after_reserved(settled, nodes)
    if division.scorer and free.place(needs.scorers, division.scorer):
        law = (
            f"no room for {counted(needs.scorers, 'scorer')} of {gpus_text(division.scorer)} beside the other processes"
        )
        raise ConfigError("pools", [list(tasks) for tasks in needs.limits.scorers()], law, "use fewer replicas")
    idle = (*_idle(settled, division, free, gpus), *_without_replicas(settled))
    return replace(division, notes=(*division.notes, *idle))


def room_for_replicas(needs: GpuNeeds, nodes: Sequence[float]) -> int:
    """The number of replicas of `needs.replica_gpus` that fit beside the trainer and the store, or on the trainer's
    GPUs."""
    free = FreeGpus(nodes)
    _place_trainer_and_store(needs, free)
    guests = needs.guests if _trainer_fits(needs, nodes) else 0
    return guests + free.room(needs.replica_gpus)


def shortfall(needs: GpuNeeds, replicas: int, nodes: Sequence[float]) -> str:
    """Why this number of replicas does not fit; an empty string if it does."""
    each = needs.replica_gpus
    room = room_for_replicas(needs, nodes) if each else replicas
    if room >= replicas:
        return ""
    have = ", ".join(f"{gpus:g}" for gpus in nodes) or "none"
    taken = f", of which the trainer needs {needs.trainer_gpus:g}" if needs.trainer_gpus else ""
    where = "" if needs.spread else " on one node"
    return (
        f"each needs {gpus_text(each)}{where}, {replicas * each:g} in total; "
        f"the nodes have {have}{taken}: room for {room} of {replicas}"
    )


def _require_separate(needs: GpuNeeds, gpus: float) -> None:
    """Raises: `ConfigError` if processes that need separate GPUs would share them, or the trainer has none."""
    if not needs.sends_by_gpu:
        return
    each, scorers = max(1, int(needs.replica_gpus)), len(needs.limits.scorers())
    whose = [f"{needs.replicas} replicas of {each} GPUs" if each > 1 else "each replica"]
    whose += ["the scorer" if scorers == 1 else f"{scorers} scorers"] if scorers else []
    whose += ["the trainer", *(["the weights store"] if needs.store_gpus else [])]
    wanted = needs.replicas * each + 1 + scorers + bool(needs.store_gpus)
    who = f"{', '.join(whose[:-1])} and {whose[-1]} need separate GPUs, {wanted} in all"
    if gpus < wanted:
        raise ConfigError("rollout.transport_backend", "nccl", f"{who}; there are {gpus:g}", "use gloo")
    if not needs.trains_on_gpus:
        law = "the trainer has no GPU to send weights from (trainer.device: cpu)"
        raise ConfigError("rollout.transport_backend", "nccl", law, "use gloo")
    if needs.guests:
        law = f"{who}, but replicas share those of the trainer's ranks"
        raise ConfigError("rollout.transport_backend", "nccl", law, "use gloo")


def _require_trainer(needs: GpuNeeds, nodes: Sequence[float]) -> None:
    """Raises: `ConfigError` if too few nodes have the GPUs of the ranks."""
    each, count = needs.reserves_of_node, needs.trainer_nodes
    if not each or _trainer_fits(needs, nodes):
        return
    law = f"its ranks need {gpus_text(each)} on one node; the largest node has {max(nodes):g}"
    if count > 1:
        have = ", ".join(f"{gpus:g}" for gpus in nodes)
        law = f"its ranks need {gpus_text(each)} on each of {count} nodes (trainer.nodes); the nodes have {have}"
    of_rank, largest = needs.trainer_reserves / needs.ranks, sorted(nodes, reverse=True)
    most = {number: int(gpus // of_rank) * number for number, gpus in enumerate(largest, 1)}
    fixes = [f"at most {most[count]}"] if most.get(count) else []
    fixes += [f"trainer.nodes: {n}" for n, ranks in most.items() if ranks >= needs.ranks and needs.ranks % n == 0][:1]
    raise ConfigError("trainer.ranks", needs.ranks, law, f"use {', or '.join(fixes) or 'fewer'}")


def _trainer_fits(needs: GpuNeeds, nodes: Sequence[float]) -> bool:
    return sum(gpus >= needs.reserves_of_node for gpus in nodes) >= needs.trainer_nodes


def _require_guests(needs: GpuNeeds, nodes: Sequence[float]) -> None:
    """Ray cannot give the same GPUs to the trainer and to replicas. So the trainer uses all GPUs of its nodes, and Ray
    gives them to the replicas of its pool. Raises: `ConfigError` if that is not possible."""
    if not needs.guests:
        return
    each, largest = needs.reserves_of_node, max(nodes)
    if largest > each:
        law = (
            f"its ranks use {each:g} of the {largest:g} GPUs of a node, but ranks that share GPUs with replicas "
            "(pools) must use every GPU of a node"
        )
        all_gpus = largest * needs.trainer_nodes
        fixes = [f"use {all_gpus * needs.ranks / needs.trainer_reserves:g}", "give rollout a pool of its own"]
        if all_gpus % needs.ranks == 0:
            fixes.insert(1, f"set trainer.gpus_per_rank: {all_gpus / needs.ranks:g}")
        raise ConfigError("trainer.ranks", needs.ranks, law, ", or ".join(fixes))
    if not needs.sleeps:
        law = "replicas share the GPUs of the trainer's ranks (pools), and vLLM frees no memory without its sleep mode"
        raise ConfigError("rollout.engine_args.enable_sleep_mode", False, law, "use true")
    if needs.spread:
        law = "replicas share the GPUs of the trainer's ranks (pools), so each must be on one node"
        raise ConfigError("rollout.engine_args.distributed_executor_backend", "ray", law, "use mp")
    part = needs.replica_gpus or _guest_part(needs)
    left = FreeGpus([each] * needs.trainer_nodes).place(needs.guests, part)
    if left:
        law = (
            f"{needs.guests} of them share the {gpus_text(needs.trainer_reserves)} of the trainer's ranks (pools), and "
            f"each needs {gpus_text(part)} on one node: room for {needs.guests - left}"
        )
        raise ConfigError("rollout.replicas", needs.replicas, law, "use fewer, or fewer GPUs for a replica")


def _guest_part(needs: GpuNeeds) -> float:
    """The part of each replica of the trainer's GPUs, if it asks for no number."""
    return part_of(needs.trainer_reserves, needs.guests) if needs.guests else 0.0


def _place_trainer_and_store(needs: GpuNeeds, free: FreeGpus) -> None:
    if needs.trainer_reserves:
        free.place_apart(needs.reserves_of_node, needs.replica_gpus or 1.0, needs.trainer_nodes)
    if needs.store_gpus:
        free.place_apart(needs.store_gpus, needs.replica_gpus or 1.0)
    if needs.spread:
        free.merge()


def _after_reserved(needs: GpuNeeds, nodes: Sequence[float]) -> FreeGpus:
    """What is left beside the trainer, the store, and replicas that ask for a number of GPUs. Raises: `ConfigError` if
    these do not fit."""
    free = FreeGpus(nodes)
    _place_trainer_and_store(needs, free)
    if needs.replica_gpus and free.place(needs.apart, needs.replica_gpus):
        if needs.ranks > 1 and needs.trainer_reserves and _trainer_fits(needs, nodes):
            left = sum(nodes) - needs.store_gpus - needs.trainer_reserves
            law = f"its ranks leave {gpus_text(left)} for {needs.apart} replicas of {gpus_text(needs.replica_gpus)}"
            raise ConfigError("trainer.ranks", needs.ranks, law, "use fewer ranks, or fewer replicas")
        room = room_for_replicas(needs, nodes)
        fix = f"use {room}" if room else "use fewer GPUs for a replica (tensor_parallel_size, rollout.gpus)"
        raise ConfigError("rollout.replicas", needs.replicas, shortfall(needs, needs.replicas, nodes), fix)
    return free


def _equal_part(needs: GpuNeeds, free: FreeGpus) -> float:
    """The part of each process that asks for no number of GPUs; 0 if there is none. Raises: `ConfigError` if nothing is
    left for them."""
    replicas = needs.apart if needs.samples_on_gpus and not needs.replica_gpus else 0
    trainers = int(needs.trains_on_gpus and not needs.trainer_reserves)
    processes = replicas + trainers + needs.scorers
    left = max((left for node in free.nodes for left in node), default=0.0)
    if not processes:
        return 0.0
    if not left and needs.trainer_reserves:
        raise _ranks_use_all(needs)
    if not left:
        law = "the replicas use all GPUs, so the trainer has none"
        fix = "use fewer, fewer GPUs for a replica (tensor_parallel_size, rollout.gpus), or trainer.device: cpu"
        raise ConfigError("rollout.replicas", needs.replicas, law, fix)
    part = part_of(left, 1)
    while free.room(part) < processes:
        part /= 2
    return part


def _ranks_use_all(needs: GpuNeeds) -> ConfigError:
    law = f"its ranks reserve {gpus_text(needs.trainer_reserves)}, and none is left for the other processes"
    if needs.ranks == 1:
        return ConfigError("trainer.gpus_per_rank", int(needs.trainer_reserves), law, "use 0: a part of a GPU")
    return ConfigError("trainer.ranks", needs.ranks, law, "use fewer")


def _by_pool(needs: GpuNeeds, gpus: float) -> GpuDivision:
    """Divide the share of each pool among its processes. All processes of a kind get the smallest part of that kind.
    Raises: `ConfigError` if a share is too small."""
    parts: dict[str, list[float]] = {"replica": [], "trainer": [], "scorer": []}
    notes: list[str] = []
    for number, (pool, share) in enumerate(zip(needs.limits.pools, needs.shares, strict=False)):
        given, fixed = gpus * share, dict(_fixed_in(needs, pool))
        divided = dict(_divided_in(needs, pool))
        rest = given - sum(fixed.values())
        if rest * ROUNDING < -1e-3 or (divided and rest < 1e-3):
            raise _small_share(number, share, gpus, fixed, divided)
        part = part_of(rest, sum(divided.values())) if divided else 0.0
        for kind in divided:
            parts[kind].append(part)
        if needs.guests and "train" in pool.tasks:
            parts["replica"].append(_guest_part(needs))
        idle = int((rest - part * sum(divided.values())) * ROUNDING)
        if idle:
            notes.append(
                f"pool {number} has {gpus_text(given)} by its share, and leaves {idle} of them idle: {_use(pool)}"
            )
    return GpuDivision(
        replica=needs.replica_gpus or min(parts["replica"], default=0.0),
        trainer=needs.trainer_reserves or min(parts["trainer"], default=0.0),
        scorer=min(parts["scorer"], default=0.0),
        notes=tuple(notes),
    )


def _fixed_in(needs: GpuNeeds, pool: Pool) -> Iterator[tuple[str, float]]:
    """GPUs of a pool's processes that ask for a number, by kind."""
    if pool.replicas and needs.replica_gpus and not (needs.guests and "train" in pool.tasks):
        yield "replica", len(pool.replicas) * needs.replica_gpus
    if "train" in pool.tasks and needs.trainer_reserves:
        yield "trainer", needs.trainer_reserves


def _divided_in(needs: GpuNeeds, pool: Pool) -> Iterator[tuple[str, int]]:
    """Processes of a pool that ask for no number of GPUs, by kind."""
    guests = bool(needs.guests) and "train" in pool.tasks
    if pool.replicas and needs.samples_on_gpus and not needs.replica_gpus and not guests:
        yield "replica", len(pool.replicas)
    if "train" in pool.tasks and needs.trains_on_gpus and not needs.trainer_reserves:
        yield "trainer", 1
    scores = any(task in pool.tasks for task in needs.limits.scoring_tasks)
    if needs.trains_on_gpus and "train" not in pool.tasks and scores:
        yield "scorer", 1


def _small_share(
    number: int, share: float, gpus: float, fixed: dict[str, float], divided: dict[str, int]
) -> ConfigError:
    words = {"replica": "its replicas", "trainer": "the trainer's ranks", "scorer": "its scorer"}
    need = " and ".join(f"{words[kind]} need {count:g}" for kind, count in fixed.items())
    law = f"is {gpus * share:g} of {gpus_text(gpus)}, but {need}"
    if divided:
        law += f", which leaves none for {' and '.join(words[kind] for kind in divided)}"
    return ConfigError(f"pools.{number}.share", share, law, "raise it, or use fewer GPUs for a process")


def _use(pool: Pool) -> str:
    """How a pool can use its idle GPUs."""
    ways = ["raise its replicas, or tensor_parallel_size"] if pool.replicas else []
    ways += ["raise trainer.ranks"] if "train" in pool.tasks else []
    return ", or ".join(ways) or "a scorer uses one GPU, so lower the share"


def _idle(needs: GpuNeeds, division: GpuDivision, free: FreeGpus, gpus: float) -> Iterator[str]:
    """A note on GPUs that no process uses, unless the notes on pools say it."""
    if not free.whole or division.notes:
        return
    sampling = needs.replicas - len(needs.limits.validators())
    more = sampling + free.room(division.replica) if division.replica else 0
    ways = [f"raise rollout.replicas to at most {more}"] if more > sampling else []
    ways += ["raise trainer.ranks"] if division.trainer else []
    stay = "stays" if free.whole == 1 else "stay"
    yield f"{free.whole} of {gpus_text(gpus)} {stay} idle: {', or '.join(ways) or 'set trainer.device: auto'}"


def _without_replicas(needs: GpuNeeds) -> Iterator[str]:
    """A note on GPUs of the trainer's ranks that are idle while the replicas of their pool sample."""
    idle = int(needs.trainer_reserves - needs.guests * needs.replica_gpus)
    if needs.guests and idle:
        yield (
            f"{idle} of the {gpus_text(needs.trainer_reserves)} of the trainer's ranks have no replica: raise the "
            "number of replicas of their pool, or tensor_parallel_size"
        )
