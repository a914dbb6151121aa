"""The lines that `engine check CONFIG` prints: the laws with their figures, and notes on settings that may surprise.

A configuration that breaks a law is refused earlier, when it is loaded.
"""

from collections.abc import Callable, Iterator, Sequence

from engine.config.custom_classes import check_custom_classes, custom_lines
from engine.config.deterministic import remarks
from engine.config.gpus import divide_gpus, needs_of
from engine.config.model_description import describes_experts, files_of
from engine.config.paths import paths_in
from engine.config.pools import layout, surprises
from engine.config.reports import missing_package
from engine.config.schema import Config
from engine.errors import ConfigError, counted
from engine.hardware import gpu_count, why_no_kernels
from engine.protocols.named_code import NO_LOCAL, Local
from engine.rollout.vllm.engine_args import built_for_cpu, check_engine_args, head_args
from engine.states.limits import Limits
from engine.tasks.hub_files import HUB, names_commit
from engine.training.custom_functions import is_custom


def _check_vllm(config: Config) -> None:
    if config.rollout.transport == "vllm" and config.rollout.transport_backend == "nccl" and built_for_cpu():
        law, fix = "the vLLM installed here is built for CPUs", "use rollout.transport_backend: gloo"
        raise ConfigError("rollout.transport_backend", "nccl", law, fix)
    check_engine_args(config.rollout.engine_args)
    head_args(config.trainer_settings.fp32_head, config.rollout.engine_args)
    if config.trainer.router_replay and built_for_cpu():
        law = "vLLM for CPUs does not say which experts sampled a token"
        raise ConfigError("trainer.router_replay", True, law, "use rollout.backend: torch, a GPU, or false")
    parallel = config.rollout.engine_args.get("data_parallel_size", 1)
    model = None if config.model.path is None else files_of(config.model.path)
    if parallel != 1 and model is not None and describes_experts(model) and built_for_cpu():
        law = "in vLLM for CPUs, data-parallel engines of a model with experts fail if their batches differ in size"
        fix = "use 1, and raise rollout.replicas"
        raise ConfigError("rollout.engine_args.data_parallel_size", parallel, law, fix)


BACKENDS: dict[str, Callable[[Config], None]] = {"vllm": _check_vllm}
"""A check for each rollout backend that may be missing or misconfigured. It runs before the backend starts."""


def check_config(config: Config, local: Local = NO_LOCAL) -> list[str]:
    """The lines of `engine check` for a valid configuration: each law with its figures, then notes. `local`: functions
    and classes that cannot be imported, by field.

    Raises: ConfigError for a policy that is not registered, for a rollout backend that cannot start here, and for GPUs
    that this machine does not have.
    """
    gpus = gpu_count()
    check_backend(config, local)
    check_gpus(config, gpus)
    idle = gpu_notes(config, gpus, built_for_cpu())
    named = ", ".join(f"{decision} {name}" for decision, name in config.policies().names.items())
    s, r = config.scheduler, config.rollout
    batch, stale, every = s.train_batch_size, s.max_staleness_steps, s.sync_every
    slots, updates = r.replicas * r.slots, batch // s.policy_mini_batch_size
    trajectories = slots * s.samples_per_prompt
    return [
        f"ok: a train step takes B = {batch} groups of {s.samples_per_prompt} trajectories in {updates} optimizer "
        f"update{'s' * (updates > 1)} of {s.policy_mini_batch_size} groups",
        f"ok: hard staleness, no group is trained more than S = {stale} train steps behind its oldest token",
        f"ok: a version comes in time, S >= k - 1 ({stale} >= {every - 1}), published every k = {every} train steps",
        f"ok: {_concurrency(config.limits)}, K groups run at once",
        f"ok: {counted(r.replicas, 'replica')} of {r.slots} slots: {slots} groups, {trajectories} trajectories at once",
        f"ok: policies: {named}",
        *(f"ok: {line}" for line in _correction(config)),
        *(f"ok: {line}" for line in custom_lines(config)),
        *(f"ok: {line}" for line in layout(config, config.limits)),
        *(f"note: {note}" for note in (*_surprises(config, slots), *idle)),
    ]


def _concurrency(limits: Limits) -> str:
    batch, workers, ahead, surplus = limits.train_batch_size, limits.max_concurrent_groups, limits.ahead, limits.surplus
    if limits.async_ratio is None and not surplus:
        return f"B <= K <= B*(S+1) ({batch} <= {workers} <= {ahead})"
    return f"B <= K <= (1 + async_ratio)*B + over_sample*B ({batch} <= {workers} <= {ahead} + {surplus})"


def _correction(config: Config) -> Iterator[str]:
    t = config.trainer
    if t.correction != "none" and not is_custom(t.correction):
        yield f"importance weights are at most trainer.correction_cap = {t.correction_cap:g} ({t.correction})"


def check_backend(config: Config, local: Local = NO_LOCAL) -> None:
    """Raises: ConfigError if the rollout backend is not installed or refuses its arguments, or a class of the user
    cannot be used."""
    check = BACKENDS.get(config.rollout.backend)
    if check is not None:
        check(config)
    check_custom_classes(config, local)


