"""Losses, advantages, corrections and masks of the user: the examples by hand, the check, and the train step."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from token_terms import evaluate, terms

from engine.cli import main
from engine.errors import ConfigError, EngineError
from engine.protocols import AdvantageTerms, Batch, Grouping, LossTerms, needs
from engine.training.custom_functions import CustomFunction
from engine.training.diagnostics import Diagnostics
from engine.training.losses import without_unsound
from engine.training.model_trainer import ModelTrainer
from engine.training.objective_check import check_objective
from engine.training.trainer_settings import Mask, TrainerSettings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIG = str(EXAMPLES / "custom_objectives.yaml")


def custom(field: str, function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Settings in which `function` is a custom one."""
    one = CustomFunction(field=f"trainer.{field}", spec="mine:function", arguments=arguments, function=function)
    return {"custom": (one,)} | ({field: one.spec} if "." not in field else {})


def example(name: str, field: str, **arguments: Any) -> dict[str, Any]:
    spec = f"custom_objectives:{name}"
    one = CustomFunction(field=f"trainer.{field}", spec=spec, directory=str(EXAMPLES), arguments=arguments)
    return {field: spec, "custom": (one,)}


# -- the examples, by hand ---------------------------------------------------------------------------------------------


def test_sapo_gates_each_token_by_its_ratio() -> None:
    # Ratios 2, 1 and 1/2 with advantages 1, -2 and -1. τ = 1 for A > 0, else 2: gates σ(1), σ(0), σ(-1).
    # Loss -4/τ σ(τ (r - 1)) A; its gradient by log π is -4 σ (1 - σ) r A.
    given = terms([0.4, 0.3, 0.1], [0.2, 0.3, 0.2], [1.0, -2.0, -1.0])
    result, gradient = evaluate(TrainerSettings(**example("sapo", "loss", positive=1.0, negative=2.0)), given)
    high, low = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    assert result.losses.tolist() == pytest.approx([-4 * high, 2.0, 2 * low])
    assert gradient == pytest.approx([-4 * high * low * 2, 2.0, 4 * high * low * 0.5])
    assert result.metrics["gate"].tolist() == pytest.approx([4 * high * low, 1.0, 4 * high * low])


def test_pass_at_k_shares_a_hit_with_the_other_rollouts_of_its_subsets() -> None:
    # n = 4, k = 2. One right: k / n = 1/2 for it, and 1/2 (1 - C(2, 1) / C(3, 1)) = 1/6 for the others; mean 1/4.
    # None right: all 0. Three right: 1/2 for these, and 1/2 (1 - C(0, 1) / C(3, 1)) = 1/2 for the wrong one, too.
    rewards = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    groups = Grouping(torch.arange(3).repeat_interleave(4), 3)
    given = AdvantageTerms(rewards=rewards, groups=groups, tokens=rewards, response_tokens=rewards)
    [function] = TrainerSettings(**example("pass_at_k", "advantage", k=2)).custom_functions()
    assert function(given).tolist() == pytest.approx([1 / 4, -1 / 12, -1 / 12, -1 / 12, *[0.0] * 8])


# -- the check ---------------------------------------------------------------------------------------------------------


def surrogate(terms: LossTerms) -> Any:
    return -terms.log_ratio.exp() * terms.advantages


def failing_backward(terms: LossTerms) -> Any:
    losses = surrogate(terms)
    losses.register_hook(lambda gradient: 1 / 0)
    return losses


def at_fresh_tokens(losses: Any) -> Callable[..., Any]:
    """A loss without a gradient at stale tokens, and `losses` where the policies agree."""
    return lambda terms: terms.current * 0 if terms.log_ratio.any() else losses


