"""Data that changes while a run is stopped: rows are found by content, and each is drawn once in the epoch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataFailure
from engine.input_identity import InputIdentity, as_ids, describe_changes, row_ids
from engine.tasks.dataset import Dataset
from engine.tasks.mixture import Mixture, Source
from engine.trajectory import Prompt

TEXTS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=9)
"""Rows, of which some are equal."""


class Rows(Dataset):
    """Rows in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def prompt(self, row: int) -> Prompt:
        return Prompt(row=row, text=self.texts[row])


def mixture(states: Sequence[Sequence[list[str]]], inputs: Sequence[InputIdentity] = (), **others: Any) -> Mixture:
    """Of the newest state of the data: the rows of each source."""
    sources = [Source(name=f"s{index}", data=Rows(texts)) for index, texts in enumerate(states[-1])]
    return Mixture(sources, inputs=inputs, **others)


def identity(state: Sequence[list[str]], **change: Any) -> InputIdentity:
    return InputIdentity(rows={f"s{index}": row_ids(texts) for index, texts in enumerate(state)}, **change)


def drawn(mixture: Mixture, groups: Iterable[int]) -> list[tuple[str, str]]:
    """The rows of these groups, but those that are gone."""
    found = []
    for group in groups:
        with suppress(DataFailure):
            prompt = mixture.prompt(group)
            found.append((prompt.source, prompt.text))
    return found


@st.composite
def changes(draw: Any) -> tuple[list[list[list[str]]], int, int, list[int]]:
    """Two states of the sources, the epochs, the groups drawn before the change, and those not finished then."""
    before, after = zip(*draw(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)), strict=True)
    epochs, size = draw(st.integers(1, 3)), sum(map(len, before))
    groups = draw(st.integers(0, epochs * size))
    newest = range((groups - 1) // size * size, groups)
    again = draw(st.sets(st.sampled_from(newest))) if groups else set()
    return [list(before), list(after)], epochs, groups, sorted(again)


@given(case=changes(), seed=st.integers(0, 3), shuffle=st.booleans())
def test_after_a_change_each_row_of_an_epoch_is_trained_once(case: Any, seed: int, shuffle: bool) -> None:
    states, epochs, count, again = case
    order: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "epochs": epochs}
    before = drawn(mixture(states[:1], **order), range(count))
    change = identity(states[1], event=7, drawn=count, again=tuple(again))
    changed = mixture(states, [identity(states[0]), change], **order)
    epoch = max(0, count - 1) // sum(map(len, states[0]))
    begun = range(epoch * sum(map(len, states[0])), count)
    finished = Counter(before[group] for group in begun if group not in again)
    wanted = Counter((f"s{index}", text) for index, texts in enumerate(states[1]) for text in texts)
    assert changed.total is not None
    trained = Counter(drawn(changed, [*again, *range(count, changed.total)]))
    whole = Counter({one: times * (epochs - epoch - 1) for one, times in wanted.items()})
    assert trained == whole + (wanted - finished)


def described(before: str, after: str) -> str:
    return describe_changes(as_ids(row_ids(before)), as_ids(row_ids(after)))


def test_a_change_is_described_by_the_rows_that_it_touches() -> None:
    assert described("abcdefgh", "abcdefgh") == ""
    assert described("abcdefgh", "abcdfgh") == "8 rows before, 7 now: 1 row (4) gone"
    assert described("abcabcabc", "abcbcabc") == "9 rows before, 8 now: 1 row (3) gone"
    assert described("abcdefgh", "abXYefgh") == "8 rows before, 8 now: 2 rows (2, 3) gone, 2 rows (2, 3) new"
    assert described("abcdefgh", "abcdefghaa") == "8 rows before, 10 now: 2 rows (8, 9) new"
    assert described("abcdefgh", "hbcdefga") == "8 rows before, 8 now: in another order"
    words = "8 rows before, 6 now: 5 rows (0, 1, 2, 3, 4) gone, 3 rows (0, 1, 2) new, in another order"
    assert described("abcdefgh", "XYZhfg") == words
    assert described("abcdefghi", "i").startswith("9 rows before, 1 now: 8 rows (0, 1, 2, 3, 4, ...) gone")


def test_rows_that_only_a_list_can_hold_have_an_identity() -> None:
    assert row_ids([{"b": {1: 2**80, "a": object()}}, []]) == row_ids([{"b": {"a": object(), 1: 2**80}}, []])
    assert row_ids([{1: 2**80}]) != row_ids([{1: 2**81}])


@given(case=changes(), seed=st.integers(0, 3), more=st.integers(0, 9))
def test_a_second_change_leaves_the_rows_of_finished_groups(case: Any, seed: int, more: int) -> None:
    """Whoever makes the draws again, after any number of changes, finds the rows of the groups that have begun."""
    states, epochs, count, again = case
    inputs = [identity(states[0]), identity(states[1], event=7, drawn=count, again=tuple(again))]
    once = mixture(states, inputs, seed=seed, epochs=epochs)
    assert once.total is not None
    groups = range(min(count + more, once.total))
    known = {group: one for group in groups if (one := drawn(once, [group]))}
    backwards = [[*reversed(texts)] for texts in states[1]]
    twice = mixture([backwards], [*inputs, identity(backwards, event=9, drawn=len(groups))], seed=seed, epochs=epochs)
    assert {group: drawn(twice, [group]) for group in known} == known
