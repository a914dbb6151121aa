"""One train step of a model of 300 M parameters: the built-in trainer against a plain loop of transformers and torch.

    python benchmarks/trainer.py [--groups 4] [--samples 4] [--prompt 64] [--tokens 256] [--equal 2] [--ranks 2]
        [--micro 2048] [--threads 2] [--turns 3] [--only KIND ...] [--small]

Both take the same GRPO step on the same batch, in separate processes, in turns. `--equal` groups have equal rewards, as
is common when prompts become too easy or too hard. The plain loop computes every trajectory and all response logits.
The trainer skips trajectories without a gradient, packs the others without padding and computes prompts once (*padded*
has neither packing nor shared prompts, *packed* only packing). *Checkpointed* keeps only the inputs of layers. Tokens
per second count every trained token of the batch; the first step is not counted. Peak memory is that of the process;
with ranks, that of the largest process, with activation checkpointing. On a shared machine, compare tokens per CPU
second.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.protocols import Batch
from engine.training.model_trainer import ModelTrainer
from engine.training.ranked_trainer import RankedTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup

STEPS = 2
"""Train steps of each process. The first one, which allocates the optimizer's moments, is not counted."""
WANTED_SPEED, WANTED_MEMORY = 1.5, 0.6
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "off"},
    "packed": {"shared_prompts": "off"},
    "trainer": {},
    "checkpointed": {"activation_checkpointing": True},
}
"""Settings of the trainer, by the name of the measurement."""


def make_model(path: Path, small: bool) -> int:
    """Write a model with random weights. Returns its number of parameters."""
    torch.manual_seed(0)
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    if not small:
        wide = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 21, "num_attention_heads": 16}
    config = Qwen2Config(vocab_size=64_000, num_key_value_heads=4, tie_word_embeddings=True, **wide)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(step: int, groups: int, samples: int, prompt_tokens: int, tokens: int, equal: int) -> Batch:
    """Groups of responses of `tokens` / 2 to `tokens` tokens; the first `equal` groups have equal rewards."""
    random = torch.Generator().manual_seed(step)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 64_000, (count,), generator=random).tolist()

    made = []
    for number in range(groups):
        prompt = ids(prompt_tokens)
        trajectories = []
        for sample in range(samples):
            length = tokens // 2 + tokens // 2 * (sample + 1) // samples
            reward = 1.0 if number < equal else float(sample % 2)
            trajectory = Trajectory(prompt_ids=prompt, reward=reward, finish_reason="stop")
            trajectory.extend(ids(length), [-11.0] * length, [Span(0, length, 0)])
            trajectories.append(trajectory)
        made.append(TrajectoryGroup(group=number, prompt=Prompt(row=number, text=""), trajectories=trajectories))
    return Batch(step=step, groups=made, staleness=[0] * groups)


