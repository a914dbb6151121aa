"""`ModelScorer`: the built-in `engine.protocols.Scorer`, which computes what `ModelTrainer` would, on hardware of its
own.

Hosted by `workers.scorer`, which calls it from one thread, one call at a time. It holds the
models that its tasks need and no others, and must never train one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from engine.errors import ConfigError, EngineError
from engine.protocols import Batch
from engine.training.advantages import set_advantages
from engine.training.batch import Sample, samples_of
from engine.training.device import device_named, runs_in_bf16
from engine.training.gradients import Policy, compile_layers
from engine.training.lora import without_adapter
from engine.training.model_checkpoint import load_weights, trained_tensors
from engine.training.model_files import load_model
from engine.training.ranks import ALONE, Ranks
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import TrajectoryGroup

# -- scores ------------------------------------------------------------------------------------------------------------


class Scoring(Protocol):
    """A `Policy`, or one without its adapter."""

    def score(self, samples: Sequence[Sample]) -> list[Tensor]: ...


def score_old(policy: Scoring, groups: Sequence[Sequence[Sample]], settings: TrainerSettings) -> list[Tensor]:
    """Log-probs of each sample under the policy's present weights, before the batch is trained. A sample that the loss
    will not read, because its advantage is 0, gets NaN without a forward pass. [samples][tokens] float32

    If advantages need the reference model, which may not have scored yet, every sample is scored. Collective.
    """
    samples = [sample for group in groups for sample in group]
    if settings.needs_every_token or settings.shapes_by_reference:
        return policy.score(samples)
    set_advantages(groups, settings)
    return score_taught(policy, samples)


def score_taught(policy: Scoring, samples: Sequence[Sample]) -> list[Tensor]:
    """Log-probs of each sample, NaN for those whose advantage is 0. Collective. [samples][tokens] float32"""
    scored = iter(policy.score([sample for sample in samples if not sample.teaches_nothing]))
    return [torch.full((sample.tokens,), torch.nan) if sample.teaches_nothing else next(scored) for sample in samples]


def scores_of(
    groups: Sequence[TrajectoryGroup], scored: Sequence[Tensor], *, filter_overlong: bool = False
) -> list[list[list[float]]]:
    """Arrange the log-probs of the groups' `samples_of` as `protocols.Scores`. `scored`: [samples][tokens] float32"""
    rows = (row for row in scored if len(row))
    return [
        [next(rows).tolist() if trained else [] for trained in _trained(group, filter_overlong)] for group in groups
    ]


def _trained(group: TrajectoryGroup, filter_overlong: bool) -> Iterator[bool]:
    """Whether each trajectory has tokens in `samples_of`."""
    for rollout in group.rollouts:
        left_out = filter_overlong and rollout[-1].finish_reason == "length"
        yield from (any(trajectory.loss_mask) and not left_out for trajectory in rollout)


def given_scores(batch: Batch, groups: Sequence[Sequence[Sample]], expected: Sequence[str]) -> dict[str, list[Tensor]]:
    """By task, the log-probs that came with a batch. [samples][tokens] float32

    Raises: `EngineError` if an expected task has no log-probs, or if they do not match the batch's tokens.
    """
    missing = [task for task in expected if task not in batch.scores]
    if missing:
        raise EngineError(f"the batch of step {batch.step} has no {' and no '.join(missing)}", step=batch.step)
    samples = [sample for group in groups for sample in group]
    given = {}
    for task, scores in batch.scores.items():
        rows = [torch.tensor(row, dtype=torch.float32) for row in _rows(scores)]
        if [len(row) for row in rows] != [sample.tokens for sample in samples if sample.tokens]:
            story = f"the {task} of step {batch.step} do not match the batch"
            raise EngineError(f"{story}: score each trainable token of each trajectory once", step=batch.step)
        each = iter(rows)
        given[task] = [next(each) if sample.tokens else torch.zeros(0) for sample in samples]
    return given


def _rows(scores: Any) -> Iterator[Any]:
    """The scores of trajectories that have a trainable token."""
    for group in scores:
        yield from (row for row in group if len(row))


# -- the reference policy ----------------------------------------------------------------------------------------------


