"""The settings of a trainer: every choice of the train step in one frozen record, checked when it is made.

`StepChoices` are the settings that a user gives, with their bounds: `config.trainer.TrainerSection` adds what a trainer
does not read, and `TrainerSettings` what comes from other sections, and checks combinations. It must not import torch,
so that a configuration is checked without loading it.

**The default formulas for asynchronous training** are `loss="ppo_clip"` with the behavior log-probs as the old
policy and `correction="none"`: one ratio, current / behavior, carries the whole off-policy correction, each token is
weighed by the policy that really drew it (whichever of several weights versions that was), and no forward pass is
spent on recomputing log-probs. Its clip range then has to hold the staleness too: with S above about 2,
`clip_share_low` and `clip_share_high` rise and learning slows. Then take `decoupled_ppo` (one more forward pass) with
`correction="token_tis"`. A configuration whose sampler is not the embedded one gets `token_tis` by default, since its
log-probs are rounded differently. docs/OBJECTIVES.md tables every choice with its formula and its paper.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from engine.errors import ConfigError
from engine.section import Section
from engine.training.custom_functions import CustomFunction, is_custom
from engine.training.lora import Lora

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "distillation")
LOSS_NAMES = ("ppo_clip", "decoupled_ppo", "gspo", "cispo")
OLD_POLICY_NAMES = ("behavior", "proximal")
CORRECTION_NAMES = ("none", "token_tis", "sequence_tis")
KL_NAMES = ("k1", "k2", "k3")
MASK_NAMES = (
    "token_ratio", "geometric_ratio", "product_ratio",
    "token_k1", "token_k2", "token_k3", "mean_k1", "mean_k2", "mean_k3", "sum_k1", "sum_k2", "sum_k3",
)  # fmt: skip
AGGREGATION_NAMES = ("token_mean", "sequence_mean", "constant")
CUSTOM_FIELDS = ("advantage", "loss", "correction")
"""Fields that also take `module:function`."""
LR_SCHEDULE_NAMES = ("constant", "linear", "cosine")

MOST_STEPS = 1 << 40
MOST_TOKENS = 1_000_000_000
GSPO_WIDEST_CLIP = 0.1
"""GSPO's ratio is a geometric mean over a sequence: bounds of tokens, 0.2 and more, never bind (the paper: 3e-4)."""


class Mask(Section):
    """Keeps the tokens or the whole trajectories with a measure in [low, high] (docs/OBJECTIVES.md). Raises
    `ConfigError`.

    A missing bound is open. Every allowed mask keeps tokens on which the policies agree (a ratio of 1, a KL of 0).
    """

    measure: str = Field(
        description="token_ratio, geometric_ratio, product_ratio, {token,mean,sum}_{k1,k2,k3}, or module:function."
    )
    """`corrections.py` says how each is computed."""
    arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `measure` names."
    )
    low: float | None = Field(None, ge=-1000, le=1000, description="Lower bound; null: none.")
    high: float | None = Field(None, ge=-1000, le=1000, description="Upper bound; null: none.")
    negative_only: bool = Field(False, description="Drop only tokens with a negative advantage.")
    """DeepSeek-V3.2, arXiv 2512.02556."""

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.measure not in MASK_NAMES and not is_custom(self.measure):
            law, fix = "is not a measure", f"use one of {', '.join(MASK_NAMES)}, or module:function"
            raise ConfigError("trainer.masks.measure", self.measure, law, fix)
        if self.low is None and self.high is None:
            law = f"a mask on {self.measure} needs a bound"
            raise ConfigError("trainer.masks.high", None, law, "set low, high or both")
        if is_custom(self.measure):
            if self.low is not None and self.high is not None and self.low > self.high:
                law = f"is above high = {self.high:g}, so the mask would drop every token"
                raise ConfigError("trainer.masks.low", self.low, law, "exchange them")
            return self
        agreed = 1.0 if self.is_ratio else 0.0
        kept = f"low <= {agreed:g} <= high, because {agreed:g} is the {self.measure} of equal policies"
        if self.low is not None and (self.low > agreed or (self.is_ratio and self.low <= 0)):
            law = kept + ("; a ratio is above 0" if self.is_ratio else "")
            raise ConfigError("trainer.masks.low", self.low, law, "use 0.5" if self.is_ratio else "use null")
        if self.high is not None and self.high < agreed:
            raise ConfigError("trainer.masks.high", self.high, kept, "use 2.0" if self.is_ratio else "use 0.1")
        return self

    @property
    def is_ratio(self) -> bool:
        return self.measure in MASK_NAMES and self.measure.endswith("_ratio")

    @property
    def of_sequences(self) -> bool:
        """Whether it keeps or drops whole trajectories. A function measures tokens."""
        return self.measure in MASK_NAMES and not self.measure.startswith("token_")

    @property
    def name(self) -> str:
        """The measure as a part of the names of metrics."""
        return CustomFunction(field="", spec=self.measure).name if is_custom(self.measure) else self.measure


