"""`ModelTrainer` as the engine uses it: steps, minibatches, failures, published weights, and whether it learns."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weight_holders import inodes

from engine.errors import ConfigError, TrainerSpoiled
from engine.protocols import Batch
from engine.testing import TrainerContract
from engine.training import device, gradients, model_trainer
from engine.training.advantages import set_advantages
from engine.training.gradients import entropy_of
from engine.training.lora import Lora
from engine.training.model_trainer import ModelTrainer
from engine.training.shared_weights import Manifest, Memory, ReusedMemory
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import TrajectoryGroup

MakeBatch = Callable[..., Batch]
Make = Callable[..., TrajectoryGroup]

METRICS = {
    "loss", "grad_norm", "lr", "clip_share_low", "clip_share_high", "approx_kl", "entropy_estimate", "ratio_mean",
    "tis_truncated_share", "ess", "reward_mean", "reward_std", "response_tokens", "zero_advantage_groups",
    "behavior_kl_k1", "behavior_kl_k2", "behavior_kl_k3", "token_share_stale_0", "ratio_mean_stale_0",
    "behavior_kl_k3_stale_0", "advantage_std", "advantage_abs_max",
    "segments", "optimizer_steps", "nonfinite_minibatches", "nonfinite_trajectories", "trained_token_share",
    "logprob_gap_max", "logprob_gap_max_fresh", "token_share_fresh", "ratio_mean_fresh", "logprob_gap_mean_fresh",
    "seconds_train", "seconds_pack", "seconds_score",
    "seconds_snapshot", "seconds_forward_backward", "seconds_optimizer",
}  # fmt: skip


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def count_steps(trainer: ModelTrainer, monkeypatch: pytest.MonkeyPatch, fail_at: int = 0) -> list[float]:
    """The norm of the gradient that each optimizer step applies; the `fail_at`-th step raises half-way through."""
    norms: list[float] = []
    take = trainer.optimizer.step

    def step(*args: Any, **keywords: Any) -> Any:
        grads = [p.grad.flatten() for p in trainer.policy.trained if p.grad is not None]
        norms.append(float(torch.cat(grads).norm()))
        if len(norms) == fail_at:
            with torch.no_grad():
                trainer.policy.trained[0].add_(1.0)
            raise RuntimeError("out of memory")
        return take(*args, **keywords)

    monkeypatch.setattr(trainer.optimizer, "step", step)
    return norms


class TestModelTrainer(TrainerContract):
    path: str

    @pytest.fixture(autouse=True)
    def model_of_the_contract(self, model_path: str) -> None:
        self.path = model_path

    def make(self) -> ModelTrainer:
        return ModelTrainer(self.path, TrainerSettings(learning_rate=1e-2, threads=1))


@pytest.mark.parametrize(
    ("size", "mini", "epochs", "steps"), [(4, 0, 1, 1), (4, 4, 1, 1), (4, 1, 1, 4), (4, 2, 3, 6), (3, 2, 1, 2)]
)
def test_optimizer_steps_are_batch_over_minibatch(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, size: int, mini: int, epochs: int, steps: int
) -> None:
    settings = TrainerSettings(policy_mini_batch_size=mini, epochs_per_batch=epochs)
    trainer = ModelTrainer(model_path, settings)
    taken = count_steps(trainer, monkeypatch)
    metrics = trainer.train(batch(0, size))
    assert len(taken) == steps == trainer.optimizer_steps == metrics["optimizer_steps"]


@pytest.mark.parametrize(("old_policy", "fresh"), [("behavior", 0.5), ("proximal", 1.0)])
def test_gaps_are_fresh_until_an_optimizer_step_moves_the_weights(
    model_path: str, batch: MakeBatch, old_policy: str, fresh: float
) -> None:
    settings = TrainerSettings(policy_mini_batch_size=2, old_policy=old_policy)
    metrics = ModelTrainer(model_path, settings).train(batch(0))
    assert metrics["token_share_fresh"] == pytest.approx(fresh)
    assert metrics.get("token_share_moved", 0.0) == pytest.approx(1.0 - fresh)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_the_entropy_is_computed_only_for_its_loss_term(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, coefficient: float
) -> None:
    computed: list[int] = []
    monkeypatch.setattr(gradients, "entropy_of", lambda logprobs: computed.append(1) or entropy_of(logprobs))
    metrics = ModelTrainer(model_path, TrainerSettings(entropy_coef=coefficient)).train(batch(0))
    assert bool(computed) == ("entropy" in metrics) == bool(coefficient)
    assert metrics["entropy_estimate"] > 0


def test_the_warm_up_counts_optimizer_steps_not_train_steps(model_path: str, batch: MakeBatch) -> None:
    """Two minibatches a step and a warm-up of 4: rates 1/4, 2/4 | 3/4, 4/4 of the peak; the last one is reported."""
    trainer = ModelTrainer(model_path, TrainerSettings(learning_rate=1e-3, lr_warmup_steps=4, policy_mini_batch_size=2))
    assert [trainer.train(batch(step))["lr"] for step in range(3)] == [5e-4, 1e-3, 1e-3]


def test_metrics_are_complete_and_describe_the_batch(model_path: str, batch: MakeBatch) -> None:
    metrics = ModelTrainer(model_path, TrainerSettings(learning_rate=3e-4)).train(batch(0))
    assert set(metrics) == METRICS
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    # Rewards 1, 0, 0.5, 0: mean 0.375, squares 1.25 / 4 - 0.140625 = 0.171875, std 0.4145781.
    # Response tokens: 4 groups · (3 + 5 + 7 + 9).
    assert metrics["reward_mean"] == pytest.approx(0.375)
    assert metrics["reward_std"] == pytest.approx(0.4145781)
    assert metrics["response_tokens"] == 96
    assert metrics["lr"] == 3e-4
    assert metrics["zero_advantage_groups"] == 0


def test_the_gradient_is_clipped_to_its_norm(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(max_grad_norm=0.01))
    applied = count_steps(trainer, monkeypatch)
    reported = trainer.train(batch(0))["grad_norm"]
    assert reported > 0.1
    assert applied == pytest.approx([0.01], rel=1e-4)
    free = ModelTrainer(model_path, TrainerSettings(max_grad_norm=0.0))
    unclipped = count_steps(free, monkeypatch)
    assert free.train(batch(0))["grad_norm"] == pytest.approx(reported, rel=1e-5)
    assert unclipped == pytest.approx([reported], rel=1e-5)


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [1.0, 0.0]])
def test_a_batch_without_a_gradient_takes_its_optimizer_step(
    model_path: str, group: Make, as_batch: MakeBatch, rewards: list[float]
) -> None:
    """Moments decay, and the decoupled weight decay acts."""
    trainer = ModelTrainer(model_path, TrainerSettings(learning_rate=0.1, weight_decay=0.5))
    trainer.train(as_batch(0, [group(0, [1.0, 0.0])]))
    matrix = next(p for p in trainer.model.parameters() if p.ndim >= 2)
    moments = {name: value.clone() for name, value in trainer.optimizer.state[matrix].items()}
    empty = [] if rewards == [1.0, 1.0] else [[], []]
    metrics = trainer.train(as_batch(1, [group(1, rewards, responses=empty or None)]))
    assert (metrics["optimizer_steps"], metrics["loss"], metrics["trained_token_share"]) == (1, 0, 0)
    after = trainer.optimizer.state[matrix]
    assert torch.allclose(after["exp_avg"], moments["exp_avg"] * 0.9)
    assert int(after["step"]) == int(moments["step"]) + 1 == 2
    assert trainer.train(as_batch(2, []))["optimizer_steps"] == 0


@pytest.mark.parametrize(
    ("fail_at", "changes"),
    [(1, {}), (2, {}), (2, {"bf16": "on", "device": "cpu"}), (2, {"lora": Lora(rank=4, alpha=8.0)})],
    ids=["the first", "the second", "masters", "an adapter"],
)
def test_a_step_that_fails_leaves_everything_as_before_and_can_be_redone(
    model_path: str, batch: MakeBatch, fail_at: int, changes: dict[str, Any]
) -> None:
    settings = TrainerSettings(policy_mini_batch_size=2, learning_rate=1e-2, loss="decoupled_ppo", **changes)
    trainer, spared = ModelTrainer(model_path, settings), ModelTrainer(model_path, settings)
    for each in (trainer, spared):
        each.train(batch(0))
        each.score(batch(1), "old_logprobs")
    before = trainer.weights()
    with pytest.MonkeyPatch.context() as patch:
        count_steps(trainer, patch, fail_at)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train(batch(1))
    assert same(before, trainer.weights())
    assert trainer.optimizer_steps == 2
    assert all(parameter.grad is None for parameter in trainer.policy.trained)
    trainer.train(batch(1))
    spared.train(batch(1))
    assert same(trainer.weights(), spared.weights())


def test_the_copies_that_undo_a_step_reuse_the_memory_of_earlier_copies(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainerSettings(policy_mini_batch_size=2, learning_rate=1e-2)
    trainer, spared = ModelTrainer(model_path, settings), ModelTrainer(model_path, settings)
    taken: list[Memory] = []

    def take(manifest: Manifest) -> Memory:
        taken.append(ReusedMemory.take(trainer._copies, manifest))
        return taken[-1]

    monkeypatch.setattr(trainer._copies, "take", take)
    for step in range(2):
        trainer.train(batch(step))
    before = trainer.weights()
    with pytest.MonkeyPatch.context() as patch:
        count_steps(trainer, patch, fail_at=2)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train(batch(2))
    assert same(before, trainer.weights())
    trainer.train(batch(2))
    first, *others = taken
    assert len(others) == 3 and all(memory is others[0] for memory in others) and first is not others[0], "no moments"
    for step in range(3):
        spared.train(batch(step))
    assert same(trainer.weights(), spared.weights())


def test_a_first_step_that_fails_leaves_no_moments(model_path: str, batch: MakeBatch) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(policy_mini_batch_size=2))
    with pytest.MonkeyPatch.context() as patch:
        count_steps(trainer, patch, fail_at=2)
        with pytest.raises(RuntimeError):
            trainer.train(batch(0))
    assert not trainer.optimizer.state


@pytest.mark.parametrize("where", ["reward", "behavior nan", "behavior -inf", "all"])
def test_a_trajectory_that_is_not_finite_is_left_out_and_counted(model_path: str, batch: MakeBatch, where: str) -> None:
    """The others are trained as if it had had no advantage: its tokens stay in the denominators."""
    settings = TrainerSettings(learning_rate=1e-2)
    trainer, reference = ModelTrainer(model_path, settings), ModelTrainer(model_path, settings)
    spoiled, same_batch = batch(0), batch(0)
    group = spoiled.groups[1]
    if where == "reward":
        group.trajectories[0].reward = math.nan  # the baseline of its siblings, too
    for victim in group.trajectories if where == "all" else group.trajectories[:1]:
        victim.logprobs[1] = -math.inf if where == "behavior -inf" else victim.logprobs[1]
        victim.logprobs[1] = math.nan if where in ("behavior nan", "all") else victim.logprobs[1]
    metrics = trainer.train(spoiled)
    left_out = [0] if where.startswith("behavior") else range(4)

    def without(groups: Any, settings: TrainerSettings) -> dict[str, float]:
        metrics = set_advantages(groups, settings)
        for index in left_out:
            groups[1][index].advantage = 0.0
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_trainer, "set_advantages", without)
        expected = reference.train(same_batch)
    assert (metrics["nonfinite_trajectories"], metrics["optimizer_steps"]) == (len(left_out), 1)
    assert metrics["nonfinite_minibatches"] == 0
    for name, value in trainer.weights().items():
        assert torch.allclose(value, reference.weights()[name], atol=1e-6), name
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"packing": "on", "shared_prompts": "on"}, {"micro_batch_tokens": 4}, {"bf16": "on"},
     {"policy_mini_batch_size": 1, "old_policy": "proximal"}],
    ids=["packed", "a pass each", "bfloat16", "scored before"],
)  # fmt: skip
def test_a_forward_pass_that_is_not_finite_costs_its_trajectory_alone(
    flawed_path: str, flawed_batch: MakeBatch, options: dict[str, Any]
) -> None:
    """The others are trained as if it had had no advantage: 0 times NaN must not reach the weights they share."""
    settings = TrainerSettings(learning_rate=1e-2, **options)
    trainer, reference = ModelTrainer(flawed_path, settings), ModelTrainer(flawed_path, settings)

    def without(groups: Any, settings: TrainerSettings) -> dict[str, float]:
        metrics = set_advantages(groups, settings)
        groups[0][1].advantage = 0.0
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_trainer, "set_advantages", without)
        expected = reference.train(flawed_batch(0))
    metrics = trainer.train(flawed_batch(0))
    assert (metrics["nonfinite_trajectories"], metrics["nonfinite_minibatches"]) == (1, 0)
    assert metrics["optimizer_steps"] == expected["optimizer_steps"]
    for name in ("loss", "grad_norm", "entropy_estimate", "trained_token_share"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    for name, value in reference.weights().items():
        assert torch.allclose(trainer.weights()[name], value, atol=1e-6, equal_nan=True), name


def test_a_minibatch_without_a_finite_trajectory_is_skipped(flawed_path: str, group: Make, as_batch: MakeBatch) -> None:
    """Of a model whose weights are NaN, for example: no optimizer step must look as if it had learned something."""
    trainer = ModelTrainer(flawed_path, TrainerSettings(learning_rate=1e-2))
    before = trainer.weights()
    metrics = trainer.train(as_batch(0, [group(0, [1.0, 0.0], prompt=[2, 15])]))
    assert (metrics["nonfinite_trajectories"], metrics["nonfinite_minibatches"]) == (2, 1)
    assert metrics["optimizer_steps"] == 0
    assert all(value.equal(before[name]) for name, value in trainer.weights().items() if "embed" not in name)


def test_a_gradient_that_is_not_finite_skips_its_minibatch(model_path: str, batch: MakeBatch) -> None:
    """The minibatch of groups 0 and 1 is spoiled, that of 2 and 3 is sound: as if only the latter had been there."""
    settings = TrainerSettings(policy_mini_batch_size=2, learning_rate=1e-2)
    trainer, reference = ModelTrainer(model_path, settings), ModelTrainer(model_path, settings)
    sound = batch(0)
    sound.groups = sound.groups[2:]
    handles: list[Any] = []

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        handles.pop().remove()
        return grad * math.inf

    handles.append(next(trainer.model.parameters()).register_hook(spoil))
    metrics = trainer.train(batch(0))
    expected = reference.train(sound)
    assert (metrics["nonfinite_minibatches"], metrics["optimizer_steps"]) == (1, 1)
    assert same(trainer.weights(), reference.weights())
    assert (metrics["loss"], metrics["entropy_estimate"]) == (expected["loss"], expected["entropy_estimate"])


@pytest.mark.parametrize("minibatch", [4, 2], ids=["one minibatch", "two minibatches"])
@pytest.mark.parametrize("old_policy", ["behavior", "proximal"])
def test_figures_of_rollouts_are_those_of_the_step(
    model_path: str, group: Make, as_batch: MakeBatch, minibatch: int, old_policy: str
) -> None:
    settings = TrainerSettings(policy_mini_batch_size=minibatch, old_policy=old_policy, learning_rate=1e-3)
    trainer = ModelTrainer(model_path, settings)
    assert trainer.rollout_figures() == []
    equal, differing = group(0, [1.0, 1.0]), [group(number, [0.0, 1.0, 0.5]) for number in (1, 2, 3)]
    metrics = trainer.train(as_batch(0, [equal, *differing]))
    figures = trainer.rollout_figures()
    assert [len(own) for own in figures] == [2, 3, 3, 3]
    assert [rollout.advantage for rollout in figures[0]] == [0.0, 0.0]
    for own in figures[1:]:
        worst, best, middle = (rollout.advantage for rollout in own)
        assert worst is not None and best is not None
        assert worst < 0 < best and middle == pytest.approx(0, abs=1e-6)
    gaps = [[rollout.logprob_gap for rollout in own] for own in figures]
    assert max(gap for own in gaps[1:] for gap in own if gap) == pytest.approx(metrics["logprob_gap_max"])
    assert gaps[0] == [None, None], "no gradient, no pass"
    assert all(worst and best for worst, best, _ in gaps[1:])


def test_published_weights_are_a_copy_by_state_dict_name(model_path: str, batch: MakeBatch) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(learning_rate=1e-2))
    published = trainer.weights()
    kept = {name: value.clone() for name, value in published.items()}
    assert list(published) == list(trainer.model.state_dict())
    assert published["lm_head.weight"] is published["model.embed_tokens.weight"]  # tied
    assert all(not value.requires_grad and value.is_contiguous() for value in published.values())
    assert all(value.numpy().dtype == "float32" for value in published.values())
    trainer.train(batch(0))
    assert same(published, kept)
    memory = inodes(os.getpid(), trainer.weights().publication)
    for step in (1, 2):  # into the same memory, beside the first version, which is held
        trainer.train(batch(step))
        latest = trainer.weights()
        assert inodes(os.getpid(), latest.publication) == memory and same(published, kept)
        assert not same(published, latest) and same(latest, trainer.model.state_dict())
        del latest
    other = ModelTrainer(model_path, TrainerSettings())
    other.model.load_state_dict(trainer.weights())
    assert same(other.weights(), trainer.weights())


def test_decoupled_ppo_uses_scores_of_these_weights_only(model_path: str, batch: MakeBatch) -> None:
    """Scored before, scored by `train` itself, or scored under weights that have moved since: the same step."""
    settings = TrainerSettings(loss="decoupled_ppo", policy_mini_batch_size=2, learning_rate=1e-2)
    asked, unasked, stale = (ModelTrainer(model_path, settings) for _ in range(3))
    stale.score(batch(1), "old_logprobs")
    kept = stale._proximal
    for each in (asked, unasked, stale):
        each.train(batch(0))
    asked.score(batch(1), "old_logprobs")
    stale._proximal = kept
    reports = [each.train(batch(1)) for each in (asked, unasked, stale)]
    assert same(asked.weights(), unasked.weights())
    assert same(asked.weights(), stale.weights())
    assert reports[0]["ess"] == reports[2]["ess"] < 1


def test_decoupled_ppo_of_one_minibatch_needs_no_scoring(model_path: str, batch: MakeBatch) -> None:
    settings = TrainerSettings(loss="decoupled_ppo", learning_rate=1e-2)
    asked, unasked = ModelTrainer(model_path, settings), ModelTrainer(model_path, settings)
    asked.score(batch(0), "old_logprobs")
    scored, plain = asked.train(batch(0)), unasked.train(batch(0))
    assert plain["ratio_mean"] == 1.0
    assert plain["approx_kl"] == 0.0
    for name in ("loss", "grad_norm", "ratio_mean", "ess"):
        assert scored[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6)


def test_on_policy_ratios_are_one(model_path: str, batch: MakeBatch) -> None:
    """Behavior log-probs from the very weights and temperature: ratio 1, KL 0, all tokens count, none is clipped."""
    trainer = ModelTrainer(model_path, TrainerSettings(temperature=0.8, loss="decoupled_ppo"))
    made = batch(0)
    trainer.score(made, "old_logprobs")
    assert trainer._proximal is not None
    trajectories = [trajectory for each in made.groups for trajectory in each.trajectories]
    for trajectory, logprobs in zip(trajectories, trainer._proximal[1], strict=True):
        trajectory.logprobs = logprobs.tolist()
    metrics = ModelTrainer(model_path, TrainerSettings(temperature=0.8)).train(made)
    assert (metrics["ratio_mean"], metrics["ess"]) == pytest.approx((1.0, 1.0), abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_share_low"] == metrics["clip_share_high"] == 0


def test_scoring_is_free_where_the_loss_reads_no_proximal_policy(model_path: str, batch: MakeBatch) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings())
    trainer.score(batch(0), "old_logprobs")
    assert trainer._proximal is None
    trainer.score(batch(0), "ref_logprobs")
    assert trainer._reference is None
    with pytest.raises(ConfigError, match="ref_logprobs"):
        trainer.score(batch(0), "values")


def test_a_device_or_precision_that_is_not_there_is_refused(model_path: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device"):
        ModelTrainer(model_path, TrainerSettings(device="nowhere"))


def test_gpus_that_torch_cannot_use_are_not_left_for_a_cpu_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024\n")
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        ConfigError, match=r"trainer\.device is 'auto': torch .* with CUDA 13.0 cannot use .*535\.183\.01"
    ):
        device.refuse_unusable_gpus(2, "13.0")
    device.refuse_unusable_gpus(0, "13.0")
    device.refuse_unusable_gpus(2, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device.refuse_unusable_gpus(2, "13.0")


def test_it_learns_a_two_token_task(model_path: str, group: Make, as_batch: MakeBatch) -> None:
    """After prompt [p, 4], answer [p, p]: 1/2 for each right token. From chance (1/16) to nearly always in 20 steps."""
    settings = TrainerSettings(learning_rate=2e-2, correction="token_tis", policy_mini_batch_size=4, threads=1, seed=3)
    trainer = ModelTrainer(model_path, settings)
    draws = torch.Generator().manual_seed(11)
    rewards = []
    for step in range(20):
        groups = [play(trainer, group, step * 8 + index, 5 + index % 4, draws) for index in range(8)]
        rewards.append(trainer.train(as_batch(step, groups))["reward_mean"])
    assert rewards[0] < 0.1
    assert min(rewards[-5:]) > 0.9


def play(trainer: ModelTrainer, group: Make, number: int, target: int, draws: torch.Generator) -> TrajectoryGroup:
    """Sample 16 two-token answers to one prompt from the trainer's own model, with behavior log-probs and rewards."""
    samples = 16
    ids = torch.tensor([[target, 4]] * samples)
    logprobs = []
    for _ in range(2):
        with torch.no_grad():
            table = trainer.model(ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(table.exp(), 1, generator=draws)
        logprobs.append(table.gather(1, token))
        ids = torch.cat([ids, token], 1)
    responses = ids[:, 2:].tolist()
    rewards = [sum(token == target for token in response) / 2 for response in responses]
    made = group(number, rewards, prompt=[target, 4], responses=responses)
    for trajectory, values in zip(made.trajectories, torch.cat(logprobs, 1).tolist(), strict=True):
        trajectory.logprobs = values
    return made


def test_one_optimizer_step_is_undone_without_a_copy(model_path: str, batch: MakeBatch, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_trainer, "ModelSnapshot", None)
    trainer, spared = (ModelTrainer(model_path, TrainerSettings(learning_rate=1e-2)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train(batch(0))
    for each in (trainer, spared):
        each.train(batch(0))
    assert same(trainer.weights(), spared.weights())


def test_one_rank_whose_loss_fails_makes_no_further_pass(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(micro_batch_tokens=12))
    passes: list[Any] = []
    compute = trainer.policy.logprobs
    monkeypatch.setattr(trainer.policy, "logprobs", lambda micro, **_: passes.append(micro) or compute(micro))
    trainer.train(batch(0))
    assert len(passes) > 1
    passes.clear()
    monkeypatch.setattr(gradients, "policy_loss", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(batch(1))
    assert len(passes) == 1


def test_a_copy_that_cannot_be_restored_spoils_the_trainer(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(policy_mini_batch_size=2))
    count_steps(trainer, monkeypatch, fail_at=2)
    monkeypatch.setattr(model_trainer.ModelSnapshot, "restore", lambda snapshot: 1 / 0)
    with pytest.raises(TrainerSpoiled, match=r"out of memory .*; the step cannot be undone: ZeroDivisionError"):
        trainer.train(batch(0))


@pytest.mark.parametrize(("settings", "fail_at"), [({}, 1), ({"rollback": False, "policy_mini_batch_size": 2}, 2)])
def test_a_step_that_cannot_be_undone_spoils_the_trainer(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], fail_at: int
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(**settings))
    count_steps(trainer, monkeypatch, fail_at)
    with pytest.raises(TrainerSpoiled):
        trainer.train(batch(0))


def test_weights_are_published_in_the_type_of_the_models_files(model_path: str, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    trainer = ModelTrainer(str(tmp_path), TrainerSettings())
    assert {value.dtype for value in trainer.weights().values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}, "what is trained"
    for name, value in half.state_dict().items():
        assert torch.equal(trainer.weights()[name], value)
    for named in ("float32", "float16"):
        other = ModelTrainer(str(tmp_path), TrainerSettings(publish_dtype=named)).weights()
        assert {value.dtype for value in other.values()} == {getattr(torch, named)}
    assert {value.dtype for value in ModelTrainer(model_path).weights().values()} == {torch.float32}
