"""Advantages, losses, corrections and aggregation against cases worked out by hand."""

import math

import pytest
import torch
from token_terms import counted, evaluate, terms

from engine.errors import ConfigError
from engine.training.advantages import ADVANTAGES, STD_EPS
from engine.training.corrections import CORRECTIONS, MAX_LOG_RATIO, bounded, effective_sample_share
from engine.training.diagnostics import Diagnostics
from engine.training.losses import LOSSES, policy_loss, token_weights
from engine.training.trainer_settings import (
    ADVANTAGE_NAMES,
    AGGREGATION_NAMES,
    CORRECTION_NAMES,
    LOSS_NAMES,
    TrainerSettings,
)

# Four tokens whose ratio current / behavior is 2, 2, 0.5, 0.5 with advantages +1, -1, +1, -1. Clip range [0.8, 1.28].
RATIOS = [2.0, 2.0, 0.5, 0.5]
SIGNS = [1.0, -1.0, 1.0, -1.0]


def close(values: torch.Tensor | list[float], expected: list[float]) -> bool:
    listed = values.tolist() if isinstance(values, torch.Tensor) else values
    return listed == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_every_name_in_settings_has_its_function() -> None:
    assert tuple(ADVANTAGES) == ADVANTAGE_NAMES
    assert tuple(LOSSES) == LOSS_NAMES
    assert tuple(CORRECTIONS) == CORRECTION_NAMES
    assert len({tuple(token_weights([1, 3], name, 8)) for name in AGGREGATION_NAMES}) == len(AGGREGATION_NAMES)


# Rewards 1, 0, 0, 1: mean 1/2; squared distances 4 · 1/4 = 1, sample variance 1/3, std 0.5773503. The eps of 1e-6 moves
# 1/2 / 0.5773503 by 1.5e-6. The others of a 1 have mean 1/3, those of a 0 have 2/3.
@pytest.mark.parametrize(
    ("name", "high"), [("grpo", 0.866024), ("dr_grpo", 0.5), ("reinforce_pp_baseline", 0.5), ("rloo", 2 / 3)]
)
def test_advantages_of_a_group_by_hand(name: str, high: float) -> None:
    assert STD_EPS == 1e-6
    [advantages, [first, second]] = ADVANTAGES[name]([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0]])
    assert close(advantages, [high, -high, -high, high]) and first == -second > 0, "each group keeps to itself"


@pytest.mark.parametrize("name", [name for name in ADVANTAGE_NAMES if name != "reinforce_pp"])
def test_equal_rewards_and_single_trajectories_teach_nothing(name: str) -> None:
    # 0.1 three times has a mean of 0.1 + one rounding error, which must not become an advantage.
    assert ADVANTAGES[name]([[0.1, 0.1, 0.1], [5.0], []]) == [[0.0, 0.0, 0.0], [0.0], []]


