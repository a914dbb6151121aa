"""A house rule: whatever the state holds has a plain form, so that no run continues without snapshots of it.

Said by the driver, where a state of somebody's own breaks it.
"""

import logging
from typing import Any

import pytest

from engine.events import RunStarted
from engine.record import Header, MemoryRecorder, read
from engine.record.snapshots import declarations, snapshot
from engine.runtime.driver import Driver
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import REWARDING, AddedState, Limits, Pool, ValidationLimits

ALL = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, scoring_tasks=("ref_logprobs",),
    added_states=(AddedState(name=REWARDING, concurrency=1),), validation=ValidationLimits(rows=1),
    pools=(Pool(tasks=("rollout", "train"), replicas=(0,)),),
)  # fmt: skip


def test_every_class_of_the_tree_is_declared_once() -> None:
    names = [name for name, *_ in declarations()]
    assert len({*names}) == len(names) and {"RunFacts", "Group", "Replica", "Process", "Step", "Order"} <= {*names}
    assert snapshot(Scheduler(ALL))
    assert not [
        (name, field) for name, *fields in declarations() for field in fields if "Any" in field or "object" in field
    ]


class Nothing:
    """A clock that stands still, and an executor that does nothing."""

    def now(self) -> float:
        return 0.0

    def execute(self, commands: Any) -> None:
        return None


def test_a_run_whose_state_has_no_plain_form_says_once_that_snapshots_are_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler(ALL)
    scheduler.state.ending.last_failure = object()  # type: ignore[assignment]
    recorder, nothing = MemoryRecorder(Header(run="set", limits=ALL.to_plain())), Nothing()
    driver = Driver(scheduler, nothing, recorder, nothing, snapshot_every=1)
    with caplog.at_level(logging.WARNING, logger="engine"):
        driver.deliver(RunStarted())
        driver.deliver(RunStarted())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "snapshots are off" in line and "is of type object" in line
    assert driver.events_handled == 2 and not list(read(recorder).snapshots())
