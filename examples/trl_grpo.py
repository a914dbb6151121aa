"""TRL's `GRPOTrainer`, scheduled by the engine: a thread generates ahead while TRL trains. Needs `pip install trl`.

    python examples/trl_grpo.py [DIRECTORY]    # runs/trl_grpo
    engine replay runs/trl_grpo

TRL computes advantages and loss, and steps the optimizer. The session decides which prompts are sampled, when the
sampler gets new weights and which groups a step trains on. Three hooks connect them: `rollout_func` takes the next
batch from the session, a callback reports each train step, and `GRPOWithBehavior` passes to the loss the log-probs
under the weights that sampled. TRL's data only sets the number of prompts of a step.
"""

import os
import sys
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from plain_loop import BATCH, LIMITS, SAMPLES, Samples, Schedule, respond, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from engine import Session

STEPS = 40
DIGITS = "0123456789"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each digit, `<pad>` and `<end>`."""
    vocabulary = {token: number for number, token in enumerate([*DIGITS, "<pad>", "<end>"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def sample_digit(model: torch.nn.Module, group: int) -> Samples:
    """Group i is the i-th prompt of the data, which repeats."""
    return respond(model, [group % 10], group % 10)


class GRPOWithBehavior(GRPOTrainer):
    """Clips against the policy that sampled, which may be older than the one that is trained."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        outputs = super()._generate_and_score_completions(inputs)
        outputs["old_per_token_logps"] = outputs["sampling_per_token_logps"]
        return outputs


class ReportSteps(TrainerCallback):
    """Reports each train step, after its optimizer step."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.schedule.trained()


def main(directory: str = "runs/trl_grpo") -> list[float]:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)
    model = tiny_model(len(DIGITS) + 2)
    rewards: list[float] = []
    with Session(replace(LIMITS, max_steps=STEPS, checkpoint_every=0), directory=directory) as session:
        schedule = Schedule(session, model, sample_digit)

        def next_batch(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
            batch = schedule.next_batch()
            assert batch is not None, "the session ended before TRL"
            rewards.append(float(torch.stack([one.rewards for one in batch]).mean()))
            print(f"step {schedule.step.step}: reward {rewards[-1]:.2f}, staleness {max(schedule.step.staleness)}")
            return {
                "prompt_ids": [one.prompt for one in batch for _ in range(SAMPLES)],
                "completion_ids": [tokens for one in batch for tokens in one.tokens.tolist()],
                "logprobs": [logprobs for one in batch for logprobs in one.logprobs.tolist()],
                "scored": [reward for one in batch for reward in one.rewards.tolist()],
            }

        def reward(prompts: Any, completions: Any, scored: list[float], **others: Any) -> list[float]:
            return scored

        settings = GRPOConfig(
            output_dir=f"{directory}/trl",
            per_device_train_batch_size=BATCH * SAMPLES,
            num_generations=SAMPLES,
            max_steps=STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            beta=0.0,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        GRPOWithBehavior(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": digit} for digit in DIGITS]),
            processing_class=tokenizer(),
            rollout_func=next_batch,
            callbacks=[ReportSteps(schedule)],
        ).train()
        schedule.finish()
        print(f"{session.outcome.outcome}: {session.outcome.reason}; {session.events} events in {directory}")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:])