class BasePolicy:
    """A policy without its adapter: the model that the adapter began from, which needs no second copy."""

    def __init__(self, adapted: Policy) -> None:
        self.model = adapted.model
        self._adapted = adapted

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """As `Policy.score`, but the model chooses its own experts, as any reference does."""
        with without_adapter(self.model):
            return self._adapted.score([replace(sample, routes=None) for sample in samples])


Reference: TypeAlias = Policy | BasePolicy


def load_reference(
    tokens: int,
    model_path: str,
    settings: TrainerSettings,
    device: torch.device,
    bf16: bool,
    ranks: Ranks = ALONE,
    adapted: Policy | None = None,
) -> Reference:
    """The reference as a policy under the same temperature and precision as the model being trained. The initial
    weights are those of `adapted`, the model being trained, without its adapter if it has one.

    Raises `ConfigError` if its vocabulary does not have `tokens` tokens.
    """
    if adapted is not None and settings.lora is not None and settings.reference_path is None:
        return BasePolicy(adapted)
    path = settings.reference_path or model_path
    loaded = load_model(path, ranks)
    theirs = tokens_of(loaded.model)
    if theirs != tokens:
        law = f"has {theirs} tokens, but the trained model has {tokens}"
        raise ConfigError("trainer.reference_path", path, law, "use a model with the same tokenizer")
    loaded.model.requires_grad_(False)
    compile_layers(loaded.model, settings)
    return Policy(loaded.model, _tolerant(settings), device, bf16, ranks, loaded.missing)


def _tolerant(settings: TrainerSettings) -> TrainerSettings:
    """The settings without the requirement of packed rows, which a reference model need not support, and without the
    experts of the samplers: it chooses its own."""
    return settings.model_copy(update={**dict.fromkeys(settings.packing_demands, "auto"), "router_replay": False})


def tokens_of(model: Any) -> int:
    """Vocabulary size of a model: the rows of its input embeddings."""
    return int(model.get_input_embeddings().weight.shape[0])


# -- the scorer --------------------------------------------------------------------------------------------------------


class ModelScorer:
    """Scores `tasks` with the trainer's `settings`. `old_logprobs` uses the model at `model_path` until `load` replaces
    its weights. `ref_logprobs` uses the reference model, which is loaded once."""

    def __init__(self, model_path: str, settings: TrainerSettings, tasks: Sequence[str]) -> None:
        transformers_logging.disable_progress_bar()
        device = device_named(settings.device)
        bf16 = runs_in_bf16(settings.bf16, device)
        self._settings = settings
        self._policies: dict[str, Reference] = {}
        trained: Policy | None = None
        if "old_logprobs" in tasks:
            loaded = load_model(model_path, ALONE, settings.lora, settings.seed)
            loaded.model.requires_grad_(False)
            compile_layers(loaded.model, settings)
            trained = Policy(loaded.model, settings, device, bf16)
            self._policies["old_logprobs"] = trained
        if "ref_logprobs" in tasks:
            tokens = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config().vocab_size
            self._policies["ref_logprobs"] = load_reference(tokens, model_path, settings, device, bf16, adapted=trained)
        for task in tasks:
            self._policy(task)

    def watch_progress(self, progressed: Callable[[], None]) -> None:
        """See `protocols.ReportsProgress`: after each pass."""
        for policy in self._policies.values():
            if isinstance(policy, Policy):
                policy.progressed = progressed

    def score(self, batch: Batch, task: str) -> list[list[list[float]]]:
        """See `protocols.Scorer`. Raises `DataFailure` for a trajectory that cannot be trained on."""
        left_out, policy = self._settings.filter_overlong, self._policy(task)
        groups = [samples_of(group, filter_overlong=left_out) for group in batch.groups]
        if task == "old_logprobs":
            scored = score_old(policy, groups, self._settings)
        else:
            scored = policy.score([sample for group in groups for sample in group])
        return scores_of(batch.groups, scored, filter_overlong=left_out)

    def load(self, weights: Any) -> None:
        """Take the weights by their names, as `ModelTrainer.weights` gives them."""
        load_weights(trained_tensors(self._policy("old_logprobs").model), weights)

    def _policy(self, task: str) -> Reference:
        if task not in self._policies:
            known = " or ".join(self._policies) or "old_logprobs or ref_logprobs"
            raise ConfigError("scoring task", task, "this scorer cannot score it", f"use {known}")
        return self._policies[task]
