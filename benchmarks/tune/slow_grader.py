"""A reward that waits, such as for a service: between 0.03 and 0.23 s, as the text of the response decides."""

import time
import zlib
from typing import Any


def slow(prompt: Any, trajectory: Any) -> float:
    share = zlib.crc32(trajectory.text.encode()) % 1000 / 1000
    time.sleep(0.03 + 0.2 * share**3)
    return share
