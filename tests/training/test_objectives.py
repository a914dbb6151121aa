"""Losses, corrections, masks and KL terms beyond clipped PPO, against numbers worked out by hand in plain Python."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from token_terms import counted, evaluate, terms

from engine.errors import ConfigError
from engine.training.advantages import overlong_share, set_advantages, shaped_reward, shaping_metrics
from engine.training.batch import CAUSES, Sample, pack, samples_of
from engine.training.diagnostics import Diagnostics
from engine.training.losses import TokenTerms, policy_loss, token_weights
from engine.training.trainer_settings import KL_NAMES, MASK_NAMES, OLD_POLICY_NAMES, Mask, TrainerSettings
from engine.trajectory import Span, TrajectoryGroup

Make = Callable[..., TrajectoryGroup]


# -- advantages --------------------------------------------------------------------------------------------------------


def shaped(groups: Sequence[TrajectoryGroup], settings: TrainerSettings, reference: float = -1.0) -> list[Sample]:
    """Samples with advantages; the reference's log-probs are all equal."""
    samples = [samples_of(group) for group in groups]
    for sample in (sample for group in samples for sample in group):
        sample.reference = torch.full((sample.tokens,), reference)
    set_advantages(samples, settings)
    return [sample for group in samples for sample in group]


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch(group: Make) -> None:
    # Rewards 1 (1 token), 0 (3 tokens) | 0 (2 tokens), 1 (2 tokens). 8 tokens, 3 of reward 1: mean 3/8,
    # squares 3 · (5/8)² + 5 · (3/8)² = 1.875, std = sqrt(1.875 / 7). No baseline of a group.
    groups = [group(0, [1.0, 0.0], responses=[[5], [6, 7, 8]]), group(1, [0.0, 1.0], responses=[[5, 6], [7, 8]])]
    std = math.sqrt(1.875 / 7)
    high, low = (1 - 3 / 8) / std, (0 - 3 / 8) / std
    samples = shaped(groups, TrainerSettings(advantage="reinforce_pp"))
    assert [sample.advantage for sample in samples] == pytest.approx([high, low, low, high], rel=1e-5)


def test_reinforce_pp_with_baseline_centres_each_group_first(group: Make) -> None:
    # Rewards 1, 0 | 4, 2 centred: 1/2, -1/2 | 1, -1, one token each: mean 0, std sqrt(2.5 / 3).
    groups = [group(0, [1.0, 0.0], responses=[[5], [6]]), group(1, [4.0, 2.0], responses=[[5], [6]])]
    samples = shaped(groups, TrainerSettings(advantage="reinforce_pp_baseline"))
    std = math.sqrt(2.5 / 3)
    assert [sample.advantage for sample in samples] == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std], 1e-5)


def test_equal_advantages_normalize_to_exact_zeros_and_bad_rewards_do_not_spread(group: Make) -> None:
    settings = TrainerSettings(advantage="reinforce_pp")
    assert {s.advantage for s in shaped([group(0, [0.1, 0.1, 0.1])], settings)} == {0.0}
    # Rewards 1, NaN, 0 of 3, 5 and 7 tokens: over ten tokens the mean is 0.3, the squares 3 · 0.49 + 7 · 0.09 = 2.1.
    values = [s.advantage for s in shaped([group(0, [1.0, math.nan, 0.0])], settings)]
    std = math.sqrt(2.1 / 9)
    assert [values[0], values[2]] == pytest.approx([0.7 / std, -0.3 / std], rel=1e-5)
    assert math.isnan(values[1])


