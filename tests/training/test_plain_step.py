"""The default train step over padded rows, GRPO with clipped PPO and no correction, equals one written out plainly, to
the bit.

What the other objectives need must neither change nor round a single weight of a run that does not use them.
"""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.protocols import Batch
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One optimizer step in one forward pass: longest rows first, padded on the right, logits of response places."""
    rows = []
    for group in batch.groups:
        rewards = [trajectory.reward or 0.0 for trajectory in group.trajectories]
        mean = sum(rewards) / len(rewards)
        spread = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5 + 1e-6
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            rows.append((trajectory.prompt_ids, trajectory.token_ids, trajectory.logprobs, (reward - mean) / spread))
    tokens = sum(len(response) for _, response, _, _ in rows)
    rows.sort(key=lambda row: -len(row[1]))
    width = len(rows[0][0]) + len(rows[0][1]) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, (prompt, response, _, _) in enumerate(rows):
        line = [*prompt, *response][:-1]
        ids[index, : len(line)] = torch.tensor(line)
    first = len(rows[0][0]) - 1
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=torch.arange(first, width)).logits
    lengths = [len(response) for _, response, _, _ in rows]
    places = torch.cat([torch.arange(length) for length in lengths])
    logprobs = logits[torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)), places].log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor([t for _, response, _, _ in rows for t in response])[:, None])[:, 0]
    ratio = (chosen - torch.tensor([p for _, _, logs, _ in rows for p in logs])).exp()
    advantage = torch.tensor([a for _, response, _, a in rows for _ in response])
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.28) * advantage)
    (losses * (1.0 / tokens)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_padded_step_is_the_plain_one_to_the_bit(
    model_path: str, batch: Callable[..., Batch], asynchronous: bool
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(learning_rate=1e-2, device="cpu", packing="off"))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others}], lr=1e-2, eps=1e-8, weight_decay=0.0, fused=True
    )
    for step in range(3):
        made = batch(step)
        made.staleness = [index if asynchronous else 0 for index in range(len(made.groups))]
        trainer.train(made)
        plain_step(model, optimizer, made)
        ours, theirs = trainer.model.state_dict(), model.state_dict()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
