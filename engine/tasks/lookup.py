"""Makes the model and the rows of the environment `environments.lookup`, locally and without a download.

Called by the preparing process for `model.make: lookup`. The model first learns from careless episodes, turn by turn:
some turns answer before every link has been followed, and some call a tool that does not exist. The model then has the
skill and two bad habits, which the reward corrects in minutes.
"""

import json
import random
import string
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from engine.tasks.quickstart import MadeModel, Prepared, Progress, made_once
from engine.tasks.tokenizer import CHAT_END, CHAT_START, save_chat_tokenizer

KEYS = string.ascii_lowercase
CALL_BEGIN = '<tool_call>\n{"name": "'
CALL_MIDDLE = '", "arguments": {"key": "'
CALL_END = '"}}\n</tool_call>'
TOOL, WRONG_TOOL = "lookup", "search"
UNKNOWN_TOOL = f"Error: there is no tool {WRONG_TOOL!r}; the tools are {TOOL}"
"""The engine's answer to a call of `WRONG_TOOL`."""
WORDS = (
    CALL_BEGIN, CALL_MIDDLE, CALL_END, TOOL, WRONG_TOOL, UNKNOWN_TOOL, "follow ", " from ", "assistant\n", "user\n",
    "tool\n",
)  # fmt: skip
"""Texts that are one token each, so that an episode is short."""


@dataclass(frozen=True, kw_only=True)
class LookupModel(MadeModel):
    """Parameters of `model.make: lookup`. Field names are those of the config section `model.lookup`."""

    recipe: ClassVar[int] = 1
    warmup_steps: int = 400
    warmup_learning_rate: float = 5e-3
    most_steps: int = 4
    """Maximum number of links to follow."""
    haste: float = 0.3
    """Share of warm-up turns that answer before every link has been followed."""
    wrong_tool: float = 0.15
    """Share of warm-up turns that call a tool that does not exist."""


class Row(NamedTuple):
    """One row of the data set."""

    start: str
    steps: int
    links: dict[str, str]

    @property
    def answer(self) -> str:
        key = self.start
        for _ in range(self.steps):
            key = self.links[key]
        return key

    @property
    def question(self) -> str:
        return f"follow {self.steps} from {self.start}"

    def as_data(self) -> dict[str, Any]:
        return {"prompt": self.question, **self._asdict(), "answer": self.answer}


def rows(seed: str, most_steps: int) -> Iterator[Row]:
    """Endless rows. The links of each are a new permutation of the keys, without a key that links to itself."""
    draws = random.Random(seed)
    while True:
        order = draws.sample(KEYS, len(KEYS))
        links = {key: order[(place + 1) % len(order)] for place, key in enumerate(order)}
        yield Row(draws.choice(KEYS), draws.randint(1, most_steps), dict(sorted(links.items())))


def prepare_lookup(directory: str | Path, wanted: LookupModel, progress: Progress | None = None) -> Prepared:
    """Make the model and the rows under `directory`, or find earlier ones. Several processes may call this at once."""
    target = Path(directory).expanduser().resolve() / f"lookup-{wanted.key()}"
    made, reused = made_once(target, lambda workplace: _make(workplace, wanted, progress or (lambda done, text: None)))
    return Prepared(
        model_path=str(target / "model"),
        training_path=str(target / "train.jsonl"),
        validation_path=str(target / "validation.jsonl"),
        reward=None,
        most_tokens=16,
        warm_up=made["warm_up"],
        reused=reused,
    )


def _make(workplace: Path, wanted: LookupModel, progress: Progress) -> dict[str, Any]:
    progress(0.0, "making data")
    for name, count in {"train": wanted.train_prompts, "validation": wanted.validation_prompts}.items():
        source = rows(f"{name} {wanted.seed}", wanted.most_steps)
        lines = (json.dumps(next(source).as_data()) + "\n" for _ in range(count))
        (workplace / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    model_directory = workplace / "model"
    model_directory.mkdir()
    save_chat_tokenizer(model_directory, WORDS)
    measured = _warm_up(model_directory, wanted, progress)
    progress(1.0, f"model ready after {measured['seconds']:.0f} s of supervised warm-up")
    return {"recipe": wanted.recipe, "parameters": asdict(wanted), "warm_up": measured}


def _warm_up(directory: Path, wanted: LookupModel, progress: Progress) -> dict[str, Any]:
    progress(0.0, "loading torch")
    from engine.training import warmup  # Brings torch, which only the preparing process needs.

    shape = warmup.ModelShape(
        hidden_size=wanted.hidden_size, layers=wanted.layers, heads=wanted.heads, positions=256
    )  # fmt: skip
    settings = warmup.WarmUp(
        steps=wanted.warmup_steps,
        examples_per_step=wanted.warmup_batch,
        learning_rate=wanted.warmup_learning_rate,
        whole_every=wanted.warmup_steps + 1,
    )
    turns = worked_turns(wanted)
    return warmup.make_model(
        str(directory), shape, settings, warmup.Material(short=turns, whole=turns), wanted.seed, progress
    )


def worked_turns(wanted: LookupModel) -> Iterator[tuple[str, str]]:
    """Careless episodes, turn by turn: the conversation as the chat template writes it, and the model's answer."""
    draws = random.Random(f"habits {wanted.seed}")
    for row in rows(f"warm-up {wanted.seed}", wanted.most_steps):
        conversation = _message("user", row.question)
        key, left = row.start, row.steps
        while True:
            slip = draws.random()
            done = not left or slip < wanted.haste
            wrong = not done and slip < wanted.haste + wanted.wrong_tool
            answer = key if done else f"{CALL_BEGIN}{WRONG_TOOL if wrong else TOOL}{CALL_MIDDLE}{key}{CALL_END}"
            yield f"{conversation}{CHAT_START}assistant\n", f"{answer}{CHAT_END}"
            if done:
                break
            if not wrong:
                key, left = row.links[key], left - 1
            conversation += _message("assistant", answer) + _message("tool", UNKNOWN_TOOL if wrong else key)


def _message(role: str, content: str) -> str:
    return f"{CHAT_START}{role}\n{content}{CHAT_END}\n"