class Plain:
    """The step in its simplest form: all trajectories in one padded pass, and all logits of their responses."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def train(self, batch: Batch) -> None:
        rows, advantages = [], []
        for group in batch.groups:
            rewards = torch.tensor([trajectory.reward or 0.0 for trajectory in group.trajectories])
            advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
            rows += group.trajectories
        prompt = len(rows[0].prompt_ids)
        width = max(len(t.prompt_ids) + len(t.token_ids) for t in rows)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
        old = torch.zeros(len(rows), width)
        for index, t in enumerate(rows):
            first, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.token_ids)
            ids[index, :end] = torch.tensor(t.prompt_ids + t.token_ids)
            mask[index, first:end] = 1
            old[index, first:end] = torch.tensor(t.logprobs)
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=width - prompt + 1).logits[:, :-1]
        targets, mask, old = ids[:, prompt:], mask[:, prompt:], old[:, prompt:]
        ratio = (logits.log_softmax(-1).gather(2, targets[:, :, None]).squeeze(2) - old).exp()
        advantage = torch.tensor(advantages)[:, None]
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        ((losses * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


SIZES = ("groups", "samples", "prompt", "tokens", "equal")


def peak_of(pid: int) -> int:
    """Peak memory of a running process in bytes, as Linux reports it."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measure_one(kind: str, path: str, given: argparse.Namespace) -> None:
    """Runs in a separate process: print the seconds of the counted steps, their tokens, and the peak memory in
    bytes."""
    torch.set_num_threads(given.threads)
    ranks = int(kind.removesuffix(" ranks")) if kind.endswith(" ranks") else 1
    changes = KINDS["checkpointed"] if ranks > 1 else KINDS.get(kind, {})
    settings = TrainerSettings(
        device="cpu", learning_rate=1e-6, ranks=ranks, micro_batch_tokens=given.micro, threads=given.threads, **changes
    )
    trainer: Any = Plain(path) if kind == "plain" else (RankedTrainer if ranks > 1 else ModelTrainer)(path, settings)
    seconds, cpu, trained = 0.0, 0.0, 0
    for step in range(STEPS):
        batch = make_batch(step, *(getattr(given, name) for name in SIZES))
        began, cpu_began = time.perf_counter(), time.process_time()
        trainer.train(batch)
        if step:
            seconds += time.perf_counter() - began
            cpu += time.process_time() - cpu_began
            trained += sum(len(t.token_ids) for group in batch.groups for t in group.trajectories)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if ranks > 1:
        peak = max(peak_of(pid) for pid in trainer.pids)
        trainer.close()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "tokens": trained, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the longest response")
    parser.add_argument("--equal", type=int, default=2, help="number of groups with equal rewards")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2], help="also measure these numbers of ranks")
    parser.add_argument("--micro", type=int, default=2048, help="the trainer's micro_batch_tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=["plain", *KINDS], help="measure only these, and plain")
    parser.add_argument("--small", action="store_true", help="use a model of 8 M parameters, for a quick test")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kind, path = given.one
        measure_one(kind, path, given)
        return
    chosen = list(KINDS) if given.only is None else [kind for kind in KINDS if kind in given.only]
    kinds = ("plain", *chosen, *(f"{count} ranks" for count in given.ranks))
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="trainer-") as directory:
        count = make_model(Path(directory), given.small)
        print(
            f"{count / 1e6:.0f} M parameters, {given.groups} groups of {given.samples}, {given.equal} of them "
            f"with equal rewards, prompts of {given.prompt} and responses of up to {given.tokens} tokens"
        )
        sizes = [f"--{name}={getattr(given, name)}" for name in (*SIZES, "micro", "threads")]
        for _ in range(given.turns):
            for kind in kinds:
                asked = [sys.executable, __file__, *sizes, "--one", kind, directory]
                done = subprocess.run(asked, capture_output=True, text=True, check=True)
                measured = done.stdout.splitlines()[-1]
                print(f"measured {kind}: {measured}", file=sys.stderr, flush=True)
                found[kind].append(json.loads(measured))
    speeds = {kind: median(one["tokens"] / one["seconds"] for one in each) for kind, each in found.items()}
    works = {kind: median(one["cpu"] / one["tokens"] for one in each) for kind, each in found.items()}
    peaks = {kind: median(one["peak"] for one in each) for kind, each in found.items()}
    for kind in kinds:
        work = "" if kind.endswith("ranks") else f", per CPU second {works['plain'] / works[kind]:.2f} x"
        print(
            f"{kind:<13} {speeds[kind]:8.1f} tokens/s ({speeds[kind] / speeds['plain']:.2f} x{work})"
            f"  peak {peaks[kind] / 1e9:5.2f} GB ({peaks[kind] / peaks['plain']:.2f} x)"
        )
    print(f"wanted: {WANTED_SPEED} x the tokens/s at {WANTED_MEMORY} x the peak memory of plain")


if __name__ == "__main__":
    main()
