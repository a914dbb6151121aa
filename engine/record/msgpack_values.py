"""Plain values to msgpack and back, inside fixed bounds.

Called by `codec` and `frames`. Decoding must never crash with anything but `CodecError`, never allocate more than a
fixed multiple of the bytes it was given, and never build anything but None, bool, int, float, str, list and dict.
"""

from typing import Any

import msgpack

from engine.errors import EngineError

MAX_INT = 2**63 - 1
"""Integers are signed and of 64 bits."""
MIN_INT = -(2**63)
MAX_TEXT_BYTES = 1 << 20
"""One string, as UTF-8."""
MAX_ITEMS = 1 << 22
"""Entries of one array: groups of a batch, commands of an event."""
MAX_PAYLOAD_BYTES = 1 << 26
"""One frame. A million `StartGroup` take 20 MB."""
CHECKED_FROM_BYTES = 512
"""From here on a payload is walked once without building anything: only then do the lengths it claims bound what it
holds. Below, nesting can claim no more than `CHECKED_FROM_BYTES` squared entries."""

_pack = msgpack.Packer(use_bin_type=True).pack


class CodecError(EngineError):
    """Bytes that are no value of this format, or a value that this format cannot hold."""


def pack(plain: Any) -> bytes:
    """Raises: `CodecError` for values msgpack has no form for, integers above 64 bits and text that is not Unicode."""
    try:
        data: bytes = _pack(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"cannot be recorded: {error}") from None
    if len(data) > MAX_PAYLOAD_BYTES:
        raise CodecError(f"{len(data)} bytes in one frame: {MAX_PAYLOAD_BYTES} at most")
    return data


def unpack(data: bytes, *, maps: bool = False) -> Any:
    """One value, and nothing after it. `maps`: mappings with text keys are allowed, which only the header has.

    Raises: `CodecError`.
    """
    size = len(data)
    if size > MAX_PAYLOAD_BYTES:
        raise CodecError(f"{size} bytes in one frame: {MAX_PAYLOAD_BYTES} at most")
    try:
        if size >= CHECKED_FROM_BYTES:
            walker = msgpack.Unpacker(max_buffer_size=MAX_PAYLOAD_BYTES)
            walker.feed(data)
            walker.skip()
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES,
            max_array_len=min(MAX_ITEMS, size),
            max_map_len=size if maps else 0,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        reason = "ends too early" if isinstance(error, msgpack.OutOfData) else str(error) or type(error).__name__
        raise CodecError(f"not a value of this format: {reason}") from None
