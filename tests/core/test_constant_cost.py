"""What a policy may cost: the same for each event, however many groups are live."""

import sys
from typing import Any

from engine.events import stamp
from tests.core.scripted import Scripted


def count_calls(run: Scripted, event: Any) -> int:
    """Calls of Python functions that the scheduler makes to handle an event."""
    count = 0

    def note(frame: Any, kind: str, argument: Any) -> None:
        nonlocal count
        count += kind == "call"

    stamp(event, run.events, run.clock)
    sys.setprofile(note)
    try:
        run.scheduler.tick((event,))
    finally:
        sys.setprofile(None)
    return count


def test_strict_order_behind_a_hanging_group_costs_the_same_however_many_are_ready() -> None:
    costs = []
    for ready in (10, 100):
        figures = {"train_batch_size": 2, "max_staleness_steps": 60, "max_concurrent_groups": 120}
        run = Scripted(slots=120, policies={"batching": "strict-order"}, **figures)
        run.finish(*range(1, 1 + ready))
        costs.append(count_calls(run, run.generated(1 + ready)))
    assert costs[0] == costs[1]