def test_the_kl_of_a_token_is_taken_off_from_there_on(group: Make) -> None:
    # behavior log-prob -2.5, reference -1: k1 = -2.5 + 1 = -1.5 a token. β = 0.1, reward 1, 3 tokens:
    # 1 - 0.1 · (-1.5) · 3 = 1.45, then 1.30 and 1.15; the single token of reward 0 has 0.15.
    # Four values of mean 4.05 / 4 = 1.0125.
    groups = [group(0, [1.0, 0.0], responses=[[5, 6, 7], [8]])]
    settings = TrainerSettings(advantage="reinforce_pp", kl_reward_coef=0.1)
    first, second = shaped(groups, settings)
    raw = [1.45, 1.30, 1.15, 0.15]
    mean = sum(raw) / 4
    std = math.sqrt(sum((value - mean) ** 2 for value in raw) / 3)
    assert first.token_advantages is not None and second.token_advantages is not None
    got = first.token_advantages.tolist() + second.token_advantages.tolist()
    assert got == pytest.approx([(value - mean) / std for value in raw], rel=1e-5)


def test_the_kl_to_go_runs_on_over_segments(group: Make) -> None:
    # As above, the three tokens cut into segments of two and one: the first tokens see the KL of the later segment.
    made = group(0, [1.0, 1.0, 0.0], responses=[[5, 6], [7], [8]])
    made.trajectories[1].continues = True
    whole = shaped([group(0, [1.0, 0.0], responses=[[5, 6, 7], [8]])], TrainerSettings(
        advantage="reinforce_pp", kl_reward_coef=0.1))  # fmt: skip
    cut = shaped([made], TrainerSettings(advantage="reinforce_pp", kl_reward_coef=0.1))
    flat = [[value for s in samples for value in s.token_advantages.tolist()] for samples in (whole, cut)]
    assert flat[0] == pytest.approx(flat[1])


@pytest.mark.parametrize(("name", "each"), [("k1", -1.5), ("k2", 1.125), ("k3", math.exp(1.5) - 1 - 1.5)])
def test_the_kl_of_a_whole_trajectory_is_taken_off_its_reward(group: Make, name: str, each: float) -> None:
    # log(reference / behavior) = -1 + 2.5 = 1.5; 3 tokens and 1 token; rewards 1 and 0. dr_grpo only centres.
    groups = [group(0, [1.0, 0.0], responses=[[5, 6, 7], [8]])]
    settings = TrainerSettings(advantage="dr_grpo", kl_reward_coef=0.1, kl_reward=name)
    first, second = shaped(groups, settings)
    rewards = [1.0 - 0.1 * 3 * each, 0.0 - 0.1 * each]
    half = (rewards[0] - rewards[1]) / 2
    assert [first.advantage, second.advantage] == pytest.approx([half, -half])
    metrics = shaping_metrics([[first, second]], settings)
    assert metrics["kl_reward_mean"] == pytest.approx(each)
    assert (metrics["advantage_abs_max"], metrics["advantage_std"]) == pytest.approx((abs(half), abs(half)))


@pytest.mark.parametrize("coef", [0.1, 0.01])
def test_grpo_centers_the_kl_and_divides_only_the_outcome_by_its_spread(group: Make, coef: float) -> None:
    # k1 = -1.5 a token, as above: the rewards of the KL are 4.5 β and 1.5 β, centered 1.5 β and -1.5 β.
    responses = [[5, 6, 7], [8]]
    settings = TrainerSettings(advantage="grpo", kl_reward_coef=coef)
    equal = shaped([group(0, [1.0, 1.0], responses=responses)], settings)
    assert [sample.advantage for sample in equal] == pytest.approx([1.5 * coef, -1.5 * coef])
    # Outcomes 0 and 1: centered -0.5 and 0.5, std sqrt(0.5): -0.7071 and 0.7071, whatever the KL is.
    other = shaped([group(0, [0.0, 1.0], responses=responses)], settings)
    outcome = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [sample.advantage for sample in other] == pytest.approx([1.5 * coef - outcome, outcome - 1.5 * coef])


