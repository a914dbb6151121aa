"""Creates the quickstart's model, tokenizer, training data and validation data locally, without a download.

The preparing process calls it once at the start of a run, if the config asks for it. Later runs find the files by a
hash of their parameters. A directory appears only when it is complete, so no run uses an incomplete one.

The model first learns from careless solutions: more often than not, a step across a ten is one too small. The model
then has the skill and a bad habit, like a model trained on web text, and a reward can correct the habit in minutes.
Long answers cross many tens, so nearly all of them are wrong before the run; after it, nearly all are right.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from pydantic import Field, model_validator

from engine.errors import ConfigError, nearest_divisor
from engine.section import Section
from engine.tasks.arithmetic import ALPHABET, STEP_TOKENS, Division, Question, QuestionPool
from engine.tasks.tokenizer import END, save_character_tokenizer

Progress: TypeAlias = Callable[[float, str], None]

MARKER = "complete.json"
MAKING = ".making-"
MOST_MADE = 10_000_000
"""Maximum number of prompts, and of supervised steps, of a model that the engine makes."""
FRESH_S = 5.0
"""A directory younger than this is not swept, because its process locks it only a moment after making it."""


class MadeModel(Section):
    """Parameters of a model and rows that the engine makes."""

    kind: ClassVar[str]
    recipe: ClassVar[int]
    """Increase it when the same parameters begin to make a different result."""
    reward: ClassVar[str | None]
    """None: an environment gives it."""
    train_prompts: int = Field(4096, ge=1, le=MOST_MADE, description="Prompts in the training set.")
    validation_prompts: int = Field(128, ge=1, le=MOST_MADE, description="Validation prompts.")
    warmup_steps: int = Field(ge=0, le=MOST_MADE, description="Supervised steps before the run.")

    def key(self, seed: int) -> str:
        """A hash of all parameters and the seed."""
        text = json.dumps({"recipe": self.recipe, "seed": seed, **self.model_dump()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def place(self, directory: str | Path, seed: int) -> Path:
        """Where it is, or will be."""
        return Path(directory).expanduser().resolve() / f"{self.kind}-{self.key(seed)}"

    def exists(self, directory: str | Path, seed: int) -> bool:
        """Whether an earlier run has made it."""
        return (self.place(directory, seed) / MARKER).is_file()

    def write_files(self, workplace: Path, seed: int) -> None:
        """Write `train.jsonl`, `validation.jsonl`, and the tokenizer in `model/`."""
        raise NotImplementedError

    def warm_up(self, directory: Path, seed: int, progress: Progress) -> dict[str, Any]:
        """Train a new model and save it. Returns the figures of the training."""
        raise NotImplementedError

    def make(self, workplace: Path, seed: int, progress: Progress) -> dict[str, Any]:
        """Fill an empty directory. Returns a description."""
        progress(0.0, "making data")
        model = workplace / "model"
        model.mkdir()
        self.write_files(workplace, seed)
        progress(0.0, "loading torch")
        measured = self.warm_up(model, seed, progress)
        progress(1.0, f"model ready after {measured['seconds']:.0f} s of supervised warm-up")
        return {"recipe": self.recipe, "parameters": {"seed": seed, **self.model_dump()}, "warm_up": measured}


class Quickstart(MadeModel, Division):
    """The model and data of the quickstart: the section `model.arithmetic`."""

    kind: ClassVar[str] = "arithmetic"
    recipe: ClassVar[int] = 6
    reward: ClassVar[str | None] = "engine.tasks.arithmetic:reward"
    layers: int = Field(2, ge=1, le=64, description="Transformer layers.")
    hidden_size: int = Field(64, ge=8, le=8192, description="Width of the model.")
    heads: int = Field(4, ge=1, le=64, description="Attention heads; must divide half of hidden_size.")
    warmup_steps: int = Field(800, ge=0, le=MOST_MADE, description="Supervised steps before the run.")
    warmup_batch: int = Field(32, ge=1, le=MOST_MADE, description="Worked solutions per supervised step.")
    warmup_learning_rate: float = Field(6e-3, gt=0, le=1, description="Learning rate of the supervised steps.")
    short_steps: int = Field(
        6, ge=1, le=24, description="Number of steps to which most supervised examples cut an answer."
    )
    carelessness: float = Field(
        0.55,
        ge=0,
        le=1,
        description="Probability that a supervised step across a ten is 1 too small; the run unlearns it.",
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            law = f"must divide half of hidden_size = {self.hidden_size}"
            fix = (
                f"use {nearest_divisor(self.hidden_size // 2, self.heads)}"
                if self.hidden_size % 2 == 0
                else "use an even hidden_size"
            )
            raise ConfigError("model.arithmetic.heads", self.heads, law, fix)
        return self

    def write_files(self, workplace: Path, seed: int) -> None:
        pool = QuestionPool(self, seed)
        _write_rows(workplace / "train.jsonl", islice(pool.training("rows"), self.train_prompts))
        _write_rows(workplace / "validation.jsonl", pool.held_out("rows", self.validation_prompts))
        save_character_tokenizer(workplace / "model", ALPHABET)

    def warm_up(self, directory: Path, seed: int, progress: Progress) -> dict[str, Any]:
        from engine.training import warmup  # Brings torch, which only the preparing process needs.

        shape = warmup.ModelShape(
            hidden_size=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            positions=max(512, 2 * self.most_tokens),
        )
        settings = warmup.WarmUp(
            steps=self.warmup_steps,
            examples_per_step=self.warmup_batch,
            learning_rate=self.warmup_learning_rate,
        )
        pool, slips = QuestionPool(self, seed), random.Random(f"slips {seed}")
        material = warmup.Material(
            short=_worked(pool.evenly("short"), self, slips, STEP_TOKENS * self.short_steps),
            whole=_worked(pool.training("whole"), self, slips, self.most_tokens),
        )
        return warmup.make_model(str(directory), shape, settings, material, seed, progress)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The paths of a prepared model and its data, and the figures of its warm-up."""

    model_path: str
    training_path: str
    validation_path: str
    reward: str | None
    """None: an environment gives it."""
    warm_up: dict[str, Any]
    reused: bool


