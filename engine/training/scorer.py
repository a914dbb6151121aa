"""`ModelScorer`: the built-in `engine.roles.Scorer`, which computes what `ModelTrainer` would, on hardware of its own.

Hosted by `hosts.scorer`, which calls it from one thread, one call at a time. It holds the
models that its tasks need and no others, and must never train one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.errors import ConfigError
from engine.roles import Batch
from engine.training.batch import trainable_samples
from engine.training.device import device_named, runs_in_bf16
from engine.training.gradients import Policy
from engine.training.reference import load_reference
from engine.training.scores import scores_of
from engine.training.settings import TrainerSettings


class ModelScorer:
    """Scores `tasks` under the trainer's own `settings`: `old_logprobs` under the model at `model_path`, then under
    whatever is loaded; `ref_logprobs` under the reference model, which is loaded once."""

    def __init__(self, model_path: str, settings: TrainerSettings, tasks: Sequence[str]) -> None:
        transformers_logging.disable_progress_bar()
        device = device_named(settings.device)
        bf16 = runs_in_bf16(settings.bf16, device)
        self._policies: dict[str, Policy] = {}
        if "old_logprobs" in tasks:
            model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            self._policies["old_logprobs"] = Policy(
                model.to(device).eval().requires_grad_(False), settings, device, bf16
            )
        if "ref_logprobs" in tasks:
            tokens = AutoConfig.from_pretrained(model_path).get_text_config().vocab_size
            self._policies["ref_logprobs"] = load_reference(tokens, model_path, settings, device, bf16)
        for task in tasks:
            self._policy(task)

    def score(self, batch: Batch, task: str) -> list[list[list[float]]]:
        """See `roles.Scorer`. Raises `DataFailure` for a trajectory that cannot be trained on."""
        samples = [sample for group in batch.groups for sample in trainable_samples(group)]
        return scores_of(batch.groups, self._policy(task).score(samples))

    def load(self, weights: Any) -> None:
        """Take the weights by their `state_dict` names, as `ModelTrainer.weights` gives them."""
        self._policy("old_logprobs").model.load_state_dict(weights)

    def _policy(self, task: str) -> Policy:
        if task not in self._policies:
            known = " or ".join(self._policies) or "old_logprobs or ref_logprobs"
            raise ConfigError("scoring task", task, "this scorer cannot score it", f"use {known}")
        return self._policies[task]
