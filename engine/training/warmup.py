"""Makes the quickstart's model: a small Qwen2, trained on worked solutions until it has learned to follow them.

Called by `tasks.quickstart`, in the process that prepares a run; `engine init` takes an untrained model from here. One
thread and seeded, so that the same parameters give the same model on any number of cores. Never sees a held-out
question.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

Example: TypeAlias = tuple[str, str]
"""A prompt and what to say: a worked solution with its end token, or the beginning of one."""

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the progress, from 0 to 1, and a description of the current work."""

PROGRESS_EVERY = 25
"""Steps between reports."""

IGNORED = -100
"""A label that cross entropy leaves out."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Size of the model; embeddings are tied and the feed-forward layers three times as wide as the rest."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    positions: int = 512


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """How long and how fast to train. The learning rate rises over `rise_steps`, then falls linearly to a tenth."""

    steps: int = 800
    examples_per_step: int = 32
    learning_rate: float = 6e-3
    rise_steps: int = 50
    whole_every: int = 5
    """Every so many steps, `whole_examples` of any length replace the short ones."""
    whole_examples: int = 8


@dataclass(frozen=True, kw_only=True)
class Material:
    """What to learn from, endlessly: mostly short examples, since a long one costs many times as much."""

    short: Iterator[Example]
    whole: Iterator[Example]


def make_model(
    directory: str, shape: ModelShape, warm_up: WarmUp, material: Material, seed: int, progress: Progress
) -> dict[str, Any]:
    """Make, train and save a model next to its tokenizer in `directory`; returns what the warm-up measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
            model = new_model(shape, tokenizer)
            measured = _train(model, tokenizer, warm_up, material, progress)
            _save(model, directory)
            return measured
    finally:
        torch.set_num_threads(threads)


def save_untrained_model(directory: str, shape: ModelShape, seed: int) -> None:
    """Save a model with random weights next to its tokenizer in `directory`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _save(new_model(shape, PreTrainedTokenizerFast.from_pretrained(directory)), directory)


def _save(model: Qwen2ForCausalLM, directory: str) -> None:
    """Without transformers' progress bar: the caller has its own. Raises: `OSError`."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        if shown:
            logging.enable_progress_bar()


def new_model(shape: ModelShape, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """An untrained model for a tokenizer."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    warm_up: WarmUp,
    material: Material,
    progress: Progress,
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    loss = torch.zeros(())
    for step in range(warm_up.steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(warm_up, step)
        whole = (step + 1) % warm_up.whole_every == 0
        source, count = material.short, warm_up.examples_per_step
        if whole:
            source, count = material.whole, warm_up.whole_examples
        loss = _loss(model, tokenizer, [next(source) for _ in range(count)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % PROGRESS_EVERY == 0:
            message = f"supervised warm-up: step {step} of {warm_up.steps}, loss {loss.item():.3f}"
            progress(step / warm_up.steps, message)
    return {"steps": warm_up.steps, "loss": round(loss.item(), 4), "seconds": round(time.perf_counter() - started, 2)}


def _learning_rate(warm_up: WarmUp, step: int) -> float:
    rise = min(1.0, (step + 1) / warm_up.rise_steps)
    return warm_up.learning_rate * min(rise, 1.0 - 0.9 * step / warm_up.steps)


def _loss(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> torch.Tensor:
    """Mean cross entropy over the tokens of what to say."""
    prompts = [tokenizer.encode(prompt) for prompt, _ in examples]
    rows = [ids + tokenizer.encode(text) for ids, (_, text) in zip(prompts, examples, strict=True)]
    width = max(map(len, rows))
    inputs = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        inputs[place, : len(row)] = torch.tensor(row)
        labels[place, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
    logits = model(input_ids=inputs).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
