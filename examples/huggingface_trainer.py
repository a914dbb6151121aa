"""A custom trainer: each train step is a step of Hugging Face's `Trainer`, with the loss of REINFORCE.

    engine check examples/custom_backends.yaml

`trainer.backend: huggingface_trainer:HuggingFaceTrainer` names it. The engine places its process, gives it batches,
publishes its weights to the replicas, and restores it from its checkpoints.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from engine.protocols import Batch, TrainerSetup
from engine.trajectory import Trajectory, TrajectoryGroup

STATE = "training_state.pt"


class Reinforce(Trainer):
    """Hugging Face's trainer with another loss. `temperature`: the sampling temperature of the responses."""

    temperature: float = 1.0
    current_gradient_accumulation_steps = 1  # set by a loop that is not used here

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *given: Any, **options: Any) -> Any:
        """Minus the sum of log-probs [rows, tokens], each times its weight: 0 for tokens that are not trained."""
        weights = inputs.pop("weights")
        logits = model(**inputs).logits[:, :-1].float() / self.temperature
        logprobs = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
        return -(weights[:, 1:] * logprobs).sum()


class HuggingFaceTrainer:
    """Trains a causal language model. `learning_rate`: of `trainer.arguments`."""

    def __init__(self, setup: TrainerSetup, learning_rate: float = 1e-3) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(setup.model)
        options = TrainingArguments(
            output_dir=tempfile.gettempdir(), learning_rate=learning_rate, lr_scheduler_type="constant",
            use_cpu=setup.device == "cpu", seed=setup.seed, report_to=[], save_strategy="no",
        )  # fmt: skip
        self.trainer = Reinforce(self.model, options)
        self.trainer.temperature = setup.temperature
        self.trainer.create_optimizer_and_scheduler(num_training_steps=setup.max_steps or 1)

    def train(self, batch: Batch) -> dict[str, float]:
        """One optimizer step over all groups. If it raises before that, the weights are as before."""
        trainer, optimizer = self.trainer, self.trainer.optimizer
        optimizer.zero_grad()
        tokens = sum(sum(one.loss_mask) for group in batch.groups for one in group.trajectories)
        losses = [trainer.training_step(self.model, self._inputs(group, tokens)) for group in batch.groups]
        norm = trainer.accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm)
        if not torch.isfinite(norm):
            raise ValueError(f"the gradient's norm is {norm}")
        optimizer.step()
        trainer.lr_scheduler.step()
        return {"loss": float(sum(losses)), "grad_norm": float(norm), "optimizer_steps": 1.0}

    def weights(self) -> dict[str, Tensor]:
        """A copy by the names of the model's tensors, as the built-in samplers need them."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def start_from(self, weights: Mapping[str, Tensor], optimizer_steps: int) -> None:
        """Take over published weights; the optimizer's moments begin anew."""
        self.model.load_state_dict(weights)

    def save(self, directory: str, step: int) -> None:
        """A model that transformers and `engine export` can read, and the state of the optimizer."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        state = {"optimizer": self.trainer.optimizer.state_dict(), "schedule": self.trainer.lr_scheduler.state_dict()}
        torch.save(state, Path(directory) / STATE)

    def load(self, directory: str) -> None:
        saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.load_state_dict(saved.state_dict())
        state = torch.load(Path(directory) / STATE, weights_only=True)
        self.trainer.optimizer.load_state_dict(state["optimizer"])
        self.trainer.lr_scheduler.load_state_dict(state["schedule"])

    def _inputs(self, group: TrajectoryGroup, tokens: int) -> dict[str, Tensor]:
        """Rows [trajectories, tokens], padded, and the weight of each token: its advantage, divided by `tokens`."""
        rows = [[*one.prompt_ids, *one.token_ids] for one in group.trajectories]
        longest = max(map(len, rows))
        weights = [
            [0.0] * len(one.prompt_ids) + [advantage * mask / tokens for mask in one.loss_mask]
            for one, advantage in zip(group.trajectories, advantages(group.trajectories), strict=True)
        ]
        return {
            "input_ids": torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
            "weights": torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in weights]),
        }


def advantages(trajectories: Sequence[Trajectory]) -> list[float]:
    """Each reward minus the mean of its group."""
    rewards = [one.reward or 0.0 for one in trajectories]
    return [reward - sum(rewards) / len(rewards) for reward in rewards]
