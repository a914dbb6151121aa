"""`ModelTrainer`: the built-in `engine.protocols.Trainer`, for any Hugging Face causal language model.

Hosted by `workers.trainer`, which calls it from one thread, one call at a time; with several ranks by
`ranked_trainer.RankedTrainer`, which makes each call in every rank. An outer step cuts its groups into minibatches of
`policy_mini_batch_size` in the order the scheduler chose, and takes one optimizer step for each. It must never leave
weights half-trained (a step that raises is undone) nor apply a gradient that is not finite.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, pstdev
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.errors import ConfigError, TrainerSpoiled, reason_of
from engine.ids import StepId
from engine.protocols import Batch, RolloutFigures
from engine.training.advantages import set_advantages, shaping_metrics
from engine.training.batch import Answer, Sample, by_rollout, sample_of_answer, samples_of
from engine.training.device import checkpoints_activations, device_named, runs_in_bf16
from engine.training.diagnostics import Diagnostics, RolloutNotes
from engine.training.gradients import Policy, accumulate_gradient, checkpoint_layers, compile_layers, finite_samples
from engine.training.losses import token_weights
from engine.training.model_checkpoint import (
    ModelSnapshot,
    TrainerState,
    load_weights,
    read_checkpoint,
    trained_tensors,
    write_checkpoint,
)
from engine.training.model_files import config_dtype, load_model
from engine.training.model_scorer import Reference, given_scores, load_reference, score_old, score_taught, tokens_of
from engine.training.objective_check import check_objective
from engine.training.ranks import ALONE, Move, Ranks
from engine.training.shared_weights import Manifest, PublishedTensors, ReusedMemory
from engine.training.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)

Scores: TypeAlias = tuple[object, list[Tensor]]
"""What was scored, and the log-probs of each sample's trainable tokens."""

PHASES = ("train", "pack", "score", "snapshot", "forward_backward", "optimizer")
"""What `seconds_*` metrics there are; `train` is the whole step and contains the others."""


@dataclasses.dataclass(slots=True)
class StepTally:
    """What one outer step adds up, minibatch by minibatch."""

    diagnostics: Diagnostics
    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    learning_rate: float = 0.0
    nonfinite: int = 0
    unsound: int = 0
    stepped: bool = False
    """Whether an optimizer step has begun."""
    optimizer_steps: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `seconds_<name>`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started


