"""Serves the metrics endpoint of a run and announces its address.

Opened by `run_parts.py`. Scrapes run on separate threads. A scrape must never wait for the driver's event loop, and the
loop must never wait for a scrape.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from engine.control import address_file as control
from engine.control.http_listener import ANYWHERE
from engine.metrics.address_files import FILE, announce, remove_dead, withdraw
from engine.metrics.collector import RunMetrics
from engine.metrics.export import ExternalFigures, registry
from engine.metrics.metrics_server import MetricsServer
from engine.metrics.status import plain_status
from engine.record import Recorder
from engine.runtime.driver import Driver
from engine.storage.trajectories import StoreStats
from engine.workers.plan import Plan, ServerAddress

log = logging.getLogger(__name__)


def places_of(plan: Plan) -> list[Path]:
    """The files in which a run announces the address of its metrics endpoint."""
    run_dir, folder = plan.run_dir, plan.endpoints
    if run_dir is None:
        return []
    return [run_dir / FILE] + ([] if folder is None else [folder / f"{run_dir.name}.json"])


def withdraw_addresses(plan: Plan) -> None:
    """Delete the announced addresses of an ended run, whose process ended before it could do so."""
    withdraw(places_of(plan))
    if plan.run_dir is not None:
        control.withdraw(plan.run_dir)


class StoreWatch:
    """The last known contents of the trajectory store. Each call also requests newer ones, for the next call."""

    def __init__(self, held: Callable[[], Awaitable[StoreStats]], loop: asyncio.AbstractEventLoop) -> None:
        self._held = held
        self._loop = loop
        self._known = (0, 0, 0)
        self._asked = False

    def __call__(self) -> tuple[int, int, int]:
        """(groups, bytes, bytes on disk). Call it from any thread; it never waits."""
        if not self._asked:
            self._asked = True
            try:
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._ask()))
            except RuntimeError:
                log.debug("the event loop is closed")
        return self._known

    async def _ask(self) -> None:
        try:
            stats = await self._held()
            self._known = (stats.groups, stats.bytes, stats.disk_bytes)
        except Exception as error:
            log.debug("cannot read the statistics of the trajectory store: %s", error)
        finally:
            self._asked = False


class Endpoint:
    """Serves the metrics of a run from construction until `close`. Raises: `ConfigError` for a bad address."""

    def __init__(
        self,
        plan: Plan,
        at: ServerAddress,
        metrics: RunMetrics,
        driver: Driver,
        held: Callable[[], Awaitable[StoreStats]],
    ) -> None:
        recorder = driver.recorder
        around = ExternalFigures(
            now=lambda: driver.clock.now(),
            events_waiting=lambda: driver.waiting,
            record=(lambda: recorder.progress) if isinstance(recorder, Recorder) else None,
            store=StoreWatch(held, asyncio.get_running_loop()),
            directory=plan.run_dir,
        )
        self.server = MetricsServer(
            registry(metrics, around),
            host=at.host,
            hosts=at.hosts,
            port=at.port,
            describe=lambda: plain_status(metrics, driver.clock.now()),
        )
        self._plan = plan
        self._places: list[Path] = []
        self._announcement = ExitStack()

    @property
    def url(self) -> str:
        return self.server.url

    def close(self) -> None:
        """Stop serving, and delete the announcement."""
        withdraw(self._places)
        self._announcement.close()
        self.server.close()

    def announce(self) -> None:
        """Announce the address, and delete announcements of killed runs. Call it once the run has begun. A failure is
        logged; the run continues."""
        run_dir = self._plan.run_dir
        if run_dir is None:
            return
        self._places = places_of(self._plan)
        host = self.server.host
        address = f"{socket.gethostname()}:{self.server.port}" if host in ANYWHERE else self.server.address
        try:
            self._announcement = announce(self._places, address, run_dir.name)
            if self._plan.endpoints is not None:
                remove_dead(self._plan.endpoints)
        except OSError as error:
            log.warning("cannot announce the address of the metrics endpoint: %s", error)
