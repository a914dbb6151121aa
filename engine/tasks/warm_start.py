"""The supervised warm start: trains a model on written answers before the run, and stores the resulting model.

Called once at the start of a run whose config has `model.warm_start.path`, in the preparing process. Later runs find
the result by a hash of the model's path, the answers and the settings.
"""

import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from engine.errors import ConfigError, suggestion
from engine.errors.redaction import described
from engine.ids import StepId
from engine.section import Section
from engine.tasks.dataset import Dataset
from engine.tasks.quickstart import Progress, made_once
from engine.trajectory import Prompt

RECIPE = 2
"""Increase it when the same settings begin to make a different result."""
FIELD = "model.warm_start"
PROGRESS_EVERY_S = 1.0

Answer = tuple[Sequence[int], Sequence[int]]


class Learner(Protocol):
    """A trainer that can learn written answers: `ModelTrainer`, `RankedTrainer`."""

    def imitate(self, answers: Sequence[Answer], learning_rate: float) -> float: ...

    def save(self, directory: str, step: StepId) -> None: ...


class WarmStart(Section):
    """Supervised training on written answers before the run begins: the section `model.warm_start`."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Prompts with answers: a file, a directory of datasets, or a glob, as in data.path; null: no warm "
        "start.",
    )
    answer_field: str = Field("answer", min_length=1, description="Column with the answer.")
    epochs: int = Field(1, ge=1, le=1000, description="Passes over the file.")
    batch_size: int = Field(32, ge=1, le=65_536, description="Answers per optimizer step.")
    learning_rate: float = Field(1e-5, gt=0, le=1, description="AdamW's peak learning rate.")


def load_answers(wanted: WarmStart, prompt_field: str) -> tuple[Dataset, list[str]]:
    """The prompts, and the answer to each. Raises: `ConfigError` for a row without one, or with one that is not
    text, with its number."""
    assert wanted.path is not None
    data = Dataset.load(wanted.path, prompt_field=prompt_field, config_field=f"{FIELD}.path")
    answers = []
    for row in range(len(data)):
        fields = data.prompt(row).fields
        answer = fields.get(wanted.answer_field)
        if answer is not None and (not isinstance(answer, str) or not answer):
            shown = described(wanted.answer_field, answer)
            law = f"row {row}: {wanted.answer_field} is {shown}, but must be text that is not empty"
            raise ConfigError(f"{FIELD}.path", wanted.path, law)
        if answer is None:
            law = f"row {row} of {wanted.path} has no text under this name"
            others = sorted(fields.keys() - {wanted.answer_field})
            fix = suggestion(wanted.answer_field, others, "name the column with the answers")
            raise ConfigError(f"{FIELD}.answer_field", wanted.answer_field, law, fix)
        answers.append(answer)
    return data, answers


def warm_started(
    directory: Path,
    model: str,
    wanted: WarmStart,
    rows: Sequence[tuple[Prompt, str]],
    *,
    seed: int,
    encode: Callable[[Prompt, str], Answer],
    settings: Mapping[str, Any],
    longest: int,
    learner: Callable[[], Learner],
    close: Callable[[Any], None],
    export: Callable[[Path, Path], None],
    progress: Progress,
) -> str:
    """The directory, under `directory`, of the model that has learned the answers. The model is made if it does not
    exist.

    `encode` returns the tokens of a prompt and of its answer. `longest`: the maximum of both together. `settings`:
    everything else on which the result depends. `export` writes the model of a checkpoint. Each epoch has its own
    order, drawn from the seed. The learning rate rises over the first tenth of the steps and then falls to a tenth.
    Raises: `ConfigError` for a row that is too long.
    """

    def make(workplace: Path) -> dict[str, Any]:
        progress(0.0, "supervised warm start: reading the answers")
        encoded = [encode(prompt, answer) for prompt, answer in rows]
        for row, (prompt, answer) in enumerate(encoded):
            if len(prompt) + len(answer) > longest:
                law = f"row {row} has {len(prompt) + len(answer)} tokens, but the model takes {longest}"
                raise ConfigError(f"{FIELD}.path", wanted.path, law, "shorten or remove the row")
        batches = _batches(len(encoded), wanted, seed)
        began = last_report = time.monotonic()
        losses = []
        taught = learner()
        try:
            for step, batch in enumerate(batches):
                chosen = [encoded[row] for row in batch]
                losses.append(taught.imitate(chosen, wanted.learning_rate * _rate(step, len(batches))))
                if time.monotonic() - last_report > PROGRESS_EVERY_S:
                    last_report = time.monotonic()
                    text = f"supervised warm start: step {step + 1} of {len(batches)}, loss {losses[-1]:.3f}"
                    progress((step + 1) / len(batches), text)
            taught.save(str(workplace / "checkpoint"), 0)
        finally:
            close(taught)
        export(workplace / "checkpoint", workplace / "model")
        shutil.rmtree(workplace / "checkpoint")
        seconds = round(time.monotonic() - began, 2)
        progress(1.0, f"warm start done: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(batches)} steps, {seconds} s")
        return {"steps": len(batches), "first_loss": losses[0], "last_loss": losses[-1], "seconds": seconds}

    target = directory.expanduser().resolve() / f"warm-start-{_key(model, wanted, seed, settings, rows)}"
    made_once(target, make)
    return str(target / "model")


def _key(
    model: str, wanted: WarmStart, seed: int, settings: Mapping[str, Any], rows: Sequence[tuple[Prompt, str]]
) -> str:
    answers = hashlib.sha256()
    for prompt, answer in rows:
        answers.update(json.dumps([prompt.text, prompt.fields, answer], sort_keys=True, default=str).encode())
    made_of = {"recipe": RECIPE, "model": model, "answers": answers.hexdigest(), "settings": settings}
    made_of |= {"seed": seed, **wanted.model_dump()}
    text = json.dumps(made_of, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _batches(rows: int, wanted: WarmStart, seed: int) -> list[list[int]]:
    batches = []
    for epoch in range(wanted.epochs):
        order = list(range(rows))
        random.Random(f"warm start {seed} {epoch}").shuffle(order)
        batches += [order[start : start + wanted.batch_size] for start in range(0, rows, wanted.batch_size)]
    return batches


def _rate(step: int, steps: int) -> float:
    """The learning rate at a step, counted from 0, as a share of its peak."""
    rise = max(1, math.ceil(steps / 10))
    return min((step + 1) / rise, 1.0 - 0.9 * step / steps)