def test_rloo_takes_the_kl_off_with_the_mean_of_the_others(group: Make) -> None:
    # Outcomes 1, 0, 0, less 1.5 · 0.1 · (-3, -1, -2): 1.45, 0.15, 0.3; the others' means 0.225, 0.875, 0.8.
    settings = TrainerSettings(advantage="rloo", kl_reward_coef=0.1)
    samples = shaped([group(0, [1.0, 0.0, 0.0], responses=[[5, 6, 7], [8], [9, 5]])], settings)
    assert [sample.advantage for sample in samples] == pytest.approx([1.225, -0.725, -0.5])


def test_overlong_responses_lose_reward_linearly(group: Make) -> None:
    # L_max 10, L_cache 4: nothing up to 6 tokens, then a quarter each, the whole from 10 on.
    settings = TrainerSettings(
        advantage="dr_grpo", overlong_cache_tokens=4, overlong_max_tokens=10, overlong_penalty=0.5
    )
    assert [overlong_share(n, settings) for n in (1, 6, 7, 8, 10, 12)] == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    # Rewards 1, 1 with 6 and 8 tokens: 1 and 1 - 0.5 · 0.5 = 0.75, centred ± 0.125.
    samples = shaped([group(0, [1.0, 1.0], responses=[[5] * 6, [6] * 8])], settings)
    assert [sample.advantage for sample in samples] == pytest.approx([0.125, -0.125])
    metrics = shaping_metrics([samples], settings)
    assert (metrics["overlong_share"], metrics["overlong_penalty_mean"]) == (0.5, 0.125)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_dual_clip_bounds_what_a_bad_action_can_push() -> None:
    # c = 3, A = -1: r = 2 -> max(min(-2, -1.28), -3) = -2: loss 2, gradient 2.  r = 5 -> max(-5, -3): loss 3, no
    # gradient.  r = 0.5 -> min(-0.5, -0.8) = -0.8: loss 0.8.  A = +1, r = 5: as PPO, -1.28.
    given = terms([0.4, 1.0, 0.1, 1.0], [0.2] * 4, [-1.0, -1.0, -1.0, 1.0])
    settings = TrainerSettings(clip_dual=3.0)
    result, gradient = evaluate(settings, given)
    assert result.losses.tolist() == pytest.approx([2.0, 3.0, 0.8, -1.28])
    assert gradient == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert result.clipped_dual is not None
    assert result.clipped_dual.tolist() == [False, True, False, False]
    diagnostics = Diagnostics(settings)
    diagnostics.add(counted(given, torch.ones(4)), result, result.losses.sum())
    assert diagnostics.metrics()["clip_share_dual"] == 0.25


def test_gspo_clips_the_geometric_mean_of_a_sequence() -> None:
    # First trajectory: r = 2 and 1/2·1.05² = 0.55125, product 1.1025, s = 1.05; second: r = 1.21, s = 1.21.
    # Bounds [0.92, 1.08], A = 1 and A = 1: -1.05 for both tokens; -min(1.21, 1.08) = -1.08 and no gradient.
    # ∇ s by each log π is s / 2; two tokens of loss s sum to a gradient of s for each.
    given = terms([0.4, 0.11025, 0.242], [0.2] * 3, [1.0] * 3, lengths=[2, 1])
    result, gradient = evaluate(TrainerSettings(loss="gspo", clip_low=0.08, clip_high=0.08), given)
    assert result.losses.tolist() == pytest.approx([-1.05, -1.05, -1.08])
    assert gradient == pytest.approx([-1.05, -1.05, 0.0])
    assert result.clipped_high.tolist() == [False, False, True]
    assert result.weights.used.tolist() == pytest.approx([1.05, 1.05, 1.21])


