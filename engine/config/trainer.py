"""The configuration of the train step. Part of `schema.Config`; `training.trainer_settings` says what each choice
means."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from engine.config.limit_fields import limit_field
from engine.errors import ConfigError
from engine.section import DEVICE, TRAINER, Section
from engine.training.custom_functions import CustomFunction, is_custom
from engine.training.lora import CONFIG_FILE, Lora, without_experts
from engine.training.named_tensors import Shapes
from engine.training.trainer_settings import CUSTOM_FIELDS, StepChoices, TrainerSettings

READ_FOR_CUSTOM = {
    "backend", "arguments", "device", "gpus_per_rank", "threads", "checkpoint_every", "keep_checkpoints",
    "keep_checkpoints_every", "keep_best",
}  # fmt: skip
"""Settings that the engine reads, or passes on, if the trainer is a class of the user."""
SETTLED = {"correction": "none", "packing": "off"}
"""Values that the engine itself may have set."""


class KeepBestSection(Section):
    """Which checkpoint is kept as the best one."""

    metric: str = Field(
        min_length=1, description="Validation metric: accuracy, reward_mean or SET/METRIC, such as math/pass@4."
    )
    mode: Literal["max", "min"] = Field("max", description="Whether the largest or the smallest value is best.")


class TrainerSection(StepChoices):
    """The train step, and what the engine does with its trainer. `TrainerSettings` checks combinations of choices."""

    backend: str = Field(
        "torch", pattern=TRAINER, description="Trainer: torch (built in), or your trainer as module:Class."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=256, description="Keyword arguments of your trainer's class."
    )
    correction: str = Field("auto", description=StepChoices.model_fields["correction"].description)
    nodes: int = Field(1, ge=1, le=64, description="Nodes of the cluster over which the ranks are divided evenly.")
    gpus_per_rank: int = Field(
        0, ge=0, le=8, description="GPUs that Ray reserves for each rank; 0: one if the cluster has GPUs, else none."
    )
    device: str = Field("auto", pattern=DEVICE, description=StepChoices.model_fields["device"].description)
    device_memory_gb: float = Field(
        0.0,
        ge=0,
        le=100_000,
        description="Memory of each rank's device; `engine check` refuses what cannot fit; 0: unknown.",
    )
    checkpoint_every: int = limit_field("checkpoint_every", 10)
    keep_checkpoints: int = limit_field("keep_checkpoints")
    keep_checkpoints_every: int = limit_field("keep_checkpoints_every")

    keep_best: KeepBestSection | None = Field(
        None, description="Also keep the best checkpoint by a validation metric; null: only the newest ones."
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.arguments and not self.custom:
            law = "only a custom trainer has arguments, and trainer.backend is torch"
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

    @model_validator(mode="after")
    def _equal_nodes(self) -> Self:
        if self.ranks % self.nodes:
            law = f"must be a multiple of trainer.nodes = {self.nodes}: each node has the same number of ranks"
            raise ConfigError("trainer.ranks", self.ranks, law, f"use {-(-self.ranks // self.nodes) * self.nodes}")
        if self.hybrid_sharding and self.nodes == 1:
            law = "needs several nodes: all ranks of a node hold one model"
            raise ConfigError("trainer.hybrid_sharding", True, law, "use false, or raise trainer.nodes")
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
        own = {name: getattr(self, name) for name in StepChoices.model_fields}
        own["custom"] = tuple(self._custom_functions(code_dir))
        for field in ("aggregation_tokens", "overlong_max_tokens"):
            own[field] = own[field] or response_tokens
        if self.publish_dtype == "auto":
            own["publish_dtype"] = samplers
        return TrainerSettings(**own, **shared)

    def _custom_functions(self, code_dir: str | None) -> Iterator[CustomFunction]:
        """Raises: `ConfigError` for arguments of a built-in name."""
        named = [(field, field, getattr(self, field), getattr(self, f"{field}_arguments")) for field in CUSTOM_FIELDS]
        for index, mask in enumerate(self.masks):
            named.append((f"masks.{index}.measure", f"masks.{index}", mask.measure, mask.arguments))
        for path, owner, spec, arguments in named:
            if is_custom(spec):
                yield CustomFunction(field=f"trainer.{path}", spec=spec, directory=code_dir, arguments=arguments)
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
    bounded = (trainer.loss == "cispo" or is_custom(trainer.loss)) and trainer.old_policy == "behavior"
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
    """Shapes of the matrices in numbered blocks that an adapter can have, by the last part of their layers' names.
    Embeddings and the head are in no block."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        if parts[-1] == "weight" and len(shape) == 2 and any(part.isdigit() for part in parts[:-2]):
            found.setdefault(parts[-2], []).append(shape)
    return {layer: found[layer] for layer in without_experts(found, shapes)}


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