def check_gpus(config: Config, gpus: int | None) -> None:
    """Raises: ConfigError if this machine lacks a GPU that a device names, or if the trainer needs several nodes. In a
    cluster that the run joins, other nodes may have it. `gpus`: number of GPUs; None: unlimited."""
    if config.cluster.joined() is not None:
        return
    if config.trainer.nodes > 1:
        law = "a run that joins no cluster has one node"
        raise ConfigError("trainer.nodes", config.trainer.nodes, law, "use 1, or join a cluster (cluster.address)")
    if gpus is None:
        return
    if gpus:
        _require_compiler(config)
    devices = {"trainer.device": config.trainer.device}
    if config.rollout.backend == "torch" or config.rollout.custom:
        devices["rollout.device"] = config.rollout.device
    law = f"cannot be used: this machine has {counted(gpus, 'GPU')}"
    if config.trainer.attention == "varlen" and not gpus:
        fix = "use auto, or join a cluster that has one (cluster.address)"
        raise ConfigError("trainer.attention", "varlen", law, fix)
    for field, device in devices.items():
        kind, _, number = device.partition(":")
        if kind == "cuda" and int(number or 0) >= gpus:
            raise ConfigError(field, device, law, "use auto, or join a cluster that has it (cluster.address)")


def _require_compiler(config: Config) -> None:
    """Raises: ConfigError if GPU kernels will be compiled here and cannot be."""
    compiled: dict[str, object] = {}
    if config.rollout.backend == "vllm" and not built_for_cpu():
        compiled["rollout.backend"] = "vllm"
    if config.trainer.compile and config.trainer.device != "cpu":
        compiled["trainer.compile"] = True
    problem = why_no_kernels() if compiled else None
    if problem is not None:
        field, value = next(iter(compiled.items()))
        raise ConfigError(field, value, f"compiles kernels when it starts, and {problem[0]}", problem[1])


def gpu_notes(config: Config, gpus: int | None, vllm_for_cpu: bool) -> Sequence[str]:
    """Notes on GPUs of this machine that stay idle. `gpus`: as in `check_gpus`; in a cluster that the run joins, the
    start of the run says it. Raises: ConfigError as `divide_gpus`."""
    if gpus is None or config.cluster.joined() is not None:
        return ()
    return divide_gpus(needs_of(config, vllm_for_cpu), [gpus]).notes


def _surprises(config: Config, slots: int) -> Iterator[str]:
    s, r = config.scheduler, config.rollout
    batch, stale, workers = s.train_batch_size, s.max_staleness_steps, s.max_concurrent_groups
    if slots < batch:
        rounds = -(-batch // slots)
        yield f"{slots} slots are fewer than B = {batch} groups: a step needs at least {rounds} rounds"
    most = s.most_groups()
    if workers > slots and s.samples_per_prompt == 1:
        yield f"K = {workers} cannot be reached with {slots} slots"
    if workers < slots:
        yield f"K = {workers} leaves {slots - workers} of {slots} slots empty: raise max_concurrent_groups"
    elif workers == slots < most and s.samples_per_prompt > 1:
        yield (
            f"K = {workers} is the number of slots: a slot whose trajectories have partly ended stays partly empty "
            f"until its group ends; max_concurrent_groups may be up to {most}"
        )
    if stale == 0:
        yield "S = 0 is synchronous: rollout and training take turns"
    if s.policies.deadline != "wait" and stale == s.sync_every - 1:
        yield (
            f"at S = k - 1 = {stale}, the deadline of a replacement group binds at once: after max_drops = "
            f"{s.max_drops} drops, a step waits"
        )
    if r.top_p < 1:
        yield f"top_p = {r.top_p:g} biases the importance ratio: only the behavior log-probs are truncated; use 1"
    t = config.trainer
    bounded = t.clip_dual or t.loss == "cispo" or is_custom(t.loss) or t.custom
    if r.backend != "torch" and t.correction == "none" and not bounded:
        yield (
            f"trainer.correction none: {r.backend} rounds differently from the trainer, and nothing bounds ratios "
            "above 1 with negative advantages; use token_tis, or trainer.clip_dual: 3"
        )
    if r.sync_mode == "wait" and r.sync_order == "together":
        yield "sync_mode wait idles every replica until its slowest group ends, at each install"
    for address in dict.fromkeys(paths_in(config.model_dump(mode="json"))):
        if address.startswith(HUB) and not names_commit(address):
            yield (
                f"{address} names no commit: after an upload to this dataset, a resumed run would read other rows; add "
                "@ and the 40 digits of a commit after the name"
            )
    if not config.held_out:
        yield "no data.validation_path: the run does not validate"
    if len(config.reward.names) > 1 and not config.reward.correct_names:
        yield (
            f"accuracy, avg@k, pass@k and maj@k count a response as right if its weighted reward is at least 1; set "
            f"reward.correct to the function that says whether it is right ({', '.join(config.reward.names)})"
        )
    v = config.validation
    if v.every and v.placement == "shared" and v.replicas == r.replicas:
        outcome = {
            "hold": "keeps all replicas from installing new weights until it ends",
            "cancel": "is canceled by new weights",
        }
        yield f"validation.conflict {v.conflict}: a measurement {outcome[v.conflict]}"
    if config.model.make == "arithmetic":
        longest = config.model.arithmetic.most_tokens
        if r.max_tokens < longest:
            yield f"rollout.max_tokens = {r.max_tokens} is less than the {longest} tokens of the longest correct answer"
    yield from surprises(config)
    yield from remarks(config)
    yield from missing_package(config.samples)
    if config.trainer.checkpoint_every == 0:
        yield "trainer.checkpoint_every 0: no checkpoints, so a resume after a crash starts over"
