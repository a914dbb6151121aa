"""Sources of prompts, and the checked calls to a user's source.

An executor draws prompts for the scheduler and reads them when a group starts. `CountedPrompts` makes a source of any
function from numbers to prompts, such as the order of draws of `tasks.dataset.PromptSource`. `MixedPrompts` makes one
of a `tasks.mixture.Mixture`. If that learns from the run, it watches the ticks, live and at a resume.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine.commands import DrawPrompts, EnterState, StartGroup
from engine.errors import ConfigError, DataFailure, EngineError, reason_of
from engine.events import DrawFailed, PromptsDrawn, RunResumed
from engine.ids import EventId, GroupId, StepId
from engine.protocols import Prompts
from engine.record.codec import plain
from engine.record.frames import Tick
from engine.record.recovery import Recovered
from engine.states.limits import QUEUED
from engine.states.state import State
from engine.trajectory import Prompt
from engine.workers.group_reports import describe_prompt
from engine.workers.threads import contained


class CountedPrompts:
    """Prompts from a function of their number: `total` of them, or endless if it is None."""

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


class Chooser(Protocol):
    """Chooses the prompt of each group when it starts: `tasks.mixture.Mixture`."""

    total: int | None
    learns: bool

    def choose(self, group: GroupId, step: StepId) -> None: ...
    def outcome(self, group: GroupId, reward: float) -> None: ...
    def branch(self, steps: StepId, again: Sequence[GroupId]) -> None: ...
    def resume(self, event: EventId) -> None: ...
    def prompt(self, group: GroupId) -> Prompt: ...
    def figures(self) -> Mapping[str, Mapping[str, int]]: ...


class MixedPrompts(CountedPrompts):
    """The prompts of a mixture. A replay of the record gives the mixture everything again, in the same order."""

    def __init__(self, mixture: Chooser) -> None:
        super().__init__(mixture.total, mixture.prompt)
        self.mixture = mixture

    @property
    def learns(self) -> bool:
        """Whether its prompts depend on what happens in the run, so that it must `watch` each tick."""
        return self.mixture.learns

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """By the name of each data source: `drawn`, `dropped`, `rested`, as in docs/DATA.md. Called on any thread."""
        return self.mixture.figures()

    def watch(self, tick: Tick, state: State) -> None:
        """Take the next tick and the state after it, before its commands are executed. A mixture that was made again,
        because the run was resumed or its scheduler restarted, first gets all ticks from the beginning."""
        for event in tick.events:
            if isinstance(event, RunResumed):
                if not event.kept:
                    self.mixture.branch(event.steps, (*event.consumed, *event.released))
                self.mixture.resume(event.id)
                self._total = self.mixture.total
        for group, reward in state.completed.items():
            self.mixture.outcome(group, reward)
        steps_in, queues = state.training.steps_in, state.groups.state_queues.by_name
        for command in tick.commands:
            if type(command) is StartGroup:
                self.mixture.choose(command.group, steps_in[command.admitted_version])
            elif type(command) is EnterState and queues[command.state].place == QUEUED:  # its work needs the prompt
                self.mixture.choose(command.group, steps_in[state.training.latest_version])


def catch_up(prompts: Prompts, earlier: Recovered) -> None:
    """Give a source that learns from the run the whole record of a run that continues. Raises: `RecordError`."""
    if isinstance(prompts, MixedPrompts) and prompts.learns:
        earlier.replay_all(prompts.watch)


def draw_prompts(
    prompts: Prompts, order: DrawPrompts, described: Sequence[str] | None = None
) -> PromptsDrawn | DrawFailed:
    """Execute an order for prompts; returns the event that answers it. Never raises. `described`: the columns that
    added states before generation see; None: there are none."""
    try:
        count, exhausted = contained(_checked_draw, prompts, order.first, order.count)
    except Exception as error:
        return DrawFailed(number=order.number, reason=reason_of(error))
    known = "" if described is None else _descriptions(prompts, range(order.first, order.first + count), described)
    return PromptsDrawn(first=order.first, count=count, exhausted=exhausted, number=order.number, described=known)


MAX_DESCRIBED = 1 << 20
"""Maximum length of the descriptions of prompts in one event, in characters."""


def _descriptions(prompts: Prompts, groups: Sequence[GroupId], columns: Sequence[str]) -> str:
    """A JSON list. It has null for a prompt that is not chosen yet or cannot be read, and for those beyond
    `MAX_DESCRIBED`."""
    texts: list[str] = []
    room = MAX_DESCRIBED - 6 * len(groups) - 2
    for group in groups:
        try:
            text = json.dumps(describe_prompt(read_prompt(prompts, group), columns))
        except Exception:  # the order that needs the prompt reports it
            text = "null"
        room -= len(text)
        texts.append(text if room >= 0 else "null")
    return f"[{', '.join(texts)}]"


def read_prompt(prompts: Prompts, group: GroupId) -> Prompt:
    """The prompt of a group. Raises: `DataFailure` if it is not a valid `Prompt`, and what the source raises."""
    return contained(_checked_prompt, prompts, group)


def _checked_draw(prompts: Prompts, first: GroupId, most: int) -> tuple[int, bool]:
    given: Any = prompts.draw(first, most)
    said = f"{type(prompts).__name__}.draw({first}, {most}) returned"
    whole = isinstance(given, tuple | list) and len(given) == 2
    count, exhausted = map(_plain, given) if whole else (None, None)
    if type(count) is not int or type(exhausted) is not bool:
        raise EngineError(f"{said} {given!r:.80}, not (how many prompts, whether they are the last)")
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
    row, problem = _plain(prompt.row), ""
    text: Any = prompt.text
    fields: Any = prompt.fields
    if not isinstance(row, int) or not -(2**63) <= row < 2**63:
        problem = f"row is a {type(row).__name__}, not an int of 64 bits"
    elif not isinstance(text, str):
        problem = f"text is a {type(text).__name__}, not a str"
    elif not isinstance(fields, Mapping):
        problem = f"fields is a {type(fields).__name__}, not a mapping"
    if problem:
        raise DataFailure(f"the prompt of group {group}: {problem}", group=group)
    return prompt if row is prompt.row else replace(prompt, row=row)


def _plain(value: Any) -> Any:
    """A number as the record has it; any other value as it is."""
    try:
        return plain(value)
    except TypeError:
        return value


def as_prompts(items: Sequence[Prompt | str]) -> list[Prompt]:
    """Turn strings into prompts, with their index as the row."""
    return [item if isinstance(item, Prompt) else Prompt(row=row, text=item) for row, item in enumerate(items)]


def listed(items: Sequence[Prompt | str], epochs: int = 1) -> CountedPrompts:
    """The prompts of a list, in order, `epochs` times. Strings become prompts, with their index as the row. Raises:
    `ConfigError` for an empty list or fewer than one epoch."""
    if not items:
        raise ConfigError("prompts", "[]", "there must be at least one prompt", "give a prompt")
    if epochs < 1:
        raise ConfigError("epochs", epochs, "must be at least 1", "use 1")
    rows = as_prompts(items)
    return CountedPrompts(epochs * len(rows), lambda group: rows[group % len(rows)])