class StepChoices(Section):
    """The choices of the train step that a configuration gives, each within its own bounds."""

    learning_rate: float = Field(1e-6, gt=0, le=1, description="AdamW's peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False, description="AdamW's decay rates, each in [0, 1).")
    adam_eps: float = Field(1e-8, gt=0, le=1, description="AdamW's denominator term.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Decoupled weight decay; applies to matrices only.")
    """Biases and norm gains are never decayed."""
    max_grad_norm: float = Field(1.0, ge=0, description="Maximum gradient norm; 0: no clipping.")
    """The L2 norm of an optimizer minibatch's gradient."""
    lr_schedule: str = Field("constant", description="After the warm-up: constant, linear to 0, or cosine to 0.")
    """The last two reach 0 at `lr_total_steps`."""
    lr_warmup_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Optimizer steps over which the learning rate rises."
    )
    """Step i (from 0) uses (i + 1) / lr_warmup_steps of the peak."""
    lr_total_steps: int = Field(
        0, ge=0, le=MOST_STEPS, description="Optimizer steps of the whole run; needed for linear and cosine."
    )

    advantage: str = Field(
        "grpo",
        description="Estimator: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, distillation, or "
        "module:function.",
    )
    """See `advantages.py`."""
    advantage_arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `advantage` names."
    )
    loss: str = Field(
        "ppo_clip",
        description="Loss: ppo_clip, gspo, cispo, decoupled_ppo (ppo_clip with old_policy proximal), or "
        "module:function.",
    )
    """See `losses.py`."""
    loss_arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `loss` names."
    )
    old_policy: str = Field(
        "behavior", description="Denominator of the ratio: behavior, or proximal (weights before the step)."
    )
    """With `proximal`, the loss is weighed by proximal / behavior, at the price of a forward pass."""
    clip_low: float = Field(0.2, gt=0, le=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, le=100, description="The ratio is clipped above at 1 + clip_high.")
    """Above clip_low it leaves room for unlikely tokens (DAPO)."""
    clip_dual: float = Field(
        0.0, ge=0, le=1000, description="Dual clip: bound of the ratio for negative advantages, such as 3; 0: none."
    )
    """With any loss that clips the ratio."""
    correction: str = Field(
        "none",
        description="none, token_tis or sequence_tis (truncated importance sampling), or module:function; auto: "
        "token_tis with the vllm and openai backends, else none.",
    )
    """The importance weight truncated at `correction_cap` is each token's own, or one of its whole trajectory."""
    correction_arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="Arguments of the function that `correction` names."
    )
    correction_cap: float = Field(2.0, gt=0, description="Maximum importance weight.")
    masks: tuple[Mask, ...] = Field(
        (), strict=False, max_length=12, description="Bounds outside which tokens or trajectories are dropped."
    )
    """After the correction; all of them hold at once."""
    kl_loss_coef: float = Field(
        0.0, ge=0, le=100, description="Coefficient of the KL to the reference in the loss; 0: none."
    )
    kl_loss: str = Field("k3", description="Estimator of the KL in the loss: k1 (with kl_loss_ratio), k2 or k3.")
    """Of KL(current ‖ reference): see `kl.py`."""
    kl_loss_ratio: bool = Field(
        False, description="Weight the estimate by current / behavior, so that its gradient is the KL's."
    )
    kl_reward_coef: float = Field(0.0, ge=0, le=100, description="Coefficient of the KL in the reward; 0: none.")
    """Times KL(behavior ‖ reference), taken off the rewards before advantages."""
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
    """The reward falls linearly, by `overlong_penalty`."""
    overlong_max_tokens: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="Response length with the full penalty; 0: rollout.max_tokens, or rollout.context with agents.",
    )
    """Tokens of tools included."""
    overlong_penalty: float = Field(1.0, ge=0, description="Full penalty of an overlong response.")
    filter_overlong: bool = Field(
        False, description="Do not train on responses that were cut off; their rewards still count in the baseline."
    )
    aggregation: str = Field(
        "token_mean", description="How losses of tokens are combined: token_mean, sequence_mean or constant."
    )
    """Over an optimizer minibatch: `token_mean` (DAPO), `sequence_mean` (GRPO) or `constant` (Dr.GRPO): see
    `losses.py`."""
    aggregation_tokens: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="Divisor of constant aggregation; 0: rollout.max_tokens, or rollout.context with agents.",
    )
    """In tokens per trajectory."""

    rollback: bool = Field(
        True,
        description="Copy weights and moments before a train step of several optimizer steps, to undo a failed one.",
    )
    """The copy is in host memory (12 bytes per parameter), which the trainer keeps for the next step; each of several
    `ranks` copies its own shards. Without the copy, as in a train step of one optimizer step, the trainer's process is
    replaced if a step fails after an optimizer step has begun."""
    epochs_per_batch: int = Field(1, ge=1, le=1000, description="Passes over each batch.")
    """The minibatches of each pass are the same, in the same order."""
    micro_batch_tokens: int = Field(
        16_384, ge=1, le=MOST_TOKENS, description="Maximum tokens of one forward pass, including padding."
    )
    """A longer trajectory gets a pass of its own. Changes speed and memory only. Small models on a CPU are fastest at
    2048 to 4096, because the activations then fit in its caches."""
    packing: Literal["auto", "on", "off"] = Field(
        "auto", description="Pack trajectories end to end, without padding; auto: if the model's attention supports it."
    )
    """docs/TRAINING.md. Changes speed, memory and rounding only."""
    shared_prompts: Literal["auto", "on", "off"] = Field(
        "auto", description="Compute a prompt once for its trajectories; auto: if this saves 15 % of the tokens."
    )
    """Needs packed rows; changes speed, memory and rounding only."""
    attention: Literal["auto", "sdpa", "varlen"] = Field(
        "auto",
        description="Kernel for packed rows: sdpa, or varlen, which needs no padding and no masks; auto: varlen on "
        "CUDA devices in bfloat16.",
    )
    """Changes speed, memory and rounding only. `auto` takes `sdpa` where torch (2.11) has no such kernel."""
    compile: bool = Field(
        False, description="Compile the model's layers with torch.compile; the first passes take a minute or more."
    )
    """The log-probs of logits are compiled, too. Changes speed, memory and rounding only."""
    router_replay: bool = Field(
        False, description="Train each token with the experts that sampled it (mixture of experts; torch and vllm)."
    )
    """docs/TRAINING.md, "Mixture of experts"."""
    bf16: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute with bfloat16 weights, rounded from float32; auto: on CUDA devices that support it.",
    )
    """The optimizer updates float32 weights with float32 moments and gradients, since an update of 1e-6 is lost in
    bfloat16."""
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of published weights; auto: the samplers' type."
    )
    """A trainer alone takes `auto` as the type in the model's `config.json`. The trained weights stay float32."""
    fp32_head: bool = Field(
        False, description="With bf16: compute logits in float32, in the trainer and in the samplers of the run."
    )
    """vLLM gets `hf_overrides: {head_dtype: float32}`. Servers of the `openai` backend must be started with it."""
    activation_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Keep only the layers' inputs for the backward pass: less memory, a third more time; auto: on "
        "GPUs.",
    )
    """Gradients are the same."""
    lora: Lora | None = Field(
        None, description="Train a low-rank adapter instead of the whole model; null: the whole model."
    )
    """Only the adapter is published and saved."""
    ranks: int = Field(1, ge=1, le=512, description="Processes that shard the trained model (FSDP2); 1: not sharded.")
    """Each holds a shard of weights, gradients and moments."""
    hybrid_sharding: bool = Field(
        False, description="Shard the model among the ranks of each node, so that every node has a whole one."
    )
    """Gradients are summed over nodes, but weights are gathered inside a node."""
    cpu_offload: bool = Field(
        False,
        description="On GPUs: keep the shards of several ranks, or the optimizer of a single one, in host memory.",
    )
    """Several ranks keep on the device only what a layer needs; one rank keeps its bfloat16 weights there."""
    device: str = Field("auto", description="Device of the trainer: auto, cpu, cuda or cuda:N.")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of the trainer; 0: from its pool's share, or torch's default."
    )
    """Torch's threads in the whole process."""

    @property
    def packing_demands(self) -> tuple[str, ...]:
        """The fields whose values need packed rows, so that a model which cannot compute them is refused."""
        demands = {"packing": "on", "shared_prompts": "on", "attention": "varlen"}
        return tuple(field for field, value in demands.items() if getattr(self, field) == value)

    def refuse_padding(self, reason: str) -> ConfigError:
        """The error for a model whose rows can only be padded, if there are `packing_demands`."""
        field = self.packing_demands[0]
        return ConfigError(f"trainer.{field}", getattr(self, field), reason, "use auto")


