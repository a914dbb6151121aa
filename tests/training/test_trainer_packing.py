"""Which tokens are trained, where their log-probs come from, and how rows are packed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from engine.errors import DataFailure
from engine.protocols import Batch
from engine.training.advantages import set_advantages
from engine.training.batch import pack, samples_of
from engine.training.gradients import accumulate_gradient, entropy_of
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Span, TrajectoryGroup

Make = Callable[..., TrajectoryGroup]


def test_the_row_ends_before_its_last_trainable_token(group: Make) -> None:
    # Prompt 2 3 4, response 5 6 7 8 with a mask of 1 0 1 0: tokens 5 (at 3) and 7 (at 5) are trained, predicted by the
    # logits at 2 and 4. Nothing after position 4 is read, so the row is 2 3 4 5 6.
    made = group(0, [1.0], responses=[[5, 6, 7, 8]])
    made.trajectories[0].loss_mask = [1, 0, 1, 0]
    made.trajectories[0].logprobs = [-0.1, -0.2, -0.3, -0.4]
    [sample] = samples_of(made)
    assert sample.input_ids.tolist() == [2, 3, 4, 5, 6]
    assert sample.positions.tolist() == [2, 4]
    assert sample.targets.tolist() == [5, 7]
    assert sample.behavior.tolist() == pytest.approx([-0.1, -0.3])


def test_a_rollout_without_trainable_tokens_keeps_its_reward(group: Make) -> None:
    made = group(0, [1.0, 0.0, 0.5], responses=[[], [5, 6], [7]])
    made.trajectories[2].loss_mask = [0]
    samples = samples_of(made)
    assert [(sample.targets.tolist(), sample.reward) for sample in samples] == [([], 1.0), ([5, 6], 0.0), ([], 0.5)]
    assert [indices for _, indices in pack(samples, 64)] == [[1]]
    made.trajectories[0].reward = None
    assert [sample.reward for sample in samples_of(made)] == [0.0, 0.5], "it was not judged"


def test_filter_overlong_trains_no_token_of_a_response_that_was_cut_off(group: Make) -> None:
    made = group(0, [1.0, 0.0], responses=[[5, 6], [7, 8]])
    made.trajectories[1].finish_reason = "length"
    assert [sample.tokens for sample in samples_of(made)] == [2, 2]
    samples = samples_of(made, filter_overlong=True)
    assert [(sample.tokens, sample.reward, sample.response_tokens) for sample in samples] == [(2, 1.0, 2), (0, 0.0, 2)]


@pytest.mark.parametrize("damage", ["reward", "prompt_ids", "logprobs", "loss_mask"])
def test_a_trajectory_that_cannot_be_trained_is_named(group: Make, damage: str) -> None:
    made = group(3, [1.0, 0.0])
    broken = {"reward": None, "prompt_ids": [], "logprobs": [-1.0], "loss_mask": [1]}[damage]
    setattr(made.trajectories[1], damage, broken)
    with pytest.raises(DataFailure, match="group 3, trajectory 1"):
        samples_of(made)


def test_packing_keeps_to_the_budget_and_loses_nothing(group: Make) -> None:
    samples = [sample for number in range(5) for sample in samples_of(group(number, [1.0, 0.0, 0.5, 0.2]))]
    packed = list(pack(samples, 24))
    assert sorted(index for _, indices in packed for index in indices) == list(range(20))
    for micro, indices in packed:
        assert micro.input_ids.numel() <= 24
        assert micro.targets.tolist() == [token for index in indices for token in samples[index].targets.tolist()]
    lengths = [micro.input_ids.shape[1] for micro, _ in packed]
    assert lengths == sorted(lengths, reverse=True)


def test_a_trajectory_over_the_budget_gets_its_own_pass(group: Make) -> None:
    samples = samples_of(group(0, [1.0, 0.0], responses=[[5] * 30, [6]]))
    assert [indices for _, indices in pack(samples, 8)] == [[0], [1]]


def test_logprobs_are_those_of_the_model_token_by_token(model_path: str, batch: Callable[..., Batch]) -> None:
    """Against one row at a time, no padding, no kept positions: log-softmax of logits / T at i - 1, read at token i."""
    trainer = ModelTrainer(model_path, TrainerSettings(temperature=0.7, micro_batch_tokens=40))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    groups = batch(0).groups
    scored = trainer.policy.score([sample for made in groups for sample in samples_of(made)])
    trajectories = [trajectory for made in groups for trajectory in made.trajectories]
    for trajectory, logprobs in zip(trajectories, scored, strict=True):
        ids = trajectory.prompt_ids + trajectory.token_ids
        with torch.no_grad():
            table = (model(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        expected = [float(table[place - 1, ids[place]]) for place in range(len(trajectory.prompt_ids), len(ids))]
        assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)


def test_models_with_dropout_and_models_that_keep_all_logits(tmp_path: Path, batch: Callable[..., Batch]) -> None:
    """GPT-2 has dropout, which must stay off, and absolute positions; both ways to the logits give the same numbers."""
    GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    policy = ModelTrainer(str(tmp_path), TrainerSettings()).policy
    samples = [sample for made in batch(0).groups for sample in samples_of(made)]
    first, second = policy.score(samples), policy.score(samples)
    assert policy._parts is not None
    policy._parts = None
    for one, two, other in zip(first, second, policy.score(samples), strict=True):
        assert torch.equal(one, two)
        assert torch.allclose(one, other, atol=1e-6)


def test_a_micro_batch_moves_whole(group: Make) -> None:
    [(micro, _)] = pack(samples_of(group(0, [1.0, 0.0])), 64)
    moved = micro.to(torch.device("meta"))
    assert moved.input_ids.shape == micro.input_ids.shape
    assert {tensor.device.type for tensor in (moved.input_ids, moved.columns, moved.rows, moved.weights)} == {"meta"}
    assert moved.proximal is None
    assert micro.to(torch.device("cpu")) is micro


def test_entropy_of_the_sampling_distribution(model_path: str, group: Make) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(temperature=0.5))
    [(micro, _)] = pack(samples_of(group(0, [1.0], responses=[[5, 6]])), 64)
    table = (trainer.model(micro.input_ids).logits[0, 2:4] / 0.5).softmax(-1)
    expected = (-(table * table.log()).sum(-1)).tolist()
    assert trainer.policy.logprobs(micro).entropy.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("gap", [80.0, 95.0, 102.0, 110.0, float("inf")])
def test_entropy_of_a_token_that_cannot_be_drawn_has_the_gradient_zero(gap: float) -> None:
    """exp of -95 is a denormal number, of -110 zero, in float32."""
    logits = torch.tensor([[0.0, 1.0, -gap]], requires_grad=True)
    entropy = entropy_of(logits.log_softmax(-1))
    entropy.sum().backward()
    known = torch.tensor([[0.0, 1.0]], requires_grad=True)
    expected = torch.distributions.Categorical(logits=known).entropy()
    expected.sum().backward()
    assert torch.allclose(entropy, expected) and logits.grad is not None and known.grad is not None
    assert torch.allclose(logits.grad[:, :2], known.grad) and logits.grad[0, 2].abs() < 1e-30


def test_micro_batching_does_not_change_the_gradient(model_path: str, batch: Callable[..., Batch]) -> None:
    def gradient(micro_batch_tokens: int) -> torch.Tensor:
        settings = TrainerSettings(
            aggregation="sequence_mean", micro_batch_tokens=micro_batch_tokens, correction="token_tis"
        )
        trainer = ModelTrainer(model_path, settings)
        groups = [samples_of(made) for made in batch(0).groups]
        set_advantages(groups, settings)
        [samples] = trainer._minibatches(groups)
        accumulate_gradient(trainer.policy, samples)
        parts = [parameter.grad for parameter in trainer.model.parameters()]
        return torch.cat([part.flatten() for part in parts if part is not None])

    whole = gradient(100_000)
    assert whole.abs().max() > 1e-3
    for tokens in (1, 16, 50):
        assert (gradient(tokens) - whole).abs().max() < 1e-6


def test_tool_tokens_are_read_but_not_trained(model_path: str, group: Make) -> None:
    """A masked token changes the log-probs of what follows and has no loss, whatever its own log-prob."""
    trainer = ModelTrainer(model_path, TrainerSettings())

    def scores(tool: int, logprob: float) -> list[float]:
        made = group(0, [1.0], responses=[[5]])
        trajectory = made.trajectories[0]
        trajectory.extend([tool, 7], [logprob, -1.0], [Span(0, 2, 0)])
        trajectory.loss_mask = [1, 0, 1]
        [logprobs] = trainer.policy.score(samples_of(made))
        return logprobs.tolist()

    first, second, other = scores(9, -1.0), scores(9, float("nan")), scores(10, -1.0)
    assert len(first) == 2
    assert first == second
    assert first[0] == other[0]
    assert first[1] != other[1]
