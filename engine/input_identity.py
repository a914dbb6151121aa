"""What a run reads: 8 bytes for each row of its data, so that a resume finds a row by its content.

Used by whatever reads the prompts of a run, and by resumes. The bytes of a row depend on its content alone, never on
the order of its columns or the format of its file. numpy is imported late: `engine check` reads data without it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
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
    ids = bytearray()  # a list of 10 million digests would take half a gigabyte
    for row in rows:
        ids += blake2b(_plain(row), digest_size=8).digest()
    return bytes(ids)


def as_ids(data: bytes) -> "RowIds":
    import numpy as np

    return np.frombuffer(data, dtype=np.uint64)


def _plain(row: Any) -> bytes:
    try:
        return msgpack.encode(row, order="sorted")
    except (TypeError, ValueError, OverflowError):  # such as integers of more than 64 bits, or what only a list has
        return json.dumps(_sorted(row), default=lambda value: type(value).__name__).encode()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _sorted(value[name]) for name in sorted(value, key=str)}
    return [_sorted(one) for one in value] if isinstance(value, list | tuple) else value


def matching_rows(before: "RowIds", after: "RowIds", *first: Sequence[int]) -> "NDArray[np.int64]":
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
    return found


def _equal_rows(before: "RowIds", after: "RowIds") -> int:
    """How many rows are equal before the first difference."""
    size = min(len(before), len(after))
    same = before[:size] == after[:size]
    return size if same.all() else int(same.argmin())


def describe_changes(before: "RowIds", after: "RowIds") -> str:
    """What happened to the rows of a file, in words; empty: nothing."""
    import numpy as np

    head = _equal_rows(before, after)
    if head == len(before) == len(after):
        return ""
    tail = _equal_rows(before[head:][::-1], after[head:][::-1])
    new = after[head : len(after) - tail]
    places = matching_rows(before[head : len(before) - tail], new)
    kept = places[places >= 0]
    changed = {"gone": np.flatnonzero(places < 0), "new": np.setdiff1d(np.arange(len(new)), kept)}
    words = [f"{shown_rows((head + rows).tolist())} {word}" for word, rows in changed.items() if len(rows)]
    words += ["in another order"] if (np.diff(kept) < 0).any() else []
    return f"{counted(len(before), 'row')} before, {len(after)} now: {', '.join(words)}"


def shown_rows(rows: Sequence[int]) -> str:
    """For example `2 rows (4, 7)`. Rows count from 0."""
    named = f" ({', '.join(map(str, rows[:SHOWN]))}{', ...' * (len(rows) > SHOWN)})" if rows else ""
    return f"{counted(len(rows), 'row')}{named}"
