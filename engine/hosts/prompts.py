"""Where prompts come from: what an executor draws for the scheduler, and looks up when a group starts.

The built-in data sets (`tasks.dataset.PromptSource`) have the order of draws; `CountedPrompts` makes a `Prompts` of
any such order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.commands import DrawPrompts
from engine.errors import ConfigError, DataFailure, EngineError
from engine.events import DrawFailed, PromptsDrawn
from engine.hosts.reasons import reason_of
from engine.hosts.threads import contained
from engine.ids import GroupId
from engine.trajectory import Prompt


class Prompts(Protocol):
    """A source of prompts. Group i is the i-th prompt drawn; the same i must always give the same prompt."""

    def draw(self, first: GroupId, count: int) -> tuple[int, bool]:
        """How many of the prompts `first`, `first + 1`, … there are, at most `count`, and whether they are the last.

        Fewer are fine: the others are ordered again. None without having been the last, more than `count`, and an
        exception are a failed attempt; `scheduler.infrastructure_attempts` of these in a row end the run. It is called
        on a thread of its own, so it may block. `prompt` may be called meanwhile, for prompts drawn before.
        """

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


def draw_prompts(prompts: Prompts, order: DrawPrompts, first: GroupId) -> PromptsDrawn | DrawFailed:
    """What comes of an order for prompts, the next of which is `first`. Never raises."""
    try:
        count, exhausted = contained(_checked_draw, prompts, first, order.count)
    except Exception as error:
        return DrawFailed(number=order.number, reason=reason_of(error))
    return PromptsDrawn(first=first, count=count, exhausted=exhausted, number=order.number)


def read_prompt(prompts: Prompts, group: GroupId) -> Prompt:
    """The prompt of a group. Raises: `DataFailure` for what is no prompt, and what the source raises."""
    return contained(_checked_prompt, prompts, group)


def _checked_draw(prompts: Prompts, first: GroupId, most: int) -> tuple[int, bool]:
    given: Any = prompts.draw(first, most)
    said = f"{type(prompts).__name__}.draw({first}, {most}) returned"
    whole = isinstance(given, tuple | list) and len(given) == 2
    if not whole or type(given[0]) is not int or not isinstance(given[1], bool):
        raise EngineError(f"{said} {given!r:.80}, not (how many prompts, whether they are the last)")
    count, exhausted = given
    if not 0 <= count <= most:
        raise EngineError(f"{said} {count} prompts, which must be 0 to {most}, the number ordered")
    if not count and not exhausted:
        raise EngineError(f"{said} no prompt and did not say that the source is exhausted; return (0, True) if it is")
    return count, exhausted


def _checked_prompt(prompts: Prompts, group: GroupId) -> Prompt:
    prompt: Any = prompts.prompt(group)
    if not isinstance(prompt, Prompt):
        law = f"{type(prompts).__name__}.prompt returned a {type(prompt).__name__} for group {group}, not a Prompt"
        raise DataFailure(law, group=group)
    row, text, fields = [getattr(prompt, name) for name in ("row", "text", "fields")]
    problem = ""
    if not isinstance(row, int) or not -(2**63) <= row < 2**63:
        problem = f"row is a {type(row).__name__}, not an int of 64 bits"
    elif not isinstance(text, str):
        problem = f"text is a {type(text).__name__}, not a str"
    elif not isinstance(fields, Mapping):
        problem = f"fields is a {type(fields).__name__}, not a mapping"
    if problem:
        raise DataFailure(f"the prompt of group {group}: {problem}", group=group)
    return prompt


def as_prompts(items: Sequence[Prompt | str]) -> list[Prompt]:
    """Strings become prompts numbered by their place."""
    return [item if isinstance(item, Prompt) else Prompt(row=row, text=item) for row, item in enumerate(items)]


def listed(items: Sequence[Prompt | str], epochs: int = 1) -> CountedPrompts:
    """Prompts of a list, in its order, `epochs` times. Strings become prompts numbered by their place."""
    if not items:
        raise ConfigError("prompts", "[]", "there must be at least one prompt", "give a prompt")
    if epochs < 1:
        raise ConfigError("epochs", epochs, "must be at least 1", "use 1")
    rows = as_prompts(items)
    return CountedPrompts(epochs * len(rows), lambda group: rows[group % len(rows)])
