"""How the state hash is made of a record: 64 bits of its figures. Called by `states/state.py` and by the records that
keep a part of the hash themselves."""

import struct
from functools import lru_cache
from hashlib import blake2b

MASK = 0xFFFFFFFFFFFFFFFF


def digest(numbers: tuple[int, ...], figures: tuple[float, ...] = ()) -> int:
    """64 bits of some numbers; stable over processes, platforms and Python versions, unlike `hash`."""
    packed = _layout(len(numbers), len(figures)).pack(*numbers, *figures)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


@lru_cache
def _layout(numbers: int, figures: int) -> struct.Struct:
    return struct.Struct(f"<{numbers}q{figures}d")
