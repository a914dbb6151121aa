"""`Recent`: a memory cache of the entries that a store wrote last, so that most reads need no disk.

Used by `durable.py`. Most batches are read before their groups are evicted; evicted groups are on disk.
"""

from collections import OrderedDict
from collections.abc import Hashable


class Recent:
    """A cache of at most `most` bytes, with the newest entries."""

    def __init__(self, most: int) -> None:
        """`most`: size in bytes; 0 caches nothing."""
        self._most = self._room = most
        self._data: OrderedDict[Hashable, bytes] = OrderedDict()
        """Ordered: a plain `dict` finds its first entry by passing all that were deleted before it."""

    def keep(self, place: Hashable, data: bytes) -> None:
        """Add an entry; `place` must be new."""
        if len(data) > self._most:
            return
        self._room -= len(data)
        self._data[place] = data
        while self._room < 0:
            self.drop(next(iter(self._data)))

    def find(self, place: Hashable) -> bytes | None:
        return self._data.get(place)

    def drop(self, place: Hashable) -> None:
        """Remove an entry, if it is in the cache."""
        self._room += len(self._data.pop(place, b""))
