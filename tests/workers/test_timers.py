"""Each timer of an executor fires once, unless it is canceled first."""

import asyncio

from engine.commands import CancelTimer, SetTimer
from engine.events import TimerFired
from engine.workers.clock import Timers


def test_a_timer_fires_once_and_is_forgotten() -> None:
    async def fire() -> list[int]:
        fired: asyncio.Queue[TimerFired] = asyncio.Queue()
        timers = Timers(fired.put_nowait)
        timers.set(SetTimer(timer=0, name="drain", delay_s=3600.0, cause=0))
        timers.set(SetTimer(timer=0, name="drain", delay_s=-1.0, cause=0))
        for timer in (1, 2):
            timers.set(SetTimer(timer=timer, name="drain", delay_s=-1.0, cause=0))
        timers.cancel(CancelTimer(timer=1, name="drain", cause=0))
        first = await fired.get()
        timers.set(SetTimer(timer=2, name="drain", delay_s=0.0, cause=0))
        again = await fired.get()
        timers.cancel(CancelTimer(timer=2, name="drain", cause=0))
        timers.set(SetTimer(timer=3, name="drain", delay_s=0.0, cause=0))
        timers.close()
        timers.set(SetTimer(timer=4, name="drain", delay_s=0.0, cause=0))
        return [first.timer, again.timer, (await fired.get()).timer]

    assert asyncio.run(asyncio.wait_for(fire(), 60.0)) == [2, 2, 4]
