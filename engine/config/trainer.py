"""The configuration of the train step. Part of `schema.Config`; `training.trainer_settings` says what each choice
means."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.config.section import DEVICE, TRAINER, Section
from engine.errors import ConfigError
from engine.states.limits import BOUNDS
from engine.training.lora import ALL_LINEAR, CONFIG_FILE, Lora
from engine.training.named_tensors import Shapes
from engine.training.own_functions import OwnFunction, is_own
from engine.training.trainer_settings import OWN_FIELDS, Mask, TrainerSettings

MOST_STEPS = 1 << 40
MOST_TOKENS = 1_000_000_000
READ_FOR_CUSTOM = {
    "backend", "arguments", "device", "gpus_per_rank", "threads", "checkpoint_every", "keep_checkpoints",
    "keep_checkpoints_every", "keep_best",
}  # fmt: skip
"""Settings that the engine reads, or passes on, if the trainer is a class of the user."""
SETTLED = {"correction": "none", "packing": "off"}
"""Values that the engine itself may have set."""


class MaskSection(Section):
    """Keeps tokens, or whole trajectories, whose measure lies between the bounds (docs/OBJECTIVES.md)."""

    measure: str = Field(
        description="token_ratio, geometric_ratio, product_ratio, {token,mean,sum}_{k1,k2,k3}, or module:function."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `measure` names."
    )
    low: float | None = Field(None, ge=-1000, le=1000, description="Lower bound; null: none.")
    high: float | None = Field(None, ge=-1000, le=1000, description="Upper bound; null: none.")
    negative_only: bool = Field(False, description="Drop only tokens with a negative advantage.")


class KeepBestSection(Section):
    """Which checkpoint is kept as the best one."""

    metric: str = Field(
        min_length=1, description="Validation metric: accuracy, reward_mean or SET/METRIC, such as math/pass@4."
    )
    mode: Literal["max", "min"] = Field("max", description="Whether the largest or the smallest value is best.")


class LoraSection(Section):
    """A low-rank adapter: `engine.training.lora.Lora` says what each field means, and checks it."""

    rank: int = Field(16, ge=1, le=4096, description="Rank of the adapter's matrices.")
    alpha: float = Field(32.0, gt=0, le=1_000_000, description="The product of the matrices is scaled by alpha / rank.")
    target_modules: list[str] = Field(
        default_factory=lambda: [ALL_LINEAR],
        max_length=64,
        description="Linear layers to adapt: all-linear, or names such as q_proj.",
    )
    dropout: float = Field(0.0, ge=0, le=0, description="Must be 0: with dropout, the sampler's log-probs differ.")

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def settings(self) -> Lora:
        """The settings for the trainer and the samplers. Raises: ConfigError."""
        return Lora(rank=self.rank, alpha=self.alpha, target_modules=tuple(self.target_modules), dropout=self.dropout)


class TrainerSection(Section):
    """The train step: `training.trainer_settings.TrainerSettings` says what each choice means, and checks it."""

    backend: str = Field(
        "torch", pattern=TRAINER, description="Trainer: torch (built in), or your trainer as module:Class."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=256, description="Keyword arguments of your trainer's class."
    )
    learning_rate: float = Field(1e-6, gt=0, le=1, description="AdamW's peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False, description="AdamW's decay rates, each in [0, 1).")
    adam_eps: float = Field(1e-8, gt=0, le=1, description="AdamW's denominator term.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Decoupled weight decay; applies to matrices only.")
    max_grad_norm: float = Field(1.0, ge=0, description="Maximum gradient norm; 0: no clipping.")
    lr_schedule: str = Field("constant", description="After the warm-up: constant, linear to 0, or cosine to 0.")
    lr_warmup_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Optimizer steps over which the learning rate rises."
    )
    lr_total_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Optimizer steps of the whole run; needed for linear and cosine."
    )
    advantage: str = Field(
        "grpo",
        description="Estimator: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, distillation, or "
        "module:function.",
    )
    advantage_arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `advantage` names."
    )
    loss: str = Field(
        "ppo_clip",
        description="Loss: ppo_clip, gspo, cispo, decoupled_ppo (ppo_clip with old_policy proximal), or "
        "module:function.",
    )
    loss_arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `loss` names."
    )
    old_policy: str = Field(
        "behavior", description="Denominator of the ratio: behavior, or proximal (weights before the step)."
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, le=100, description="The ratio is clipped above at 1 + clip_high.")
    clip_dual: float = Field(
        0.0, ge=0, le=1000, description="Dual clip: bound of the ratio for negative advantages, such as 3; 0: none."
    )
    correction: str = Field(
        "auto",
        description="none, token_tis or sequence_tis (truncated importance sampling), or module:function; auto: "
        "token_tis with the vllm and openai backends, else none.",
    )
    correction_arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `correction` names."
    )
    correction_cap: float = Field(2.0, gt=0, description="Maximum importance weight.")
    masks: tuple[MaskSection, ...] = Field(
        (), strict=False, max_length=12, description="Bounds outside which tokens or trajectories are dropped."
    )
    kl_loss_coef: float = Field(
        0.0, ge=0, le=100, description="Coefficient of the KL to the reference in the loss; 0: none."
    )
    kl_loss: str = Field("k3", description="Estimator of the KL in the loss: k1 (with kl_loss_ratio), k2 or k3.")
    kl_loss_ratio: bool = Field(
        False, description="Weight the estimate by current / behavior, so that its gradient is the KL's."
    )
    kl_reward_coef: float = Field(0.0, ge=0, le=100, description="Coefficient of the KL in the reward; 0: none.")
    kl_reward: str = Field("k1", description="Estimator of the KL in the reward: k1, k2 or k3.")
    entropy_coef: float = Field(0.0, ge=0, le=100, description="Coefficient of the entropy bonus in the loss; 0: none.")
    reference_path: str | None = Field(
        None, min_length=1, description="Reference model, or teacher; null: the initial weights."
    )
    overlong_cache_tokens: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="Number of tokens before overlong_max_tokens over which the reward falls (DAPO); 0: no penalty.",
    )
    overlong_max_tokens: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="Response length with the full penalty; 0: rollout.max_tokens, or rollout.context with agents.",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="Full penalty of an overlong response.")
    filter_overlong: bool = Field(
        False, description="Do not train on responses that were cut off; their rewards still count in the baseline."
    )
    aggregation: str = Field(
        "token_mean", description="How losses of tokens are combined: token_mean, sequence_mean or constant."
    )
    aggregation_tokens: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="Divisor of constant aggregation; 0: rollout.max_tokens, or rollout.context with agents.",
    )
    rollback: bool = Field(
        True,
        description="Copy weights and moments before a train step of several optimizer steps, to undo a failed one.",
    )
    epochs_per_batch: int = Field(1, ge=1, le=1000, description="Passes over each batch.")
    micro_batch_tokens: int = Field(
        16_384, ge=1, le=MOST_TOKENS, description="Maximum tokens of one forward pass, including padding."
    )
    packing: Literal["auto", "on", "off"] = Field(
        "auto", description="Pack trajectories end to end, without padding; auto: if the model's attention supports it."
    )
    shared_prompts: Literal["auto", "on", "off"] = Field(
        "auto", description="Compute a prompt once for its trajectories; auto: if this saves 15 % of the tokens."
    )
    bf16: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute with bfloat16 weights, rounded from float32; auto: on CUDA devices that support it.",
    )
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of published weights; auto: the samplers' type."
    )
    fp32_head: bool = Field(
        False, description="With bf16: compute logits in float32. No effect on models that scale or cap their logits."
    )
    activation_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Keep only the layers' inputs for the backward pass: less memory, a third more time; auto: on "
        "GPUs.",
    )
    lora: LoraSection | None = Field(
        None, description="Train a low-rank adapter instead of the whole model; null: the whole model."
    )
    ranks: int = Field(
        1, ge=1, le=64, description="Processes on one machine that shard the trained model (FSDP2); 1: not sharded."
    )
    gpus_per_rank: int = Field(
        0, ge=0, le=8, description="GPUs that Ray reserves for each rank; 0: one if the cluster has GPUs, else none."
    )
    cpu_offload: bool = Field(
        False,
        description="On GPUs: keep the shards of several ranks, or the optimizer of a single one, in host memory.",
    )
    device: str = Field("auto", pattern=DEVICE, description="Device of the trainer: auto, cpu, cuda or cuda:N.")
    device_memory_gb: float = Field(
        0.0,
        ge=0,
        le=100_000,
        description="Memory of each rank's device; `engine check` refuses what cannot fit; 0: unknown.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of the trainer; 0: from its pool's share, or torch's default."
    )
    checkpoint_every: int = Field(
        10,
        **BOUNDS["checkpoint_every"].as_field(),
        description="Train steps between checkpoints; the last step also makes one. 0: no checkpoints.",
    )
    keep_checkpoints: int = Field(
        2,
        **BOUNDS["keep_checkpoints"].as_field(),
        description="Number of newest checkpoints to keep; others are deleted.",
    )
    keep_checkpoints_every: int = Field(
        0,
        **BOUNDS["keep_checkpoints_every"].as_field(),
        description="Keep a checkpoint permanently after every so many train steps; 0: none.",
    )

    keep_best: KeepBestSection | None = Field(
        None, description="Also keep the best checkpoint by a validation metric; null: only the newest ones."
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.arguments and not self.custom:
            law = "only a trainer of your own has arguments, and trainer.backend is torch"
            raise ConfigError(
                "trainer.arguments", self.arguments, law, "remove them, or use trainer.backend: module:Class"
            )
        for name, info in type(self).model_fields.items() if self.custom else ():
            value, default = getattr(self, name), info.get_default(call_default_factory=True)
            if name not in READ_FOR_CUSTOM and value not in (default, SETTLED.get(name, default)):
                law = f"is not read with trainer.backend {self.backend}"
                raise ConfigError(
                    f"trainer.{name}", value, law, "remove it, and give what the class reads as arguments"
                )
        return self

    @property
    def custom(self) -> bool:
        """Whether the trainer is a class of the user."""
        return ":" in self.backend

    def settings(
        self, *, response_tokens: int, samplers: str, code_dir: str | None = None, **shared: Any
    ) -> TrainerSettings:
        """The settings for the trainer. `shared`: settings from other sections. `samplers`: the type of the samplers'
        weights, for `publish_dtype`. `code_dir`: the directory of the user's functions. Raises: ConfigError."""
        elsewhere = {"checkpoint_every", "keep_checkpoints", "keep_checkpoints_every", "keep_best"}
        elsewhere |= {"device_memory_gb", "gpus_per_rank", "backend", "arguments"}
        elsewhere |= {f"{field}_arguments" for field in OWN_FIELDS}
        own = self.model_dump(exclude=elsewhere)
        own["masks"] = tuple(Mask(**mask.model_dump(exclude={"arguments"})) for mask in self.masks)
        own["own"] = tuple(self._own_functions(code_dir))
        own["lora"] = None if self.lora is None else self.lora.settings()
        for field in ("aggregation_tokens", "overlong_max_tokens"):
            own[field] = own[field] or response_tokens
        if self.publish_dtype == "auto":
            own["publish_dtype"] = samplers
        return TrainerSettings(**own, **shared)

    def _own_functions(self, code_dir: str | None) -> Iterator[OwnFunction]:
        """Raises: `ConfigError` for arguments of a built-in name."""
        named = [(field, field, getattr(self, field), getattr(self, f"{field}_arguments")) for field in OWN_FIELDS]
        for index, mask in enumerate(self.masks):
            named.append((f"masks.{index}.measure", f"masks.{index}", mask.measure, mask.arguments))
        for path, owner, spec, arguments in named:
            if is_own(spec):
                yield OwnFunction(field=f"trainer.{path}", spec=spec, directory=code_dir, arguments=arguments)
            elif arguments:
                field = f"trainer.{owner}{'.' if owner != path else '_'}arguments"
                law = f"trainer.{path} {spec} is built in and takes no arguments"
                raise ConfigError(field, arguments, law, "remove them, or use module:function")


