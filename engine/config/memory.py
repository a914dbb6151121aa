"""The memory that a run is expected to need, as `engine check` shows it, part by part.

The estimate comes from the model's files: parameters are counted exactly, and activations by what a transformer layer
keeps for its backward pass. Called by `inputs.check_inputs`; never imports torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from engine.config.gpus import GpuDivision, divide_gpus, needs_of
from engine.config.model_description import numbers_in, read_json
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.hardware import gpu_count, gpu_memory_gb, memory_bytes
from engine.rollout.vllm.engine_args import MEMORY_SHARE, built_for_cpu, memory_args, workers_of
from engine.training.lora import Lora
from engine.training.named_tensors import Shapes
from engine.training.trainer_settings import TrainerSettings

GB = 1e9
MOST_RANKS = 8
"""Ranks that a message suggests for a machine whose GPUs are not known."""
LOGIT_BYTES = 256 << 20
"""The same value as in `training.gradients`, which this module cannot import because it needs torch."""
LOGIT_COPIES = 3
"""Logits, their log-softmax and its gradient exist at the same time."""
ENTROPY_COPIES = 5.5
"""The same where the loss has an entropy term: also probabilities, bounded log-probs and their products, and the
head's own logits in bfloat16."""
CHECKPOINT_FILE_BYTES = 1 << 30
"""Size of a weights file in a checkpoint, unless one tensor is larger. Files are gathered and written one by one."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The sizes of a model that memory depends on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads_width: int
    """Width of the queries of a layer."""
    kv_width: int
    """Width of the keys of a layer, and of its values."""
    vocabulary: int
    context: int
    head: int = 1
    """Width of one head of keys."""
    head_norms: bool = False
    """Queries and keys are normalized, as in Qwen3."""
    largest: int = 0
    """Numbers in the model's largest tensor."""
    adapter: int = 0
    """Parameters of the adapter that is trained (`trainer.lora`); 0: the model itself is trained."""
    bytes: int = 4
    """Of a number in the type that `config.json` names, in which samplers load and the trainer publishes the model."""

    @classmethod
    def of(cls, directory: Path, shapes: Shapes, adapter: int = 0, number: int = 4) -> "Model | None":
        """From `config.json` and the shapes of the tensors; None if these do not say the sizes under their usual names.
        `number`: bytes of a number of the weights that the run begins with."""
        if not shapes:
            return None
        try:
            plain: dict[str, Any] = read_json(directory / "config.json")
            plain = plain.get("text_config", plain)
            heads, hidden = plain["num_attention_heads"], plain["hidden_size"]
            size = plain.get("head_dim") or hidden // heads
            return cls(
                parameters=numbers_in(shapes), adapter=adapter, layers=plain["num_hidden_layers"], hidden=hidden,
                intermediate=plain["intermediate_size"], heads_width=heads * size,
                kv_width=(plain.get("num_key_value_heads") or heads) * size, vocabulary=plain["vocab_size"],
                context=plain["max_position_embeddings"], head=size, largest=max(map(prod, shapes.values())),
                bytes=number, head_norms=any(name.endswith(".q_norm.weight") for name in shapes),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError):
            return None

    @property
    def trained(self) -> int:
        """Parameters that have gradients and moments, and that a version consists of."""
        return self.adapter or self.parameters

    def kept_by_a_layer(self, number: int) -> int:
        """Bytes that a layer stores for each token for the backward pass, with numbers of 2 or 4 bytes: residuals and
        norms, queries, keys, values, the output of attention, and the three products of a gated MLP. Norms compute in
        float32."""
        kept = 6 * self.hidden + 2 * self.heads_width + 2 * self.kv_width + 4 * self.intermediate
        norms = (number + 4) * (self.heads_width + self.kv_width) if self.head_norms else 0
        return number * kept + norms + (4 * self.hidden if number < 4 else 0)

    def gathered(self, number: int) -> float:
        """Bytes of the parameters that a rank gathers at a time (FSDP2): those outside of layers, and those of two
        layers, because the next layer is gathered while one computes."""
        outside = 2 * self.vocabulary * self.hidden
        return number * (outside + 2 * max(0, self.parameters - outside) / self.layers)


