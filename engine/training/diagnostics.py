"""What a train step reports about its tokens: clip shares, KL estimates, entropy, masks, effective sample size.

`gradients.accumulate_gradient` fills it. `model_trainer.ModelTrainer` reads it once per optimizer minibatch, to decide
whether to skip the minibatch. It must never wait for the device while gradients are being computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.protocols import RolloutFigures
from engine.training.batch import STALENESS_BUCKETS, Rows, Sample, by_rollout
from engine.training.corrections import Weights, bounded, bounded_for, effective_sample_share
from engine.training.kl import estimate
from engine.training.losses import TokenLosses, TokenTerms
from engine.training.ranks import Ranks
from engine.training.trainer_settings import KL_NAMES, TrainerSettings

BUCKET_NAMES = tuple(
    str(first) if after == first + 1 else f"{first}_up" if after == 0 else f"{first}_{after - 1}"
    for first, after in zip(STALENESS_BUCKETS, (*STALENESS_BUCKETS[1:], 0), strict=True)
)
"""How the staleness buckets are called in metrics: `0`, `1`, …, `4_7`, `8_up`."""
BY_STALENESS = ("token_share", "ratio_mean", "kl_k3")


class Diagnostics:
    """Sums over tokens, added up micro-batch by micro-batch on the device and read once."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        masks = [f"masked_{mask.measure}" for mask in settings.masks]
        masks += [f"rejected_{mask.measure}" for mask in settings.masks if mask.of_sequences]
        self._names = (
            "loss", "tokens", "unsound", "clip_low", "clip_high", "kl", "entropy", "ratio", "truncated", "weights",
            "squares",
            *(f"behavior_{name}" for name in KL_NAMES),
            *(("clip_dual",) if settings.clip_dual else ()),
            *((f"reference_{name}" for name in KL_NAMES) if settings.needs_reference else ()),
            *(("masked", "trajectories", *masks) if masks else ()),
        )  # fmt: skip
        self._by_staleness = tuple(f"{name}_stale_{bucket}" for name in BY_STALENESS for bucket in BUCKET_NAMES)
        self._parts: list[Tensor] = []
        self._gaps: list[Tensor] = []

    def add(self, terms: TokenTerms, result: TokenLosses, loss: Tensor) -> None:
        """Take in one micro-batch, without trajectories that are left out. Tensors stay on the device; nothing waits
        for it."""
        assert terms.sound is not None and terms.entropy is not None
        sound = terms.sound
        ratio = torch.where(sound, result.log_ratio.exp(), 0.0)
        weights = result.weights
        used = torch.where(sound, weights.used, 0.0)
        unsound = terms.rows.sums((~sound).double()) > 0
        behavior = [estimate(name, bounded_for(name, result.importance)) for name in KL_NAMES]
        row = [
            loss.detach(),
            sound.sum(),
            unsound.sum(),
            result.clipped_low.sum(),
            result.clipped_high.sum(),
            (result.log_ratio.exp() - 1 - result.log_ratio).sum(),
            terms.entropy.detach().sum(),
            ratio.sum(),
            (weights.truncated & sound).sum(),
            used.sum(),
            used.square().sum(),
            *(values.sum() for values in behavior),
        ]
        if result.clipped_dual is not None:
            row.append(result.clipped_dual.sum())
        if terms.reference is not None:
            log_ratio = bounded(terms.reference - terms.current.detach())
            row += [estimate(name, log_ratio).sum() for name in KL_NAMES]
        row += _masked(weights, terms.rows.trajectories)
        scalars = torch.stack([value.double() for value in row])
        self._parts.append(torch.cat([scalars, *_by_staleness(terms, sound, result.importance, behavior[2])]))
        self._gaps.append(_largest_gaps(terms, result.importance))

    def __bool__(self) -> bool:
        """Whether any token was taken in."""
        return bool(self._parts)

    def merge(self, other: "Diagnostics") -> None:
        self._parts.extend(other._parts)
        self._gaps.extend(other._gaps)

    def gather(self, ranks: Ranks) -> None:
        """Add up what all ranks took in. Collective."""
        width = len(self._names) + len(self._by_staleness)
        if ranks.count > 1 and ranks.most(len(self._parts)):
            parts = torch.stack(self._parts).sum(0) if self._parts else torch.zeros(width, dtype=torch.float64)
            gaps = torch.stack(self._gaps).amax(0) if self._gaps else torch.zeros(2, dtype=torch.float64)
            self._parts, self._gaps = [ranks.total(parts)], [ranks.largest(gaps)]

    def sums(self) -> dict[str, float]:
        """The sums by name; waits for the device."""
        names = (*self._names, *self._by_staleness)
        if not self._parts:
            return dict.fromkeys(names, 0.0)
        return dict(zip(names, torch.stack(self._parts).sum(0).tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens taken in, which are those with a gradient; all 0 where there were none.

        `clip_share_*`; `approx_kl`, Schulman's k3 estimate r - 1 - log r, and `ratio_mean` of the loss's own ratio;
        `entropy` in nats; `tis_truncated_share`; `ess`, a share of the tokens; `behavior_kl_*` of KL(behavior ‖
        proximal), or ‖ current where the old policy is the behavior policy. With a reference `reference_kl_*` of
        KL(current ‖ reference). With masks `masked_share` of the tokens, by any of them, and `masked_share_<measure>`
        by one; `rejected_share_<measure>` of the trajectories. `logprob_gap_max` is the greatest |log ρ| of a
        token, `logprob_gap_max_fresh` that of groups that lag behind by no step. For each staleness that occurs, its
        `token_share_`, and over its tokens `ratio_mean_` and `behavior_kl_k3` of log ρ.
        """
        sums = self.sums()
        tokens = max(1.0, sums["tokens"])
        metrics = {
            "clip_share_low": sums["clip_low"] / tokens,
            "clip_share_high": sums["clip_high"] / tokens,
            "approx_kl": sums["kl"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "tis_truncated_share": sums["truncated"] / tokens,
            "ess": effective_sample_share(sums["weights"], sums["squares"], tokens),
        }
        for policy in ("behavior", "reference") if self._settings.needs_reference else ("behavior",):
            metrics |= {f"{policy}_kl_{name}": sums[f"{policy}_{name}"] / tokens for name in KL_NAMES}
        if "clip_dual" in sums:
            metrics["clip_share_dual"] = sums["clip_dual"] / tokens
        for name in self._names:
            what, _, measure = name.partition("_")
            if what == "masked":
                metrics["_".join(filter(None, ("masked_share", measure)))] = sums[name] / tokens
            elif what == "rejected":
                metrics[f"rejected_share_{measure}"] = sums[name] / max(1.0, sums["trajectories"])
        gaps = torch.stack(self._gaps).amax(0).tolist() if self._gaps else (0.0, 0.0)
        metrics |= dict(zip(("logprob_gap_max", "logprob_gap_max_fresh"), gaps, strict=True))
        return metrics | self._buckets(sums, tokens)

    def _buckets(self, sums: dict[str, float], tokens: float) -> dict[str, float]:
        """What is known of each staleness that occurs."""
        metrics = {}
        for bucket in BUCKET_NAMES:
            count, ratio, kl = (sums[f"{name}_stale_{bucket}"] for name in BY_STALENESS)
            if count:
                metrics[f"token_share_stale_{bucket}"] = count / tokens
                metrics[f"ratio_mean_stale_{bucket}"] = ratio / count
                metrics[f"behavior_kl_k3_stale_{bucket}"] = kl / count
        return metrics


# -- single rollouts ---------------------------------------------------------------------------------------------------


def note_gaps(samples: Sequence[Sample], rows: Rows, importance: Tensor) -> None:
    """Note the largest |log ρ| of each sample, for `RolloutNotes`. `rows`: which sample each token of `importance` is
    of. The first pass counts: later ones are under weights that have changed. Nothing waits for the device."""
    gaps = importance.new_zeros(rows.trajectories).scatter_reduce(0, rows.of_token, importance.detach().abs(), "amax")
    for sample, gap in zip(samples, gaps, strict=True):
        sample.logprob_gap = gap if sample.logprob_gap is None else sample.logprob_gap


class RolloutNotes:
    """Figures of the rollouts of one trained batch. Keeps no tokens."""

    def __init__(self, groups: Sequence[Sequence[Sample]]) -> None:
        rollouts = [by_rollout(samples) for samples in groups]
        self._advantages = [
            [rollout[0].advantage if _trained(rollout) else None for rollout in own] for own in rollouts
        ]
        self._gaps = [[_gaps(rollout) for rollout in own] for own in rollouts]

    def figures(self, ranks: Ranks) -> list[list[RolloutFigures]]:
        """By group and rollout. Waits for the device. Collective: a rank knows the gaps of its share."""
        places = [(group, place) for group, own in enumerate(self._gaps) for place in range(len(own))]
        known = [index for index, (group, place) in enumerate(places) if self._gaps[group][place] is not None]
        own: list[Tensor] = [gap for gaps in self._gaps for gap in gaps if gap is not None]
        parts = dict(zip(known, torch.stack(own).cpu() if own else (), strict=True))
        joined = ranks.joined(parts)
        found: list[list[RolloutFigures]] = [[] for _ in self._gaps]
        for index, (group, place) in enumerate(places):
            gap = float(joined[index]) if index in joined else None
            found[group].append(RolloutFigures(advantage=self._advantages[group][place], logprob_gap=gap))
        return found


def _trained(rollout: Sequence[Sample]) -> bool:
    return any(sample.tokens for sample in rollout)


def _gaps(rollout: Sequence[Sample]) -> Tensor | None:
    """The largest gap of a rollout's tokens, as far as they have had a pass."""
    gaps = [gap for sample in rollout if (gap := _gap(sample)) is not None]
    return torch.stack(gaps).amax() if gaps else None


def _gap(sample: Sample) -> Tensor | None:
    if sample.logprob_gap is None and sample.proximal is not None and len(sample.proximal) == sample.tokens > 0:
        return (sample.proximal - sample.behavior).abs().amax()
    return sample.logprob_gap


# -- sums over a micro-batch -------------------------------------------------------------------------------------------


def _masked(weights: Weights, trajectories: int) -> list[Tensor]:
    """Counts of what was masked, in the order of the names."""
    if weights.kept is None:
        return []
    whole = [each.trajectories for each in weights.dropped if each.trajectories is not None]
    counts = [(~weights.kept).sum(), weights.kept.new_full((), trajectories, dtype=torch.int64)]
    return [*counts, *(each.tokens.sum() for each in weights.dropped), *(dropped.sum() for dropped in whole)]


def _by_staleness(terms: TokenTerms, sound: Tensor, importance: Tensor, kl: Tensor) -> list[Tensor]:
    """Tokens, Σ ρ and Σ k3 of each staleness bucket. 3 × [buckets] float64"""
    where = terms.staleness if terms.staleness is not None else torch.zeros_like(terms.rows.of_token)
    each = (sound, torch.where(sound, bounded(importance).exp(), 0.0), kl)
    empty = importance.new_zeros(len(STALENESS_BUCKETS), dtype=torch.float64)
    return [empty.index_add(0, where, values.double()) for values in each]


def _largest_gaps(terms: TokenTerms, importance: Tensor) -> Tensor:
    """The greatest |log ρ| of all tokens, and of those that lag behind by no step. [2] float64"""
    gaps = importance.abs().double()
    fresh = gaps if terms.staleness is None else torch.where(terms.staleness == 0, gaps, 0.0)
    return torch.stack([gaps.amax(), fresh.amax()])
