"""Signs of life, without Ray: an actor that says that it cannot go on, one that dies, one that is silent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from engine.actors.heartbeat import Pulse


class Patient:
    """An actor's handle: it answers so many beats, then it is silent, or its end is known."""

    def __init__(self, beats: int, end: str | Exception | None = None) -> None:
        self.beats = beats
        self.end = end
        self.over = asyncio.Event()
        self.alive = SimpleNamespace(remote=self._alive)
        self.beat = SimpleNamespace(remote=self._beat)

    async def _alive(self) -> Any:
        await self.over.wait()
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    async def _beat(self) -> None:
        self.beats -= 1
        if self.beats < 0:
            if self.end is None:
                await asyncio.Event().wait()
            self.over.set()
            if isinstance(self.end, Exception):
                raise RayError("it died")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (None, "no sign of life for 0.03 s"),
        ("its engine died", "its engine died"),
        (RayError("gone"), "RayError: gone"),
    ],
    ids=["silent", "broken", "dead"],
)
def test_an_actor_is_lost_after_its_last_sign_of_life_with_the_reason(end: Any, reason: str) -> None:
    async def story() -> tuple[str, int]:
        actor = Patient(3, end)
        return await Pulse(every_s=0.01, missed=3).lost(actor), actor.beats

    assert asyncio.run(story()) == (reason, -1)


def test_without_beats_none_is_asked_for() -> None:
    async def story() -> tuple[str, int]:
        actor = Patient(3, "its engine died")
        asyncio.get_running_loop().call_soon(actor.over.set)
        return await Pulse(every_s=0.0, missed=3).lost(actor), actor.beats

    assert asyncio.run(story()) == ("its engine died", 3)