@dataclass(frozen=True, slots=True)
class Device:
    """The memory that a process may use of its device; 0: unknown."""

    gigabytes: float
    declared: bool = True
    """In the configuration; otherwise it was read from this machine."""
    part: float = 1.0
    """Of a GPU, which it shares."""

    def __str__(self) -> str:
        return f"{self.gigabytes:.3g} GB" + (f" ({self.part:g} of a GPU)" if self.part < 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a run's processes."""

    trainer: Device
    scorer: Device
    replica: Device


def devices_of(config: Config) -> Devices:
    """As the configuration declares them. Otherwise the GPUs of this machine and how they are divided, unless the run
    joins a cluster, which may have others. vLLM has the memory of the whole GPU, because its settings are shares of
    that. So do processes that take turns on one."""
    trainer, rollout = config.trainer.device_memory_gb, config.rollout.device_memory_gb
    gpus = gpu_count()
    read = gpu_memory_gb() if gpus and config.cluster.joined() is None else 0.0
    given = divide_gpus(needs_of(config, built_for_cpu()), [gpus]) if gpus and read else GpuDivision()

    def device(declared: float, part: float) -> Device:
        part = 1.0 if part and config.limits.trains_in_turns else min(1.0, part)
        return Device(declared) if declared else Device(read * part, declared=False, part=part)

    whole = config.rollout.backend == "vllm" and not rollout
    return Devices(
        trainer=device(trainer, given.trainer / config.trainer.ranks),
        scorer=device(trainer, given.scorer),
        replica=Device(read, False, given.replica) if whole else device(rollout, given.replica),
    )


def trainer_memory(model: Model, config: Config, reference: Model | None = None) -> dict[str, float]:
    """Bytes that each rank of the trainer needs on its device, by their purpose. `reference`: the model of the
    reference or teacher; None if its sizes are not known."""
    t, number = config.trainer, computed_bytes(config)
    shards = t.ranks // t.nodes if t.hybrid_sharding else t.ranks
    share, trained = (model.parameters + model.adapter) / shards, model.trained / shards
    own = None if reference is None or not loads_reference(config) else reference
    held = {"weights": 4.0 * trained + number * (share - trained)}
    if halved := number < 4 and t.ranks == 1:
        held = {"bfloat16 weights": 2.0 * share, "float32 masters": 4.0 * trained}
    held |= {"gradients": 4.0 * trained, "moments": 8.0 * trained}
    if own is not None:
        held["reference"] = float(number) * own.parameters / shards
    if t.cpu_offload and (halved or t.ranks > 1):
        held = {name: held[name] for name in ("bfloat16 weights", "reference") if halved and name in held}
    if t.ranks > 1:
        held["gathered parameters"] = max(one.gathered(number) for one in (model, own) if one is not None)
    kept = model.layers * model.kept_by_a_layer(number)
    if checkpoints_activations(config):
        kept = model.layers * model.hidden * number + model.kept_by_a_layer(number)
    if number < 4 and 4 * t.micro_batch_tokens * model.vocabulary > LOGIT_BYTES:
        held["gradient of the head"] = 4.0 * model.vocabulary * model.hidden
    return {
        **held,
        "activations": float(t.micro_batch_tokens * kept),
        "logits": logit_bytes(model, config, ENTROPY_COPIES if t.entropy_coef > 0 else LOGIT_COPIES),
    }


def logit_bytes(model: Model, config: Config, copies: float) -> float:
    return float(min(4 * config.trainer.micro_batch_tokens * model.vocabulary, LOGIT_BYTES) * copies)


def checkpoints_activations(config: Config) -> bool:
    choice = config.trainer.activation_checkpointing
    return on_gpu(config) if choice == "auto" else bool(choice)


def computed_bytes(config: Config) -> int:
    """Bytes of a number in the trainer's passes, as far as the configuration and this machine say."""
    t = config.trainer
    return 2 if t.bf16 == "on" or (t.bf16 == "auto" and on_gpu(config)) else 4


def on_gpu(config: Config) -> bool:
    """Whether the trainer has a GPU. With `device: auto` it has one if its memory is declared, or if this machine has a
    GPU or cannot say."""
    t = config.trainer
    return t.device.startswith("cuda") or (t.device == "auto" and (t.device_memory_gb > 0 or gpu_count() != 0))


def has_reference(settings: TrainerSettings) -> bool:
    """Whether the settings need a reference that is a separate model. With an adapter and without `reference_path`, the
    reference is the trained model without its adapter."""
    return settings.needs_reference and (settings.lora is None or settings.reference_path is not None)


def loads_reference(config: Config) -> bool:
    """Whether the trainer holds the model of a reference."""
    return has_reference(config.trainer_settings) and "ref_logprobs" not in config.limits.scored_apart


def published_bytes(config: Config, number: int) -> int:
    """Bytes of a number of a published version. `number`: in the type that `config.json` names."""
    return WIDTHS.get(config.trainer_settings.publish_dtype, number)


def start_memory(model: Model, config: Config, reference: Model | None = None) -> dict[str, float]:
    """Bytes in host memory while the trainer loads models for its device. With several ranks, each reads its rows one
    tensor after the other."""
    t = config.trainer
    loaded = [model, *([reference] if reference is not None and loads_reference(config) else [])]
    if t.ranks > 1:
        return {"rows of a tensor in each rank": 4.0 * max(one.largest for one in loaded)}
    parts = {"float32 weights": 4.0 * max(one.parameters + one.adapter for one in loaded)}
    if computed_bytes(config) < 4:
        parts["bfloat16 copies"] = 2.0 * model.trained
    return parts


def host_memory(model: Model, config: Config, reference: Model | None = None) -> dict[str, float]:
    """Bytes that the trainer needs in host memory of its first node, in addition to those on its devices."""
    t, settings = config.trainer, config.trainer_settings
    divided = 1 if t.hybrid_sharding else t.nodes
    parts = {"a version being published": float(published_bytes(config, model.bytes) * model.trained)}
    if t.checkpoint_every and (t.ranks > 1 or on_gpu(config)):
        parts["weights being saved"] = min(4.0 * model.trained, max(CHECKPOINT_FILE_BYTES, 4.0 * model.largest))
    if t.cpu_offload and t.ranks == 1 and computed_bytes(config) < 4:
        parts["masters, gradients and moments"] = 16.0 * model.trained
    elif t.cpu_offload and t.ranks > 1:
        number = computed_bytes(config)
        frozen = model.parameters + model.adapter - model.trained
        parts["shards of its ranks"] = float(number * frozen + 16 * model.trained) / divided
        if reference is not None and loads_reference(config):
            parts["reference"] = float(number * reference.parameters) / divided
    if t.rollback and settings.optimizer_steps(config.scheduler.train_batch_size) > 1:
        parts["the copy that undoes a failed step"] = 12.0 * model.trained / divided
    return parts


def scorer_memory(
    model: Model, config: Config, tasks: Sequence[str], reference: Model | None = None
) -> dict[str, float]:
    """Bytes that a scorer needs on its device. It is one process, holds whole models and makes no backward pass."""
    number, settings = computed_bytes(config), config.trainer_settings
    parts = {}
    if "old_logprobs" in tasks:
        parts["weights"] = float(number * (model.parameters + model.adapter))
    if "ref_logprobs" in tasks and reference is not None and (has_reference(settings) or "old_logprobs" not in tasks):
        parts["reference"] = float(number * reference.parameters)
    scored = [model] * ("weights" in parts) + ([reference] if reference and "reference" in parts else [])
    layer = max((one.kept_by_a_layer(number) for one in scored), default=0)
    parts["activations of a layer"] = float(config.trainer.micro_batch_tokens * layer)
    return parts | {"logits": logit_bytes(model, config, LOGIT_COPIES)}


def replica_memory(model: Model, config: Config) -> dict[str, float]:
    """Bytes of a replica of the embedded sampler: the weights, and keys and values of every trajectory it samples."""
    rows = config.rollout.slots * config.scheduler.samples_per_prompt
    columns = config.rollout.context or model.context
    cache = 2.0 * model.bytes * model.layers * rows * columns * model.kv_width
    weights = float(model.bytes * (model.parameters + model.adapter))
    return {"weights": weights, "a version being installed": float(model.bytes * model.trained), "KV cache": cache}


def worker_memory(model: Model, config: Config) -> dict[str, float]:
    """Bytes that a worker of a vLLM replica needs at least: its part of the weights, and the keys and values of one
    request at full length. If no dtype is set, vLLM computes in 2 bytes, whatever the type of the files is."""
    args = config.rollout.engine_args
    tensor, pipeline = args.get("tensor_parallel_size", 1), args.get("pipeline_parallel_size", 1)
    number = WIDTHS.get(config.rollout.sampler_dtype, 2)
    cached = 1 if str(args.get("kv_cache_dtype", "auto")).startswith("fp8") else number
    width = max(model.kv_width / tensor, model.head)  # every worker has at least one head
    tokens = config.rollout.longest or model.context
    return {
        "weights": float(number * (model.parameters + model.adapter)) / (tensor * pipeline),
        f"KV cache of {tokens} tokens": 2.0 * cached * (model.layers / pipeline) * tokens * width,
    }


def memory_lines(model: Model, config: Config, reference: Model | None = None) -> Iterator[str]:
    """Lines of `engine check`. Raises: ConfigError if a device is too small, whose memory is declared or was read."""
    devices = devices_of(config)
    if config.trainer.custom:
        yield f"note: the memory of trainer.backend {config.trainer.backend} is not estimated"
    else:
        yield from _trainer_lines(model, config, reference, devices.trainer)
    for tasks in config.limits.scorers():
        scorer, who = scorer_memory(model, config, tasks, reference), f"the scorer of {' and '.join(tasks)}"
        yield f"ok: {who} needs about {shown(scorer)} on its device"
        if lacks_memory(devices.scorer, scorer):
            raise _too_small(config, "trainer", devices.scorer, scorer, who, SCORER_FIX)
    if config.rollout.backend == "torch":
        replica = replica_memory(model, config)
        yield f"ok: a replica needs about {shown(replica)}, with the cache at full length"
        if lacks_memory(devices.replica, replica):
            raise _too_small(config, "rollout", devices.replica, replica, "a replica", REPLICA_FIX)
    elif config.rollout.backend == "vllm":
        yield from _vllm_lines(model, config, devices)


def _trainer_lines(model: Model, config: Config, reference: Model | None, device: Device) -> Iterator[str]:
    trainer = trainer_memory(model, config, reference)
    who = "the trainer" if config.trainer.ranks == 1 else f"each of the trainer's {config.trainer.ranks} ranks"
    yield f"ok: {who} needs about {shown(trainer)} on its device"
    if lacks_memory(device, trainer):
        raise _too_small(config, "trainer", device, trainer, who, trainer_fix(model, config, reference))
    if on_gpu(config):
        loading = shown(start_memory(model, config, reference))
        yield f"ok: to load the model, the trainer needs about {loading} of host memory"
    yield f"ok: the trainer needs about {shown(host_memory(model, config, reference))} of host memory in addition"


def _vllm_lines(model: Model, config: Config, devices: Devices) -> Iterator[str]:
    """Raises: ConfigError if vLLM's share of its device is too small for its worker."""
    rollout, args, device = config.rollout, config.rollout.engine_args, devices.replica
    if args.get("quantization"):
        yield f"note: the memory of vLLM with quantization {args['quantization']} is not estimated"
        return
    parts = worker_memory(model, config)
    weights, request = parts.values()
    requests = args.get("max_num_seqs", rollout.slots * config.scheduler.samples_per_prompt)
    who = f"each of the {workers} workers of a replica" if (workers := workers_of(args)) > 1 else "a replica"
    yield (
        f"ok: {who} needs at least {shown(parts)}; "
        f"{requests} requests of that length at once fill {_size(requests * request)} of cache"
    )
    version = float(published_bytes(config, model.bytes) * model.trained)
    if rollout.transport == "vllm":
        held = f"the trainer's machine also holds the newest version in shared memory, {_size(version)}"
    else:
        held = f"a machine with replicas holds 2 versions in shared memory, {_size(2 * version)}"
    yield f"ok: {held}, and one more for each validation of an older version"
    if device.gigabytes:
        given = {**memory_args(device.part, args), **args}
        share = 1.0 if args.get("kv_cache_memory_bytes") else given.get("gpu_memory_utilization", MEMORY_SHARE)
        room = share * device.gigabytes * GB
        takes = f"vLLM takes {_size(room)} of its device ({share:g} * {device.gigabytes:g} GB)"
        if weights + request > room:
            law = f"{who} needs at least {shown(parts)}, but {takes}"
            if device.declared:
                raise ConfigError("rollout.device_memory_gb", rollout.device_memory_gb, law, VLLM_FIX)
            raise ConfigError("rollout.engine_args", dict(args), law, VLLM_FIX)
        fitting = int((room - weights) // request)
        yield f"ok: {takes}: {_size(room - weights)} of cache, {fitting} requests of that length"


SCORER_FIX = "lower trainer.micro_batch_tokens, or use a larger device"
REPLICA_FIX = "lower rollout.slots or rollout.context, or use a larger device"
VLLM_FIX = (
    "raise tensor_parallel_size or gpu_memory_utilization in rollout.engine_args, lower max_model_len, "
    "or use a larger device"
)  # fmt: skip


def lacks_memory(device: Device, parts: Mapping[str, float]) -> bool:
    return 0 < device.gigabytes * GB < sum(parts.values())


def _too_small(
    config: Config, section: str, device: Device, parts: Mapping[str, float], who: str, fix: str
) -> ConfigError:
    law = f"{who} needs about {shown(parts)}"
    if device.declared:
        return ConfigError(f"{section}.device_memory_gb", device.gigabytes, law, fix)
    return ConfigError(f"{section}.device", getattr(config, section).device, f"{law}, but has {device}", fix)


def trainer_fix(model: Model, config: Config, reference: Model | None) -> str:
    """The settings with which the trainer fits: those that only cost time if they are enough, else more ranks, host
    memory or an adapter, with them."""
    ways = []
    for larger in _larger_changes(config):
        changes = (change for more in larger for change in _changes(config, more))
        fitting = next((change for change in changes if _fits(model, config, reference, change)), None)
        if fitting is not None:
            ways.append(", ".join(f"trainer.{name}: {_shown_setting(value)}" for name, value in fitting.items()))
        if ways and larger == [{}]:
            break
    return f"use {'; or '.join(ways)}" if ways else "use a larger device, or a smaller model"


def _larger_changes(config: Config) -> Iterator[list[dict[str, Any]]]:
    """Changes of one kind after the other, smaller ones first."""
    t, gpus = config.trainer, gpu_count() or MOST_RANKS
    yield [{}]
    yield [{"ranks": ranks} for ranks in (2, 4, 8) if t.ranks < ranks <= gpus and not ranks % t.nodes]
    if not t.cpu_offload:
        yield [{"cpu_offload": True}]
    if t.lora is None:
        yield [{"lora": Lora()}]


def _changes(config: Config, more: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`more`, with checkpointed activations and fewer and fewer tokens in a pass."""
    t = config.trainer
    saving = {} if checkpoints_activations(config) else {"activation_checkpointing": True}
    if more:
        yield dict(more)
    for part in (1, 2, 4, 8):
        tokens = {} if part == 1 else {"micro_batch_tokens": t.micro_batch_tokens // part}
        yield {**saving, **tokens, **more}


def _fits(model: Model, config: Config, reference: Model | None, change: Mapping[str, Any]) -> bool:
    if not change or change.get("micro_batch_tokens", 1) < 1:
        return False
    try:
        changed = config.model_copy(update={"trainer": config.trainer.model_copy(update=dict(change))})
        device = devices_of(changed).trainer
    except ConfigError:
        return False
    if "lora" in change:
        model = replace(model, adapter=adapter_estimate(model, change["lora"].rank))
    host = host_memory(model, changed, reference)
    held = trainer_memory(model, changed, reference)
    return not lacks_memory(device, held) and sum(host.values()) < memory_bytes()


def adapter_estimate(model: Model, rank: int) -> int:
    """Parameters of an adapter of all linear layers of a transformer with a gated MLP."""
    widths = 2 * (model.hidden + model.heads_width) + 2 * (model.hidden + model.kv_width)
    return rank * model.layers * (widths + 3 * (model.hidden + model.intermediate))


def _shown_setting(value: Any) -> str:
    return f"{{rank: {value.rank}}}" if isinstance(value, Lora) else str(value).lower()


def shown(parts: Mapping[str, float]) -> str:
    """The sum and its parts, as text."""
    return f"{_size(sum(parts.values()))} ({' + '.join(f'{_size(bytes)} {name}' for name, bytes in parts.items())})"


def _size(bytes: float) -> str:
    return f"{bytes / GB:.1f} GB" if bytes >= GB else f"{bytes / 1e6:.1f} MB"
