"""Synchronous reinforcement learning as plainly as it can be written, for the engine at S = 0 to equal to the bit.

Draw B prompts, sample them one after the other, reward, train one step, copy the weights, repeat. It shares with the
engine the forward pass (`CausalModel.decode`, at the fixed shape that deterministic mode promises, and `Policy`) and
the loss (advantages, token weights, `accumulate_gradient`); nothing of its scheduler, driver, replicas, Ray or
continuous batching, nor its sampler, whose random numbers are derived here once more.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.rollout.torch.causal_model import FIXED_ROWS, CausalModel
from engine.training.advantages import ADVANTAGES
from engine.training.batch import samples_of
from engine.training.gradients import Policy, accumulate_gradient
from engine.training.lora import adapter_tensors, add_adapter
from engine.training.losses import token_weights
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup

WORD = 2**64


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what. `prompts` in the order drawn, epoch after epoch."""

    model_path: str
    prompts: Sequence[Prompt]
    reward: Callable[[Prompt, Trajectory], float]
    tokenizer: Any
    stop_ids: Sequence[int]
    settings: TrainerSettings
    batch: int
    samples: int
    max_tokens: int
    temperature: float = 1.0
    context: int | None = None
    seed: int = 0
    keep: Callable[[TrajectoryGroup], bool] = lambda group: True
    """Whether a group is trained on; a filtered one is replaced by the next prompt."""


