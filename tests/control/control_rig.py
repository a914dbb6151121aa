"""A run on a virtual clock that takes orders over real HTTP, its server on a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steady_world import SteadyWorld, steady_world

from engine.control.address_file import ControlPlace, announce, new_token
from engine.control.control_server import ControlServer
from engine.control.requests import Operation, decide
from engine.errors import ConfigError
from engine.events import Event


class Rig:
    """`events` were decided on; nothing is delivered. `break_with`: raised by the next operations."""

    def __init__(self, run_dir: Path, most_replicas: int = 8, **world: Any) -> None:
        (run_dir / "schedule").mkdir(parents=True)
        self.run_dir = run_dir
        self.world: SteadyWorld = steady_world(batch=4, stale=2, workers=12, steps=None, replicas=2, slots=6, **world)
        self.world.until(lambda state: state.groups.ledger.running == 12)
        self.events: list[Event] = []
        self.break_with: ConfigError | None = None
        self._most = most_replicas
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = ControlServer(new_token(), self.carry_out)
        self.place: ControlPlace = self._await(lambda: self.server.start("127.0.0.1", 0))
        announce(run_dir, self.place)

    def carry_out(self, asked: Operation) -> dict[str, Any]:
        if self.break_with is not None:
            raise self.break_with
        self.events += decide(asked, self.world.scheduler, self._most)
        return {"done": f"did {asked.operation}", "waits": [], "outcome": None}

    def close(self) -> None:
        self._await(self.server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, begin: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(begin(), self._loop).result(30)
