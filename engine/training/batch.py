"""From trajectories to tensors: which tokens are trained, and how rows are packed into micro-batches.

Called by `model_trainer.ModelTrainer`. Alignment: the logits at position i - 1 predict the token at position i, so a
row is cut before its last trainable token, which is only ever a target. Rows lie end to end in one packed row
(`layout.py`), or under each other, padded on the right; causal attention never looks there, so no attention mask is
needed and the fast kernels stay usable. It must never drop a trainable token: a trajectory longer than the budget gets
a micro-batch of its own.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.errors import DataFailure
from engine.training.expert_routes import packed_routes
from engine.training.layout import Layout, Prefix, Unit, buckets_of, common_prefix, load_of, rows_of, split
from engine.trajectory import StepReward, Trajectory, TrajectoryGroup

# -- the batch ---------------------------------------------------------------------------------------------------------


STALENESS_BUCKETS = (0, 1, 2, 3, 4, 8)
"""Least staleness, in train steps, of each bucket that the diagnostics tell apart."""


CAUSES = ("fresh", "stale", "mixed", "moved")
"""Why the log-probs of sampler and trainer may differ at a token. `fresh`: the trained weights sampled its whole group,
so that only rounding or a defect remains. `stale`: its group has tokens of older weights. `mixed`: so it has, and new
weights came in this response before the token, which may have read keys and values of the older ones
(`rollout.kv: keep`). `moved`: earlier optimizer steps of this train step have changed the weights."""
FRESH, STALE, MIXED, MOVED = range(len(CAUSES))


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
    prompt_tokens: int = 0
    """Length of the prompt at the beginning of `input_ids`; 0: unknown, so it is not shared."""
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
    mixed: Tensor | None = None
    """True for tokens sampled after new weights came in the middle of the response; None: one version sampled all.
    [tokens] bool"""
    steps: tuple[StepReward, ...] = ()
    """Shares of `reward` that belong to single tokens, by their positions in the response."""
    places: Tensor | None = None
    """Positions of the trainable tokens in the response; None where no token has a reward of its own. [tokens] int64"""
    routes: Tensor | None = None
    """See `expert_routes.packed_routes`. [length, 1 + route bytes] uint8"""
    logprob_gap: Tensor | None = None
    """Largest |log ρ| of its tokens in its first pass with a gradient, on the device; None before. [] float32"""

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
    """[rows, length] int64, a trajectory in each row, padded with 0 on the right; or [1, length], as `layout` says"""
    position_ids: Tensor | None = None
    """Of a packed row: the position of each token in its trajectory. [1, length] int64"""
    layout: Layout | None = None
    """Where trajectories lie in a packed row; None: one padded row for each."""
    routes: Tensor | None = None
    """See `expert_routes.Routers.repeat`. [rows, length, 1 + route bytes] uint8"""
    trajectories: int
    """Number of trajectories."""
    rows: Tensor
    """Trajectory of each trainable token. [tokens] int64"""
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
    causes: Tensor
    """Index of the token's cause in `CAUSES`, before any optimizer step. [tokens] int64"""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device; itself where it is there already."""
        if self.input_ids.device == device:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        movable = {name: value for name, value in values.items() if isinstance(value, Tensor | Layout)}
        moved = {name: value.to(device, non_blocking=True) for name, value in movable.items()}
        return MicroBatch(**{**values, **moved})

    def inputs(self) -> dict[str, Any]:
        """The arguments of a model."""
        if self.layout is None:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "layout": self.layout}

    def predictors(self, values: Tensor) -> Tensor:
        """The values that predict the trainable tokens. [rows, length, ...] to [tokens, ...]"""
        if self.layout is None:
            return values[self.rows, self.columns]
        return values[0].index_select(0, self.columns)


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
            samples.append(_without_tokens(rollout))
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
    places = mask.nonzero().squeeze(1)
    indices = places + len(trajectory.prompt_ids)
    assert trajectory.reward is not None  # `_check` has seen it
    length = int(indices[-1])
    return Sample(
        input_ids=ids[:length],
        positions=indices - 1,
        targets=ids[indices],
        behavior=torch.tensor(trajectory.logprobs, dtype=torch.float32)[mask],
        reward=trajectory.reward,
        prompt_tokens=len(trajectory.prompt_ids),
        response_tokens=len(trajectory.token_ids),
        continues=continues,
        steps=tuple(trajectory.step_rewards),
        mixed=places >= trajectory.spans[0].stop if len(trajectory.spans) > 1 else None,
        places=places if trajectory.step_rewards else None,
        routes=packed_routes(trajectory.routes, length),
    )