@dataclass(kw_only=True)
class Outcome:
    """Of each step what `seen` gives, and the digest of the weights after the last."""

    steps: list[list[Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    weights: str = ""


def run_reference(task: Task, most_steps: int | None = None) -> Outcome:
    """The whole loop. Torch must be set to use one thread."""
    assert torch.get_num_threads() == 1
    trained: Any = AutoModelForCausalLM.from_pretrained(task.model_path, dtype=torch.float32).eval()
    s = task.settings
    sampled = CausalModel(
        task.model_path, rows=task.samples, context=task.context, device="cpu", fixed_shapes=True,
        lora=s.lora,
    )  # fmt: skip
    if s.lora is not None:
        add_adapter(trained, s.lora, s.seed)
    policy = Policy(trained, s, torch.device("cpu"), False)
    optimizer = torch.optim.AdamW(
        [one for one in trained.parameters() if one.requires_grad],
        lr=s.learning_rate, betas=s.betas, eps=s.adam_eps, weight_decay=s.weight_decay, fused=True,
    )  # fmt: skip
    outcome, drawn = Outcome(), 0
    while drawn < len(task.prompts) and len(outcome.steps) != most_steps:
        groups: list[TrajectoryGroup] = []
        while len(groups) < task.batch and drawn < len(task.prompts):
            group = sample_group(task, sampled, drawn, version=len(outcome.steps))
            drawn += 1
            groups += [group] if task.keep(group) else []
        if groups:
            train(policy, optimizer, groups, s)
            sampled.model.load_state_dict(trained.state_dict())
            outcome.steps.append(seen(groups))
            rewards = [t.reward or 0.0 for group in groups for t in group.trajectories]
            outcome.rewards.append(sum(rewards) / len(rewards))
    outcome.weights = digest(adapter_tensors(trained) if s.lora is not None else trained.state_dict())
    return outcome


def sample_group(task: Task, model: CausalModel, number: int, version: int) -> TrajectoryGroup:
    """All trajectories of one prompt, side by side, token by token from the first of the prompt."""
    prompt = task.prompts[number]
    prompt_ids = task.tokenizer.encode(prompt.text)
    rows = [list(prompt_ids) for _ in range(task.samples)]
    logprobs: list[list[float]] = [[] for _ in rows]
    ended = [False] * task.samples
    budget = min(task.max_tokens, model.context - len(prompt_ids))
    model.cache.clear()
    place = 0
    while not all(ended):
        for index, logits in enumerate(forward(model, rows, place)):
            position = place + 1 - len(prompt_ids)  # in the response, of the token that these logits predict
            if position < 0 or ended[index]:
                continue
            token, logprob = pick(logits / task.temperature, uniform(seed_of(task.seed, number, index), position))
            rows[index].append(token)
            logprobs[index].append(logprob)
            ended[index] = token in task.stop_ids or position + 1 == budget
        place += 1
    trajectories = []
    for ids, probabilities in zip(rows, logprobs, strict=True):
        response = ids[len(prompt_ids) :]
        made = Trajectory(prompt_ids=prompt_ids, finish_reason="stop" if response[-1] in task.stop_ids else "length")
        made.extend(response, probabilities, [Span(0, len(response), version)])
        ended = response[-1] in task.stop_ids
        made.text = task.tokenizer.decode(response[:-1] if ended else response)
        made.reward = float(task.reward(prompt, made))
        trajectories.append(made)
    return TrajectoryGroup(group=number, prompt=prompt, trajectories=trajectories)


@torch.inference_mode()
def forward(model: CausalModel, rows: Sequence[Sequence[int]], place: int) -> list[torch.Tensor]:
    """Each row's logits after its token at `place`; a row that has ended is fed a 0 there, which nobody looks at."""
    logits: list[torch.Tensor] = []
    for first in range(0, len(rows), FIXED_ROWS):
        part = rows[first : first + FIXED_ROWS]
        fed = [row[place] if place < len(row) else 0 for row in part] + [0] * (FIXED_ROWS - len(part))
        columns = torch.full((FIXED_ROWS,), place)
        logits += list(model.decode(torch.tensor(fed), columns, model.context, first))[: len(part)]
    return logits


def pick(logits: torch.Tensor, draw: float) -> tuple[int, float]:
    """The token whose share of [0, 1) a draw falls into, in vocabulary order, and its log-prob."""
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    token = int((cumulative <= draw * cumulative[-1]).sum())
    return token, float(logprobs[token])


def splitmix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % WORD
    return value ^ (value >> 31)


def seed_of(seed: int, group: int, sample: int) -> int:
    """One number out of (seed, group, sample); hashed once more, as the sampler does with what it is given."""
    gamma, state = 0x9E3779B97F4A7C15, 0
    for part in (seed, group, sample):
        state = splitmix(((state + gamma) ^ splitmix((part + gamma) % WORD)) % WORD)
    return splitmix((gamma ^ splitmix((state + gamma) % WORD)) % WORD)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 52 bits for (seed, position)."""
    return (splitmix((seed + (position + 1) * 0x9E3779B97F4A7C15) % WORD) >> 12) * 2.0**-52


def train(
    policy: Policy, optimizer: torch.optim.Optimizer, groups: Sequence[TrajectoryGroup], settings: TrainerSettings
) -> None:
    """One train step: an optimizer update for each minibatch of groups."""
    samples = [samples_of(group) for group in groups]
    advantages = ADVANTAGES[settings.advantage]([[sample.reward for sample in group] for group in samples])
    for group, values in zip(samples, advantages, strict=True):
        for sample, value in zip(group, values, strict=True):
            sample.advantage = value
    size = settings.policy_mini_batch_size or len(groups)
    for start in range(0, len(groups), size):
        minibatch = [sample for group in samples[start : start + size] for sample in group]
        lengths = [sample.tokens for sample in minibatch]
        weights = token_weights(lengths, settings.aggregation, settings.aggregation_tokens)
        for sample, weight in zip(minibatch, weights, strict=True):
            sample.weight = weight
        optimizer.zero_grad()
        accumulate_gradient(policy, minibatch)
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), settings.max_grad_norm)
        optimizer.step()


def seen(groups: Sequence[TrajectoryGroup]) -> list[Any]:
    """What two runs are compared by, in order: groups, tokens, log-probs and rewards. Survives JSON."""
    return [[g.group, [[t.token_ids, t.logprobs, t.reward] for t in g.trajectories]] for g in groups]


def reward(prompt: Prompt, trajectory: Trajectory) -> float:
    """A reward that even a model without any skill earns now and then."""
    return float("1" in trajectory.text[:6])


def digest(weights: dict[str, torch.Tensor]) -> str:
    """A hash of every bit of a state dict."""
    made = hashlib.sha256()
    for name in sorted(weights):
        made.update(name.encode())
        made.update(weights[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
