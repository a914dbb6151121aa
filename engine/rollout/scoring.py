"""A user's reward on threads: each call on one of its own, so that one that never returns takes no place from others.

Called by `rollout.generator.ModelGenerator`. It must never block the event loop, never let a stuck call hold up the
others or the end of the process, and never lose a call's outcome, whatever the call raises.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any

from engine.errors import DataFailure, EngineError
from engine.trajectory import Prompt, Trajectory

Reward = Callable[[Prompt, Trajectory], float]

MOST_STUCK = 64
"""Calls past their time that may still run at once: each keeps a thread, and none can be ended."""

Outcome = float | str | BaseException
"""The reward; or what the call returned instead, in words; or what it raised."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of the reward, from the start of its thread to its return."""

    outcome: asyncio.Future[Outcome | None]
    """None once the call is past its time."""
    timer: asyncio.TimerHandle | None = None
    stuck: bool = False


class RewardCalls:
    """Calls `reward`, `threads` at a time. A call's time is counted from its own start, not from when it was asked for.

    One that is past `timeout_s` is given up and its place goes to the next; its thread runs on until it returns.
    """

    def __init__(self, reward: Reward, *, threads: int, timeout_s: float | None) -> None:
        self._reward = reward
        self._name = name_of(reward)
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(threads)
        self._stuck = 0
        self._lost = asyncio.Event()

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> float:
        """Raises: `DataFailure` naming whatever the reward did wrong, `EngineError` once `failed` has returned."""
        await self._places.acquire()
        if self._lost.is_set():
            self._places.release()
            raise EngineError(self._loss())
        outcome = await self._begin(prompt, trajectory).outcome
        if isinstance(outcome, float):
            return outcome
        where = f"on prompt row {prompt.row}"
        if outcome is None:
            story = f"took longer than {self._timeout_s} s {where}"
        elif isinstance(outcome, str):
            story = f"returned {outcome} {where}, not a finite number"
        else:
            story = f"raised {type(outcome).__name__} {where}: {outcome}"
        cause = outcome if isinstance(outcome, BaseException) else None
        raise DataFailure(f"reward {self._name} {story}", row=prompt.row) from cause

    async def failed(self) -> str:
        """Return once `MOST_STUCK` calls are stuck, with that as the reason; never before."""
        await self._lost.wait()
        return self._loss()

    def _begin(self, prompt: Prompt, trajectory: Trajectory) -> Call:
        """Start a call in the place that the caller has taken."""
        loop = asyncio.get_running_loop()
        call = Call(loop.create_future())

        def run() -> None:
            try:
                outcome: Outcome = number_in(self._reward(prompt, trajectory))
            except BaseException as error:  # one that wants to end the process has only failed
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._returned, call, outcome)

        try:
            Thread(target=run, name="reward", daemon=True).start()
        except BaseException:
            self._places.release()
            raise
        if self._timeout_s is not None:
            call.timer = loop.call_later(self._timeout_s, self._overdue, call)
        return call

    def _returned(self, call: Call, outcome: Outcome) -> None:
        if call.stuck:
            self._stuck -= 1
            return
        if call.timer is not None:
            call.timer.cancel()
        self._end(call, outcome)

    def _overdue(self, call: Call) -> None:
        call.stuck = True
        self._stuck += 1
        if self._stuck >= MOST_STUCK:
            self._lost.set()
        self._end(call, None)

    def _end(self, call: Call, outcome: Outcome | None) -> None:
        """Give back its place, also where whoever asked for it was cancelled meanwhile."""
        self._places.release()
        if not call.outcome.done():
            call.outcome.set_result(outcome)

    def _loss(self) -> str:
        return f"{MOST_STUCK} calls of reward {self._name} took longer than {self._timeout_s} s and have not returned"


def number_in(value: Any) -> float | str:
    """A finite number as a float; anything else in words."""
    try:
        if math.isfinite(value):
            return float(value)
    except Exception:  # whatever the value's own conversion raises
        with contextlib.suppress(Exception):
            return f"{value!r:.80} of type {type(value).__name__}"
        return f"a {type(value).__name__}"
    return str(float(value))


def name_of(function: Callable[..., Any]) -> str:
    """`module.function`, as a user would look for it."""
    module = getattr(function, "__module__", "") or ""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}.{name}" if module else name