@needs(entropies=True)
def weighed_by_entropy(terms: Any) -> Any:
    return surrogate(terms) * terms.entropies.detach()


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a mean": ("loss", lambda terms: surrogate(terms).mean(), "must not average"),
    "a shape": ("loss", lambda terms: surrogate(terms)[:3], "the shape [3] for 14 tokens"),
    "a type": ("loss", lambda terms: surrogate(terms).double(), "returned float64, not float32"),
    "no tensor": ("loss", lambda terms: surrogate(terms).tolist(), "of type list, not a Tensor"),
    "metrics": ("loss", lambda terms: (surrogate(terms), [1]), "metrics of type list"),
    "a metric": ("loss", lambda terms: (surrogate(terms), {"kept": torch.ones(2)}), "for the metric 'kept' the shape"),
    "a metric's name": ("loss", lambda terms: (surrogate(terms), {"a b": terms.old}), "the name 'a b'"),
    "NaN": ("loss", lambda terms: surrogate(terms) * (terms.advantages.sqrt()), "not finite: nan at item 1"),
    "a NaN gradient": ("loss", lambda terms: (terms.log_ratio * 0).sqrt() + surrogate(terms), "gradient that is not"),
    "no gradient": ("loss", lambda terms: surrogate(terms).detach(), "without a gradient"),
    "another gradient": ("loss", lambda terms: torch.ones(14, requires_grad=True) * 2, "with respect to terms.current"),
    "a gradient at 0": ("loss", lambda terms: surrogate(terms) - terms.current, "needs(zero_advantages=True)"),
    "no training": ("loss", lambda terms: terms.current * 0, "a gradient of 0 at every token"),
    "no fresh gradient": ("loss", at_fresh_tokens(torch.ones(14)), "a gradient of 0 at every token"),
    "another fresh one": ("loss", at_fresh_tokens(torch.ones(14, requires_grad=True)), "a gradient of 0 at every"),
    "the backward pass": ("loss", failing_backward, "raised in the backward pass: ZeroDivisionError"),
    "the pass": ("loss", lambda terms: surrogate(terms) * terms.old.mean(), "depends on the other trajectories"),
    "an exception": ("loss", lambda terms: surrogate(terms) / terms.length, "AttributeError"),
    "no reference": ("loss", lambda terms: surrogate(terms) * terms.reference, "None without trainer.reference_path"),
    "no terms": ("loss", lambda: 0, "cannot be called with its terms alone"),
    "rollouts": ("advantage", lambda terms: terms.groups.means(terms.rewards), "the shape [3] for 8 rollouts"),
    "a taken name": ("advantage", lambda terms: (terms.rewards, {"std": terms.rewards}), "reports itself"),
    "a negative weight": ("correction", lambda terms: terms.log_ratio, "returned a negative weight"),
    "a change in place": ("correction", lambda terms: terms.weights.clamp_(max=2), "changed terms.weights in place"),
    "an exit": ("loss", lambda terms: sys.exit(3), "raised on synthetic tensors: SystemExit: 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_that_cannot_be_used_is_named_with_its_signature(case: str) -> None:
    field, function, words = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        check_objective(TrainerSettings(**custom(field, function)))
    assert str(raised.value).startswith(f"trainer.{field} ")
    assert "'mine:function'" in str(raised.value) and words in str(raised.value)
    assert "define it as def function(terms: " in str(raised.value) or case == "a gradient at 0"


def test_a_mask_and_its_arguments_are_checked_too() -> None:
    masks = (Mask(measure="mine:function", high=1.0),)
    wrong = custom("masks.0.measure", lambda terms, scale: terms.log_ratio.sum() * scale, scale=2)
    with pytest.raises(ConfigError, match=r"trainer\.masks\.0\.measure .*the shape \[\] for 14 tokens"):
        check_objective(TrainerSettings(masks=masks, **wrong))
    with pytest.raises(ConfigError, match=r"trainer\.masks\.0\.arguments .* did you mean scale\?"):
        check_objective(TrainerSettings(masks=masks, **custom("masks.0.measure", lambda terms, scale: 0, scal=2)))


def test_a_mask_that_no_value_can_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.masks\.low 3.0 is above high = 2"):
        Mask(measure="mine:function", low=3, high=2)


def test_a_loss_that_clips_every_stale_token_is_accepted() -> None:
    def strict(terms: LossTerms) -> Any:
        inside = (terms.log_ratio.detach().abs() < 1e-5).float()
        return -terms.log_ratio * inside * terms.advantages

    assert check_objective(TrainerSettings(**custom("loss", strict))).metrics == ()


def test_the_check_describes_a_correct_objective() -> None:
    settings = TrainerSettings(**custom("loss", lambda terms: (surrogate(terms), {"old": terms.old})))
    found = check_objective(settings)
    assert found.metrics == ("old",)
    assert found.lines == (
        "trainer.loss mine:function returns a loss for each token, and the metrics loss_old; trajectories with an "
        "advantage of 0 are skipped",
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["trainer.loss=custom_objectives:sapp"], "did you mean sapo?"),
        (["trainer.loss_arguments.positiv=2"], "trainer.loss_arguments"),
        (["trainer.loss=gspo", "trainer.clip_low=0.1", "trainer.clip_high=0.1"], "is built in and takes no arguments"),
        (["trainer.correction=token_tis"], "your loss contains the importance ratio itself"),
        (["trainer.clip_dual=3.0"], "is not read by your loss"),
    ],
)
def test_engine_check_refuses_an_objective(changes: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", CONFIG, *(word for change in changes for word in ("--set", change))]) == 2
    assert words in capsys.readouterr().err


# -- the train step ----------------------------------------------------------------------------------------------------

FIXED = {"learning_rate": 1e-3, "policy_mini_batch_size": 2, "micro_batch_tokens": 40, "threads": 1}


def clipped(terms: LossTerms, low: float, high: float) -> Any:
    """`ppo_clip` once more."""
    ratio = terms.log_ratio.clamp(-20, 20).exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * terms.advantages, bounded * terms.advantages), {"ratio": ratio.detach()}


def centered(terms: AdvantageTerms) -> Any:
    """`dr_grpo` once more."""
    return terms.rewards - terms.groups.spread(terms.groups.means(terms.rewards)), {"reward": terms.rewards}


def truncated(terms: Any, cap: float) -> Any:
    """`token_tis` once more."""
    return terms.weights.clamp(max=cap)


def near(terms: Any) -> Any:
    """`token_ratio` once more."""
    return terms.log_ratio.clamp(-20, 20).exp()