@pytest.mark.parametrize("name", [name for name in ADVANTAGE_NAMES if name != "distillation"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_seen(name: str, bad: float) -> None:
    [advantages] = ADVANTAGES[name]([[1.0, bad, 0.0]])
    assert math.isnan(advantages[1])
    assert all(math.isnan(a) for a in advantages) or name == "reinforce_pp"


def test_ppo_clip_on_both_sides() -> None:
    # min(r A, clip(r) A), negated, and its gradient by log π, which is -r A where the unclipped branch is the smaller:
    #   r = 2,   A = +1: min( 2,    1.28) =  1.28 -> loss -1.28, clipped above, gradient 0
    #   r = 2,   A = -1: min(-2,   -1.28) = -2    -> loss  2,    not clipped,   gradient 2
    #   r = 0.5, A = +1: min( 0.5,  0.8)  =  0.5  -> loss -0.5,  not clipped,   gradient -0.5
    #   r = 0.5, A = -1: min(-0.5, -0.8)  = -0.8  -> loss  0.8,  clipped below, gradient 0
    given = terms([0.4, 0.4, 0.1, 0.1], [0.2] * 4, SIGNS)
    result, gradient = evaluate(TrainerSettings(clip_low=0.2, clip_high=0.28), given)
    assert close(result.losses, [-1.28, 2.0, -0.5, 0.8])
    assert close(gradient, [0.0, 2.0, -0.5, 0.0])
    assert result.clipped_high.tolist() == [True, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True]
    assert close(result.weights.used, RATIOS)


def test_the_bounds_are_decoupled() -> None:
    # r = 1.25, A = 1: inside 1 + 0.28, outside 1 + 0.2. r = 0.75, A = -1: outside 1 - 0.2, inside 1 - 0.28.
    given = terms([0.25, 0.15], [0.2, 0.2], [1.0, -1.0])
    higher, _ = evaluate(TrainerSettings(clip_low=0.2, clip_high=0.28), given)
    lower, _ = evaluate(TrainerSettings(clip_low=0.28, clip_high=0.2), given)
    assert close(higher.losses, [-1.25, 0.8])
    assert close(lower.losses, [-1.2, 0.75])


def test_ppo_clip_with_truncated_weights_caps_the_gradient() -> None:
    # As in the two-sided case but C = 1.5: the ratio of the first two tokens is 2, so their loss is scaled by 1.5 / 2.
    #   token 1: -1.28 · 0.75 = -0.96, gradient still 0.  token 2: 2 · 0.75 = 1.5, gradient 1.5 = C · |A|.
    settings = TrainerSettings(correction="token_tis", correction_cap=1.5)
    result, gradient = evaluate(settings, terms([0.4, 0.4, 0.1, 0.1], [0.2] * 4, SIGNS))
    assert close(result.losses, [-0.96, 1.5, -0.5, 0.8])
    assert close(gradient, [0.0, 1.5, -0.5, 0.0])
    assert close(result.weights.used, [1.5, 1.5, 0.5, 0.5])
    assert result.weights.truncated.tolist() == [True, True, False, False]


def test_decoupled_ppo_clips_around_the_proximal_policy() -> None:
    # current / proximal = 0.30 / 0.20 = 1.5, proximal / behavior = 0.20 / 0.05 = 4.
    #   A = +1: -min(1.5, 1.28) = -1.28, times 4 = -5.12, clipped above, gradient 0
    #   A = -1: -min(-1.5, -1.28) = 1.5, times 4 =  6,    gradient 1.5 · 4 = 6
    # Around the behavior policy (ratio 6) the same tokens would give -1.28 and 6.
    given = terms([0.3, 0.3], [0.05, 0.05], [1.0, -1.0], proximal=[0.2, 0.2])
    result, gradient = evaluate(TrainerSettings(loss="decoupled_ppo"), given)
    assert close(result.losses, [-5.12, 6.0])
    assert close(gradient, [0.0, 6.0])
    assert close(result.weights.used, [4.0, 4.0])
    assert result.clipped_high.tolist() == [True, False]
    # Truncated at C = 2 the weight 4 becomes 2: -1.28 · 2 and 1.5 · 2.
    capped, gradient = evaluate(TrainerSettings(loss="decoupled_ppo", correction="token_tis"), given)
    assert close(capped.losses, [-2.56, 3.0])
    assert close(gradient, [0.0, 3.0])
    assert capped.weights.truncated.tolist() == [True, True]


def test_log_ratios_stay_finite_but_nan_stays_seen() -> None:
    ratio = bounded(torch.tensor([0.0, -900.0, math.nan]) - torch.tensor([-900.0, 0.0, -1.0]))
    assert ratio[:2].tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO]
    assert math.isnan(ratio[2])


def test_effective_sample_size() -> None:
    # Weights 1, 1, 2: sum 4, squares 6, so 16 / (3 · 6) = 0.8888889. Equal weights: 1. One of four alone: 1/4.
    assert effective_sample_share(4.0, 6.0, 3.0) == pytest.approx(0.8888889)
    assert effective_sample_share(10.0, 20.0, 5.0) == 1.0
    assert effective_sample_share(7.0, 49.0, 4.0) == 0.25
    assert effective_sample_share(0.0, 0.0, 4.0) == 0.0


def test_aggregation_weights() -> None:
    # Two trajectories of 1 and 3 tokens.
    #   token_mean: 1 / 4 each token.  sequence_mean: 1 / (2 · 1) and 1 / (2 · 3).  constant of 8: 1 / (2 · 8).
    assert token_weights([1, 3], "token_mean", 0) == [0.25, 0.25]
    assert token_weights([1, 3], "sequence_mean", 0) == pytest.approx([0.5, 1 / 6])
    assert token_weights([1, 3], "constant", 8) == [0.0625, 0.0625]


def test_diagnostics_by_hand() -> None:
    # The two-sided case, taken in as two micro-batches of two. Ratios 2, 2, 0.5, 0.5.
    #   clip shares: one of four each.  ratio mean: 5 / 4 = 1.25.
    #   k3 = r - 1 - ln r: 2 - 1 - 0.6931472 = 0.3068528 twice, 0.5 - 1 + 0.6931472 = 0.1931472 twice; mean 0.25.
    #   ess of the raw ratios: (5)² / (4 · (4 + 4 + 0.25 + 0.25)) = 25 / 34 = 0.7352941.
    #   entropy estimate: -ln 0.4 = 0.9162907 twice and -ln 0.1 = 2.3025851 twice, mean 1.6094379.
    #   k1 = -ln r: -0.6931472 twice and 0.6931472 twice, mean 0.  k2 = ln² r / 2 = 0.2402265 of each.
    diagnostics = Diagnostics(TrainerSettings())
    for half in (slice(0, 2), slice(2, 4)):
        given = terms([0.4, 0.4, 0.1, 0.1][half], [0.2] * 2, SIGNS[half])
        result = policy_loss(given, TrainerSettings())
        diagnostics.add(counted(given, torch.tensor([1.0, 2.0])), result, result.losses.sum())
    metrics = diagnostics.metrics()
    assert metrics == pytest.approx(
        {
            "clip_share_low": 0.25,
            "clip_share_high": 0.25,
            "approx_kl": 0.25,
            "entropy_estimate": 1.6094379,
            "ratio_mean": 1.25,
            "tis_truncated_share": 0.0,
            "ess": 25 / 34,
            "behavior_kl_k1": 0.0,
            "behavior_kl_k2": 0.2402265,
            "behavior_kl_k3": 0.25,
            "token_share_stale_0": 1.0,
            "ratio_mean_stale_0": 1.25,
            "behavior_kl_k3_stale_0": 0.25,
            "logprob_gap_max": 0.6931472,
            "logprob_gap_max_fresh": 0.6931472,
            "token_share_fresh": 1.0,
            "ratio_mean_fresh": 1.25,
            "logprob_gap_mean_fresh": 0.6931472,
        },
        rel=1e-5,
        abs=1e-7,
    )
    assert diagnostics.sums()["loss"] == pytest.approx(-1.28 + 2.0 - 0.5 + 0.8, rel=1e-5)
    assert all(value == 0.0 for value in Diagnostics(TrainerSettings()).metrics().values())


def test_learning_rate_schedule_by_hand() -> None:
    # Peak 1.0, warm-up 4: 1/4, 2/4, 3/4, 4/4, then 1. Linear to 0 at 8: step 4 has (8-4)/4, step 6 (8-6)/4.
    constant = TrainerSettings(learning_rate=1.0, lr_warmup_steps=4)
    linear = TrainerSettings(learning_rate=1.0, lr_warmup_steps=4, lr_schedule="linear", lr_total_steps=8)
    assert [constant.learning_rate_at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [linear.learning_rate_at(step) for step in (0, 4, 6, 8, 99)] == [0.25, 1.0, 0.5, 0.0, 0.0]
    cosine = TrainerSettings(learning_rate=1.0, lr_warmup_steps=4, lr_schedule="cosine", lr_total_steps=8)
    expected = [0.25, 1.0, (1 + 0.5**0.5) / 2, 0.5, 0.0, 0.0]
    assert [cosine.learning_rate_at(step) for step in (0, 4, 5, 6, 8, 99)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("advantage", {"advantage": "gae"}),
        ("loss", {"loss": "ppo"}),
        ("betas", {"betas": (0.9, 1.0)}),
        ("aggregation_tokens", {"aggregation": "constant"}),
        ("lr_total_steps", {"lr_schedule": "linear", "lr_warmup_steps": 5, "lr_total_steps": 5}),
    ],
)
def test_settings_that_cannot_work_are_refused_by_field(field: str, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerSettings(**values)  # type: ignore[arg-type]
    assert refused.value.details["field"] == f"trainer.{field}"
    assert refused.value.details["fix"]
