"""Integers of any size in msgpack, whose own have 64 bits: the columns of a row may have larger ones.

Used by `storage.group_codec` and by `tasks.reward_child`, as msgpack's `default` and `ext_hook`.
"""

from typing import Any

import msgpack

CODE = 1


def pack_big(value: Any) -> msgpack.ExtType:
    """Raises: `TypeError` for what is no integer."""
    if not isinstance(value, int):
        raise TypeError(f"can not serialize {type(value).__name__!r} object")
    return msgpack.ExtType(CODE, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def unpack_big(code: int, data: bytes) -> int:
    """Raises: `ValueError` for another type."""
    if code != CODE:
        raise ValueError(f"the type {code} is not known")
    return int.from_bytes(data, "little", signed=True)