def test_gspo_has_the_gradient_of_its_first_form() -> None:
    """Eq. 5, differentiated numerically in plain Python: (1/n) Σ_i s_i A_i, s_i = (Π r)^(1/|y|), inside the bounds."""
    current, behavior, lengths, advantages = [0.21, 0.19, 0.2, 0.3], [0.2, 0.2, 0.21, 0.3], [3, 1], [0.5, -2.0]

    def objective(logs: list[float]) -> float:
        total, start = 0.0, 0
        for length, advantage in zip(lengths, advantages, strict=True):
            part = range(start, start + length)
            total += math.exp(sum(logs[t] - math.log(behavior[t]) for t in part) / length) * advantage / len(lengths)
            start += length
        return -total

    each = [1 / (2 * length) for length in lengths for _ in range(length)]
    given = terms(current, behavior, [0.5] * 3 + [-2.0], lengths=lengths)
    losses = policy_loss(given, TrainerSettings(loss="gspo", clip_low=0.1, clip_high=0.1)).losses
    total = (losses * torch.tensor(each)).sum()
    (gradient,) = torch.autograd.grad(total, given.current)
    logs, eps = [math.log(p) for p in current], 1e-6
    assert total.item() == pytest.approx(objective(logs))
    for t in range(4):
        up, down = ([v + sign * eps * (i == t) for i, v in enumerate(logs)] for sign in (1, -1))
        assert float(gradient[t]) == pytest.approx((objective(up) - objective(down)) / (2 * eps), rel=1e-5)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    # r = 2, 0.5, 1 with bounds [0.8, 1.28]: weights 1.28, 0.8, 1. Loss -w A log π, gradient -w A.
    given = terms([0.4, 0.1, 0.2], [0.2] * 3, [1.0, -1.0, 2.0])
    result, gradient = evaluate(TrainerSettings(loss="cispo"), given)
    assert gradient == pytest.approx([-1.28, 0.8, -2.0])
    assert result.losses.tolist() == pytest.approx([-1.28 * math.log(0.4), 0.8 * math.log(0.1), -2 * math.log(0.2)])
    assert (result.clipped_high.tolist(), result.clipped_low.tolist()) == ([True, False, False], [False, True, False])


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo"])
def test_a_proximal_old_policy_weighs_any_loss(loss: str) -> None:
    # current / proximal = 1.1 inside every bound, proximal / behavior = 0.2 / 0.1 = 2; gradient -2 · 1.1 · A.
    given = terms([0.22], [0.1], [1.0], proximal=[0.2])
    _, gradient = evaluate(TrainerSettings(loss=loss, old_policy="proximal"), given)
    assert gradient == pytest.approx([-2.2])


# -- corrections -------------------------------------------------------------------------------------------------------


def test_sequence_tis_weighs_a_whole_trajectory() -> None:
    # proximal / behavior: 2 and 3 -> 6, capped at 4; 0.5 alone. current = proximal, so the gradient is -w A.
    given = terms([0.2, 0.3, 0.1], [0.1, 0.1, 0.2], [1.0] * 3, lengths=[2, 1])
    settings = TrainerSettings(old_policy="proximal", correction="sequence_tis", correction_cap=4.0)
    result, gradient = evaluate(settings, given)
    assert gradient == pytest.approx([-4.0, -4.0, -0.5])
    assert result.weights.truncated.tolist() == [True, True, False]


# log ρ of three tokens: ρ = 2, 0.5, 0.9 in one trajectory, 1.5 and 1.5 in the next.
RHO = [2.0, 0.5, 0.9, 1.5, 1.5]


def by_hand(measure: str) -> list[float]:
    """A mask's measure of each token of `RHO`, in plain Python."""
    level, _, statistic = measure.partition("_")
    values = {
        "ratio": RHO,
        "k1": [-math.log(r) for r in RHO],
        "k2": [math.log(r) ** 2 / 2 for r in RHO],
        "k3": [r - 1 - math.log(r) for r in RHO],
    }[statistic]
    parts = [values[:3], values[3:]]
    if level == "geometric":
        combined = [math.prod(part) ** (1 / len(part)) for part in parts]
    elif level == "product":
        combined = [math.prod(part) for part in parts]
    else:
        combined = [sum(part) / (len(part) if level == "mean" else 1) for part in parts]
    return values if level == "token" else [combined[0]] * 3 + [combined[1]] * 2


