"""Where a vLLM engine's requests stop until a test lets them continue, so that "in the middle" is certain and no race.

`Gate` is the test's side, `Counted` what tells it how far a backend has come; `held_scheduler.py` is vLLM's side. The
file between them is mapped by both.
"""

import asyncio
import mmap
from collections.abc import Awaitable, Generator
from pathlib import Path
from typing import Any

TURN, QUOTA = 0, 1
OPEN = 2**62
TOO_LONG_S = 100.0


def gated(gate: Path) -> dict[str, Any]:
    """Engine arguments for requests that stop at a gate."""
    return {"scheduler_cls": "held_scheduler.HeldScheduler", "additional_config": {"gate": str(gate)}}


class Gate:
    """A turn, counted up each time it is set, and the tokens that each request may have from then on."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")

    def hold(self, tokens: int) -> None:
        """No request gets beyond so many further tokens, a new one beyond so many at all."""
        self.words[QUOTA] = tokens
        self.words[TURN] += 1

    def open(self) -> None:
        self.hold(OPEN)


class Counted:
    """Mixed into a backend whose engine is gated: wakes who waits for a number of tokens."""

    gate: Gate
    _count = 0
    _awaited: tuple[int, asyncio.Event] | None = None

    @property
    def _sampled(self) -> int:
        return self._count

    @_sampled.setter
    def _sampled(self, count: int) -> None:
        self._count = count
        if self._awaited is not None and count >= self._awaited[0]:
            self._awaited[1].set()

    def hold(self, tokens: int) -> Awaitable[None]:
        """From this call on; what it returns ends once that many further tokens have come, together, from requests
        each of which stops there by itself."""
        self.gate.hold(tokens)
        return self.reaching(tokens)

    def reaching(self, tokens: int) -> "Reached":
        """Ends once that many further tokens have come."""
        reached = asyncio.Event()
        self._awaited = (self._count + tokens, reached)
        if tokens <= 0:
            reached.set()
        return Reached(reached)

    def go_on(self) -> None:
        self.gate.open()


class Reached:
    """Awaited or not."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def __await__(self) -> Generator[Any, None, None]:
        return self._in_time().__await__()

    async def _in_time(self) -> None:
        async with asyncio.timeout(TOO_LONG_S):  # a backend that is broken fails its test, and does not hang it
            await self._event.wait()
