"""Frees vLLM's memory while another task of the pool uses the GPU, and takes it back.

Base class of `rollout.vllm.VllmBackend`. vLLM's sleep mode needs a GPU and `engine_args.enable_sleep_mode`; without it
the engine keeps its memory and only resets its cache. (Calls of vLLM's sleep mode are tested only with a GPU.)
"""

from collections.abc import Coroutine
from typing import Any

from engine.errors import EngineError
from engine.rollout.remote import RemoteEngine


class SleepingEngine(RemoteEngine):
    """The `roles.Sleeper` part of a `RolloutBackend`. Uses `_engine` and `_control` of its subclass."""

    _engine: Any

    def __init__(self, sleep_mode: bool) -> None:
        super().__init__()
        self._sleep_mode = sleep_mode

    async def _control(self, call: Coroutine[Any, Any, Any], timeout_s: float = 0.0) -> Any:
        raise NotImplementedError

    async def sleep(self) -> None:
        """Free memory (level 1): weights move to host memory, keys and values are dropped."""
        self._check_open()
        if not self._frozen:
            raise EngineError("vLLM can sleep only when paused")
        if self._sleep_mode:
            await self._control(self._engine.sleep(level=1))
        else:
            await self._control(self._engine.reset_prefix_cache())

    async def wake(self) -> None:
        """Take the memory back with the same weights. The engine stays paused, although vLLM's own wake-up would let it
        sample."""
        self._check_open()
        if self._sleep_mode:
            if not await self._control(self._engine.wake_up()):
                raise EngineError("vLLM woke up only partly")
            await self._control(self._engine.pause_generation(mode="keep", clear_cache=False))