@pytest.mark.parametrize("old_policy", OLD_POLICY_NAMES)
@pytest.mark.parametrize("measure", MASK_NAMES)
def test_masks_keep_what_lies_between_their_bounds(measure: str, old_policy: str) -> None:
    expected = by_hand(measure)
    agreed = 1.0 if measure.endswith("ratio") else 0.0
    low, high = sorted((min(expected), max(expected)))
    middle = (low + high) / 2
    mask = Mask(measure=measure, high=middle) if middle >= agreed else Mask(measure=measure, low=middle)
    keep = [value <= middle if middle >= agreed else value >= middle for value in expected]
    assert len(set(keep)) == 2
    behavior = [0.4 / ratio for ratio in RHO]
    settings = TrainerSettings(old_policy=old_policy, masks=(mask,), clip_low=1.0, clip_high=100.0)
    result, gradient = evaluate(settings, terms([0.4] * 5, behavior, [1.0] * 5, lengths=[3, 2]))
    assert result.weights.kept is not None
    assert result.weights.kept.tolist() == keep
    assert gradient == pytest.approx([-ratio * kept for ratio, kept in zip(RHO, keep, strict=True)])


def test_icepop_and_a_sequence_mask_together_with_their_shares() -> None:
    # ρ as above. token_ratio in [0.6, 1.8] drops the first two; product_ratio <= 2 drops the second trajectory (2.25),
    # keeps the first (0.9). token_tis at 1.2 cuts 2 and both 1.5. Left: the third token, of weight 0.9.
    # ESS: 0.9² / (5 · 0.9²) = 1/5.
    masks = (Mask(measure="token_ratio", low=0.6, high=1.8), Mask(measure="product_ratio", high=2.0))
    settings = TrainerSettings(masks=masks, correction="token_tis", correction_cap=1.2)
    given = terms([0.4] * 5, [0.4 / ratio for ratio in RHO], [-1.0] * 5, lengths=[3, 2])
    result, gradient = evaluate(settings, given)
    assert gradient == pytest.approx([0.0, 0.0, 0.9, 0.0, 0.0])
    diagnostics = Diagnostics(settings)
    diagnostics.add(counted(given, torch.ones(5)), result, result.losses.sum())
    metrics = diagnostics.metrics()
    assert metrics["ess"] == pytest.approx(0.2)
    assert metrics["tis_truncated_share"] == pytest.approx(0.6)
    assert metrics["masked_share"] == pytest.approx(0.8)
    assert metrics["masked_share_token_ratio"] == metrics["masked_share_product_ratio"] == pytest.approx(0.4)
    assert metrics["rejected_share_product_ratio"] == pytest.approx(0.5)


def test_ratios_by_staleness() -> None:
    # ρ = 2 at staleness 0; 1 and 4 at staleness 5, in the bucket 4_7. k3: 2 - 1 - ln 2; 0 and 4 - 1 - ln 4.
    given = terms([0.4, 0.4, 0.4], [0.2, 0.4, 0.1], [1.0] * 3)._replace(staleness=torch.tensor([0, 4, 4]))
    result = policy_loss(given, TrainerSettings())
    diagnostics = Diagnostics(TrainerSettings())
    diagnostics.add(counted(given, torch.ones(3)), result, result.losses.sum())
    stale = {name: value for name, value in diagnostics.metrics().items() if "_stale_" in name}
    assert stale == pytest.approx(
        {
            "token_share_stale_0": 1 / 3,
            "ratio_mean_stale_0": 2.0,
            "behavior_kl_k3_stale_0": 1 - math.log(2),
            "token_share_stale_4_7": 2 / 3,
            "ratio_mean_stale_4_7": 2.5,
            "behavior_kl_k3_stale_4_7": (3 - math.log(4)) / 2,
        }
    )


# -- KL to the reference -----------------------------------------------------------------------------------------------


