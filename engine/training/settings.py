"""What a trainer can be told: every choice of the train step in one frozen record, checked when it is made.

The configuration layer maps its `trainer`, `scheduler` and `rollout` sections onto `TrainerSettings`; a user who embeds
`ModelTrainer` makes one directly. It must stay free of torch, so that a configuration is checked without loading it.

**The default formulas for asynchronous training** are `loss="ppo_clip"` with the behaviour log-probs as the old
policy and `correction="none"`: one ratio, current / behaviour, carries the whole off-policy correction, each token is
weighed by the policy that really drew it (whichever of several weights versions that was), and no forward pass is
spent on recomputing log-probs. Its clip range then has to hold the staleness too: with S above about 2,
`clip_share_low` and `clip_share_high` rise and learning slows. Then take `decoupled_ppo` (one more forward pass) with
`correction="token_tis"`.
"""

from dataclasses import dataclass

from engine.errors import ConfigError

ADVANTAGE_NAMES = ("grpo", "dr_grpo")
LOSS_NAMES = ("ppo_clip", "decoupled_ppo")
CORRECTION_NAMES = ("none", "token_tis")
AGGREGATION_NAMES = ("token_mean", "sequence_mean", "constant")
LR_SCHEDULE_NAMES = ("constant", "linear")
BF16_NAMES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """All choices of the train step. Raises `ConfigError` for a value that cannot work."""

    learning_rate: float = 1e-6
    """AdamW's peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    adam_eps: float = 1e-8
    """AdamW's denominator term."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of matrices only: biases and norm gains are never decayed."""
    max_grad_norm: float = 1.0
    """The gradient of an optimizer minibatch is scaled down to this L2 norm; 0 leaves it as it is."""
    lr_schedule: str = "constant"
    """After the warm-up: `constant`, or `linear` down to 0 at `lr_total_steps`."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly; step i (from 0) uses (i + 1) / lr_warmup_steps of the
    peak."""
    lr_total_steps: int = 0
    """Optimizer steps of the whole run; needed by `linear` only."""

    advantage: str = "grpo"
    """`grpo` or `dr_grpo`: see `advantages.py`."""
    loss: str = "ppo_clip"
    """`ppo_clip` (ratio current / behaviour) or `decoupled_ppo` (current / proximal, weighed by proximal /
    behaviour)."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped above at 1 + clip_high; above clip_low it leaves room for unlikely tokens (DAPO)."""
    correction: str = "none"
    """`none`, or `token_tis`: the importance weight is truncated at `correction_cap`."""
    correction_cap: float = 2.0
    """C of truncated importance sampling."""
    aggregation: str = "token_mean"
    """Over an optimizer minibatch: `token_mean` (DAPO), `sequence_mean` (GRPO) or `constant` (Dr.GRPO): see
    `losses.py`."""
    aggregation_tokens: int = 0
    """The divisor of `constant`, in tokens per trajectory; usually the response budget `max_tokens`."""

    policy_mini_batch_size: int = 0
    """Groups per optimizer step; 0 takes the whole batch in one."""
    epochs_per_batch: int = 1
    """Passes over each batch; the minibatches of each pass are the same, in the same order."""
    micro_batch_tokens: int = 16384
    """Padded input tokens per forward pass. A longer trajectory gets a pass of its own. Changes speed and memory
    only: small models on a CPU are fastest at 2048 to 4096, whose activations stay in its caches."""

    temperature: float = 1.0
    """The rollout's sampling temperature: the logits are divided by it, since the behaviour log-probs are after it."""
    bf16: str = "auto"
    """bfloat16 autocast: `on`, `off`, or `auto` = on where a CUDA device has it. Weights and moments stay float32,
    since an update of 1e-6 is lost in bfloat16."""
    device: str = "auto"
    """A torch device, or `auto`: CUDA where there is one."""
    threads: int = 0
    """Torch's threads in this whole process; 0 leaves them alone."""
    seed: int = 0
    """Seeds torch at construction: only weights that a checkpoint lacks are drawn from it."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_ranges()

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads log-probs recomputed under the weights before the step."""
        return self.loss == "decoupled_ppo"

    def learning_rate_at(self, optimizer_step: int) -> float:
        """The rate of one optimizer step, counted from 0."""
        if optimizer_step < self.lr_warmup_steps:
            return self.learning_rate * (optimizer_step + 1) / self.lr_warmup_steps
        if self.lr_schedule == "linear":
            left = (self.lr_total_steps - optimizer_step) / (self.lr_total_steps - self.lr_warmup_steps)
            return self.learning_rate * max(0.0, left)
        return self.learning_rate

    def _check_names(self) -> None:
        choices = {
            "advantage": ADVANTAGE_NAMES,
            "loss": LOSS_NAMES,
            "correction": CORRECTION_NAMES,
            "aggregation": AGGREGATION_NAMES,
            "lr_schedule": LR_SCHEDULE_NAMES,
            "bf16": BF16_NAMES,
        }
        for field, names in choices.items():
            value = getattr(self, field)
            if value not in names:
                raise ConfigError(f"trainer.{field}", value, "it is not a known name", f"one of {', '.join(names)}")

    def _check_ranges(self) -> None:
        self._require("learning_rate", self.learning_rate > 0, "the learning rate is above 0", "1e-6")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "each beta is in [0, 1)", "(0.9, 0.999)")
        self._require("adam_eps", self.adam_eps > 0, "it keeps the denominator above 0", "1e-8")
        self._require("weight_decay", self.weight_decay >= 0, "weight decay is not negative", "0")
        self._require("max_grad_norm", self.max_grad_norm >= 0, "a norm is not negative", "1.0, or 0 for no clipping")
        self._require("clip_low", 0 < self.clip_low <= 1, "the lower bound 1 - clip_low is in [0, 1)", "0.2")
        self._require("clip_high", self.clip_high > 0, "the upper bound 1 + clip_high is above 1", "0.28")
        self._require("correction_cap", self.correction_cap > 0, "an importance weight is above 0", "2.0")
        self._require("temperature", self.temperature > 0, "greedy samples have no log-probs to learn from", "1.0")
        self._require("epochs_per_batch", self.epochs_per_batch >= 1, "a batch is trained at least once", "1")
        self._require("micro_batch_tokens", self.micro_batch_tokens >= 1, "a pass holds at least one token", "16384")
        for field in ("policy_mini_batch_size", "lr_warmup_steps", "lr_total_steps", "threads", "aggregation_tokens"):
            self._require(field, getattr(self, field) >= 0, "a count is not negative", "0")
        if self.aggregation == "constant":
            law = "`aggregation: constant` divides by it"
            self._require("aggregation_tokens", self.aggregation_tokens >= 1, law, "the rollout's max_tokens")
        if self.lr_schedule == "linear":
            law = "`lr_schedule: linear` ends there, after the warm-up"
            enough = self.lr_total_steps > self.lr_warmup_steps
            self._require("lr_total_steps", enough, law, f"more than {self.lr_warmup_steps}")

    def _require(self, field: str, holds: bool, law: str, would_hold: str) -> None:
        if not holds:
            raise ConfigError(f"trainer.{field}", getattr(self, field), law, would_hold)