class TrainerSettings(StepChoices):
    """All choices of the train step. Raises `ConfigError` for unknown names and for contradictory values."""

    custom: tuple[CustomFunction, ...] = ()
    """The functions that `advantage`, `loss`, `correction` and `masks` name, with their arguments."""
    policy_mini_batch_size: int = 0
    """Groups per optimizer step; 0 takes the whole batch in one."""
    temperature: float = 1.0
    """The rollout's sampling temperature: the logits are divided by it, since the behavior log-probs are after it."""
    seed: int = 0
    """Seeds torch at construction: only weights that a checkpoint lacks are drawn from it."""

    @model_validator(mode="after")
    def _laws(self) -> Self:
        self._check_names()
        self._check_step()
        for field, holds, law, value in self._objective_laws():
            self._require(field, holds, law, value)
        return self

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads log-probs recomputed under the weights before the step."""
        return self.loss == "decoupled_ppo" or self.old_policy == "proximal"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are read."""
        custom = is_custom(self.loss) and self.reference_path is not None
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0 or self.distills or custom

    @property
    def distills(self) -> bool:
        """Whether the reference model is a teacher, whose log-probs take the place of rewards."""
        return self.advantage == "distillation"

    @property
    def needs_every_token(self) -> bool:
        """Whether the loss has a gradient also where the advantage is 0. Imports the user's loss."""
        custom = self.custom_function("loss")
        return self.kl_loss_coef > 0 or self.entropy_coef > 0 or (custom is not None and custom.needs.zero_advantages)

    @property
    def needs_entropies(self) -> bool:
        """Whether the entropy of each token's distribution is read. Imports the user's functions."""
        readers = [one for one in self.custom_functions() if one.field != "trainer.advantage"]
        return self.entropy_coef > 0 or any(one.needs.entropies for one in readers)

    def custom_functions(self) -> tuple[CustomFunction, ...]:
        """The user's functions: those of `custom`, and for other names `module:function` without arguments."""
        named = {f"trainer.{field}": getattr(self, field) for field in CUSTOM_FIELDS}
        named |= {f"trainer.masks.{index}.measure": mask.measure for index, mask in enumerate(self.masks)}
        given = {one.field: one for one in self.custom}
        return tuple(
            given.get(path) or CustomFunction(field=path, spec=spec) for path, spec in named.items() if is_custom(spec)
        )

    def custom_function(self, field: str) -> CustomFunction | None:
        """The user's `advantage`, `loss` or `correction`; None if a built-in one is used."""
        return next((one for one in self.custom_functions() if one.field == f"trainer.{field}"), None)

    def custom_measures(self) -> dict[str, CustomFunction]:
        """The user's measures of masks, by their names `module:function`."""
        return {one.spec: one for one in self.custom_functions() if one.field.endswith(".measure")}

    def with_local(self, local: Mapping[str, Any]) -> Self:
        """The settings with the functions in `local`, by field, which cannot be imported. Raises: `ConfigError` for
        several ranks, whose processes would have to import them."""
        custom = tuple(replace(one, function=local.get(one.field)) for one in self.custom_functions())
        for one in custom if self.ranks > 1 else ():
            if one.function is not None:
                law = "belongs to a script or a notebook, or is inside a function, so that the ranks cannot import it"
                raise ConfigError(one.field, one.spec, law, "put it in a module, or use trainer.ranks: 1")
        return self.model_copy(update={"custom": custom})

    def plain(self) -> dict[str, Any]:
        """The settings as plain data, without the user's functions themselves."""
        return self.model_dump(exclude={"custom"})

    @property
    def shapes_by_reference(self) -> bool:
        """Whether advantages need log-probs of the reference model."""
        return self.kl_reward_coef > 0 or self.distills

    def optimizer_steps(self, groups: int) -> int:
        """Optimizer steps of a batch of so many groups."""
        size = self.policy_mini_batch_size or max(1, groups)
        return self.epochs_per_batch * -(-groups // size)

    def scoring_tasks(self, groups: int) -> tuple[str, ...]:
        """What each batch of so many groups is scored by before it is trained, in order. A batch of a single optimizer
        step needs no `old_logprobs`: its own forward pass is under the weights before the step."""
        reference = ("ref_logprobs",) if self.needs_reference else ()
        old = ("old_logprobs",) if self.needs_proximal and self.optimizer_steps(groups) > 1 else ()
        return (*reference, *old)

    @property
    def compares_siblings(self) -> bool:
        """Whether a trajectory without siblings on its prompt teaches nothing."""
        return self.advantage not in ("reinforce_pp", "distillation") and not is_custom(self.advantage)

    @property
    def normalises_over_batch(self) -> bool:
        """Whether advantages are normalised over all tokens of the batch."""
        return self.advantage in ("reinforce_pp", "reinforce_pp_baseline")

    @property
    def kl_reward_per_token(self) -> bool:
        """Whether the KL in the reward is each token's own from there on, not the whole trajectory's."""
        return self.advantage == "reinforce_pp"

    def learning_rate_at(self, optimizer_step: int) -> float:
        """The rate of one optimizer step, counted from 0."""
        if optimizer_step < self.lr_warmup_steps:
            return self.learning_rate * (optimizer_step + 1) / self.lr_warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        left = max(0.0, (self.lr_total_steps - optimizer_step) / (self.lr_total_steps - self.lr_warmup_steps))
        return self.learning_rate * (left if self.lr_schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)

    def _check_names(self) -> None:
        choices = {
            "advantage": ADVANTAGE_NAMES,
            "loss": LOSS_NAMES,
            "old_policy": OLD_POLICY_NAMES,
            "correction": CORRECTION_NAMES,
            "kl_loss": KL_NAMES,
            "kl_reward": KL_NAMES,
            "aggregation": AGGREGATION_NAMES,
            "lr_schedule": LR_SCHEDULE_NAMES,
        }
        for field, names in choices.items():
            value = getattr(self, field)
            custom = field in CUSTOM_FIELDS
            if value not in names and not (custom and is_custom(value)):
                fix = f"use one of {', '.join(names)}" + (", or module:function" if custom else "")
                raise ConfigError(f"trainer.{field}", value, "is not allowed", fix)

    def _check_step(self) -> None:
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "must each be in [0, 1)", "(0.9, 0.999)")
        law = "is one device, but each of several ranks needs its own"
        self._require("device", self.ranks == 1 or ":" not in self.device, law, "cuda, or auto")
        law = "has no effect with one rank without bfloat16 weights"
        fits = not self.cpu_offload or self.ranks > 1 or self.bf16 != "off"
        self._require("cpu_offload", fits, law, "trainer.bf16: on, or trainer.ranks: 2")
        law = "needs packed rows, but trainer.packing is off"
        fits = self.shared_prompts != "on" or self.packing != "off"
        self._require("shared_prompts", fits, law, "auto, or trainer.packing: auto")
        fits = self.attention != "varlen" or self.packing != "off"
        self._require("attention", fits, law, "auto, or trainer.packing: auto")
        law = f"computes in bfloat16 on CUDA devices, but device is {self.device} and bf16 is {self.bf16}"
        fits = self.attention != "varlen" or (self.device != "cpu" and self.bf16 != "off")
        self._require("attention", fits, law, "auto")
        if self.aggregation == "constant":
            law = "must be at least 1: trainer.aggregation constant divides by it"
            self._require("aggregation_tokens", self.aggregation_tokens >= 1, law, "the rollout's max_tokens")
        if self.lr_schedule != "constant":
            law = f"must be above trainer.lr_warmup_steps: trainer.lr_schedule {self.lr_schedule} ends there"
            enough = self.lr_total_steps > self.lr_warmup_steps
            self._require("lr_total_steps", enough, law, f"{self.lr_warmup_steps + 1}")

    def _objective_laws(self) -> Iterator[tuple[str, bool, str, str]]:
        """(field, whether it holds, law, allowed value) of losses, corrections, KL terms and shaping."""
        law = "must be 0 (no bound) or above 1 (arXiv 1912.09729)"
        yield "clip_dual", not self.clip_dual or self.clip_dual > 1, law, "3.0"
        law = "cispo bounds its weights by clip_high; it has no ratio that clip_dual could bound"
        yield "clip_dual", not self.clip_dual or self.loss != "cispo", law, "0"
        custom = is_custom(self.loss)
        law = "is not read by your loss"
        yield "clip_dual", not self.clip_dual or not custom, law, "0, and a bound in trainer.loss_arguments"
        law = "with trainer.old_policy behavior, your loss contains the importance ratio itself"
        fits = self.correction == "none" or not custom or self.needs_proximal
        yield "correction", fits, law, "none, or trainer.old_policy: proximal"
        for field in ("clip_low", "clip_high") if self.loss == "gspo" else ():
            law = f"must be at most {GSPO_WIDEST_CLIP:g} with gspo, which clips a geometric mean over the sequence"
            yield field, getattr(self, field) <= GSPO_WIDEST_CLIP, law, "3e-4"
        law = "sequence_tis needs the proximal policy: this loss uses the ratio current / behavior"
        fits = self.correction != "sequence_tis" or self.needs_proximal
        yield "correction", fits, law, "trainer.old_policy: proximal, or token_tis"
        measures = [mask.name for mask in self.masks]
        yield "masks", len(set(measures)) == len(measures), "a measure occurs twice", "one mask for each measure"
        law = "the expected gradient of k1 is zero without trainer.kl_loss_ratio (arXiv 2510.01555)"
        yield "kl_loss", self.kl_loss != "k1" or self.kl_loss_ratio or not self.kl_loss_coef, law, "k2 or k3"
        law = "distillation needs a teacher"
        yield "reference_path", not self.distills or self.reference_path is not None, law, "the path of the teacher"
        for field in ("kl_reward_coef", "overlong_cache_tokens") if self.distills else ():
            yield field, not getattr(self, field), "changes rewards, which distillation does not read", "0"
        law = "no KL term and no loss of yours uses the reference model"
        yield "reference_path", self.reference_path is None or self.needs_reference, law, "trainer.kl_loss_coef: 0.001"
        law = f"must be less than trainer.overlong_max_tokens = {self.overlong_max_tokens}"
        fits = not self.overlong_cache_tokens or self.overlong_cache_tokens < self.overlong_max_tokens
        yield "overlong_cache_tokens", fits, law, f"{max(0, self.overlong_max_tokens // 4)}"

    def _require(self, field: str, holds: bool, law: str, value: str) -> None:
        if not holds:
            raise ConfigError(f"trainer.{field}", getattr(self, field), law, f"for example {value}")
