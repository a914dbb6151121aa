"""How vLLM gives its memory back while another task of the pool uses the GPU, and takes it again.

Base of `rollout.vllm.VllmBackend`. Sleep mode is vLLM's own and needs a GPU and `engine_args.enable_sleep_mode`;
without it the engine keeps its memory and forgets its cache only. (What calls vLLM's sleep mode is tested with a GPU
only.)
"""

from collections.abc import Coroutine
from typing import Any

from engine.errors import EngineError
from engine.rollout.remote import RemoteEngine


class SleepingEngine(RemoteEngine):
    """Part of a `RolloutBackend`, and all of a `roles.Sleeper`, over `_engine` and `_control` of its subclass."""

    _engine: Any

    def __init__(self, sleep_mode: bool) -> None:
        super().__init__()
        self._sleep_mode = sleep_mode

    async def _control(self, call: Coroutine[Any, Any, Any], timeout_s: float = 0.0) -> Any:
        raise NotImplementedError

    async def sleep(self) -> None:
        """Level 1: weights move to host memory, keys and values go."""
        self._check_open()
        if not self._frozen:
            raise EngineError("vLLM can sleep only when paused")
        if self._sleep_mode:
            await self._control(self._engine.sleep(level=1))
        else:
            await self._control(self._engine.reset_prefix_cache())

    async def wake(self) -> None:
        """The weights it had are back; vLLM's own waking lets it sample again, and nothing may be yet."""
        self._check_open()
        if self._sleep_mode:
            if not await self._control(self._engine.wake_up()):
                raise EngineError("vLLM woke up only partly")
            await self._control(self._engine.pause_generation(mode="keep", clear_cache=False))
