"""Makes the model and the rows of the environment `environments.lookup`, locally and without a download.

Called by the preparing process for `model.make: lookup`. The model first learns from careless episodes, turn by turn:
some turns answer before every link has been followed, and some call a tool that does not exist. The model then has the
skill and two bad habits, which the reward corrects in minutes.
"""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from engine.errors import ConfigError
from engine.tasks.quickstart import MOST_MADE, MadeModel, Progress
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


class LookupModel(MadeModel):
    """The model and rows of `environments.lookup`: the section `model.lookup`."""

    kind: ClassVar[str] = "lookup"
    recipe: ClassVar[int] = 2
    reward: ClassVar[str | None] = None

    warmup_steps: int = Field(400, ge=0, le=MOST_MADE, description="Supervised steps before the run.")
    most_steps: int = Field(4, ge=1, le=9, description="Maximum number of links in a question.")
    haste: float = Field(
        0.3, ge=0, le=1, description="Share of warm-up turns that answer before every link is followed."
    )
    wrong_tool: float = Field(
        0.15, ge=0, le=1, description="Share of warm-up turns that call a tool that does not exist."
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.haste + self.wrong_tool > 1:
            law = f"must be at most {1 - self.wrong_tool:g}: with wrong_tool = {self.wrong_tool:g}, the sum may be 1"
            raise ConfigError("model.lookup.haste", self.haste, law, "lower one of them")
        return self

    def write_files(self, workplace: Path, seed: int) -> None:
        for name, count in {"train": self.train_prompts, "validation": self.validation_prompts}.items():
            source = rows(f"{name} {seed}", self.most_steps)
            lines = (json.dumps(next(source).as_data()) + "\n" for _ in range(count))
            (workplace / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        save_chat_tokenizer(workplace / "model", WORDS)

    def warm_up(self, directory: Path, seed: int, progress: Progress) -> dict[str, Any]:
        from engine.training import warmup  # Brings torch, which only the preparing process needs.

        shape = warmup.ModelShape(hidden_size=64, layers=2, heads=4, positions=256)
        settings = warmup.WarmUp(
            steps=self.warmup_steps,
            examples_per_step=32,
            learning_rate=5e-3,
            whole_every=self.warmup_steps + 1,
        )
        turns = worked_turns(self, seed)
        material = warmup.Material(short=turns, whole=turns)
        return warmup.make_model(str(directory), shape, settings, material, seed, progress)


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


def worked_turns(wanted: LookupModel, seed: int) -> Iterator[tuple[str, str]]:
    """Careless episodes, turn by turn: the conversation as the chat template writes it, and the model's answer."""
    draws = random.Random(f"habits {seed}")
    for row in rows(f"warm-up {seed}", wanted.most_steps):
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
