"""Answers validation prompts, each validation set by a generator with the sampling parameters and reward of the set.

`plans.configured_plan` makes one for each replica; all its generators share the replica's backend. Only the generator
that trains stages and installs weights, pauses and closes the backend.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import EngineError
from engine.ids import GroupId, Version
from engine.protocols import CallFigures, Generated, Generator, GroupWork, MeasuresCalls


class SetEvaluator:
    """Passes each prompt to the generator of its set. Implements `protocols.Generator`."""

    def __init__(self, generators: Mapping[str, Generator]) -> None:
        self._generators = dict(generators)

    async def generate(self, work: GroupWork) -> Generated:
        """Raises: what the set's generator raises."""
        if work.validation_set not in self._generators:
            raise EngineError(f"there is no validation set {work.validation_set!r}")
        return await self._generators[work.validation_set].generate(work)

    async def abort(self, groups: Sequence[GroupId]) -> None:
        for generator in self._generators.values():
            await generator.abort(groups)

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        for generator in self._generators.values():
            await generator.truncate(groups)

    async def pause(self, mode: str) -> None:
        await asyncio.gather(*(generator.pause(mode) for generator in self._generators.values()))

    async def stage(self, version: Version, weights: Any) -> None:
        """The generators share a backend, so one of them is enough."""
        await next(iter(self._generators.values())).stage(version, weights)

    async def install(self, version: Version) -> None:
        await next(iter(self._generators.values())).install(version)

    def call_figures(self) -> list[CallFigures]:
        """See `protocols.MeasuresCalls`."""
        return [figures for generator in self._measured() for figures in generator.call_figures()]

    def watch_calls(self, changed: Callable[[], None]) -> None:
        for generator in self._measured():
            generator.watch_calls(changed)

    def _measured(self) -> list[MeasuresCalls]:
        generators: list[object] = list(self._generators.values())
        return [generator for generator in generators if isinstance(generator, MeasuresCalls)]

    async def resume(self) -> None:
        for generator in self._generators.values():
            await generator.resume()

    async def close(self) -> None:
        for generator in self._generators.values():
            await generator.close()
