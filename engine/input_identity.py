"""What a run reads: 8 bytes for each row of its data, so that a resume finds a row by its content.

Used by whatever reads the prompts of a run, and by resumes. The bytes of a row depend on its content alone, never on
the order of its columns or the format of its file. numpy is imported late: `engine check` reads data without it.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct, msgpack

from engine.errors import counted
from engine.ids import EventId, GroupId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    RowIds: TypeAlias = NDArray[np.uint64]

SHOWN = 5
"""Maximum number of rows that a message names."""


class InputIdentity(Struct, frozen=True, kw_only=True):
    """What a run reads from its beginning on, or from a change of its data on that a resume accepted."""

    rows: dict[str, bytes]
    """The `row_ids` of the training prompts, by the name of their source."""
    held_out: bytes = b""
    """Those of the validation prompts."""
    files: dict[str, str] = {}
    """Digests of the files of models and code, by name."""
    event: EventId = -1
    """Number of events before the change; -1: it is not in the record yet."""
    drawn: int = 0
    """Number of groups drawn before it."""
    again: tuple[GroupId, ...] = ()
    """Those of them that are generated after it."""

    def ids(self, source: str) -> "RowIds":
        return as_ids(self.rows.get(source, b""))


def row_ids(rows: Iterable[Any]) -> bytes:
    """The ids of rows, which are plain data."""
    return b"".join(blake2b(_plain(row), digest_size=8).digest() for row in rows)


def as_ids(data: bytes) -> "RowIds":
    import numpy as np

    return np.frombuffer(data, dtype=np.uint64)


def _plain(row: Any) -> bytes:
    try:
        return msgpack.encode(row, order="sorted")
    except (TypeError, ValueError, OverflowError):  # such as integers of more than 64 bits
        return json.dumps(row, sort_keys=True, default=repr).encode()


def matching_rows(before: "RowIds", after: "RowIds", *first: Sequence[int]) -> list[int]:
    """For each row of `before`, the number of an equal row in `after`, or -1. Of equal rows, those of the first of
    `first` are matched first, then those of the next, then others."""
    import numpy as np

    rank = np.full(len(before), len(first))
    for place, rows in reversed([*enumerate(first)]):
        rank[np.asarray(rows, dtype=np.int64)] = place
    order, there = np.lexsort((rank, before)), np.argsort(after, kind="stable")
    wanted, known = before[order], after[there]
    places = np.searchsorted(known, wanted) + np.arange(len(wanted)) - np.searchsorted(wanted, wanted)
    fits = places < np.searchsorted(known, wanted, side="right")
    found = np.full(len(before), -1, dtype=np.int64)
    found[order[fits]] = there[places[fits]]
    numbers: list[int] = found.tolist()
    return numbers


def _equal_rows(before: "RowIds", after: "RowIds") -> int:
    """How many rows are equal before the first difference."""
    size = min(len(before), len(after))
    same = before[:size] == after[:size]
    return size if same.all() else int(same.argmin())


def describe_changes(before: "RowIds", after: "RowIds") -> str:
    """What happened to the rows of a file, in words; empty: nothing."""
    head = _equal_rows(before, after)
    if head == len(before) == len(after):
        return ""
    tail = _equal_rows(before[head:][::-1], after[head:][::-1])
    middle = matching_rows(before[head : len(before) - tail], after[head : len(after) - tail])
    places = [*range(head), *(place + head if place >= 0 else place for place in middle)]
    places += range(len(after) - tail, len(after))
    kept = [place for place in places if place >= 0]
    free = {*range(len(after))}.difference(kept)
    removed, edited, ends = list[int](), list[int](), list[int]()
    for row, place in enumerate(places):
        beside = places[row - 1] + 1 if row else 0
        if place < 0 and beside in free and (beside or not row):  # a new row stands where this one was
            free.remove(beside)
            places[row] = beside
            edited.append(row)
        elif place < 0:
            removed.append(row)
    for place in kept:  # `ends`: the last rows of the longest series of each length that kept its order
        at = bisect_left(ends, place)
        ends[at : at + 1] = [place]
    changed = {"removed": removed, "edited": edited, "added": sorted(free)}
    words = [f"{shown_rows(rows)} {word}" for word, rows in changed.items() if rows]
    words += [f"{counted(len(kept) - len(ends), 'row')} moved"] if len(kept) > len(ends) else []
    return f"{counted(len(before), 'row')} before, {len(after)} now: {', '.join(words)}"


def shown_rows(rows: Sequence[int]) -> str:
    """For example `2 rows (4, 7)`. Rows count from 0."""
    named = f" ({', '.join(map(str, rows[:SHOWN]))}{', ...' * (len(rows) > SHOWN)})" if rows else ""
    return f"{counted(len(rows), 'row')}{named}"
