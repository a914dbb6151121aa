"""The cost of `rollout.deterministic`, and the differences without it: S = 0 in one process, with one and two replicas.

Run by hand: `python benchmarks/determinism.py [--steps 20] [--batch 8]`. It uses the quickstart's model and task. With
the setting on and off, it compares the runs with one and with two replicas step by step. The cost is given in tokens/s.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import engine.runtime.local
from engine.config import Config
from engine.config.loading import parse_config
from engine.protocols import Batch
from engine.rollout.backend import SamplingParams
from engine.rollout.generator import TRAINING, ModelGenerator, Way
from engine.rollout.scoring import Grader
from engine.rollout.torch.torch_backend import TorchBackend
from engine.runtime.prompt_sources import CountedPrompts
from engine.tasks.chat import PromptRenderer
from engine.tasks.dataset import Dataset, PromptSource
from engine.tasks.quickstart import Prepared, prepare
from engine.tasks.rewards import find
from engine.training.model_trainer import ModelTrainer

CONTEXT = 176
"""Maximum tokens of the longest prompt and a response of 144 tokens, with some room."""


def configured(steps: int, batch: int, deterministic: bool) -> Config:
    """The quickstart at S = 0."""
    return parse_config(
        {
            "run": {"max_steps": steps, "epochs": None},
            "model": {"make": "arithmetic"},
            "scheduler": {"train_batch_size": batch, "max_staleness_steps": 0},
            "rollout": {
                "deterministic": deterministic,
                "max_tokens": 144,
                "context": CONTEXT if deterministic else None,
            },
            "trainer": {
                "learning_rate": 5e-4,
                "lr_warmup_steps": 5,
                "micro_batch_tokens": 4096,
                "threads": 1,
                "checkpoint_every": 0,
            },
        }
    )


@dataclass
class Watched:
    """A trainer that forwards every call, and keeps the sampled trajectories."""

    trainer: ModelTrainer
    steps: list[list[tuple[list[int], list[float]]]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def train(self, batch: Batch) -> dict[str, float]:
        groups = sorted(batch.groups, key=lambda group: group.group)
        self.steps.append([(t.token_ids, t.logprobs) for group in groups for t in group.trajectories])
        metrics = self.trainer.train(batch)
        self.rewards.append(metrics["reward_mean"])
        return metrics


@dataclass
class Seen:
    """The results of a run. `rate`: tokens trained per second of the whole run, in which rollout and training take
    turns."""

    trainer: Watched
    rate: float
    weights: dict[str, torch.Tensor]


def run(config: Config, made: Prepared, replicas: int) -> Seen:
    tokenizer = AutoTokenizer.from_pretrained(made.model_path)
    params = SamplingParams(max_tokens=config.rollout.max_tokens, stop_ids=(tokenizer.eos_token_id,))
    samples, slots = config.scheduler.samples_per_prompt, config.scheduler.train_batch_size // replicas
    source = PromptSource(Dataset.load(made.training_path, prompt_field="prompt"), seed=config.run.seed)
    assert made.reward is not None
    reward = find(made.reward, None, "reward.function")

    def generator(replica: int) -> ModelGenerator:
        r = config.rollout
        backend = TorchBackend(made.model_path, rows=slots * samples, context=r.context, deterministic=r.deterministic)
        ways = {TRAINING: Way(params, Grader(tokenizer, reward, ends=params.stop_ids))}
        return ModelGenerator(backend, PromptRenderer(tokenizer), ways, seed=config.run.seed)

    trainer = Watched(ModelTrainer(made.model_path, config.trainer_settings))
    generators = [generator(replica) for replica in range(replicas)]
    started = time.perf_counter()
    result = engine.runtime.local.run(
        generators=generators,
        trainer=trainer,
        prompts=CountedPrompts(source.total, source.prompt),
        limits=replace(config.limits, validation=None),
        samples=samples,
        slots=slots,
        policies=config.policies().names,
    )
    return Seen(trainer, result.tokens / (time.perf_counter() - started), trainer.weights())


def first_difference(one: Sequence[Any], two: Sequence[Any]) -> int | None:
    """Index of the first elements that differ; None if there are none."""
    pairs = enumerate(zip_longest(one, two))
    return next((index for index, (left, right) in pairs if left != right), None)


def compare(name: str, one: Seen, two: Seen) -> None:
    steps = list(zip(one.trainer.steps, two.trainer.steps, strict=True))
    logprobs = first_difference(one.trainer.steps, two.trainer.steps)
    tokens = first_difference(*([[t for t, _ in step] for step in run.trainer.steps] for run in (one, two)))
    last = [left[0] != right[0] for left, right in zip(*steps[-1], strict=True)]
    apart = max(float((one.weights[key] - two.weights[key]).abs().max()) for key in one.weights)
    reward = max(abs(a - b) for a, b in zip(one.trainer.rewards, two.trainer.rewards, strict=True))
    print(
        f"{name:13} 1 against 2 replicas: log-probs differ from step {logprobs}, tokens from step {tokens}, "
        f"{sum(last)} of {len(last)} trajectories of the last step; rewards by {reward:.4f} at most, "
        f"weights by {apart:.1e}"
    )


def main(steps: int, batch: int) -> None:
    torch.set_num_threads(1)
    seen: dict[tuple[bool, int], Seen] = {}
    with tempfile.TemporaryDirectory() as directory:
        made = prepare(Path(directory), configured(steps, batch, True).model.arithmetic)
        for deterministic in (True, False):
            for replicas in (1, 2):
                with contextlib.redirect_stderr(None):
                    seen[deterministic, replicas] = run(configured(steps, batch, deterministic), made, replicas)
    for deterministic, name in ((True, "deterministic"), (False, "off")):
        compare(name, seen[deterministic, 1], seen[deterministic, 2])
    for replicas in (1, 2):
        on, off = seen[True, replicas].rate, seen[False, replicas].rate
        print(f"price, {replicas} replicas: {on:.0f} against {off:.0f} tokens/s of the whole run, {on / off:.2f} x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="train steps of each of the four runs")
    parser.add_argument("--batch", type=int, default=8, help="prompt groups of a step, of 8 trajectories")
    chosen = parser.parse_args()
    main(chosen.steps, chosen.batch)
