"""What holds of every loss, correction and mask, whatever the log-probs: by hypothesis."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_terms import evaluate

from engine.protocols import Grouping, ImportanceTerms
from engine.training.advantages import ADVANTAGES
from engine.training.corrections import MAX_LOG_RATIO, ImportanceWeights, corrected, drop, measured
from engine.training.kl import estimate
from engine.training.losses import TokenTerms
from engine.training.trainer_settings import KL_NAMES, LOSS_NAMES, MASK_NAMES, Mask, TrainerSettings

LOG_PROBS = st.floats(-60.0, 0.0)
BOUNDS = {"clip_low": 0.1, "clip_high": 0.1}
Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def token_terms(draw: Draw) -> TokenTerms:
    """Tokens of one to four trajectories, with four unrelated policies."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tokens = sum(lengths)

    def logs() -> torch.Tensor:
        return torch.tensor(draw(st.lists(LOG_PROBS, min_size=tokens, max_size=tokens)), dtype=torch.float64)

    advantages = torch.tensor(draw(st.lists(st.floats(-5, 5), min_size=tokens, max_size=tokens)), dtype=torch.float64)
    rows = Grouping(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), len(lengths))
    return TokenTerms(logs().requires_grad_(), logs(), logs(), advantages, rows, logs())


@st.composite
def masks(draw: Draw) -> Mask:
    measure = draw(st.sampled_from(MASK_NAMES))
    if measure.endswith("ratio"):
        return Mask(measure=measure, low=draw(st.floats(0.01, 1.0)), high=draw(st.floats(1.0, 100.0)))
    return Mask(measure=measure, low=draw(st.floats(-10.0, 0.0)), high=draw(st.floats(0.0, 10.0)))


def log_ratios(terms: TokenTerms) -> torch.Tensor:
    return (terms.proximal - terms.behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weights_of(
    terms: TokenTerms, log_ratio: torch.Tensor, correction: str, cap: float, some: Sequence[Mask] = ()
) -> ImportanceWeights:
    given = ImportanceTerms(
        log_ratio=log_ratio, weights=log_ratio.exp(), current=terms.current.detach(), behavior=terms.behavior,
        advantages=terms.advantages, trajectories=terms.rows,
    )  # fmt: skip
    chosen = TrainerSettings(old_policy="proximal", correction=correction, correction_cap=cap, masks=tuple(some))
    return corrected(given, chosen)


def lists_of_masks(most: int) -> st.SearchStrategy[list[Mask]]:
    return st.lists(masks(), max_size=most, unique_by=lambda mask: mask.measure)


@given(token_terms(), lists_of_masks(4), st.sampled_from(["none", "token_tis"]))
def test_a_further_mask_only_removes(terms: TokenTerms, some: list[Mask], correction: str) -> None:
    log_ratio = log_ratios(terms)
    before = weights_of(terms, log_ratio, correction, 2.0, some[1:])
    after = weights_of(terms, log_ratio, correction, 2.0, some)
    assert bool(((after.used == before.used) | (after.used == 0)).all())
    assert after.used.count_nonzero() <= before.used.count_nonzero()


@given(token_terms(), st.sampled_from(["token_tis", "sequence_tis"]), st.floats(0.1, 10.0))
def test_truncated_weights_stay_under_the_cap(terms: TokenTerms, correction: str, cap: float) -> None:
    log_ratio = log_ratios(terms)
    weights = weights_of(terms, log_ratio, correction, cap)
    assert bool((weights.used <= cap).all() and (weights.used >= 0).all())


@given(token_terms(), st.sampled_from(["token_tis", "sequence_tis"]), st.floats(1.0, 10.0), lists_of_masks(3))
def test_what_both_policies_agree_on_is_left_alone(
    terms: TokenTerms, correction: str, cap: float, some: list[Mask]
) -> None:
    log_ratio = torch.zeros_like(terms.behavior)
    weights = weights_of(terms, log_ratio, correction, cap, some)
    assert bool((weights.used == 1.0).all()) and not weights.truncated.any()


@given(
    token_terms(),
    st.sampled_from(LOSS_NAMES),
    st.sampled_from(["none", "token_tis", "sequence_tis"]),
    lists_of_masks(2),
    st.sampled_from(["k2", "k3"]),
    st.booleans(),
)
def test_gradients_are_finite_whatever_the_log_probs(
    terms: TokenTerms, loss: str, correction: str, some: list[Mask], kl: str, ratio: bool
) -> None:
    old = "proximal" if correction == "sequence_tis" else "behavior"
    chosen = TrainerSettings(
        loss=loss, old_policy=old, correction=correction, masks=tuple(some), kl_loss_coef=0.1, kl_loss=kl,
        kl_loss_ratio=ratio, **BOUNDS,
    )  # fmt: skip
    result, gradient = evaluate(chosen, terms)
    assert all(map(math.isfinite, gradient)) and bool(result.losses.isfinite().all())


@given(token_terms(), st.sampled_from(LOSS_NAMES), masks())
def test_a_masked_token_has_no_gradient_of_the_policy_nor_of_the_kl(terms: TokenTerms, loss: str, mask: Mask) -> None:
    chosen = TrainerSettings(loss=loss, masks=(mask,), kl_loss_coef=0.1, **BOUNDS)
    result, gradient = evaluate(chosen, terms)
    assert result.weights.kept is not None
    assert [g for g, kept in zip(gradient, result.weights.kept.tolist(), strict=True) if not kept and g] == []


@given(st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=6), st.integers(2, 4), st.randoms())
def test_a_sequence_mask_ignores_order_and_neighbors_and_the_geometric_one_length(
    ratios: list[float], times: int, random: Any
) -> None:
    shuffled = random.sample(ratios, len(ratios))
    logs = torch.tensor([*ratios, *shuffled, *(ratios * times)], dtype=torch.float64)
    lengths = torch.tensor([len(ratios), len(ratios), len(ratios) * times])
    rows = Grouping(torch.arange(3).repeat_interleave(lengths), 3)
    alone = Grouping(torch.zeros(len(ratios), dtype=torch.int64), 1)
    mean = math.fsum(ratios) / len(ratios)
    high = math.exp(abs(mean)) * (1.5 if mean > 0.5 else 0.5) if abs(mean) > 1 else 3.0
    mask = Mask(measure="geometric_ratio", low=0.05, high=max(1.0, high))
    measures = measured(mask.measure, logs, rows), measured(mask.measure, logs[: len(ratios)], alone)
    dropped = drop(mask, measures[0], rows, logs).trajectories
    single = drop(mask, measures[1], alone, logs[: len(ratios)]).trajectories
    assert dropped is not None and single is not None
    assert dropped.tolist() == [single.item()] * 3


