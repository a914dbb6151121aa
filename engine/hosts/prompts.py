"""Where prompts come from: what an executor draws for the scheduler, and looks up when a group starts.

The built-in data sets (`tasks.dataset.PromptSource`) have the order of draws; `CountedPrompts` makes a `Prompts` of
any such order.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.errors import ConfigError
from engine.ids import GroupId
from engine.trajectory import Prompt


class Prompts(Protocol):
    """A source of prompts. Group i is the i-th prompt drawn; the same i must always give the same prompt."""

    def draw(self, first: GroupId, count: int) -> tuple[int, bool]:
        """How many of the prompts `first`, `first + 1`, … there are, at most `count`, and whether they are the last."""

    def prompt(self, group: GroupId) -> Prompt:
        """The prompt of a group that was drawn. Raises `DataFailure` when it cannot be read."""


class CountedPrompts:
    """Prompts that a function gives by number: `total` of them, or without end where it is None."""

    def __init__(self, total: int | None, prompt: Callable[[GroupId], Prompt]) -> None:
        self._total = total
        self._prompt = prompt

    def draw(self, first: GroupId, count: int) -> tuple[int, bool]:
        if self._total is None:
            return count, False
        given = max(0, min(count, self._total - first))
        return given, first + given >= self._total

    def prompt(self, group: GroupId) -> Prompt:
        return self._prompt(group)


def as_prompts(items: Sequence[Prompt | str]) -> list[Prompt]:
    """Strings become prompts numbered by their place."""
    return [item if isinstance(item, Prompt) else Prompt(row=row, text=item) for row, item in enumerate(items)]


def listed(items: Sequence[Prompt | str], epochs: int = 1) -> CountedPrompts:
    """Prompts of a list, in its order, `epochs` times. Strings become prompts numbered by their place."""
    if not items:
        raise ConfigError("prompts", "[]", "there must be at least one prompt", "give a prompt")
    if epochs < 1:
        raise ConfigError("epochs", epochs, "at least one pass over the prompts", "1")
    rows = as_prompts(items)
    return CountedPrompts(epochs * len(rows), lambda group: rows[group % len(rows)])
