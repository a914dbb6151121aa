"""What a train step reports about its tokens: clip shares, KL estimates, entropy, masks, effective sample size.

`gradients.accumulate_gradient` fills it. `model_trainer.ModelTrainer` reads it once per optimizer minibatch, to decide
whether to skip the minibatch. It must never wait for the device while gradients are being computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.protocols import Grouping, RolloutFigures
from engine.training.batch import CAUSES, FRESH, MOVED, STALENESS_BUCKETS, Sample, by_rollout
from engine.training.corrections import ImportanceWeights, bounded, bounded_for, effective_sample_share
from engine.training.custom_functions import is_custom
from engine.training.kl import estimate
from engine.training.losses import TokenLosses, TokenTerms
from engine.training.ranks import Ranks
from engine.training.trainer_settings import KL_NAMES, TrainerSettings

BUCKET_NAMES = tuple(
    str(first) if after == first + 1 else f"{first}_up" if after == 0 else f"{first}_{after - 1}"
    for first, after in zip(STALENESS_BUCKETS, (*STALENESS_BUCKETS[1:], 0), strict=True)
)
"""How the staleness buckets are called in metrics: `0`, `1`, …, `4_7`, `8_up`."""
STALE = tuple(f"stale_{bucket}" for bucket in BUCKET_NAMES)
BY_STALENESS = ("token_share", "ratio_mean", "behavior_kl_k3")
BY_CAUSE = ("token_share", "ratio_mean", "logprob_gap_mean")
"""Figures of each kind of tokens. Their sums have the same names: of the tokens, of ρ, and of the third."""


class Diagnostics:
    """Sums over tokens, added up micro-batch by micro-batch on the device and read once. `moved`: log ρ is of weights
    that earlier optimizer steps of this train step have changed. `own_metrics`: names of the user's loss."""

    def __init__(self, settings: TrainerSettings, *, moved: bool = False, own_metrics: Sequence[str] = ()) -> None:
        self._settings = settings
        self._moved = moved
        self._own_metrics = own_metrics
        masks = [f"masked_{mask.name}" for mask in settings.masks]
        masks += [f"rejected_{mask.name}" for mask in settings.masks if mask.of_sequences]
        self._names = (
            "loss", "tokens", "unsound", "clip_low", "clip_high", "kl", "surprise", "ratio", "truncated", "weights",
            "squares", *(f"own_{name}" for name in own_metrics),
            *(f"behavior_{name}" for name in KL_NAMES),
            *(("entropy",) if settings.needs_entropies else ()),
            *(("clip_dual",) if settings.clip_dual else ()),
            *((f"reference_{name}" for name in KL_NAMES) if settings.needs_reference else ()),
            *(("masked", "trajectories", *masks) if masks else ()),
        )  # fmt: skip
        self._by_kind = tuple(f"{name}_{kind}" for name in BY_STALENESS for kind in STALE)
        self._by_kind += tuple(f"{name}_{cause}" for name in BY_CAUSE for cause in CAUSES)
        self._parts: list[Tensor] = []
        self._gaps: list[Tensor] = []

    def add(self, terms: TokenTerms, result: TokenLosses, loss: Tensor) -> None:
        """Take in one micro-batch, without trajectories that are left out. Tensors stay on the device; nothing waits
        for it."""
        assert terms.sound is not None
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
            -terms.current.detach().sum(),
            ratio.sum(),
            (weights.truncated & sound).sum(),
            used.sum(),
            used.square().sum(),
            *self._own_sums(result, sound),
            *(values.sum() for values in behavior),
        ]
        if self._settings.needs_entropies:
            assert terms.entropy is not None  # `gradients` has computed it
            row.append(terms.entropy.detach().sum())
        if result.clipped_dual is not None:
            row.append(result.clipped_dual.sum())
        if terms.reference is not None:
            log_ratio = bounded(terms.reference - terms.current.detach())
            row += [estimate(name, log_ratio).sum() for name in KL_NAMES]
        row += _masked(weights, terms.rows.count)
        scalars = torch.stack([value.double() for value in row])
        causes = torch.zeros_like(terms.rows.of) if terms.causes is None else terms.causes
        causes = torch.full_like(causes, MOVED) if self._moved else causes
        gaps = result.importance.abs()
        ratios = torch.where(sound, bounded(result.importance).exp(), 0.0)
        by_staleness = _by_staleness(terms, sound, ratios, behavior[2])
        by_cause = _sums_by(causes, len(CAUSES), sound, ratios, gaps)
        self._parts.append(torch.cat([scalars, *by_staleness, *by_cause]))
        largest = gaps.new_zeros(len(CAUSES)).scatter_reduce(0, causes, gaps, "amax")
        self._gaps.append(largest.double())

    def _own_sums(self, result: TokenLosses, sound: Tensor) -> list[Tensor]:
        """Raises: `EngineError` if the user's loss does not measure what it did when it was checked."""
        if sorted(result.metrics) != sorted(self._own_metrics):
            story = f"{self._settings.loss} returned the metrics {', '.join(result.metrics) or '(none)'}"
            raise EngineError(f"{story}, but {', '.join(self._own_metrics) or '(none)'} when it was checked")
        return [torch.where(sound, result.metrics[name].detach(), 0).sum() for name in self._own_metrics]

    def __bool__(self) -> bool:
        """Whether any token was taken in."""
        return bool(self._parts)

    def merge(self, other: "Diagnostics") -> None:
        self._parts.extend(other._parts)
        self._gaps.extend(other._gaps)

    def gather(self, ranks: Ranks) -> None:
        """Add up what all ranks took in. Collective."""
        width = len(self._names) + len(self._by_kind)
        if ranks.count > 1 and ranks.most(len(self._parts)):
            parts = torch.stack(self._parts).sum(0) if self._parts else torch.zeros(width, dtype=torch.float64)
            gaps = torch.stack(self._gaps).amax(0) if self._gaps else torch.zeros(len(CAUSES), dtype=torch.float64)
            self._parts, self._gaps = [ranks.total(parts)], [ranks.largest(gaps)]

    def sums(self) -> dict[str, float]:
        """The sums by name; waits for the device."""
        names = (*self._names, *self._by_kind)
        if not self._parts:
            return dict.fromkeys(names, 0.0)
        return dict(zip(names, torch.stack(self._parts).sum(0).tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens taken in, which are those with a gradient; all 0 where there were none.

        `clip_share_*`, unless the loss is the user's, and then `loss_*`, which it measures; `approx_kl`, Schulman's k3
        estimate r - 1 - log r, and `ratio_mean` of the loss's own ratio;
        `entropy_estimate`, the mean -log current of the sampled tokens, in nats, and with an entropy term in the loss
        the exact `entropy`; `tis_truncated_share`; `ess`, a share of the tokens; `behavior_kl_*` of KL(behavior ‖
        proximal), or ‖ current where the old policy is the behavior policy. With a reference `reference_kl_*` of
        KL(current ‖ reference). With masks `masked_share` of the tokens, by any of them, and `masked_share_<measure>`
        by one; `rejected_share_<measure>` of the trajectories. `logprob_gap_max` is the greatest |log ρ| of a
        token, `logprob_gap_max_fresh` that of fresh tokens (`batch.CAUSES`). For each cause that occurs, its
        `token_share_`, and over its tokens `logprob_gap_mean_`, the mean |log ρ|, and `ratio_mean_`. For each staleness
        that occurs, its `token_share_`, and over its tokens `ratio_mean_` and `behavior_kl_k3` of log ρ.
        """
        sums = self.sums()
        tokens = max(1.0, sums["tokens"])
        clips = {f"clip_share_{side}": sums[f"clip_{side}"] / tokens for side in ("low", "high")}
        metrics = {
            **({} if is_custom(self._settings.loss) else clips),
            **{f"loss_{name}": sums[f"own_{name}"] / tokens for name in self._own_metrics},
            "approx_kl": sums["kl"] / tokens,
            "entropy_estimate": sums["surprise"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "tis_truncated_share": sums["truncated"] / tokens,
            "ess": effective_sample_share(sums["weights"], sums["squares"], tokens),
        }
        for policy in ("behavior", "reference") if self._settings.needs_reference else ("behavior",):
            metrics |= {f"{policy}_kl_{name}": sums[f"{policy}_{name}"] / tokens for name in KL_NAMES}
        if "entropy" in sums:
            metrics["entropy"] = sums["entropy"] / tokens
        if "clip_dual" in sums:
            metrics["clip_share_dual"] = sums["clip_dual"] / tokens
        for name in self._names:
            what, _, measure = name.partition("_")
            if what == "masked":
                metrics["_".join(filter(None, ("masked_share", measure)))] = sums[name] / tokens
            elif what == "rejected":
                metrics[f"rejected_share_{measure}"] = sums[name] / max(1.0, sums["trajectories"])
        gaps = torch.stack(self._gaps).amax(0).tolist() if self._gaps else [0.0] * len(CAUSES)
        metrics |= {"logprob_gap_max": max(gaps), "logprob_gap_max_fresh": gaps[FRESH]}
        return metrics | self._of_kinds(sums, tokens)

    def _of_kinds(self, sums: dict[str, float], tokens: float) -> dict[str, float]:
        """What is known of each staleness and each cause that occurs."""
        metrics = {}
        for names, kinds in ((BY_STALENESS, STALE), (BY_CAUSE, CAUSES)):
            for kind in kinds:
                share, *means = (f"{name}_{kind}" for name in names)
                if count := sums[share]:
                    metrics[share] = count / tokens
                    metrics |= {mean: sums[mean] / count for mean in means}
        return metrics


# -- single rollouts ---------------------------------------------------------------------------------------------------


def note_gaps(samples: Sequence[Sample], rows: Grouping, importance: Tensor) -> None:
    """Note the largest |log ρ| of each sample, for `RolloutNotes`. `rows`: which sample each token of `importance` is
    of. The first pass counts: later ones are under weights that have changed. Nothing waits for the device."""
    gaps = importance.new_zeros(rows.count).scatter_reduce(0, rows.of, importance.detach().abs(), "amax")
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


def _masked(weights: ImportanceWeights, trajectories: int) -> list[Tensor]:
    """Counts of what was masked, in the order of the names."""
    if weights.kept is None:
        return []
    whole = [each.trajectories for each in weights.dropped if each.trajectories is not None]
    counts = [(~weights.kept).sum(), weights.kept.new_full((), trajectories, dtype=torch.int64)]
    return [*counts, *(each.tokens.sum() for each in weights.dropped), *(dropped.sum() for dropped in whole)]


def _by_staleness(terms: TokenTerms, sound: Tensor, ratios: Tensor, kl: Tensor) -> list[Tensor]:
    """Tokens, Σ ρ and Σ k3 of each staleness bucket. 3 × [buckets] float64"""
    where = terms.staleness if terms.staleness is not None else torch.zeros_like(terms.rows.of)
    return _sums_by(where, len(STALENESS_BUCKETS), sound, ratios, kl)


def _sums_by(where: Tensor, kinds: int, *each: Tensor) -> list[Tensor]:
    """The sum of each of `each` over the tokens of each kind; `where`: the kind of each token. [kinds] float64 each"""
    empty = where.new_zeros(kinds, dtype=torch.float64)
    return [empty.index_add(0, where, values.double()) for values in each]
