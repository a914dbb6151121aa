"""The memory that a run is expected to need, as `engine check` shows it, part by part.

An estimate from the model's files: parameters are counted exactly, activations by what a transformer layer keeps for
its backward pass. Called by `inputs.check_inputs`; never imports torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.errors import ConfigError

GB = 1e9
LOGIT_BYTES = 256 << 20
"""As in `training.gradients`, which needs torch. Logits, their log-softmax and its gradient exist at a time."""
LOGIT_COPIES = 3


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
    """Width of its keys, and of its values."""
    vocabulary: int
    context: int
    adapter: int = 0
    """Parameters of the adapter that is trained (`trainer.lora`); 0: the model itself is trained."""
    bytes: int = 4
    """Of a number in the model's files, which samplers load and the trainer publishes."""

    @classmethod
    def of(cls, directory: Path, parameters: int, adapter: int = 0) -> "Model | None":
        """From `config.json`; None if that does not say the sizes under their usual names."""
        try:
            plain: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            plain = plain.get("text_config", plain)
            heads, hidden = plain["num_attention_heads"], plain["hidden_size"]
            size = plain.get("head_dim") or hidden // heads
            return cls(
                parameters=parameters, adapter=adapter, layers=plain["num_hidden_layers"], hidden=hidden,
                intermediate=plain["intermediate_size"], heads_width=heads * size,
                kv_width=(plain.get("num_key_value_heads") or heads) * size, vocabulary=plain["vocab_size"],
                context=plain["max_position_embeddings"],
                bytes=2 if (plain.get("dtype") or plain.get("torch_dtype")) in ("bfloat16", "float16") else 4,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def trained(self) -> int:
        """Parameters that have gradients and moments, and that a version consists of."""
        return self.adapter or self.parameters

    @property
    def kept_by_a_layer(self) -> int:
        """Numbers that a layer stores for each token for the backward pass: residuals and norms, queries, keys, values,
        the output of attention, and the three products of a gated MLP."""
        return 6 * self.hidden + 2 * self.heads_width + 2 * self.kv_width + 4 * self.intermediate


def trainer_memory(model: Model, config: Config) -> dict[str, float]:
    """Bytes of each rank of the trainer on its device, by what they are."""
    t = config.trainer
    tokens = t.micro_batch_tokens
    activations = model.layers * model.kept_by_a_layer
    if t.activation_checkpointing:
        activations = model.layers * model.hidden + model.kept_by_a_layer
    logits = min(4 * tokens * model.vocabulary, LOGIT_BYTES) * LOGIT_COPIES
    share, trained = (model.parameters + model.adapter) / t.ranks, model.trained / t.ranks
    bf16 = runs_in_bf16(config)
    parts = {"weights": 4.0 * share}
    if halved := bf16 and t.ranks == 1:
        parts = {"bfloat16 weights": 2.0 * share, "float32 masters": 4.0 * trained}
    parts |= {"gradients": 4.0 * trained, "moments": 8.0 * trained}
    if t.ranks > 1:  # FSDP2 gathers the parameters of no layer, and of a layer while the next one is on its way
        outside = 2 * model.vocabulary * model.hidden
        layers = 2 * max(0, model.parameters - outside) / model.layers
        parts["gathered parameters"] = (2.0 if bf16 else 4.0) * (outside + layers)
    if t.cpu_offload and (halved or t.ranks > 1):
        parts = {name: parts[name] for name in ("bfloat16 weights", "gathered parameters") if name in parts}
    settings = config.trainer_settings()
    adapted = settings.lora is not None and settings.reference_path is None  # then it is the model without its adapter
    if settings.needs_reference and not adapted and "ref_logprobs" not in config.limits().scored_apart:
        parts["reference"] = (2.0 if halved else 4.0) * model.parameters / t.ranks
    return {**parts, "activations": 4.0 * tokens * activations, "logits": float(logits)}


def runs_in_bf16(config: Config) -> bool:
    """Whether the trainer computes in bfloat16, as far as the configuration says; `auto` does where there is a GPU."""
    t = config.trainer
    return t.bf16 == "on" or (t.bf16 == "auto" and t.device.startswith("cuda"))


def host_memory(model: Model, config: Config) -> dict[str, float]:
    """Bytes of the trainer's process in host memory, beside those of its device."""
    published = {"auto": model.bytes, "float32": 4}.get(config.trainer_settings().publish_dtype, 2)
    parts = {"a version being published": float(published * model.trained)}
    if config.trainer.cpu_offload and config.trainer.ranks == 1 and runs_in_bf16(config):
        parts["masters, gradients and moments"] = 16.0 * model.trained
    elif config.trainer.cpu_offload and config.trainer.ranks > 1:
        parts["shards of every rank"] = 4.0 * (model.parameters + model.adapter) + 12.0 * model.trained
    if (
        config.trainer.ranks == 1
        and config.trainer.rollback
        and config.trainer_settings().optimizer_steps(config.scheduler.train_batch_size) > 1
    ):
        parts["the copy that undoes a failed step"] = 12.0 * model.trained
    return parts


def replica_memory(model: Model, config: Config) -> dict[str, float]:
    """Bytes of a replica of the embedded sampler: the weights, and keys and values of every trajectory it samples."""
    rows = config.rollout.slots * config.scheduler.samples_per_prompt
    columns = config.rollout.context or model.context
    cache = 2.0 * model.bytes * model.layers * rows * columns * model.kv_width
    weights = float(model.bytes * (model.parameters + model.adapter))
    return {"weights": weights, "a version being installed": float(model.bytes * model.trained), "KV cache": cache}


def memory_lines(model: Model, config: Config) -> Iterator[str]:
    """Lines of `engine check`. Raises: ConfigError if a device that the configuration declares is too small."""
    trainer = trainer_memory(model, config)
    who = "the trainer" if config.trainer.ranks == 1 else f"each of the trainer's {config.trainer.ranks} ranks"
    yield f"ok: {who} needs about {shown(trainer)} on its device"
    yield f"ok: the trainer needs about {shown(host_memory(model, config))} of host memory besides"
    _require("trainer.device_memory_gb", config.trainer.device_memory_gb, trainer, who, TRAINER_FIX)
    if config.rollout.backend == "torch":
        replica = replica_memory(model, config)
        yield f"ok: a replica needs about {shown(replica)}, the cache at full length"
        _require("rollout.device_memory_gb", config.rollout.device_memory_gb, replica, "a replica", REPLICA_FIX)


TRAINER_FIX = (
    "set trainer.activation_checkpointing, lower trainer.micro_batch_tokens, raise trainer.ranks, "
    "or use a larger device"
)  # fmt: skip
REPLICA_FIX = "lower rollout.slots or rollout.context, or use a larger device"


def _require(field: str, declared: float, parts: Mapping[str, float], who: str, fix: str) -> None:
    if declared and sum(parts.values()) > declared * GB:
        raise ConfigError(field, declared, f"{who} needs about {shown(parts)}", fix)


def shown(parts: Mapping[str, float]) -> str:
    """A sum with its parts."""
    return f"{_size(sum(parts.values()))} ({' + '.join(f'{_size(bytes)} {name}' for name, bytes in parts.items())})"


def _size(bytes: float) -> str:
    return f"{bytes / GB:.1f} GB" if bytes >= GB else f"{bytes / 1e6:.1f} MB"