class ModelTrainer:
    """Trains the causal language model at `model_path` (a directory, or a name that transformers resolves).

    The model stays in evaluation mode, gradients on: dropout would make current / behavior differ from 1 on the very
    weights that sampled. Tasks `scored_apart` come with the batch: no model is loaded for them, and a batch without
    them is not trained. With several `ranks` this is one of them: all get the same calls. Raises `ConfigError` for
    settings that this machine cannot serve.
    """

    def __init__(
        self,
        model_path: str,
        settings: TrainerSettings | None = None,
        *,
        scored_apart: Sequence[str] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        self.settings = settings or TrainerSettings()
        self.model_path = model_path
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        torch.manual_seed(self.settings.seed)
        transformers_logging.disable_progress_bar()
        named = self.settings.publish_dtype
        self._config_dtype = config_dtype(model_path)
        self._published: torch.dtype = self._config_dtype if named == "auto" else getattr(torch, named)
        device = device_named(self.settings.device)
        loaded = load_model(model_path, ranks, self.settings.lora, self.settings.seed)
        self.model: PreTrainedModel = loaded.model
        self._files = loaded.files
        bf16 = runs_in_bf16(self.settings.bf16, device)
        compile_layers(self.model, self.settings)
        choice = self.settings.activation_checkpointing
        if checkpoints_activations(choice, device) and not checkpoint_layers(self.model) and choice != "auto":
            law = f"{type(self.model).__name__} does not name its layers"
            raise ConfigError("trainer.activation_checkpointing", True, law, "use false")
        self.ranks = ranks
        tokens = tokens_of(self.model)
        self.policy = Policy(self.model, self.settings, device, bf16, ranks, loaded.missing)
        self.reference: Reference | None = None
        self.policy.own_metrics = check_objective(self.settings).metrics
        self._scored_apart = scored_apart
        if self.settings.needs_reference and "ref_logprobs" not in scored_apart:
            self.reference = load_reference(tokens, model_path, self.settings, device, bf16, ranks, adapted=self.policy)
        self.optimizer = _adamw(self.policy.trained, self.settings)
        self.optimizer.register_step_post_hook(lambda *_: self.policy.masters.round())
        self.optimizer_steps = 0
        self._proximal: Scores | None = None
        self._reference: Scores | None = None
        self._notes = RolloutNotes([])
        self._memory, self._copies = (ReusedMemory(pins=device.type == "cuda") for _ in range(2))
        self._progressed: Callable[[], None] = lambda: None
        self._release_gathered()

    def watch_progress(self, progressed: Callable[[], None]) -> None:
        """See `protocols.ReportsProgress`: after each pass, published tensor and saved part."""
        self._progressed = progressed
        for policy in (self.policy, self.reference):
            if isinstance(policy, Policy):
                policy.progressed = progressed

    def score(self, batch: Batch, task: str) -> None:
        """Keep the batch's log-probs for `train`: under the present weights (`old_logprobs`), or under the reference
        model (`ref_logprobs`).

        Does nothing if the loss does not read them. If the scheduler does not order the task, `train` scores the batch.
        """
        if task not in ("old_logprobs", "ref_logprobs"):
            raise ConfigError("trainer task", task, "this trainer cannot score it", "use old_logprobs or ref_logprobs")
        groups = self._samples(batch)
        samples = [sample for group in groups for sample in group]
        if task == "old_logprobs" and self.settings.needs_proximal:
            self._proximal = (self._score_key(batch, samples), score_old(self.policy, groups, self.settings))
        if task == "ref_logprobs" and self.reference is not None:
            self._reference = (self._score_key(batch, samples), self.reference.score(samples))

    def offload(self) -> None:
        """Leave the accelerator, if there is one, for the host's memory."""
        self.move(Tensor.cpu)

    def onload(self) -> None:
        """Come to the accelerator. Collective."""
        self.move(lambda tensor: tensor.to(self.policy.device))
        for policy in (self.policy, self.reference):
            if isinstance(policy, Policy):
                policy.examine()

    def move(self, to: Move) -> None:
        """Move models, masters and moments, and release the freed memory. A fused optimizer needs its step counts where
        the moments are."""
        for policy in (self.policy, self.reference):
            if isinstance(policy, Policy):
                policy.move(to)
        if not self.policy.masters.on_host:
            for values in self.optimizer.state.values():
                for name, value in values.items():
                    if isinstance(value, Tensor) and (value.dim() or self.optimizer.defaults["fused"]):
                        values[name] = to(value)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def train(self, batch: Batch) -> dict[str, float]:
        """One outer step. On any exception the weights, the optimizer and the random state are as before it, unless it
        is `TrainerSpoiled`.

        Metrics: means over the optimizer minibatches that were applied (0 where none was) of `loss` and `grad_norm`
        (before clipping); over their tokens, what `Diagnostics.metrics` says; over the batch's rollouts,
        `reward_mean`, `reward_std`, `accuracy` (share of rewards of at least 1), `response_tokens` (trained ones),
        `zero_advantage_groups`, `segments` (of a rollout, on average: above 1 where histories were rewritten) and what
        `shaping_metrics` says; `trained_token_share`, the share of tokens that had a gradient: the metrics of tokens
        describe these; `lr` of the last minibatch, `optimizer_steps`, `nonfinite_minibatches` (skipped),
        `nonfinite_trajectories` (left out), and `seconds_*`.
        """
        tally = StepTally(Diagnostics(self.settings, own_metrics=self.policy.own_metrics))
        with tally.phase("train"):
            with tally.phase("pack"):
                groups = self._samples(batch)
                given = given_scores(batch, groups, self._scored_apart)
                for samples, staleness in zip(groups, batch.staleness, strict=False):
                    for sample in samples:
                        sample.staleness = staleness
            with tally.phase("score"):
                self._set_reference(batch, groups, given.get("ref_logprobs"))
            own_metrics = set_advantages(groups, self.settings)
            minibatches = self._minibatches(groups)
            with tally.phase("score"):
                self._set_proximal(batch, groups, given.get("old_logprobs"))
            with self._whole_or_nothing(tally, self.settings.epochs_per_batch * len(minibatches)):
                for _ in range(self.settings.epochs_per_batch):
                    for samples in minibatches:
                        self._train_minibatch(samples, tally)
                metrics = _metrics(groups, tally, self.settings.epochs_per_batch) | own_metrics
                if self.settings.router_replay:
                    metrics["replayed_token_share"] = _replayed_share(groups)
                metrics |= shaping_metrics(groups, self.settings)
        self.optimizer_steps += tally.optimizer_steps
        self._proximal = self._reference = None
        self._notes = RolloutNotes(groups)
        return metrics | {f"seconds_{name}": seconds for name, seconds in tally.seconds.items()}

    def rollout_figures(self) -> list[list[RolloutFigures]]:
        """See `protocols.Explainable`. The gap is unknown for a rollout without a forward pass. Collective."""
        return self._notes.figures(self.ranks)

    @contextmanager
    def _whole_or_nothing(self, tally: StepTally, optimizer_steps: int) -> Iterator[None]:
        """Leave everything as before if the block raises. Raises: `TrainerSpoiled` where that cannot be."""
        snapshot = None
        if self.settings.rollback and optimizer_steps > 1:
            with tally.phase("snapshot"), self.ranks.together():
                snapshot = ModelSnapshot(self.model, self.optimizer, self.policy.masters, self._copies)
        try:
            yield
        except TrainerSpoiled:
            raise
        except Exception as error:
            if snapshot is not None:
                _undo(error, snapshot)
            elif tally.stepped:
                raise TrainerSpoiled(reason_of(error)) from error
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def imitate(self, answers: Sequence[Answer], learning_rate: float) -> float:
        """One supervised optimizer step: the mean cross entropy of the answers' tokens, which is returned. Collective.

        Raises: `TrainerSpoiled` where the loss or the gradient is not finite, or a rank of several leaves a pass.
        """
        samples = [sample_of_answer(*answer) for answer in answers]
        tokens = sum(sample.tokens for sample in samples)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        with self.ranks.spoil_on_error():
            for packed, indices in self.policy.passes(samples):
                chosen = self.policy.logprobs(packed.to(self.policy.device), entropy=False).chosen
                loss = -chosen.sum() * (1.0 / tokens if indices else 0.0)
                (loss * self.ranks.count).backward()
                total += loss.detach().cpu()
            norm = float(self.ranks.whole(torch.nn.utils.clip_grad_norm_(self.policy.trained, 1.0)))
            loss_of_all = float(self.ranks.total(total))
        if not math.isfinite(norm + loss_of_all):
            raise TrainerSpoiled(f"supervised loss {loss_of_all}, gradient norm {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_of_all

    def weights(self) -> PublishedTensors:
        """The weights by their `state_dict` name, or only the adapter's by their names in peft's files: copies in host
        memory that other processes may map, in the type that is published. They do not change while a process holds
        them. Collective; only the first rank gets them.

        Tied weights appear under each of their names, as in `state_dict`, and share one copy.
        """
        memory = None
        with self.ranks.together():
            if self.ranks.index == 0:
                memory = self._memory.take(self.manifest())
        for index, whole in enumerate(self.published()):
            if memory is not None:
                memory.tensors[index].copy_(whole)
        self._release_gathered()
        return PublishedTensors({}, "") if memory is None else memory.complete()

    def published(self) -> Iterator[Tensor]:
        """Each tensor of `manifest`, whole and in the type that is published, one after another. Collective."""
        for value in self._each_trained().values():
            kind = self._kind(value)
            own = value if value.dtype == kind else self.policy.masters.of(value)
            yield self.ranks.whole(own.detach(), kind)
            self._progressed()

    def manifest(self) -> Manifest:
        """The published tensors and their names."""
        each = self._each_trained()
        places = {place: index for index, place in enumerate(each)}
        kinds = ((str(self._kind(value)).removeprefix("torch."), tuple(value.shape)) for value in each.values())
        names = ((name, places[id(value)]) for name, value in trained_tensors(self.model).items())
        return Manifest(tensors=tuple(kinds), names=tuple(names))

    def _each_trained(self) -> dict[int, Tensor]:
        """Trained tensors by identity, tied ones once."""
        return {id(value): value for value in trained_tensors(self.model).values()}

    def _kind(self, value: Tensor) -> torch.dtype:
        return self._published if value.is_floating_point() else value.dtype

    def start_from(self, weights: Mapping[str, Tensor], optimizer_steps: int) -> None:
        """Continue from published weights, with an optimizer whose moments begin anew."""
        load_weights(trained_tensors(self.model), weights, self.ranks, self.policy.masters)
        self.optimizer_steps = optimizer_steps

    def save(self, directory: str, step: StepId) -> None:
        """Write a checkpoint after `step` train steps; it is there complete or not at all. Collective."""
        state = TrainerState(step=step, optimizer_steps=self.optimizer_steps, settings=self.settings.plain())
        write_checkpoint(
            Path(directory), state, self.model, self.optimizer, self.model_path, self.ranks, self.policy.masters,
            config_dtype=self._config_dtype, files=self._files, progressed=self._progressed,
        )  # fmt: skip
        self._release_gathered()

    def _release_gathered(self) -> None:
        """Release the memory of whole tensors, which torch keeps, to replicas that take turns with this trainer."""
        if self.ranks.on_host:
            torch.cuda.empty_cache()

    def load(self, directory: str) -> StepId:
        """Go on from a checkpoint, whose tensors are restored to the bit. Returns the train steps it contains. Later
        steps repeat those of the trainer that wrote it: to the bit on a CPU with as many ranks, on GPUs up to
        rounding."""
        state = read_checkpoint(Path(directory), self.model, self.optimizer, self.ranks, self.policy.masters)
        self.optimizer_steps = state.optimizer_steps
        self._proximal = self._reference = None
        return state.step

    def _samples(self, batch: Batch) -> list[list[Sample]]:
        return [samples_of(group, filter_overlong=self.settings.filter_overlong) for group in batch.groups]

    def _minibatches(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Samples of each optimizer step, weighed."""
        size = self.settings.policy_mini_batch_size or max(1, len(groups))
        minibatches = []
        for start in range(0, len(groups), size):
            samples = [sample for group in groups[start : start + size] for sample in group]
            rollouts = by_rollout(samples)
            lengths = [sum(sample.tokens for sample in rollout) for rollout in rollouts]
            weights = token_weights(lengths, self.settings.aggregation, self.settings.aggregation_tokens)
            for rollout, weight in zip(rollouts, weights, strict=True):
                for sample in rollout:
                    sample.weight = weight
            minibatches.append(samples)
        return minibatches

    def _set_proximal(self, batch: Batch, groups: Sequence[Sequence[Sample]], given: list[Tensor] | None) -> None:
        """Give each sample that is trained its log-probs under the present weights, as scored before or now.

        A step of a single minibatch needs none: its first forward pass *is* under the weights before the step.
        """
        if not self.settings.needs_proximal:
            return
        samples = [sample for group in groups for sample in group]
        key = self._score_key(batch, samples)
        if given is not None:
            scored = given
        elif self._proximal is not None and self._proximal[0] == key:
            scored = self._proximal[1]
        elif self.settings.optimizer_steps(len(groups)) > 1:
            every = self.settings.needs_every_token
            scored = self.policy.score(samples) if every else score_taught(self.policy, samples)
        else:
            return
        for sample, logprobs in zip(samples, scored, strict=True):
            if not (sample.teaches_nothing and logprobs.isnan().any()):  # else it had no pass
                sample.proximal = logprobs

    def _set_reference(self, batch: Batch, groups: Sequence[Sequence[Sample]], given: list[Tensor] | None) -> None:
        """Give each sample its log-probs under the reference model, as scored before or now."""
        samples = [sample for group in groups for sample in group]
        if given is not None:
            scored = given
        elif self.reference is None:
            return
        elif self._reference is not None and self._reference[0] == self._score_key(batch, samples):
            scored = self._reference[1]
        else:
            scored = self.reference.score(samples)
        for sample, logprobs in zip(samples, scored, strict=True):
            sample.reference = logprobs

    def _score_key(self, batch: Batch, samples: Sequence[Sample]) -> object:
        """Scores are good for this batch under these weights only."""
        groups = tuple(group.group for group in batch.groups)
        return batch.step, groups, tuple(sample.tokens for sample in samples), self.optimizer_steps

    def _gradient(self, samples: Sequence[Sample], *, stepped: bool) -> tuple[Diagnostics, float]:
        """Compute the gradient of a minibatch and clip it. Returns its norm before. `stepped`: whether this train step
        has changed the weights already. Collective."""
        self.optimizer.zero_grad(set_to_none=True)
        moved = stepped and not self.settings.needs_proximal
        diagnostics = accumulate_gradient(self.policy, samples, moved=moved)
        limit = self.settings.max_grad_norm or float("inf")
        with self.ranks.spoil_on_error():
            norm = torch.nn.utils.clip_grad_norm_(self.policy.trained, limit)
            return diagnostics, float(self.ranks.whole(norm))

    def _train_minibatch(self, samples: Sequence[Sample], tally: StepTally) -> None:
        """One optimizer step, or none where the loss or the gradient is not finite. Trajectories with a log-prob or an
        advantage that is not finite are left out.

        A log-prob that is NaN makes the whole gradient NaN, although its trajectory has none: 0 · NaN is NaN. Then the
        minibatch is computed again without such trajectories, if others remain.
        """
        with tally.phase("forward_backward"):
            diagnostics, norm = self._gradient(samples, stepped=tally.stepped)
            sums = diagnostics.sums()
            unsound = int(sums["unsound"])
            if unsound and not math.isfinite(norm) and (finite := finite_samples(self.policy, samples)):
                diagnostics, norm = self._gradient(finite, stepped=tally.stepped)
                sums = diagnostics.sums()
        if unsound:
            tally.unsound += unsound
            log.warning("%d trajectories are not trained: a log-prob or an advantage is not finite", unsound)
        if not math.isfinite(sums["loss"]) or not math.isfinite(norm):
            tally.nonfinite += 1
            self.optimizer.zero_grad(set_to_none=True)
            log.warning("minibatch skipped: loss %s and gradient norm %s must be finite", sums["loss"], norm)
            return
        tally.stepped = True
        with tally.phase("optimizer"):
            rate = self.settings.learning_rate_at(self.optimizer_steps + tally.optimizer_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            with self.ranks.together():
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        tally.learning_rate = rate
        tally.optimizer_steps += 1
        tally.losses.append(sums["loss"])
        tally.grad_norms.append(norm)
        tally.diagnostics.merge(diagnostics)


def _undo(error: Exception, snapshot: ModelSnapshot) -> None:
    """Restore what an error has left half-changed. Raises: `TrainerSpoiled`."""
    try:
        snapshot.restore()
    except Exception as broken:
        raise TrainerSpoiled(f"{reason_of(error)}; the step cannot be undone: {reason_of(broken)}") from error


def _metrics(groups: Sequence[Sequence[Sample]], tally: StepTally, passes: int) -> dict[str, float]:
    """`passes` over the batch were made."""
    samples = [sample for group in groups for sample in group]
    rewards = [sample.reward for sample in samples if math.isfinite(sample.reward) and not sample.continues]
    return {
        "loss": fmean(tally.losses) if tally.losses else 0.0,
        "grad_norm": fmean(tally.grad_norms) if tally.grad_norms else 0.0,
        "lr": tally.learning_rate,
        **tally.diagnostics.metrics(),
        "reward_mean": fmean(rewards) if rewards else 0.0,
        "reward_std": pstdev(rewards) if rewards else 0.0,
        "response_tokens": float(sum(sample.tokens for sample in samples)),
        "trained_token_share": tally.diagnostics.sums()["tokens"] / max(1, passes * sum(s.tokens for s in samples)),
        "zero_advantage_groups": float(sum(all(sample.teaches_nothing for sample in group) for group in groups)),
        "segments": len(samples) / max(1, sum(not sample.continues for sample in samples)),
        "optimizer_steps": float(tally.optimizer_steps),
        "nonfinite_minibatches": float(tally.nonfinite),
        "nonfinite_trajectories": float(tally.unsound),
    }


def _replayed_share(groups: Sequence[Sequence[Sample]]) -> float:
    """Share of the trained tokens, prompts included, whose experts are those that sampled them."""
    samples = [sample for group in groups for sample in group]
    replayed = sum(int(sample.routes[:, 0].sum()) for sample in samples if sample.routes is not None)
    return replayed / max(1, sum(len(sample.input_ids) for sample in samples))


def _adamw(trained: Sequence[Tensor], settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW in one fused kernel where torch has it; decay for matrices only."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_eps,
        fused=trained[0].device.type in ("cpu", "cuda"),
    )
