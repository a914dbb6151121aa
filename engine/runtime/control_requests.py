"""Handles operations on a running run (scale, drain, stop, …) from its command line or its control endpoint, and
detects silence: no change for `silence_s`.

Called by `run_parts.py` on the driver's event loop. Operations are checked and delivered between two events.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.control.address_file import announce, new_token, withdraw
from engine.control.control_server import ControlServer
from engine.control.requests import Drain, Look, Operation, Scale, Set, Stop, decide
from engine.errors import EngineError, are, clean
from engine.metrics.collector import RunMetrics
from engine.metrics.waits import waits
from engine.runtime.driver import Driver
from engine.workers.plan import Plan

# -- silence -----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

NAMED = 8
"""Number of waits in a report, the most important first."""


class Silence:
    """Watches for silence. `after_s`: seconds without a change before the first report."""

    def __init__(self, metrics: RunMetrics, after_s: float) -> None:
        self._metrics = metrics
        self._after_s = after_s
        self._patience_s = self._interval_s = after_s
        self._seen = metrics.changes
        self._since = metrics.at
        """Time of the newest event that changed something, seconds since the run began."""

    def look(self, now: float) -> float:
        """Report a silence if it is due. Returns the seconds until the next call."""
        metrics = self._metrics
        if metrics.changes != self._seen:
            self._seen, self._since = metrics.changes, metrics.at
            self._patience_s = self._interval_s = self._after_s
        silent = now - self._since
        if silent < self._patience_s:
            return self._patience_s - silent
        found = [wait.sentence(now) for wait in waits(metrics.state)]
        more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
        named = "; ".join(found[:NAMED]) + more or "no process: no order is open"
        text = f"nothing has changed for {silent:.0f} s: {named}"
        log.warning(text)
        metrics.silence = (metrics.changes, text)
        self._interval_s *= 2
        self._patience_s = silent + self._interval_s
        return self._interval_s


# -- requests ----------------------------------------------------------------------------------------------------------


SHOWN = 32
"""Maximum number of waits in an answer, the most important ones first."""


class Control:
    """Call `open`, then `begin` once the run has begun, finally `close`.

    `end_requested`: whether a user asked the run to end.
    """

    def __init__(
        self,
        plan: Plan,
        metrics: RunMetrics,
        driver: Driver,
        changed: Callable[[], None],
    ) -> None:
        """`changed()` wakes the observers of the run."""
        self.end_requested = False
        self._plan = plan
        self._metrics = metrics
        self._driver = driver
        self._changed = changed
        self._server: ControlServer | None = None
        self._timer: asyncio.TimerHandle | None = None
        """The next check for silence."""

    async def open(self) -> None:
        """Open the control endpoint, if the plan has one. Raises: `ConfigError` for a bad address."""
        plan = self._plan
        if (at := plan.control) is not None and plan.run_dir is not None:
            self._server = ControlServer(new_token(), self.carry_out)
            self._place = await self._server.start(at.host, at.port, at.hosts)

    def begin(self) -> None:
        """Announce the control endpoint, and begin to check for silence. If the announcement fails, the run
        continues."""
        if self._server is not None and self._plan.run_dir is not None:
            try:
                announce(self._plan.run_dir, self._place)
            except OSError as error:
                log.warning("cannot announce the address of the control endpoint: %s", error)
        self._silence = Silence(self._metrics, self._plan.silence_s)
        self._listen()
        if self._driver.scheduler.state.ending.draining:
            self.end_requested = True

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            if self._plan.run_dir is not None:
                withdraw(self._plan.run_dir)
            await self._server.close()

    def carry_out(self, asked: Operation) -> dict[str, Any]:
        """Execute an operation; returns the decision and the run's state. Raises: `ConfigError` if the operation is
        not allowed, `EngineError` if the run has failed."""
        events = decide(asked, self._driver.scheduler, self._plan.most_replicas, self._plan.reward_timeout_s)
        if not isinstance(asked, Look):
            log.info("operation: %s", clean(str(asked)))
        if isinstance(asked, Stop) or (isinstance(asked, Drain) and asked.replica is None):
            self.end_requested = True
        self._driver.deliver(*events)
        if self._driver.failure is not None:
            raise EngineError(f"the run has failed: {self._driver.failure}")
        return {"done": self._answer(asked), **self._state()}

    def _answer(self, asked: Operation) -> str:
        if isinstance(asked, Look):
            return ""
        if isinstance(asked, Stop):
            return "the run stops now"
        if isinstance(asked, Set):
            return "set: " + ", ".join(f"{one.setting} = {one.value}" for one in asked.settings)
        if isinstance(asked, Scale):
            return f"{are(asked.replicas, 'replica')} wanted{self._beside(asked.replicas)}"
        if asked.replica is not None:
            return f"replica {asked.replica} leaves: it gets no more groups; its groups continue on other replicas"
        drain_s = self._driver.scheduler.state.limits.drain_s
        bound = "" if drain_s is None else f", for {drain_s:g} s at most"
        return f"the run drains{bound}: no group starts, running groups are parked, then the run stops and can resume"

    def _beside(self, replicas: int) -> str:
        """A warning if the slots of this many replicas do not fit K or B; empty otherwise."""
        limits, slots = self._driver.scheduler.state.limits, replicas * self._plan.slots
        if slots > limits.max_concurrent_groups:
            law = f"K = {limits.max_concurrent_groups} leaves some of their {slots} slots empty"
            return f"; {law}: raise scheduler.max_concurrent_groups"
        if slots < limits.train_batch_size:
            return (
                f"; their {slots} slots hold fewer than B = {limits.train_batch_size} groups: a step needs several "
                "rounds"
            )
        return ""

    def _state(self) -> dict[str, Any]:
        state, now = self._driver.scheduler.state, self._driver.clock.now()
        found = [wait.sentence(now) for wait in waits(state)]
        return {
            "outcome": state.ending.outcome.outcome if state.ending.outcome else None,
            "step": state.training.steps_trained,
            "waits": found[:SHOWN] + ([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []),
        }

    def _listen(self) -> None:
        before = self._metrics.silence
        delay = self._silence.look(self._driver.clock.now())
        if self._metrics.silence != before:
            self._changed()
        self._timer = asyncio.get_running_loop().call_later(delay, self._listen)