def prepare(
    directory: str | Path, wanted: MadeModel, progress: Progress = lambda done, text: None, *, seed: int = 0
) -> Prepared:
    """Make a model and its rows under `directory`, or find earlier ones. Several processes may call this at once."""
    target = wanted.place(directory, seed)
    made, reused = made_once(target, lambda workplace: wanted.make(workplace, seed, progress))
    return Prepared(
        model_path=str(target / "model"),
        training_path=str(target / "train.jsonl"),
        validation_path=str(target / "validation.jsonl"),
        reward=wanted.reward,
        warm_up=made["warm_up"],
        reused=reused,
    )


def made_once(target: Path, make: Callable[[Path], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Make a directory, unless it exists: `make` fills an empty one and describes what it made. Returns the
    description, and whether the directory existed. Several processes may call this at once."""
    reused = (target / MARKER).is_file()
    if not reused:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with _workplace(target.parent) as workplace:
            (workplace / MARKER).write_text(json.dumps(make(workplace), indent=2), encoding="utf-8")
            _put(workplace, target)
    return json.loads((target / MARKER).read_text(encoding="utf-8")), reused


@contextmanager
def _workplace(parent: Path) -> Iterator[Path]:
    """A new directory, which is locked while this process works in it and removed afterwards."""
    workplace = Path(tempfile.mkdtemp(prefix=MAKING, dir=parent))
    lock: int | None = None
    try:
        lock = os.open(workplace, os.O_RDONLY)
        with suppress(OSError):  # Without locks for directories, `_sweep` removes nothing either.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield workplace
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the directories of processes that were killed. They are no longer locked."""
    for left in parent.glob(f"{MAKING}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < FRESH_S:
                continue
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _put(workplace: Path, target: Path) -> None:
    """Rename into place. If another process was faster, its result stays: it is as good."""
    for path in workplace.rglob("*"):
        if path.is_file():
            with path.open("rb") as written:
                os.fsync(written.fileno())
    workplace.chmod(0o755)
    try:
        os.rename(workplace, target)
    except OSError:
        if not (target / MARKER).is_file():
            raise


def _worked(
    questions: Iterator[Question], wanted: Quickstart, slips: random.Random, most_tokens: int
) -> Iterator[tuple[str, str]]:
    """Prompts with their worked solutions. A long solution is cut to its first `most_tokens` tokens."""
    for question in questions:
        text = question.careless_solution(wanted.carelessness, slips)
        yield question.prompt, text[:most_tokens] if len(text) >= most_tokens else text + END


def _write_rows(path: Path, questions: Iterable[Question]) -> None:
    path.write_text("".join(json.dumps(question.row()) + "\n" for question in questions), encoding="utf-8")