def test_the_kl_joins_the_loss_and_its_shares_the_metrics() -> None:
    # π = 0.4, ref = 0.2: log(ref / π) = -ln 2. k3 = 0.5 - 1 + ln 2, gradient 1 - ref / π = 0.5; k2 = ln² 2 / 2,
    # gradient log(π / ref) = ln 2. Advantage 0, coefficient 0.1.
    for name, value, slope in (("k3", math.log(2) - 0.5, 0.5), ("k2", math.log(2) ** 2 / 2, math.log(2))):
        settings = TrainerSettings(kl_loss_coef=0.1, kl_loss=name)
        given = terms([0.4], [0.4], [0.0], reference=[0.2])
        result, gradient = evaluate(settings, given)
        assert result.losses.tolist() == pytest.approx([0.1 * value])
        assert gradient == pytest.approx([0.1 * slope])
        diagnostics = Diagnostics(settings)
        diagnostics.add(counted(given, torch.ones(1)), result, result.losses.sum())
        assert diagnostics.metrics()[f"reference_kl_{name}"] == pytest.approx(value)


def expected_gradient(name: str, ratio: bool, policy: list[float], drawn: list[float], ref: list[float]) -> list[float]:
    """Σ drawn(a) · ∇ of the KL term at token a, by the logits of `policy`: the gradient in expectation."""
    logits = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    settings = TrainerSettings(kl_loss_coef=1.0, kl_loss=name, kl_loss_ratio=ratio)
    log_current = logits.log_softmax(0)
    given = terms(policy, drawn, [0.0] * len(policy), reference=ref)._replace(current=log_current)
    losses = policy_loss(given, settings).losses
    (gradient,) = torch.autograd.grad((losses * torch.tensor(drawn, dtype=torch.float64)).sum(), logits)
    return list(gradient.tolist())


def kl_gradient(policy: list[float], ref: list[float]) -> list[float]:
    """∇ KL(policy ‖ ref) by the logits, in plain Python: π_a (log(π_a / ref_a) - KL)."""
    kl = sum(p * math.log(p / q) for p, q in zip(policy, ref, strict=True))
    return [p * (math.log(p / q) - kl) for p, q in zip(policy, ref, strict=True)]


POLICY, STALE, REFERENCE = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.25, 0.25, 0.5]


@pytest.mark.parametrize("name", KL_NAMES)
def test_with_the_ratio_every_estimator_has_the_kl_s_own_gradient_on_stale_tokens(name: str) -> None:
    expected = kl_gradient(POLICY, REFERENCE)
    assert expected_gradient(name, True, POLICY, STALE, REFERENCE) == pytest.approx(expected)


def test_without_it_k2_has_it_on_policy_and_k3_that_of_the_reverse_kl() -> None:
    assert expected_gradient("k2", False, POLICY, POLICY, REFERENCE) == pytest.approx(kl_gradient(POLICY, REFERENCE))
    # ∇ KL(ref ‖ π) by the logits: π - ref.
    reverse = [p - q for p, q in zip(POLICY, REFERENCE, strict=True)]
    assert expected_gradient("k3", False, POLICY, POLICY, REFERENCE) == pytest.approx(reverse)