def _without_tokens(rollout: Sequence[Trajectory]) -> Sample:
    trajectory = rollout[0]
    none = torch.zeros(0, dtype=torch.int64)
    assert trajectory.reward is not None
    return Sample(
        input_ids=none, positions=none, targets=none, behavior=torch.zeros(0), reward=trajectory.reward,
        response_tokens=len(trajectory.token_ids), steps=tuple(rollout[-1].step_rewards),
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


# -- micro-batches -----------------------------------------------------------------------------------------------------


LEAST_SHARED = 0.15
"""Share of a group's tokens that `auto` must save to share a prompt, because that needs attention masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How rows are laid out."""

    packed: bool = False
    """End to end, without padding; otherwise one padded row for each trajectory."""
    shared: float | None = None
    """Compute a prompt once for its trajectories in a pass, if that saves at least this share of their tokens; None:
    never."""


PADDED = Packing()


def units_of(samples: Sequence[Sample], packing: Packing, parts: int = 1) -> list[Unit]:
    """Samples that must stay together to compute a prompt once; samples without tokens are left out. If the units will
    be divided among several `parts`, none is larger than half of an equal share."""
    taken = [index for index, sample in enumerate(samples) if sample.tokens]
    if packing.shared is None:
        return [Unit((index,), 0) for index in taken]
    by_prompt: dict[object, list[int]] = {}
    for index in taken:
        sample = samples[index]
        prompt = sample.input_ids[: sample.prompt_tokens].numpy().tobytes() if sample.prompt_tokens else index
        by_prompt.setdefault(prompt, []).append(index)
    lengths = [len(sample.input_ids) for sample in samples]
    units = [unit for members in by_prompt.values() for unit in _shared(samples, members, lengths, packing.shared)]
    if parts == 1:
        return units
    due = sum(load_of(unit, lengths) for unit in units) // (2 * parts)
    return [part for unit in units for part in split(unit, lengths, due)]


def _shared(samples: Sequence[Sample], members: Sequence[int], lengths: Sequence[int], least: float) -> list[Unit]:
    """Samples of one prompt as a unit, or one by one if a unit would save too little."""
    if len(members) > 1:
        prefix = common_prefix([samples[index].input_ids for index in members])
        if prefix * (len(members) - 1) >= max(1.0, least * sum(lengths[index] for index in members)):
            return [Unit(tuple(members), prefix)]
    return [Unit((index,), 0) for index in members]


def pack(
    samples: Sequence[Sample], micro_batch_tokens: int, packing: Packing = PADDED
) -> Iterator[tuple[MicroBatch, list[int]]]:
    """Micro-batches of at most `micro_batch_tokens` tokens, padding included, with the indices of their samples;
    without samples that have no tokens.

    Longest first: neighbors are of like length, so little is padding, and a pass that does not fit in memory fails
    at once. The order of equal lengths is that of the samples, so packing is a function of its input.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    units = units_of(samples, packing)
    if packing.packed:
        for row in rows_of(units, lengths, micro_batch_tokens):
            yield _packed(samples, row)
        return
    order = sorted((index for unit in units for index in unit.members), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        stop = start + max(1, micro_batch_tokens // lengths[order[start]])
        chosen = order[start:stop]
        yield _padded([samples[index] for index in chosen]), chosen
        start = stop


def idle_pass() -> MicroBatch:
    """A pass over one token that nothing is learned from."""
    none, one = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        input_ids=one[None], trajectories=1, rows=one, columns=one, targets=one, behavior=none, proximal=None,
        reference=None, advantages=none, weights=none, staleness=one, causes=one,
    )  # fmt: skip


def _padded(samples: Sequence[Sample]) -> MicroBatch:
    routes = _routes(samples)
    return MicroBatch(
        input_ids=pad_sequence([sample.input_ids for sample in samples], batch_first=True),
        routes=None if routes is None else pad_sequence(routes, batch_first=True),
        columns=torch.cat([sample.positions for sample in samples]),
        **_tokens_of(samples),
    )


def _packed(samples: Sequence[Sample], units: Sequence[Unit]) -> tuple[MicroBatch, list[int]]:
    """One row: whole trajectories and shared prompts, longest first, then the responses to each of these prompts."""
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    own_routes = _routes(samples)
    routes: list[Tensor] = []
    starts: dict[int, int] = {}
    """Where each sample's own tokens begin."""
    prefixes: dict[int, Prefix] = {}
    """The shared prompt of each sample that has one."""
    place = 0

    def lay(index: int, tokens: Tensor, first: int) -> int:
        """Tokens of a sample, of which the first one is at position `first` there."""
        nonlocal place
        ids.append(tokens)
        if own_routes is not None:
            routes.append(own_routes[index][first : first + len(tokens)])
        positions.append(torch.arange(first, first + len(tokens)))
        place += len(tokens)
        return place - len(tokens)

    roots = [(samples[unit.members[0]].input_ids[: unit.shared or None], unit) for unit in units]
    roots.sort(key=lambda root: -len(root[0]))
    for tokens, unit in roots:
        start = lay(unit.members[0], tokens, 0)
        starts |= dict.fromkeys(unit.members, start)
        prefixes |= dict.fromkeys(unit.members, Prefix(start, unit.shared)) if unit.shared else {}
    buckets = [*buckets_of([len(tokens) for tokens, _ in roots], 0)]
    for unit in (unit for unit in units if unit.shared):
        own = {index: samples[index].input_ids[unit.shared :] for index in unit.members}
        members = sorted((index for index in unit.members if len(own[index])), key=lambda index: -len(own[index]))
        start = place
        starts |= {index: lay(index, own[index], unit.shared) for index in members}
        buckets += buckets_of([len(own[index]) for index in members], start, prefixes[unit.members[0]])
    chosen = [index for unit in units for index in unit.members]
    columns = [_columns(samples[index].positions, starts[index], prefixes.get(index)) for index in chosen]
    micro = MicroBatch(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        routes=torch.cat(routes)[None] if routes else None,
        layout=Layout(buckets=tuple(buckets)),
        columns=torch.cat(columns),
        **_tokens_of([samples[index] for index in chosen]),
    )
    return micro, chosen


def _routes(samples: Sequence[Sample]) -> list[Tensor] | None:
    """Of each sample, with zeros for one that has none; None if none has any."""
    some = next((sample.routes for sample in samples if sample.routes is not None), None)
    if some is None:
        return None
    width = some.shape[1]
    return [
        torch.zeros((len(sample.input_ids), width), dtype=torch.uint8) if sample.routes is None else sample.routes
        for sample in samples
    ]


def _columns(positions: Tensor, start: int, prefix: Prefix | None) -> Tensor:
    """Places in the row of a sample's positions."""
    if prefix is None:
        return positions + start
    return torch.where(positions < prefix.length, positions + prefix.start, positions - prefix.length + start)


def _tokens_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of a micro-batch about its trainable tokens, which do not depend on the layout."""
    counts = torch.tensor([sample.tokens for sample in samples])
    staleness = torch.tensor([staleness_bucket(sample.staleness) for sample in samples])
    return {
        "trajectories": len(samples),
        "rows": torch.arange(len(samples)).repeat_interleave(counts),
        "targets": torch.cat([sample.targets for sample in samples]),
        "behavior": torch.cat([sample.behavior for sample in samples]),
        "proximal": _joined([sample.proximal for sample in samples]),
        "reference": _joined([sample.reference for sample in samples]),
        "advantages": _advantages(samples, counts),
        "weights": torch.tensor([sample.weight for sample in samples]).repeat_interleave(counts),
        "staleness": staleness.repeat_interleave(counts),
        "causes": torch.cat([_causes(sample) for sample in samples]),
    }


def _causes(sample: Sample) -> Tensor:
    """[tokens] int64"""
    causes = torch.full((sample.tokens,), STALE if sample.staleness else FRESH)
    return causes if sample.mixed is None or not sample.staleness else causes.masked_fill(sample.mixed, MIXED)


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
