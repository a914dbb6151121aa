"""Calls the work of each added state once before a run: `backend_rehearsal` calls it for `engine check`.

As in a run, the work gets a group, a batch or weights. A state of train steps may refuse them, because they are
synthetic. This module must never wait for work that does not end.
"""

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

from engine.config import Config
from engine.errors import ConfigError, EngineError, describe_error, message_of, place_of
from engine.policies.state_registry import METHODS, STEP_METHODS, added_states, work_of
from engine.protocols import Batch, PublishedWeights
from engine.states.limits import PUBLISHING, QUEUED, SCORING
from engine.trajectory import TrajectoryGroup
from engine.workers.added_states import check_inspected, check_prepared, check_worked
from engine.workers.threads import on_a_thread

LONGEST_S = 120.0
"""Maximum seconds for the work of one state."""


def rehearse_states(config: Config, group: TrajectoryGroup, weights: Any) -> Iterator[str]:
    """Lines like those of `check_inputs`. `weights`: as a trainer returns them.

    Raises: `ConfigError` for work that raises, does not end, or returns what a run would refuse.
    """
    for added in added_states(config.scheduler.states):
        work, name = work_of(added.name), added.name
        if work is None:
            continue
        given: Any = replace(group, trajectories=[]) if added.place == QUEUED else group
        if added.place == SCORING:
            given = Batch(step=0, groups=[group], staleness=[0])
        elif added.place == PUBLISHING:
            given = PublishedWeights(version=1, steps=1, weights=weights)
        refused = _called(config, name, work, given)
        if isinstance(refused, str):
            subject = "weights of zeros" if added.place == PUBLISHING else "a batch of one group"
            yield f"note: state {name} refuses {subject}: {refused}"
        else:
            yield f"ok: state {name} does its work"


def _called(config: Config, name: str, work: Any, given: Any) -> Any:
    """What the work returned, checked as in a run."""
    longest_s = min(LONGEST_S, config.scheduler.state_timeout_s)

    async def bounded() -> Any:
        async with asyncio.timeout(longest_s):
            return await on_a_thread(lambda: asyncio.run(work(copied)))

    of_group = isinstance(given, TrajectoryGroup)
    copied = deepcopy(given) if not isinstance(given, PublishedWeights) else given
    fix = f"define {(METHODS if of_group else STEP_METHODS)['work']}"
    try:
        found = asyncio.run(bounded())
        if not of_group:
            check_inspected(name, found)
        elif given.trajectories:
            check_worked(name, given, found)
        else:
            check_prepared(name, given, found)
        return found
    except TimeoutError as error:
        law = f"its work has not ended after {longest_s:g} s (scheduler.state_timeout_s)"
        raise ConfigError("scheduler.states", name, law, fix) from error
    except Exception as error:  # the user's work can raise anything
        shown = message_of(error) + place_of(error) if isinstance(error, EngineError) else describe_error(error)
        raise ConfigError("scheduler.states", name, f"its work failed: {shown}", fix) from error
