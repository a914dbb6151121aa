"""From trajectories to tensors: which tokens are trained, and how rows are packed into micro-batches.

Called by `model_trainer.ModelTrainer`. Alignment: the logits at position i - 1 predict the token at position i, so a
row is cut before its last trainable token, which is only ever a target. Rows are padded on the right; causal attention
never looks there, so no attention mask is needed and the fast kernels stay usable. It must never drop a trainable
token: a trajectory longer than the budget gets a micro-batch of its own.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.errors import DataFailure
from engine.trajectory import Trajectory, TrajectoryGroup

# -- sums over trajectories --------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Which trajectory each token is of."""

    of_token: Tensor
    """[tokens] int64, from 0 to trajectories - 1"""
    trajectories: int

    def sums(self, values: Tensor) -> Tensor:
        """[tokens] to [trajectories]"""
        return values.new_zeros(self.trajectories).index_add(0, self.of_token, values)

    def means(self, values: Tensor) -> Tensor:
        """[tokens] to [trajectories]; 0 for a row without tokens."""
        lengths = torch.bincount(self.of_token, minlength=self.trajectories)
        return self.sums(values) / lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[trajectories] to [tokens]: every token gets its trajectory's."""
        return values[self.of_token]


# -- the batch ---------------------------------------------------------------------------------------------------------


STALENESS_BUCKETS = (0, 1, 2, 3, 4, 8)
"""Least staleness, in train steps, of each bucket that the diagnostics tell apart."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One trajectory as the train step sees it: its input row and its trainable tokens."""

    input_ids: Tensor
    """Prompt and response up to, without, the last trainable token. [length] int64"""
    positions: Tensor
    """Where in `input_ids` the logits stand that predict each trainable token. [tokens] int64"""
    targets: Tensor
    """The trainable tokens themselves. [tokens] int64"""
    behavior: Tensor
    """Their behavior log-probs. [tokens] float32"""
    reward: float
    response_tokens: int = 0
    """Length of the response, including tokens that are not trained, for example tool output."""
    continues: bool = False
    """A further segment of the rollout of the sample before it: its reward votes once."""
    advantage: float = 0.0
    weight: float = 0.0
    """What one of its tokens weighs in the loss of its optimizer minibatch."""
    proximal: Tensor | None = None
    """Log-probs under the weights before the step, where computed. [tokens] float32"""
    reference: Tensor | None = None
    """Log-probs under the reference model, where computed. [tokens] float32"""
    token_advantages: Tensor | None = None
    """Where its tokens do not all have `advantage`, which is then their mean. [tokens] float32"""
    staleness: int = 0
    """Train steps that its group lags behind."""

    @property
    def tokens(self) -> int:
        return len(self.targets)

    @property
    def teaches_nothing(self) -> bool:
        """Whether the policy loss has no gradient from it."""
        own = self.token_advantages
        return not self.tokens or (self.advantage == 0.0 and (own is None or not own.any()))


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass, and their trainable tokens laid end to end, row by row."""

    input_ids: Tensor
    """[rows, length] int64, padded with 0 on the right"""
    rows: Tensor
    """Row of each trainable token. [tokens] int64"""
    columns: Tensor
    """Position in its row of the logits that predict it. [tokens] int64"""
    targets: Tensor
    """[tokens] int64"""
    behavior: Tensor
    """[tokens] float32"""
    proximal: Tensor | None
    """[tokens] float32"""
    reference: Tensor | None
    """[tokens] float32"""
    advantages: Tensor
    """[tokens] float32"""
    weights: Tensor
    """[tokens] float32"""
    staleness: Tensor
    """Index of the token's bucket in `STALENESS_BUCKETS`. [tokens] int64"""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device; itself where it is there already."""
        if self.input_ids.device == device:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: value.to(device, non_blocking=True) for name, value in values.items() if value is not None}
        return MicroBatch(**{**values, **moved})


def samples_of(group: TrajectoryGroup, *, filter_overlong: bool = False) -> list[Sample]:
    """The group's samples in order: one for each trajectory that has a trainable token. The first sample of a rollout
    has `continues=False`. A rollout with a reward but no trainable token has one sample without tokens: its reward
    enters the baseline, and the rollout is counted.

    `filter_overlong`: train no token of a rollout if its last segment was cut off at the length limit.
    Raises `DataFailure` if a trajectory has no reward, no prompt, or lists of different lengths.
    """
    samples, index = [], 0
    for rollout in group.rollouts:
        left_out = filter_overlong and rollout[-1].finish_reason == "length"
        for place, trajectory in enumerate(rollout):
            if any(trajectory.loss_mask):
                _check(trajectory, group, index + place)
        trained = [trajectory for trajectory in rollout if any(trajectory.loss_mask) and not left_out]
        samples += [_sample(trajectory, continues=place > 0) for place, trajectory in enumerate(trained)]
        if not trained and rollout[0].reward is not None:
            samples.append(_without_tokens(rollout[0]))
        index += len(rollout)
    return samples


