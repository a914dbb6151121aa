"""What the state is made of: typed records whose classes declare each field once, and the hash of their values.

The state of a run is one tree with `State` at the root. The annotations in the body of a class declare its fields.
Every other attribute can be computed from these fields, and is rebuilt after a snapshot was loaded. Snapshots write the
declared fields and nothing else (`record/snapshots.py`). The hash covers them, except those in `UNHASHED`.

A record notes every assignment to its fields. A dict or list that is hashed must be replaced, never changed in place.
Groups are the exception, since there are so many changes of them: `State.fire_group` and `State.update` note these.
"""

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any, ClassVar, get_origin, get_type_hints

import msgpack

MASK = 0xFFFFFFFFFFFFFFFF
_pack = msgpack.Packer(use_bin_type=True).pack


class Record:
    """A part of the state that notes its changes."""

    UNHASHED: ClassVar[tuple[str, ...]] = ()
    """Fields that the hash leaves out: they repeat others, or are too large to be hashed at every change."""
    _note: Callable[[], None] = staticmethod(lambda: None)

    def watch(self, note: Callable[[], None]) -> None:
        """Call `note` after every change of a field from now on."""
        object.__setattr__(self, "_note", note)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self._note()


@lru_cache
def declared(cls: Any) -> dict[str, Any]:
    """The fields of a class of the tree, with their types."""
    hints = get_type_hints(cls)
    return {name: hint for name, hint in hints.items() if not name.startswith("_") and get_origin(hint) is not ClassVar}


@lru_cache
def hashed(cls: Any) -> Callable[[Any], Any]:
    """A function that takes the values of the hashed fields from an object of a class."""
    left_out = getattr(cls, "UNHASHED", ())
    return attrgetter(*(name for name in declared(cls) if name not in left_out))


def hashed_values(record: Any) -> Any:
    """The values of the hashed fields of an object of the tree."""
    cls: Any = type(record)
    return hashed(cls)(record)


def digest(values: Any) -> int:
    """64 bits of plain values; stable over processes, platforms and Python versions, unlike `hash`."""
    return int.from_bytes(blake2b(_pack(values), digest_size=8).digest(), "little")


def digest_of(record: Any) -> int:
    """64 bits of the hashed fields of a record."""
    return digest(hashed_values(record))
