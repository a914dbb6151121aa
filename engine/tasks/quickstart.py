"""Creates the quickstart's model, tokenizer, training data and held-out data locally, without a download.

The preparing process calls it once at the start of a run, if the config asks for it. Later runs find the files by a
hash of their parameters. A directory appears only when it is complete, so no run uses an incomplete one.

The model first learns from careless solutions: more often than not, a step across a ten is one too small. So the model
has the skill and a bad habit, like a model trained on web text, and a reward can correct the habit in minutes. Long
answers cross many tens: nearly all are wrong before the run and right after it.
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
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from engine.tasks.arithmetic import ALPHABET, STEP_TOKENS, Division, Question, QuestionPool
from engine.tasks.tokenizer import END, save_character_tokenizer

Progress: TypeAlias = Callable[[float, str], None]

MARKER = "complete.json"
MAKING = ".making-"
FRESH_S = 5.0
"""A workplace is left alone for so long after it was made: its lock comes a moment later."""


@dataclass(frozen=True, kw_only=True)
class MadeModel:
    """Parameters of a model and its rows that are made on the spot."""

    recipe: ClassVar[int]
    """Raised when the same parameters make something else than they used to."""
    seed: int = 0
    layers: int = 2
    hidden_size: int = 64
    heads: int = 4
    train_prompts: int = 4096
    validation_prompts: int = 128
    warmup_steps: int
    warmup_batch: int = 32
    warmup_learning_rate: float

    def key(self) -> str:
        """A hash of all parameters."""
        text = json.dumps({"recipe": self.recipe, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Quickstart(MadeModel):
    """Parameters of the quickstart. Field names are those of the config section `model.arithmetic`."""

    recipe: ClassVar[int] = 5
    warmup_steps: int = 800
    warmup_learning_rate: float = 6e-3
    short_steps: int = 6
    """Warm-up is mostly on the first so many steps of a solution."""
    carelessness: float = 0.55
    """How often the worked solutions of the warm-up slip where they may: what the run then has to unlearn."""
    family: Division = field(default_factory=Division)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Where things are, and what the warm-up measured when they were made."""

    model_path: str
    training_path: str
    validation_path: str
    reward: str | None
    """None: an environment gives it."""
    most_tokens: int
    """Response tokens that the longest right answer takes."""
    warm_up: dict[str, Any]
    reused: bool


def prepare(directory: str | Path, parameters: Quickstart | None = None, progress: Progress | None = None) -> Prepared:
    """Make, or find again, the quickstart under `directory`. Safe to call from several processes at once."""
    wanted = parameters or Quickstart()
    target = Path(directory).expanduser().resolve() / f"arithmetic-{wanted.key()}"
    made, reused = made_once(target, lambda workplace: _make(workplace, wanted, progress or _silent))
    return Prepared(
        model_path=str(target / "model"),
        training_path=str(target / "train.jsonl"),
        validation_path=str(target / "validation.jsonl"),
        reward="engine.tasks.arithmetic:reward",
        most_tokens=wanted.family.most_tokens,
        warm_up=made["warm_up"],
        reused=reused,
    )


def made_once(target: Path, make: Callable[[Path], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Make a directory, unless it is there: `make` fills an empty one and describes what it made. Returns the
    description, and whether it was there. Safe to call from several processes at once."""
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
    """A directory that is locked for as long as this process works in it, and gone after."""
    workplace = Path(tempfile.mkdtemp(prefix=MAKING, dir=parent))
    lock: int | None = None
    try:
        lock = os.open(workplace, os.O_RDONLY)
        with suppress(OSError):  # Not every file system locks directories: then nobody sweeps there either.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield workplace
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove what processes left that were killed at work: their locks went with them."""
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
    """Rename into place. Another process may have been first: then what it made is as good."""
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


def _silent(done: float, text: str) -> None:
    pass


def _make(workplace: Path, wanted: Quickstart, progress: Progress) -> dict[str, Any]:
    progress(0.0, "making data")
    pool = QuestionPool(wanted.family, wanted.seed)
    _write_rows(workplace / "train.jsonl", islice(pool.training("rows"), wanted.train_prompts))
    _write_rows(workplace / "validation.jsonl", pool.held_out("rows", wanted.validation_prompts))
    model_directory = workplace / "model"
    model_directory.mkdir()
    save_character_tokenizer(model_directory, ALPHABET)
    measured = _warm_up(model_directory, wanted, pool, progress)
    progress(1.0, f"model ready after {measured['seconds']:.0f} s of supervised warm-up")
    return {"recipe": wanted.recipe, "parameters": asdict(wanted), "warm_up": measured}


def _warm_up(directory: Path, wanted: Quickstart, pool: QuestionPool, progress: Progress) -> dict[str, Any]:
    progress(0.0, "loading torch")
    from engine.training import warmup  # Brings torch, which only the preparing process needs.

    shape = warmup.ModelShape(
        hidden_size=wanted.hidden_size,
        layers=wanted.layers,
        heads=wanted.heads,
        positions=max(512, 2 * wanted.family.most_tokens),
    )
    settings = warmup.WarmUp(
        steps=wanted.warmup_steps,
        examples_per_step=wanted.warmup_batch,
        learning_rate=wanted.warmup_learning_rate,
    )
    slips = random.Random(f"slips {wanted.seed}")
    material = warmup.Material(
        short=_worked(pool.evenly("short"), wanted, slips, STEP_TOKENS * wanted.short_steps),
        whole=_worked(pool.training("whole"), wanted, slips, wanted.family.most_tokens),
    )
    return warmup.make_model(str(directory), shape, settings, material, wanted.seed, progress)


def _worked(
    questions: Iterator[Question], wanted: Quickstart, slips: random.Random, most_tokens: int
) -> Iterator[tuple[str, str]]:
    """Prompts with their worked solutions; of a long one its first tokens."""
    for question in questions:
        text = question.careless_solution(wanted.carelessness, slips)
        yield question.prompt, text[:most_tokens] if len(text) >= most_tokens else text + END


def _write_rows(path: Path, questions: Iterable[Question]) -> None:
    path.write_text("".join(json.dumps(question.row()) + "\n" for question in questions), encoding="utf-8")