def settled_correction(trainer: TrainerSection, backend: str) -> TrainerSection:
    """The section with a correction for the rollout `backend`, if it is left open.

    vLLM and servers round differently from the trainer, above all in bfloat16, and PPO's clip has no bound for a ratio
    above 1 with a negative advantage. `cispo` bounds its ratio to the behavior policy itself; a loss of the user's own
    contains it.
    """
    if trainer.correction != "auto":
        return trainer
    bounded = (trainer.loss == "cispo" or is_own(trainer.loss)) and trainer.old_policy == "behavior"
    bounded = bounded or trainer.custom
    correction = "none" if backend == "torch" or bounded else "token_tis"
    return trainer.model_copy(update={"correction": correction})


def refuse_idle_gpus(trainer: TrainerSection) -> None:
    """Raises: `ConfigError` for GPUs that a trainer on the CPU would reserve."""
    if trainer.gpus_per_rank and trainer.device == "cpu":
        law = "trainer.device is cpu, so the reserved GPUs would be idle"
        raise ConfigError("trainer.gpus_per_rank", trainer.gpus_per_rank, law, "use 0, or trainer.device: auto")


def refuse_adapter_as_model(directory: Path, field: str) -> None:
    """Raises: `ConfigError` for the directory of an adapter."""
    if (directory / CONFIG_FILE).is_file():
        law = "is an adapter (it has adapter_config.json), not a model"
        fix = "give the model that it belongs to, or merge them, for example with `engine export`"
        raise ConfigError(field, str(directory), law, fix)


