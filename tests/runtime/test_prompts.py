"""Data sources that do wrong: what they return is refused by name, before the scheduler hears of it."""

from typing import Any

import numpy as np
import pytest

from engine.commands import DrawPrompts
from engine.errors import DataFailure
from engine.events import DrawFailed, PromptsDrawn
from engine.runtime.prompt_sources import CountedPrompts, draw_prompts, listed, read_prompt
from engine.trajectory import Prompt

ORDER = DrawPrompts(first=12, count=4, number=7, cause=0)


class Source:
    """Returns or raises what it was given."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def draw(self, first: int, count: int) -> Any:
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given

    def prompt(self, group: int) -> Any:
        return self.draw(group, 1)


@pytest.mark.parametrize(
    "given", [(4, False), (1, False), (0, True), (4, True), [2, False], (np.int64(3), np.bool_(False))]
)
def test_as_many_prompts_as_ordered_or_fewer_are_drawn(given: Any) -> None:
    count, exhausted = given
    drawn = PromptsDrawn(first=12, count=count, exhausted=exhausted, number=7)
    assert draw_prompts(Source(given), ORDER) == drawn


@pytest.mark.parametrize(
    ("total", "first", "given"),
    [(10, 3, (4, False)), (10, 6, (4, True)), (10, 8, (2, True)), (10, 12, (0, True)), (None, 12, (4, False))],
)
def test_counted_prompts_end_with_the_last(total: int | None, first: int, given: tuple[int, bool]) -> None:
    assert CountedPrompts(total, lambda group: Prompt(token_ids=[1])).draw(first, 4) == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((5, False), "Source.draw(12, 4) returned 5 prompts, which must be 0 to 4, the number ordered"),
        ((-1, False), "returned -1 prompts, which must be 0 to 4"),
        ((0, False), "returned no prompt and did not say that the source is exhausted; return (0, True)"),
        ((2.0, False), "returned (2.0, False), not (how many prompts, whether they are the last)"),
        ((True, False), "returned (True, False), not (how many prompts"),
        ((2, "no"), "returned (2, 'no'), not (how many prompts"),
        ((2, None), "returned (2, None), not (how many prompts"),
        (2, "returned 2, not (how many prompts"),
        (None, "returned None, not (how many prompts"),
        ((np.float32(2.0), False), "not (how many prompts"),
        ((1, 2, 3), "returned (1, 2, 3), not (how many prompts"),
        (OSError("no such file"), "OSError: no such file"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("\ud800"), "ValueError: ?"),
    ],
)
def test_a_draw_that_is_wrong_is_a_failed_attempt(given: Any, words: str) -> None:
    failed = draw_prompts(Source(given), ORDER)
    assert isinstance(failed, DrawFailed) and failed.number == 7
    assert words in failed.reason


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "returned a NoneType for group 3, not a Prompt"),
        ("2 + 2", "returned a str for group 3, not a Prompt"),
        (Prompt(row="3", text="?"), "row is a str, not an int of 64 bits"),  # type: ignore[arg-type]
        (Prompt(row=2**70, text="?"), "not an int of 64 bits"),
        (Prompt(row=3, text=None), "text is a NoneType, not a str"),  # type: ignore[arg-type]
        (Prompt(row=3, text="?", fields=[1]), "fields is a list, not a mapping"),  # type: ignore[arg-type]
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_prompt_that_is_none_is_a_fault_of_the_data(given: Any, words: str) -> None:
    with pytest.raises((DataFailure, RuntimeError)) as raised:
        read_prompt(Source(given), 3)
    assert words in str(raised.value)


def test_a_prompt_of_a_list_is_as_it_was_given() -> None:
    assert read_prompt(listed(["a", Prompt(row=9, text="b")]), 1) == Prompt(row=9, text="b")


def test_a_row_of_numpy_becomes_a_plain_one() -> None:
    prompt = read_prompt(Source(Prompt(row=np.int64(3), text="?")), 3)  # type: ignore[arg-type]
    assert prompt == Prompt(row=3, text="?") and type(prompt.row) is int