# -- laws of the settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("clip_low", {"loss": "gspo"}),
        ("clip_high", {"loss": "gspo", "clip_low": 3e-4}),
        ("clip_dual", {"clip_dual": 1.0}),
        ("correction", {"correction": "sequence_tis"}),
        ("old_policy", {"old_policy": "reference"}),
        ("kl_loss", {"kl_loss": "k1", "kl_loss_coef": 0.1}),
        ("kl_reward", {"kl_reward": "k4"}),
        ("reference_path", {"reference_path": "somewhere"}),
        ("overlong_cache_tokens", {"overlong_cache_tokens": 8, "overlong_max_tokens": 8}),
        ("masks", {"masks": (Mask(measure="token_k3", high=1.0),) * 2}),
    ],
)
def test_objectives_that_cannot_work_are_refused_by_field(field: str, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerSettings(**values)  # type: ignore[arg-type]
    assert refused.value.details["field"] == f"trainer.{field}"
    assert refused.value.details["fix"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("measure", {"measure": "sequence"}),
        ("high", {"measure": "token_ratio"}),
        ("low", {"measure": "token_ratio", "low": 1.1}),
        ("low", {"measure": "token_ratio", "low": 0.0}),
        ("high", {"measure": "mean_k1", "high": -0.1}),
        ("low", {"measure": "mean_k1", "low": 0.1}),
    ],
)
def test_masks_that_drop_what_agrees_are_refused(field: str, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        Mask(**values)  # type: ignore[arg-type]
    assert refused.value.details["field"] == f"trainer.masks.{field}"


# -- numerics ----------------------------------------------------------------------------------------------------------


def far(log_ratios: Sequence[float]) -> TokenTerms:
    """One trajectory whose log ρ are these, current = proximal."""
    given = terms([0.5] * len(log_ratios), [0.5] * len(log_ratios), [1.0] * len(log_ratios))
    return given._replace(behavior=given.current.detach() - torch.tensor(log_ratios, dtype=torch.float64))


def test_log_ratios_are_bounded_after_they_are_summed() -> None:
    # log ρ = -30 and 25: the product is e⁻⁵, the geometric mean e^-2.5. Bounded one by one they would sum to 0.
    given = far([-30.0, 25.0])
    settings = TrainerSettings(old_policy="proximal", correction="sequence_tis")
    assert policy_loss(given, settings).weights.used.tolist() == pytest.approx([math.exp(-5)] * 2)
    for measure, bound in (("product_ratio", 0.1), ("geometric_ratio", 0.5)):
        masked = TrainerSettings(old_policy="proximal", masks=(Mask(measure=measure, low=bound),))
        assert policy_loss(given, masked).weights.used.tolist() == [0.0, 0.0], measure
    result, gradient = evaluate(TrainerSettings(loss="gspo", clip_low=0.1, clip_high=0.1), given)
    assert result.losses.tolist() == pytest.approx([-math.exp(-2.5)] * 2)
    assert gradient == pytest.approx([-math.exp(-2.5)] * 2)


def test_a_mask_may_spare_what_has_no_negative_advantage() -> None:
    # The trajectories' ρ are 4 and 4; the first has advantage 1, the second -1: DeepSeek-V3.2 masks the second alone.
    given = terms([0.4] * 4, [0.1] * 4, [1.0, 1.0, -1.0, -1.0], lengths=[2, 2], proximal=[0.4] * 4)
    for negative_only, used in ((False, [0.0] * 4), (True, [4.0, 4.0, 0.0, 0.0])):
        mask = Mask(measure="mean_k1", low=-0.5, negative_only=negative_only)
        weights = policy_loss(given, TrainerSettings(old_policy="proximal", masks=(mask,))).weights
        assert weights.used.tolist() == pytest.approx(used)
        (dropped,) = weights.dropped
        assert dropped.trajectories is not None
        assert dropped.trajectories.tolist() == [not negative_only, True]


def test_the_entropy_bonus_is_taken_off_the_loss() -> None:
    entropy = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    given = terms([0.4, 0.4], [0.4, 0.4], [0.0, 0.0])._replace(entropy=entropy)
    losses = policy_loss(given, TrainerSettings(entropy_coef=0.1)).losses
    assert losses.tolist() == pytest.approx([-0.1, -0.2])
    (gradient,) = torch.autograd.grad(losses.sum(), entropy)
    assert gradient.tolist() == pytest.approx([-0.1, -0.1])


def gap_figures(log_ratios: Sequence[float], causes: Sequence[str], *, moved: bool = False) -> dict[str, float]:
    """The metrics of gaps between log-probs."""
    given = far(log_ratios)._replace(causes=torch.tensor([CAUSES.index(cause) for cause in causes]))
    diagnostics = Diagnostics(TrainerSettings(), moved=moved)
    result = policy_loss(given, TrainerSettings())
    diagnostics.add(counted(given, torch.ones(len(causes))), result, result.losses.sum())
    figures = diagnostics.metrics().items()
    return {name: value for name, value in figures if name.startswith("logprob_gap_") or name.endswith(CAUSES)}


def test_gaps_are_told_apart_by_their_cause() -> None:
    # fresh: |0.5| and |-0.1|, mean 0.3, mean ratio (e^0.5 + e^-0.1) / 2; mixed: |-3|. No token is stale.
    assert gap_figures([0.5, -0.1, -3.0], ["fresh", "fresh", "mixed"]) == pytest.approx(
        {
            "logprob_gap_max": 3.0,
            "logprob_gap_max_fresh": 0.5,
            "token_share_fresh": 2 / 3,
            "ratio_mean_fresh": (math.exp(0.5) + math.exp(-0.1)) / 2,
            "logprob_gap_mean_fresh": 0.3,
            "token_share_mixed": 1 / 3,
            "ratio_mean_mixed": math.exp(-3),
            "logprob_gap_mean_mixed": 3.0,
        }
    )


def test_gaps_after_an_optimizer_step_say_nothing_of_the_sampler() -> None:
    found = gap_figures([0.5, -3.0], ["fresh", "mixed"], moved=True)
    assert found["logprob_gap_max_fresh"] == 0.0
    assert (found["token_share_moved"], found["logprob_gap_mean_moved"]) == (1.0, pytest.approx(1.75))


def test_tokens_after_new_weights_in_a_response_are_mixed(group: Make) -> None:
    # Response tokens 0 to 4; version 1 sampled the last three. Token 3 is a tool's, so it is not trained.
    made = group(0, [1.0, 0.0], responses=[[5, 6, 7, 8, 9], [5, 6]])
    first = made.trajectories[0]
    first.spans, first.loss_mask = [Span(0, 2, 0), Span(2, 5, 1)], [1, 1, 1, 0, 1]
    samples = samples_of(made)

    def causes(staleness: int) -> list[str]:
        for sample in samples:
            sample.staleness = staleness
        [(micro, indices)] = pack(samples, 100)
        assert indices == [0, 1]
        return [CAUSES[cause] for cause in micro.causes]

    assert causes(1) == ["stale", "stale", "mixed", "mixed", "stale", "stale"]
    assert causes(0) == ["fresh"] * 6


def test_the_baseline_and_the_denominators_count_rollouts_without_trained_tokens(group: Make) -> None:
    # Rewards 1, 0, 0.5, the last of a response whose tokens are not trained: mean 0.5, so 0.5 and -0.5 under dr_grpo.
    # sequence_mean over three rollouts: 1 / (3 · 2) for a token of the first.
    made = group(0, [1.0, 0.0, 0.8], responses=[[5, 6], [7, 8], [9]])
    made.trajectories[2].loss_mask = [0]
    samples = samples_of(made)
    settings = TrainerSettings(advantage="dr_grpo", aggregation="sequence_mean")
    set_advantages([samples], settings)
    assert [sample.advantage for sample in samples] == pytest.approx([0.4, -0.6, 0.2])
    assert token_weights([sample.tokens for sample in samples], "sequence_mean", 0)[:2] == pytest.approx([1 / 6] * 2)
    assert token_weights([0, 0], "token_mean", 0) == [1.0, 1.0]


def test_the_length_penalty_counts_tokens_of_tools(group: Make) -> None:
    made = group(0, [1.0], responses=[[5, 6, 7, 8]])
    made.trajectories[0].loss_mask = [1, 0, 0, 1]
    settings = TrainerSettings(overlong_cache_tokens=2, overlong_max_tokens=4)
    assert shaped_reward(samples_of(made), settings) == 0.0