def linear_layers(shapes: Shapes) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the matrices in numbered blocks, by the last part of their layers' names. Embeddings and the head are
    in no block."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        if parts[-1] == "weight" and len(shape) == 2 and any(part.isdigit() for part in parts[:-2]):
            found.setdefault(parts[-2], []).append(shape)
    return dict(sorted(found.items()))


def adapter_numbers(lora: Lora, shapes: Shapes) -> int:
    """Number of parameters of an adapter. Raises: `ConfigError` for layers that the model lacks, and for a rank that is
    larger than that of every adapted matrix."""
    layers = linear_layers(shapes)
    adapted = [shape for name in (lora.targets(list(layers)) if layers else []) for shape in layers[name]]
    highest = max(map(min, adapted), default=lora.rank)
    if lora.rank > highest:
        law = f"must be at most {highest}, the largest rank that an adapted layer of this model can have"
        raise ConfigError("trainer.lora.rank", lora.rank, law, f"use {highest} or less")
    return sum(lora.rank * (rows + columns) for rows, columns in adapted)


def adapter_line(lora: Lora, shapes: Shapes, parameters: int) -> Iterator[str]:
    """A line of `engine check`. Raises: `ConfigError` like `adapter_numbers`."""
    numbers = adapter_numbers(lora, shapes)
    if numbers:
        share = numbers / max(1, parameters)
        yield f"ok: trainer.lora trains {numbers:,} parameters in addition to the model's {parameters:,} ({share:.2%})"
