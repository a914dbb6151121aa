"""Tests custom policies and states before the real run: everything that can happen happens in small runs, in any order.

Called by `engine check` and `engine.testing`. It looks for a run in which a policy breaks a law, raises, deadlocks, or
decides differently on replay or after a resume, and writes its record for `engine debug`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ConfigError, reason_of
from engine.policies import PolicySet
from engine.simulation.order_answers import GivenPrompts
from engine.simulation.small_run import NO_CONFIG, SmallRun
from engine.states.laws import require
from engine.states.limits import ROUNDING, Limits
from engine.states.timeouts import Timeouts

RUNS = 100
"""Number of simulated runs of `engine check`."""
FIGURES_ONLY = GivenPrompts()


def prove(
    limits: Limits, policies: Mapping[str, str], runs: int = RUNS, source: GivenPrompts = FIGURES_ONLY,
    config: Mapping[str, Any] = NO_CONFIG,
) -> int:  # fmt: skip
    """Make small runs with these policies. Returns their number. `source`: its sizes are not used. `config`: for the
    header of a record.

    Raises: `ConfigError` with the first finding, the law, and the directory of its record.
    """
    from engine.simulation.any_order import TICK_SIZES, shortest_failure  # imports Hypothesis

    def begin(batch: int, staleness: int, prompts: int, slots: int, **sizes: int) -> SmallRun:
        given = replace(source, prompts=prompts, slots=slots)
        small = scaled_down(limits, batch, staleness)
        return SmallRun(small, PolicySet.from_names(policies), given, config=config, **sizes)

    calm = (begin(4, 3, 24, 2, replicas=2, together=together) for together in dict.fromkeys(TICK_SIZES))
    failure = next((found for run in calm if (found := _calm_failure(run))), None) or shortest_failure(begin, runs)
    if failure is None:
        return runs
    error, run = failure
    chosen = PolicySet.from_names(policies).custom
    custom = ", ".join([*chosen, *(state.name for state in limits.added_states)])
    field = "scheduler.policies" if chosen or not limits.added_states else "scheduler.states"
    law = f"fails in a simulated run with {run.limits.train_batch_size} groups per step: {reason_of(error)}"
    fix = "correct it: docs/EXTENDING.md says what it may answer"
    command = f"engine debug {run.write()}{' --extensions' if config else ''}"
    raise ConfigError(field, custom or "built-in", law, f"{fix}; `{command}` shows the run")


def _calm_failure(run: SmallRun) -> tuple[Exception, SmallRun] | None:
    """Why a run without any fault does not finish, also if a restored scheduler decides, too."""
    try:
        for _ in range(20):
            if run.driver.outcome is None:
                run.advance()
        if run.driver.outcome is None:
            run.restore_twin()
        outcome = run.complete()
        filtered = run.state.ending.filtered_in_a_row > 0  # simulated rewards say nothing about real ones
        require(outcome.outcome == "finished" or filtered, "law 7: it does not finish", reason=outcome.reason)
    except Exception as error:
        return error, run
    return None


def scaled_down(limits: Limits, batch: int = 4, staleness: int = 3) -> Limits:
    """The same limits, scaled down: at most `batch` groups per step and this staleness, with the same ratios if the
    laws allow them. Removes the time limits, because they apply to real durations."""
    batch, staleness = min(limits.train_batch_size, batch), min(limits.max_staleness_steps, staleness)
    every = min(limits.sync_every, staleness + 1)
    ratio = limits.async_ratio
    share = limits.max_concurrent_groups / limits.train_batch_size
    figures: dict[str, Any] = {
        "train_batch_size": batch,
        "max_staleness_steps": staleness,
        "sync_every": every,
        "async_ratio": None if ratio is None else min(max(ratio, every - 1), staleness),
        "over_sample": min(limits.over_sample, 2.0),
        "max_steps": min(limits.max_steps or 6, 6),
        "added_states": tuple(replace(s, concurrency=min(s.concurrency, 3)) for s in limits.added_states),
        "pools": (),
        "validation": None,
        "timeouts": Timeouts.every(None),
    }
    if limits.validation is not None:
        own = 2 if limits.validation.own else None
        rows, replicas = min(limits.validation.rows, 12), min(limits.validation.replicas, 2)
        figures["validation"] = replace(limits.validation, rows=rows, sets=(), replicas=replicas, own_from=own)
    most = replace(limits, **figures, max_concurrent_groups=batch)
    workers = min(max(batch, int(share * batch + ROUNDING)), most.ahead + most.surplus)
    return replace(most, max_concurrent_groups=workers)
