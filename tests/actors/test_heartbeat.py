"""Signs of life, without Ray: an actor that says that it cannot continue, one that dies, one that is silent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from engine.actors.failures import PATIENCE_S, ProcessEnd, Pulse, Sign


class Patient:
    """An actor's handle: it answers so many beats with its process id, then it is silent, or its end is known."""

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

    async def _beat(self) -> Sign:
        self.beats -= 1
        if self.beats < 0:
            if self.end is None:
                await asyncio.Event().wait()
            self.over.set()
            if isinstance(self.end, Exception):
                raise RayError("it died")
        return Sign(4711)


@pytest.mark.parametrize(
    ("beats", "end", "ended"),
    [
        (3, None, ProcessEnd("no sign of life for 0.03 s", silent=True)),
        (0, None, ProcessEnd("no sign of life for 0.03 s", silent=True)),
        (3, "its engine died", ProcessEnd("its engine died", self_reported=True)),
        (3, RayError("gone"), ProcessEnd("RayError: gone")),
    ],
    ids=["silent", "silent from the first", "broken", "dead"],
)
def test_an_actor_is_lost_after_its_last_sign_of_life_with_the_reason(beats: int, end: Any, ended: ProcessEnd) -> None:
    async def story() -> tuple[ProcessEnd, int]:
        actor = Patient(beats, end)
        return await Pulse(every_s=0.01, missed=3).lost(actor), actor.beats

    assert asyncio.run(story()) == (ended, -1)


def test_without_beats_none_is_asked_for() -> None:
    async def story() -> tuple[ProcessEnd, int]:
        actor = Patient(3, "its engine died")
        asyncio.get_running_loop().call_soon(actor.over.set)
        return await Pulse(every_s=0.0, missed=3).lost(actor), actor.beats

    assert asyncio.run(story()) == (ProcessEnd("its engine died", self_reported=True), 3)


def test_no_answer_is_waited_for_without_end() -> None:
    assert (Pulse(0.0, 3).patience_s, Pulse(2.0, 3).patience_s) == (PATIENCE_S, 6.0)
