"""The reference policy that KL terms pull towards: a second model, never trained, kept once and without gradients.

Made by `trainer.ModelTrainer`, or by `scorer.ModelScorer` in its place, where a KL term reads it. Its weights come from
where the run's first weights came from, or from `trainer.reference_path`; whoever takes over loads them from there
again. It must never be given the weights being trained, nor be part of a checkpoint.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.errors import ConfigError
from engine.training.gradients import Policy
from engine.training.settings import TrainerSettings


def load_reference(tokens: int, model_path: str, settings: TrainerSettings, device: torch.device, bf16: bool) -> Policy:
    """The reference as a policy under the same temperature and precision as the model being trained.

    Raises `ConfigError` where it has other `tokens` than that.
    """
    path = settings.reference_path or model_path
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs = tokens_of(loaded)
    if theirs != tokens:
        law = f"has {theirs} tokens, but the trained model has {tokens}"
        raise ConfigError("trainer.reference_path", path, law, "use a model with the same tokenizer")
    return Policy(loaded.to(device).eval().requires_grad_(False), settings, device, bf16)


def tokens_of(model: Any) -> int:
    """How many tokens a model knows: rows of its embeddings."""
    return int(model.get_input_embeddings().weight.shape[0])
