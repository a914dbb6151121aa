"""Converts plain values to msgpack and back, within fixed bounds.

Called by `codec` and `frames`. Decoding must raise nothing but `CodecError`, allocate at most a fixed multiple of the
bytes it was given, and build nothing but None, bool, int, float, str, list and dict.
"""

from typing import Any

import msgpack

from engine.errors import EngineError

MAX_INT = 2**63 - 1
"""Integers are signed and have 64 bits."""
MIN_INT = -(2**63)
MAX_TEXT_BYTES = 1 << 20
"""Maximum size of one string, as UTF-8."""
MAX_ITEMS = 1 << 22
"""Maximum entries of one array, such as the groups of a batch or the commands of an event."""
MAX_PAYLOAD_BYTES = 1 << 26
"""Maximum size of one frame. A million `StartGroup` take 20 MB."""
CHECKED_FROM_BYTES = 512
"""A payload of at least this size is first walked without building anything, because nested arrays could otherwise
claim more entries than it has bytes. A smaller one can claim at most `CHECKED_FROM_BYTES` squared entries."""

_pack = msgpack.Packer(use_bin_type=True).pack


class CodecError(EngineError):
    """The bytes are not a value of this format, or the format cannot hold the value."""


def pack(plain: Any) -> bytes:
    """Raises: `CodecError` for values that msgpack cannot encode, integers beyond 64 bits and invalid Unicode."""
    try:
        data: bytes = _pack(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"cannot be recorded: {error}") from None
    if len(data) > MAX_PAYLOAD_BYTES:
        raise CodecError(f"the frame has {len(data)} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed")
    return data


def unpack(data: bytes, *, lists: bool = True) -> Any:
    """Decode one value and nothing after it. Mappings have string keys; arrays are `lists` or tuples. Raises:
    `CodecError`."""
    size = len(data)
    if size > MAX_PAYLOAD_BYTES:
        raise CodecError(f"the frame has {size} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed")
    try:
        if size >= CHECKED_FROM_BYTES:
            walker = msgpack.Unpacker(max_buffer_size=MAX_PAYLOAD_BYTES)
            walker.feed(data)
            walker.skip()
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=lists,
            strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES,
            max_array_len=min(MAX_ITEMS, size),
            max_map_len=size,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        reason = "the data ends early" if isinstance(error, msgpack.OutOfData) else str(error) or type(error).__name__
        raise CodecError(f"cannot decode the frame: {reason}") from None
