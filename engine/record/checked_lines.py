"""Lines of JSON in which every changed byte is noticed: each ends with a checksum of what is before it.

    {"step": 3, "loss": 0.25, "crc32": "5c0d2a6b"}

`metrics.journal` and `storage.samples` write and read them. To other programs, they are ordinary JSON.
"""

import json
from typing import Any
from zlib import crc32

MARK = b', "crc32": "'


def checked_line(text: str) -> bytes:
    """The line of a JSON object that is not empty, with its line end."""
    whole = text.removesuffix("}").encode("utf-8", "replace")
    return whole + MARK + b'%08x"}\n' % crc32(whole)


def object_of(line: bytes) -> dict[str, Any]:
    """The object of a line, without its checksum. Raises: `ValueError` if the line is damaged."""
    whole, mark, end = line.rstrip(b"\n").rpartition(MARK)
    if not mark or end != b'%08x"}' % crc32(whole):
        raise ValueError("its checksum is missing or wrong")
    row: dict[str, Any] = json.loads(whole + b"}")
    return row
