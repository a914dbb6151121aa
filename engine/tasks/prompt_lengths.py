"""Counts the tokens of the prompts of a data set, and says which prompts a run uses.

Called before a run by the launching process, and by `engine check`. The result depends only on the file, the tokenizer
and the settings, so a resumed run uses the same prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, DataFailure, message_of
from engine.tasks.chat import PromptRenderer
from engine.tasks.dataset import Dataset


def count_tokens(data: Dataset, renderer: PromptRenderer, field: str, most: int) -> NDArray[np.int64]:
    """Tokens of each prompt that may have more than `most`, before truncation: [rows]. 0 for all other prompts.

    Raises: `ConfigError` that names `field` and a row that cannot be rendered.
    """
    long: list[int] = []

    def texts() -> Iterator[str]:
        for row, prompt in enumerate(data.prompts()):
            try:
                text = renderer.quick_text(prompt)
            except DataFailure as error:
                law = f"row {row}: {error}"
                raise ConfigError(field, data.path, law, "correct the row, or use another template") from error

            if renderer.most_tokens_of(text) > most:
                long.append(row)
                yield text

    counted = np.fromiter(renderer.counts(texts()), dtype=np.int64)
    counts = np.zeros(len(data), dtype=np.int64)
    counts[np.asarray(long, dtype=np.int64)] = counted
    return counts


COUNTED = 20_000
"""Up to this many prompts are all counted. Of more, those that may be too long are counted, and a sample of the
others."""
UNCOUNTED = -1


def sampled_counts(texts: Sequence[str], renderer: PromptRenderer, most: int | None) -> NDArray[np.int64]:
    """Tokens of each text that may have more than `most`, and of a sample of the others: [texts]. `UNCOUNTED` for the
    rest."""
    counts = np.full(len(texts), UNCOUNTED, dtype=np.int64)
    chosen = range(len(texts)) if len(texts) <= COUNTED else _chosen(texts, renderer, most)
    counted = renderer.counts(texts[row] for row in chosen)
    counts[np.asarray(chosen, dtype=np.int64)] = np.fromiter(counted, dtype=np.int64, count=len(chosen))
    return counts


def _chosen(texts: Sequence[str], renderer: PromptRenderer, most: int | None) -> Sequence[int]:
    bounds = np.fromiter(map(renderer.most_tokens_of, texts), dtype=np.int64, count=len(texts))
    extremes = np.argsort(bounds, kind="stable")
    few = COUNTED // 20
    spread = np.linspace(0, len(texts) - 1, COUNTED // 2).astype(np.int64)
    long = np.flatnonzero(bounds > most) if most is not None else spread[:0]
    chosen: list[int] = np.unique(np.concatenate([extremes[:few], extremes[-few:], spread, long])).tolist()
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimit:
    """Maximum tokens of a prompt, and the setting that it comes from."""

    tokens: int
    reason: str
    context: int | None = None
    """Maximum tokens of prompt and response, where known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingPrompts:
    """The prompts that a run uses."""

    rows: Sequence[int] | None = None
    """None: all of them."""
    note: str = ""
    """Says what happens to prompts over the limit; "" if there are none."""


MOST_CUT = 100
"""Maximum number of prompts that are cut before the run, to find one that cannot be cut."""


def fitting_prompts(
    data: Dataset, counts: NDArray[np.int64], limit: PromptLimit, overlong: str, field: str, cutter: PromptRenderer
) -> FittingPrompts:
    """The prompts that a run uses under `data.overlong`. `cutter` cuts them to the limit. Raises: `ConfigError` for
    `error`, if none is left, or for one that cannot be cut."""
    over = np.flatnonzero(counts > limit.tokens)
    if not len(over):
        return FittingPrompts()
    share = f"{len(over)} of {len(data)} prompts of {field} have more than {limit.tokens} tokens ({limit.reason})"
    if overlong == "error":
        law = f"row {over[0]} has {counts[over[0]]} tokens; {share}"
        raise ConfigError(field, data.path, law, "set data.overlong to drop or truncate_left, or raise the limit")
    if overlong == "truncate_left":
        for row in over[:MOST_CUT].tolist():
            try:
                cutter.ids(data.prompt(row))
            except DataFailure as error:
                raise ConfigError(
                    field, data.path, message_of(error), "shorten it, or use data.overlong: drop"
                ) from error
        return FittingPrompts(note=f"data.overlong truncate_left: {share} and are cut")
    if len(over) == len(data):
        raise ConfigError("data.overlong", "drop", f"leaves no prompt: {share}", "raise the limit")
    rows = np.flatnonzero(counts <= limit.tokens).tolist()
    return FittingPrompts(rows=rows, note=f"data.overlong drop: {share} and are dropped")
