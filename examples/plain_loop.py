"""A plain loop of PyTorch and transformers, scheduled by the engine: it trains while a thread generates ahead.

    python examples/plain_loop.py [DIRECTORY]    # runs/plain_loop; run it again to continue after an interruption
    engine replay runs/plain_loop

`Schedule` executes the orders of a session. `main` is an ordinary loop over its batches. The script makes a small
model, which learns to repeat a digit. `trl_grpo.py` uses the same `Schedule` inside TRL.
"""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import Limits, Session, Timeouts, commands, events

BATCH, SAMPLES, LENGTH, STEPS = 8, 8, 4, 50
LIMITS = Limits(
    train_batch_size=BATCH,
    max_staleness_steps=2,
    max_concurrent_groups=3 * BATCH,
    max_steps=STEPS,
    checkpoint_every=10,
    sync_mode="wait",
    timeouts=Timeouts.every(None),  # this loop blocks while it trains
)


class Samples(NamedTuple):
    """The samples of one prompt."""

    prompt: list[int]
    tokens: torch.Tensor
    """[samples, tokens]"""
    logprobs: torch.Tensor
    """Log-probs of the tokens under the weights that sampled them."""
    rewards: torch.Tensor
    """[samples]"""


class Schedule:
    """Executes the orders of a session: those of the replica on a thread, one after the other; all others at once."""

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        sample: Callable[[torch.nn.Module, int], Samples],
        save: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """`model`: the model that the loop trains. `sample(model, group)` generates and scores a group."""
        self.session, self.model, self.sample, self.save = session, model, sample, save
        self.sampler = copy.deepcopy(model).eval()
        self.version = 0
        """The weights version of the sampler."""
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.groups: dict[int, Samples] = {}
        self.replica = ThreadPoolExecutor(max_workers=1)
        self.orders = deque(session.begin())

    def batches(self) -> Iterator[list[Samples]]:
        """The batch of each train step. A batch counts as trained when the caller asks for the next one."""
        while (batch := self.next_batch()) is not None:
            yield batch
            self.trained()
        self.finish()

    def next_batch(self) -> list[Samples] | None:
        """Execute orders until there is a batch to train. Returns None when the run has ended."""
        while self.session.outcome is None:
            if not self.orders:
                self.orders += self.session.next_orders()
                continue
            order = self.orders.popleft()
            if isinstance(order, commands.TrainStep):
                self.step = order
                return [self.groups[group] for group in order.groups]
            self.execute(order)
        return None

    def trained(self) -> None:
        self.step.answer(events.StepTrained, updates=1)

    def finish(self) -> None:
        """Execute the last orders, after the last batch."""
        self.next_batch()
        self.replica.shutdown()

    def execute(self, order: Any) -> None:
        """Execute an order, or pass it to the replica's thread, which executes its orders in sequence."""
        match order:
            case commands.StartGroup() | commands.ResumeGroup():
                self.replica.submit(self.in_thread, order, self.generate)
            case commands.PauseReplica():
                self.replica.submit(order.answer, events.ReplicaPaused)
            case commands.InstallWeights():
                self.replica.submit(self.in_thread, order, self.install)
            case commands.StartProcess():
                order.answer(events.ProcessUp, slots=self.session.limits.max_concurrent_groups, samples=SAMPLES)
            case commands.DrawPrompts():
                order.answer(events.PromptsDrawn, exhausted=False)
            case commands.PublishWeights():
                self.versions[order.version] = copy.deepcopy(self.model.state_dict())
                order.answer(events.WeightsPublished)
            case commands.StageWeights():
                order.answer(events.WeightsStaged)  # they are in the memory of this process
            case commands.SaveCheckpoint():
                self.save(order.steps)
                order.answer(events.CheckpointSaved)
            case commands.DiscardGroups():
                for group in order.groups:
                    self.groups.pop(group, None)
                order.answer(events.OrderDone)
            case commands.RetireWeights():
                self.versions.pop(order.version, None)
                order.answer(events.OrderDone)
            case commands.ResumeReplica() | commands.DeleteCheckpoint():
                order.answer(events.OrderDone)
            case commands.FinishRun():
                pass
            case _:
                raise NotImplementedError(f"this loop does not expect {order}")

    def in_thread(self, order: Any, work: Callable[[Any], None]) -> None:
        try:
            work(order)
        except Exception as error:
            if isinstance(order, commands.StartGroup | commands.ResumeGroup):
                order.answer(events.GroupFailed, cause="infrastructure", reason=str(error))
            else:
                order.answer(events.SyncFailed, reason=str(error))

    def generate(self, order: Any) -> None:
        done = self.groups[order.group] = self.sample(self.sampler, order.group)
        spread = float(done.rewards.max() - done.rewards.min())
        order.answer(
            events.GroupGenerated, tokens=done.tokens.numel(), trainable=len(done.tokens), reward_spread=spread,
            oldest_version=self.version, newest_version=self.version, reward_mean=float(done.rewards.mean()),
        )  # fmt: skip

    def install(self, order: Any) -> None:
        self.sampler.load_state_dict(self.versions[order.version])
        self.version = order.version
        order.answer(events.WeightsInstalled)


# -- the task and the loop ---------------------------------------------------------------------------------------------


def tiny_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, **sizes))


def logprobs_of(model: torch.nn.Module, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs [samples, tokens] of responses to a prompt."""
    ids = torch.cat([torch.tensor([prompt] * len(tokens)), tokens], dim=1)
    logits = model(ids).logits[:, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def respond(model: torch.nn.Module, prompt: list[int], wanted: int) -> Samples:
    """Sample responses. The reward is the share of tokens that are the `wanted` token."""
    ids = torch.tensor([prompt] * SAMPLES)
    for _ in range(LENGTH):
        chances = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
    tokens = ids[:, len(prompt) :]
    return Samples(prompt, tokens, logprobs_of(model, prompt, tokens), (tokens == wanted).float().mean(1))


def sample_digit(model: torch.nn.Module, group: int) -> Samples:
    digit = random.Random(group).randrange(10)  # group i is always the same prompt
    return respond(model, [digit], digit)


def loss_of(model: torch.nn.Module, batch: list[Samples]) -> torch.Tensor:
    """PPO's clipped loss, relative to the weights that sampled. The advantages compare the samples of a prompt."""
    losses = []
    for one in batch:
        advantages = ((one.rewards - one.rewards.mean()) / (one.rewards.std() + 1e-4)).unsqueeze(1)
        ratio = (logprobs_of(model, one.prompt, one.tokens) - one.logprobs).exp()
        losses.append(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean())
    return torch.stack(losses).mean()


def main(directory: str = "runs/plain_loop") -> list[float]:
    torch.set_num_threads(1)
    model = tiny_model(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def checkpoint(steps: int) -> Path:
        return Path(directory) / "checkpoints" / f"{steps}.pt"

    def save(steps: int) -> None:
        checkpoint(steps).parent.mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint(steps))

    begun = (Path(directory) / "schedule").is_dir()
    with Session.resume(directory) if begun else Session(LIMITS, directory=directory) as session:
        if session.steps:
            saved = torch.load(checkpoint(session.steps), weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        schedule, rewards = Schedule(session, model, sample_digit, save), []
        for batch in schedule.batches():
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rewards.append(float(torch.stack([one.rewards for one in batch]).mean()))
            stale = max(schedule.step.staleness)
            print(f"step {schedule.step.step}: reward {rewards[-1]:.2f}, staleness at most {stale}")
        print(f"{session.outcome.outcome}: {session.outcome.reason}; {session.events} events in {directory}")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:])