Answer = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of what to say to it."""


def sample_of_answer(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    """A sample whose answer is trained, token by token, for supervised learning."""
    ids = torch.tensor([*prompt, *answer], dtype=torch.int64)
    return Sample(
        input_ids=ids[:-1], positions=torch.arange(len(prompt), len(ids)) - 1, targets=ids[len(prompt) :],
        behavior=torch.zeros(len(answer)), reward=0.0, response_tokens=len(answer),
    )  # fmt: skip


def by_rollout(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples in order, those of one rollout together."""
    rollouts: list[list[Sample]] = []
    for sample in samples:
        if sample.continues:
            rollouts[-1].append(sample)
        else:
            rollouts.append([sample])
    return rollouts


def _sample(trajectory: Trajectory, continues: bool) -> Sample:
    mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
    ids = torch.tensor(trajectory.prompt_ids + trajectory.token_ids, dtype=torch.int64)
    indices = mask.nonzero().squeeze(1) + len(trajectory.prompt_ids)
    assert trajectory.reward is not None  # `_check` has seen it
    return Sample(
        input_ids=ids[: int(indices[-1])],
        positions=indices - 1,
        targets=ids[indices],
        behavior=torch.tensor(trajectory.logprobs, dtype=torch.float32)[mask],
        reward=trajectory.reward,
        response_tokens=len(trajectory.token_ids),
        continues=continues,
    )


def _without_tokens(trajectory: Trajectory) -> Sample:
    none = torch.zeros(0, dtype=torch.int64)
    assert trajectory.reward is not None
    return Sample(
        input_ids=none, positions=none, targets=none, behavior=torch.zeros(0), reward=trajectory.reward,
        response_tokens=len(trajectory.token_ids),
    )  # fmt: skip


def _check(trajectory: Trajectory, group: TrajectoryGroup, index: int) -> None:
    tokens = len(trajectory.token_ids)
    problem = ""
    if trajectory.reward is None:
        problem = "it has no reward"
    elif not trajectory.prompt_ids:
        problem = "it has no prompt token, so its first token has no log-prob; give at least one prompt token"
    elif len(trajectory.logprobs) != tokens or len(trajectory.loss_mask) != tokens:
        problem = (
            f"it has {tokens} tokens, {len(trajectory.logprobs)} log-probs and {len(trajectory.loss_mask)} mask entries"
            ", but needs one log-prob and one mask entry for each token"
        )
    if problem:
        story = f"group {group.group}, trajectory {index}, cannot be trained: {problem}"
        raise DataFailure(story, group=group.group, trajectory=index)


def pack(samples: Sequence[Sample], micro_batch_tokens: int) -> Iterator[tuple[MicroBatch, list[int]]]:
    """Micro-batches of at most `micro_batch_tokens` padded tokens, with the indices of their samples; without samples
    that have no tokens.

    Longest first: neighbors are of like length, so little is padding, and a pass that does not fit in memory fails
    at once. The order of equal lengths is that of the samples, so packing is a function of its input.
    """
    taken = [index for index, sample in enumerate(samples) if sample.tokens]
    order = sorted(taken, key=lambda index: -len(samples[index].input_ids))
    start = 0
    while start < len(order):
        longest = len(samples[order[start]].input_ids)
        stop = start + max(1, micro_batch_tokens // longest)
        chosen = order[start:stop]
        yield _micro_batch([samples[index] for index in chosen]), chosen
        start = stop


def idle_pass() -> MicroBatch:
    """A pass over one token that nothing is learned from."""
    none, one = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        input_ids=one[None], rows=one, columns=one, targets=one, behavior=none, proximal=None, reference=None,
        advantages=none, weights=none, staleness=one,
    )  # fmt: skip


def _micro_batch(samples: Sequence[Sample]) -> MicroBatch:
    counts = torch.tensor([sample.tokens for sample in samples])
    return MicroBatch(
        input_ids=pad_sequence([sample.input_ids for sample in samples], batch_first=True),
        rows=torch.arange(len(samples)).repeat_interleave(counts),
        columns=torch.cat([sample.positions for sample in samples]),
        targets=torch.cat([sample.targets for sample in samples]),
        behavior=torch.cat([sample.behavior for sample in samples]),
        proximal=_joined([sample.proximal for sample in samples]),
        reference=_joined([sample.reference for sample in samples]),
        advantages=_advantages(samples, counts),
        weights=torch.tensor([sample.weight for sample in samples]).repeat_interleave(counts),
        staleness=torch.tensor([staleness_bucket(sample.staleness) for sample in samples]).repeat_interleave(counts),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The samples' tokens end to end; None where some sample has none."""
    given = [part for part in parts if part is not None]
    return torch.cat(given) if len(given) == len(parts) else None


def _advantages(samples: Sequence[Sample], counts: Tensor) -> Tensor:
    own = _joined([sample.token_advantages for sample in samples])
    return torch.tensor([sample.advantage for sample in samples]).repeat_interleave(counts) if own is None else own


def staleness_bucket(steps: int) -> int:
    """Index into `STALENESS_BUCKETS`."""
    return bisect_right(STALENESS_BUCKETS, steps) - 1
