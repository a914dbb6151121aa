"""Where trajectories lie in one packed row, and which of its tokens attend to which.

Called by `batch.pack`, which fills the row, and by `packed_attention`, which computes it. A row consists of pieces: a
whole trajectory, a prompt that several share, or what follows that prompt in one of them. Pieces of similar length lie
next to each other in a bucket, which attention computes in one call. Only there, inside a layer, is anything padded.
Nothing here depends on models, samples or losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

LIKE = 0.75
"""A piece shorter than this share of the longest in its bucket begins a new bucket."""
SHORT = 64
"""Pieces of at most this many tokens share a bucket, whatever their lengths: a call costs more than their padding."""
LEAST_WIDTH = 128
"""On a GPU, calls of attention have at least this many columns."""
CALL_KEYS = 512
"""On a GPU, a call of attention with several pieces has at most this many keys, padding included."""
MASK_NUMBERS = 1 << 24
"""Maximum numbers in an attention mask; more queries are computed in parts."""


class Prefix(NamedTuple):
    """Tokens of the row to which every piece of a bucket also attends."""

    start: int
    length: int


class AttentionPart(NamedTuple):
    """The queries of one call, and the keys they need, as [start, stop) of a bucket's columns."""

    queries: slice
    keys: slice
    mask: Tensor | None
    """[queries, keys] bool, True where a query attends; None: causal."""


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """Adjacent pieces of the row with the same attention: each token attends to the prefix, then to its piece up to
    itself."""

    start: int
    """Its first token's place in the row."""
    lengths: tuple[int, ...]
    pieces: int
    """Rows of its call: one for each length, and maybe empty ones."""
    width: int
    """Columns of its call: of the longest piece at least."""
    prefix: Prefix | None = None
    gap: int = 0
    """Empty columns before the prefix, to which nothing attends."""
    places: Tensor | None = None
    """Places of its tokens in [pieces * width]; None if they fill it. [tokens] int64"""
    _parts: dict[tuple[int | None, torch.device], list[AttentionPart]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def padded(self, values: Tensor) -> Tensor:
        """From [tokens of the row, ...] its own, as [pieces, width, ...], zeros where a piece is shorter."""
        own, shape = values[self.start : self.start + self.tokens], (self.pieces, self.width)
        if self.places is None:
            return own.unflatten(0, shape)
        empty = own.new_zeros(shape[0] * shape[1], *own.shape[1:])
        return empty.index_copy(0, self.places, own).unflatten(0, shape)

    def with_prefix(self, values: Tensor) -> Tensor:
        """As `padded`, with the gap and the prefix before each piece: [pieces, gap + prefix + width, ...]"""
        own = self.padded(values)
        if self.prefix is None:
            return own
        before = values[self.prefix.start : self.prefix.start + self.prefix.length]
        if self.gap:
            before = torch.cat([before.new_zeros(self.gap, *before.shape[1:]), before])
        return torch.cat([before.expand(self.pieces, *before.shape), own], dim=1)

    def unpadded(self, values: Tensor) -> Tensor:
        """The inverse of `padded`: [pieces, width, ...] to [tokens, ...]"""
        flat = values.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)

    def parts(self, window: int | None, device: torch.device) -> list[AttentionPart]:
        """The calls of attention: one, causal, unless a prefix or a sliding `window` needs masks."""
        key = (window, device)
        if key not in self._parts:
            self._parts[key] = list(self._new_parts(window, device))
        return self._parts[key]

    def _new_parts(self, window: int | None, device: torch.device) -> Iterator[AttentionPart]:
        before = 0 if self.prefix is None else self.gap + self.prefix.length
        keys = before + self.width
        if not before and (window is None or keys <= window):
            yield AttentionPart(slice(0, self.width), slice(0, keys), None)
            return
        step = max(1, MASK_NUMBERS // keys)
        for first in range(0, self.width, step):
            stop = min(first + step, self.width)
            oldest = 0 if window is None else max(0, before + first - window + 1)
            query = torch.arange(before + first, before + stop, device=device)[:, None]
            column = torch.arange(oldest, before + stop, device=device)[None]
            mask = column <= query
            if window is not None:
                mask &= column > query - window
            if self.gap:
                mask &= column >= self.gap
            yield AttentionPart(slice(first, stop), slice(oldest, before + stop), mask)

    def rounded(self) -> Iterator["Bucket"]:
        """The same pieces in calls of few shapes: numbers of pieces and of keys behind a prefix are 2^n, of columns 2^n
        or, where that would be much more, 3 * 2^n."""
        start, lengths = self.start, self.lengths
        while lengths:
            width = max(LEAST_WIDTH, _rounded_width(lengths[0]))
            needed = width + (0 if self.prefix is None else self.prefix.length)
            keys = width if self.prefix is None else _power_of_two(needed)
            pieces = min(max(1, CALL_KEYS // keys), _power_of_two(len(lengths)))
            own, lengths = lengths[:pieces], lengths[pieces:]
            yield Bucket(
                start=start, lengths=own, pieces=pieces, width=width, prefix=self.prefix, gap=keys - needed,
                places=_places(own, pieces, width),
            )  # fmt: skip
            start += sum(own)


def _power_of_two(number: int) -> int:
    """The lowest that is not less."""
    return 1 << (number - 1).bit_length()


def _rounded_width(tokens: int) -> int:
    above = _power_of_two(tokens)
    between = above // 4 * 3
    return between if above > CALL_KEYS and between >= tokens else above


class Sequences(NamedTuple):
    """The pieces of a row for the varlen kernel, which takes sequences of variable length. The last query of a piece
    attends to all of its keys, and each earlier query to one key less."""

    query_starts: Tensor
    """Place of the first query of each piece, and the number of queries. [pieces + 1] int32"""
    key_starts: Tensor
    """The same for the keys: those of the prefix, then those of the piece. [pieces + 1] int32"""
    key_places: Tensor | None
    """Place in the row of each key; None if no piece has a prefix, so that keys lie like queries. [keys] int64"""
    longest_query: int
    longest_key: int


@dataclass(slots=True, kw_only=True, eq=False)
class Layout:
    """The buckets of one packed row."""

    buckets: tuple[Bucket, ...]
    """In the order of the row, without gaps."""
    _sequences: dict[torch.device, Sequences] = field(default_factory=dict)

    def sequences(self, device: torch.device) -> Sequences:
        """The same pieces, one by one. They need neither padding nor masks."""
        if device not in self._sequences:
            self._sequences[device] = self._new_sequences(device)
        return self._sequences[device]

    def _new_sequences(self, device: torch.device) -> Sequences:
        queries = torch.tensor([length for bucket in self.buckets for length in bucket.lengths])
        prefixes = [bucket.prefix or Prefix(0, 0) for bucket in self.buckets for _ in bucket.lengths]
        keys = queries + torch.tensor([prefix.length for prefix in prefixes])
        places: Tensor | None = None
        if any(prefix.length for prefix in prefixes):
            own = torch.arange(int(queries.sum())).split(queries.tolist())
            pairs = zip(prefixes, own, strict=True)
            places = torch.cat(
                [part for (start, length), mine in pairs for part in (torch.arange(start, start + length), mine)]
            )
        query_starts, key_starts = (torch.cat([one.new_zeros(1), one.cumsum(0)]).int() for one in (queries, keys))
        return Sequences(
            query_starts.to(device), key_starts.to(device), None if places is None else places.to(device),
            int(queries.max()), int(keys.max()),
        )  # fmt: skip

    def rounded(self) -> "Layout":
        """The same row, whose calls of attention have few shapes."""
        return Layout(buckets=tuple(part for bucket in self.buckets for part in bucket.rounded()))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Layout":
        """On a device. For a GPU it is rounded: there, padding costs less than what depends on shapes, such as plans of
        kernels and blocks of memory that fit no later pass."""
        row = self.rounded() if device.type == "cuda" else self
        moved = (
            one if one.places is None else replace(one, places=one.places.to(device, non_blocking=non_blocking))
            for one in row.buckets
        )
        return Layout(buckets=tuple(moved))


def buckets_of(lengths: Sequence[int], start: int, prefix: Prefix | None = None) -> Iterator[Bucket]:
    """The buckets of pieces that lie end to end from `start`, longest first."""
    assert list(lengths) == sorted(lengths, reverse=True) and all(lengths)
    first = 0
    while first < len(lengths):
        least = 1 if lengths[first] <= SHORT else LIKE * lengths[first]
        stop = first
        while stop < len(lengths) and lengths[stop] >= least:
            stop += 1
        own = tuple(lengths[first:stop])
        places = _places(own, len(own), own[0])
        yield Bucket(start=start, lengths=own, pieces=len(own), width=own[0], prefix=prefix, places=places)
        start, first = start + sum(own), stop


def _places(lengths: Sequence[int], pieces: int, width: int) -> Tensor | None:
    """See `Bucket.places`."""
    if sum(lengths) == pieces * width:
        return None
    return torch.cat([torch.arange(length) + index * width for index, length in enumerate(lengths)])


# -- what is shared ----------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Trajectories that must lie in one row."""

    members: tuple[int, ...]
    """Their indices."""
    shared: int
    """Number of tokens with which all of them begin, and which are computed once; 0: none."""


def common_prefix(rows: Sequence[Tensor]) -> int:
    """Number of tokens with which all rows begin."""
    shortest = min(len(row) for row in rows)
    same = torch.stack([row[:shortest] for row in rows]) == rows[0][:shortest]
    return int(same.all(0).int().cumprod(0).sum())


def load_of(unit: Unit, lengths: Sequence[int]) -> int:
    """Number of tokens of a unit in a row."""
    return unit.shared + sum(lengths[index] - unit.shared for index in unit.members)


def split(unit: Unit, lengths: Sequence[int], most: int) -> list[Unit]:
    """Parts of the unit, longest first, of at most `most` tokens unless one trajectory has more. Each part repeats the
    shared tokens."""
    parts: list[list[int]] = []
    load = 0
    for index in sorted(unit.members, key=lambda index: -lengths[index]):
        own = lengths[index] - unit.shared
        if not parts or load + own > most:
            parts.append([])
            load = unit.shared
        parts[-1].append(index)
        load += own
    return [Unit(tuple(part), unit.shared if len(part) > 1 else 0) for part in parts]


def rows_of(units: Sequence[Unit], lengths: Sequence[int], most: int) -> Iterator[list[Unit]]:
    """Units of each row, which has at most `most` tokens unless one trajectory has more. Longest trajectories first:
    neighbors have similar lengths, and a pass that does not fit in memory fails at once. Equal lengths stay in order.
    """
    parts = [part for unit in units for part in split(unit, lengths, most)]
    parts.sort(key=lambda part: -lengths[part.members[0]])
    row: list[Unit] = []
    tokens = 0
    for part in parts:
        load = load_of(part, lengths)
        if row and tokens + load > most:
            yield row
            row, tokens = [], 0
        row.append(part)
        tokens += load
    if row:
        yield row