@given(st.lists(LOG_PROBS, min_size=1, max_size=6), st.lists(LOG_PROBS, min_size=6, max_size=6))
def test_gspo_s_ratio_is_the_same_for_every_token_and_one_on_policy(current: list[float], other: list[float]) -> None:
    tokens = len(current)
    rows = Grouping(torch.zeros(tokens, dtype=torch.int64), 1)
    logs = torch.tensor(current, dtype=torch.float64)
    advantages = torch.ones(tokens, dtype=torch.float64)
    behavior = torch.tensor(other[:tokens], dtype=torch.float64)
    chosen = TrainerSettings(loss="gspo", **BOUNDS)
    stale, _ = evaluate(chosen, TokenTerms(logs.clone().requires_grad_(), behavior, logs, advantages, rows))
    fresh, gradient = evaluate(chosen, TokenTerms(logs.clone().requires_grad_(), logs, logs, advantages, rows))
    assert len(set(stale.weights.used.tolist())) == 1
    assert fresh.losses.tolist() == gradient == [-1.0] * tokens


@given(st.floats(-MAX_LOG_RATIO, MAX_LOG_RATIO))
def test_k2_and_k3_are_never_negative_and_all_are_zero_where_policies_agree(log_ratio: float) -> None:
    logs = torch.tensor([log_ratio, 0.0], dtype=torch.float64)
    assert all(estimate(name, logs)[1] == 0 for name in KL_NAMES)
    assert min(float(estimate(name, logs)[0]) for name in ("k2", "k3")) >= 0


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=1, max_size=4), st.floats(-50, 50))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_group_baselines_sum_to_zero_and_heed_no_shift(name: str, rewards: list[list[float]], shift: float) -> None:
    moved = ADVANTAGES[name]([[r + shift for r in group] for group in rewards])
    for one, other in zip(ADVANTAGES[name](rewards), moved, strict=True):
        assert math.fsum(one) == pytest.approx(0.0, abs=1e-6 * max(1.0, *map(abs, one)) * len(one))
        if max(map(abs, one)) > 1e-3 and name != "grpo":
            assert other == pytest.approx(one, rel=1e-6, abs=1e-6)
