"""Forward and backward passes: log-probs of trainable tokens, and the gradient of one optimizer minibatch.

Called by `model_trainer.ModelTrainer`. Logits are computed at response positions only (`logits_to_keep`, where the
model has it), and the log-softmax at trainable tokens only. Nothing here may step the optimizer.

The log-probs are of the full vocabulary after temperature. Behavior log-probs are after top-p as well: with top_p <
1 the sampler renormalises over its nucleus, whose mass is between top_p and 1, so that current / behavior is too
small by that factor on every token, and no clip or cap notices. Sample with top_p = 1 to train.
"""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.training.batch import MicroBatch, Rows, Sample, pack
from engine.training.diagnostics import Diagnostics
from engine.training.losses import TokenTerms, policy_loss
from engine.training.trainer_settings import TrainerSettings

ENTROPY_ROWS = 2048
"""Tokens whose entropy is computed at a time: bounds the extra [tokens, vocabulary] memory."""


class TokenLogprobs(NamedTuple):
    """Of a micro-batch's trainable tokens."""

    chosen: Tensor
    """Log-prob of each token; carries the gradient. [tokens] float32"""
    entropy: Tensor
    """Entropy of the distribution it is drawn from, in nats; without gradient. [tokens] float32"""


class Policy:
    """A causal language model together with how its log-probs are computed: temperature, device, precision."""

    def __init__(self, model: torch.nn.Module, settings: TrainerSettings, device: torch.device, bf16: bool) -> None:
        self.model = model
        self.settings = settings
        self.device = device
        self.bf16 = bf16
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def logprobs(self, micro: MicroBatch, *, entropy: bool = True) -> TokenLogprobs:
        """Log-probs and entropies of the trainable tokens; entropies are empty where not asked for."""
        with self.autocast():
            if self._keeps_logits:
                logits = self.model(input_ids=micro.input_ids, use_cache=False, logits_to_keep=micro.kept).logits
            else:
                logits = self.model(input_ids=micro.input_ids, use_cache=False).logits[:, micro.kept]
        logits = logits[micro.rows, micro.columns].float()
        if self.settings.temperature != 1.0:
            logits = logits / self.settings.temperature
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, micro.targets[:, None]).squeeze(1)
        return TokenLogprobs(chosen, _entropy(logprobs.detach()) if entropy else chosen.new_zeros(0))

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probs of each sample's trainable tokens under the present weights. [samples][tokens] float32, on the
        CPU"""
        scored: dict[int, Tensor] = {}
        for micro, indices in pack(samples, self.settings.micro_batch_tokens):
            with torch.no_grad():
                chosen = self.logprobs(micro.to(self.device), entropy=False).chosen.cpu()
            counts = [samples[index].tokens for index in indices]
            scored.update(zip(indices, chosen.split(counts), strict=True))
        return [scored[index] for index in range(len(samples))]


def _entropy(logprobs: Tensor) -> Tensor:
    """-Σ p log p of each row of [tokens, vocabulary]; a token of probability 0 (log-prob -inf) adds 0."""
    parts = []
    for rows in logprobs.split(ENTROPY_ROWS):
        parts.append(torch.special.entr(rows.exp()).sum(-1))
    return torch.cat(parts)


def accumulate_gradient(policy: Policy, samples: Sequence[Sample]) -> Diagnostics:
    """Add the gradient of one optimizer minibatch to the parameters' `grad`, pass by pass.

    Each sample's `weight` is already relative to the whole minibatch, so the passes' losses add up to the minibatch's
    loss however it is cut.
    """
    settings = policy.settings
    diagnostics = Diagnostics(settings)
    for packed, _ in pack(samples, settings.micro_batch_tokens):
        micro = packed.to(policy.device)
        logprobs = policy.logprobs(micro)
        proximal = logprobs.chosen.detach() if micro.proximal is None else micro.proximal
        rows = Rows(micro.rows, len(micro.input_ids))
        terms = TokenTerms(
            logprobs.chosen, micro.behavior, proximal, micro.advantages, rows, micro.reference, micro.staleness
        )
        result = policy_loss(terms, settings)
        loss = (result.losses * micro.weights).sum()
        loss.backward()
        diagnostics.add(terms, result, logprobs.entropy, loss)
    return diagnostics
