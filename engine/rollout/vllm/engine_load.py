"""What vLLM's engines do for a replica: how full their KV caches are, and which engine has the prefix of a session.

Used by `rollout.vllm.vllm_backend` on its event loop. With data parallelism one backend has several engines.
"""

from collections import OrderedDict
from typing import Any

SESSIONS_KEPT = 16_384
"""Maximum number of sessions whose engine is known; the least recently used is forgotten."""


class SessionEngines:
    """Sends all requests of a session to one engine, which has their common prefix in its cache: samples of a group
    share their prompt, and each turn of an agent continues the turns before it. vLLM would choose an engine for each
    request. A new session goes to the engine with the fewest requests."""

    def __init__(self, engines: int) -> None:
        self.requests = [0] * engines
        """Number of requests that run on each engine."""
        self._engine_of: OrderedDict[int, int] = OrderedDict()

    def enter(self, session: int | None) -> int | None:
        """The engine of a new request; None: vLLM chooses. Call `leave` with it when the request has ended."""
        if session is None or len(self.requests) == 1:
            return None
        engine = self._engine_of.pop(session, None)
        if engine is None:
            engine = self.requests.index(min(self.requests))
        self._engine_of[session] = engine
        if len(self._engine_of) > SESSIONS_KEPT:
            self._engine_of.popitem(last=False)
        self.requests[engine] += 1
        return engine

    def leave(self, engine: int | None) -> None:
        if engine is not None:
            self.requests[engine] -= 1


class CacheUse:
    """How full the KV cache of each engine is. An object of this class is one of vLLM's `stat_loggers`: vLLM calls it
    once for each engine, and calls `record` on the result with the figures of each forward pass."""

    def __init__(self) -> None:
        self._used: dict[int, float] = {}

    @property
    def used(self) -> float:
        """Share of the KV cache in use, of the fullest engine."""
        return max(self._used.values(), default=0.0)

    def __call__(self, vllm_config: Any, engine_index: int) -> "CacheUse":
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._used[engine_idx] = scheduler_stats.kv_cache_usage

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...