def weights_of(trainer: Any) -> list[torch.Tensor]:
    return [value.clone() for value in dict(trainer.weights()).values()]


def test_the_built_in_formulas_written_as_custom_functions_train_the_same(
    model_path: str, batch: Callable[[int, int], Batch]
) -> None:
    shared: dict[str, Any] = {**FIXED, "old_policy": "proximal"}
    built_in = TrainerSettings(
        **shared, advantage="dr_grpo", correction="token_tis", correction_cap=1.5,
        masks=(Mask(measure="token_ratio", low=0.1, high=8.0),),
    )  # fmt: skip
    functions = {
        "trainer.loss": (clipped, {"low": 0.2, "high": 0.28}), "trainer.advantage": (centered, {}),
        "trainer.correction": (truncated, {"cap": 1.5}), "trainer.masks.0.measure": (near, {}),
    }  # fmt: skip
    mine = TrainerSettings(
        **shared, loss="m:clipped", advantage="m:centered", correction="m:truncated",
        masks=(Mask(measure="m:near", low=0.1, high=8.0),),
        custom=tuple(
            CustomFunction(field=field, spec=f"m:{function.__name__}", arguments=arguments, function=function)
            for field, (function, arguments) in functions.items()
        ),
    )  # fmt: skip
    ours, theirs = ModelTrainer(model_path, built_in), ModelTrainer(model_path, mine)
    before = weights_of(theirs)
    expected, found = ours.train(batch(0, 4)), theirs.train(batch(0, 4))
    for one, other in zip(weights_of(ours), weights_of(theirs), strict=True):
        assert torch.equal(one, other)
    assert not all(map(torch.equal, weights_of(theirs), before)), "the loss trains the model"
    assert found["loss_ratio"] == pytest.approx(found["ratio_mean"]) and found["advantage_reward"] == 0.375
    assert found["masked_share_near"] == expected["masked_share_token_ratio"] > 0
    assert found["tis_truncated_share"] == expected["tis_truncated_share"] > 0
    assert "clip_share_low" in expected and "clip_share_low" not in found


def test_trajectories_without_an_advantage_are_skipped_unless_the_loss_needs_them(
    model_path: str, group: Callable[..., Any], as_batch: Callable[..., Batch]
) -> None:
    same, different = group(0, [1.0, 1.0]), group(1, [1.0, 0.0])

    @needs(zero_advantages=True)
    def everywhere(terms: LossTerms) -> Any:
        return surrogate(terms) - 0.1 * terms.current

    shares = []
    for function in (surrogate, everywhere):
        trainer = ModelTrainer(model_path, TrainerSettings(threads=1, **custom("loss", function)))
        shares.append(trainer.train(as_batch(0, [same, different]))["trained_token_share"])
    assert shares == [0.5, 1.0]


def test_a_loss_gets_entropies_if_it_needs_them(model_path: str, batch: Callable[[int, int], Batch]) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(threads=1, **custom("loss", weighed_by_entropy)))
    assert trainer.train(batch(0, 2))["entropy"] > 0


def test_a_trajectory_that_is_left_out_does_not_affect_a_custom_loss() -> None:
    given = without_unsound(terms([0.4, 0.5, 0.2], [0.4, 0.5, 0.2], [2.0, math.nan, math.nan], lengths=(1, 2)))
    result, gradient = evaluate(TrainerSettings(**custom("loss", lambda terms: 1.0 + surrogate(terms))), given)
    assert result.losses.tolist() == [-1.0, 0.0, 0.0] and gradient == [-2.0, 0.0, 0.0]


def test_a_custom_advantage_within_rounding_of_zero_is_zero(
    model_path: str, batch: Callable[[int, int], Batch]
) -> None:
    settings = TrainerSettings(threads=1, **custom("advantage", lambda terms: 1e-9 * terms.rewards))
    figures = ModelTrainer(model_path, settings).train(batch(0, 2))
    assert (figures["zero_advantage_groups"], figures["trained_token_share"]) == (2.0, 0.0)


def test_a_loss_that_raises_in_a_train_step_is_named_with_its_line() -> None:
    settings = TrainerSettings(**custom("loss", lambda terms: 1 / 0))
    words = (
        r"trainer\.loss mine:function raised ZeroDivisionError: division by zero \(test_custom_objectives\.py:\d+, in"
    )
    with pytest.raises(EngineError, match=words):
        evaluate(settings, terms([0.5], [0.5], [1.0]))


def test_a_loss_that_changes_its_metrics_is_named() -> None:
    given = terms([0.5], [0.5], [1.0])
    settings = TrainerSettings(**custom("loss", surrogate))
    result, _ = evaluate(settings, given)
    sound = given._replace(sound=torch.tensor([True]))
    with pytest.raises(EngineError, match=r"returned the metrics \(none\), but kept when it was checked"):
        Diagnostics(settings, own_metrics=["kept"]).add(sound, result, result.losses.sum())


def test_a_function_of_a_script_is_refused_with_several_ranks() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.loss .*belongs to a script .*the ranks cannot import it"):
        TrainerSettings(loss="__main__:mine", ranks=2).with_local({"trainer.loss": surrogate})
