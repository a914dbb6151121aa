"""`Recent`: entries of a store as they were written last, so that what is read soon is not read from the disk.

Used by `durable.py`. A batch is mostly read before its groups leave here; what has left is on the disk.
"""

from collections import OrderedDict
from collections.abc import Hashable


class Recent:
    """At most so many bytes, those kept last."""

    def __init__(self, most: int) -> None:
        """`most`: bytes; 0 keeps nothing."""
        self._most = self._room = most
        self._data: OrderedDict[Hashable, bytes] = OrderedDict()
        """A plain `dict` looks for its first entry past all that were dropped before it."""

    def keep(self, place: Hashable, data: bytes) -> None:
        """`place` holds nothing yet."""
        if len(data) > self._most:
            return
        self._room -= len(data)
        self._data[place] = data
        while self._room < 0:
            self.drop(next(iter(self._data)))

    def find(self, place: Hashable) -> bytes | None:
        return self._data.get(place)

    def drop(self, place: Hashable) -> None:
        """Where it is here; of no use any more."""
        self._room += len(self._data.pop(place, b""))
