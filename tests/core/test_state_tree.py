"""Records of the state tree note their own changes, and the hash covers what they declare."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.events import PromptsDrawn, RunStarted, stamp
from engine.scheduling.scheduler import Scheduler
from engine.states.laws import check_all
from engine.states.limits import Limits, ValidationLimits
from engine.states.state import State
from engine.states.tree import Record, declared, digest_of, hashed_values

LIMITS = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, checkpoint_every=1,
    validation=ValidationLimits(rows=4),
)  # fmt: skip
OTHER: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value + 1,
    float: lambda value: value + 0.5,
    bool: lambda value: not value,
    str: lambda value: f"{value}?",
    type(None): lambda value: 7,
    list: lambda value: [*value, 7],
    dict: lambda value: {**value, "7": 7},
    tuple: lambda value: (*value, 7),
}


def begun() -> State:
    """A state with a record of nearly every kind."""
    scheduler = Scheduler(LIMITS)
    (draw,) = [order for order in tell(scheduler, 0, RunStarted(replicas=2)) if hasattr(order, "count")]
    tell(scheduler, 1, PromptsDrawn(first=0, count=draw.count, exhausted=False, number=draw.number))
    return scheduler.state


def tell(scheduler: Scheduler, id: int, event: Any) -> Any:
    stamp(event, id, float(id))
    return scheduler.handle(event)


def hashed_fields(record: Any) -> list[str]:
    return [name for name in declared(type(record)) if name not in record.UNHASHED]


def test_every_record_notes_every_change_of_a_hashed_field() -> None:
    kinds = set()
    for place in range(len(records(begun()))):
        for name in hashed_fields(records(begun())[place]):
            state = begun()
            record, before = records(state)[place], state.hash
            state.changed = False
            value = getattr(record, name)
            setattr(record, name, OTHER[type(value)](value))
            assert state.hash != before and state.hash == state.hashed.from_scratch(), (record, name)
            assert state.changed, (record, name)
            kinds.add(type(record).__name__)
    assert kinds >= {
        "Step",
        "PoolLease",
        "WeightsVersion",
        "Validations",
        "Checkpoints",
        "Clocks",
        "Process",
        "Replica",
    }


def records(state: State) -> list[Record]:
    return [*state.small_records(), *state.fleet.replicas.values(), *(r.process for r in state.fleet.replicas.values())]


def test_an_update_of_a_group_is_noted_and_a_bare_assignment_is_found() -> None:
    state = begun()
    group = state.groups[0]
    group.attempt = 1
    with pytest.raises(Exception, match="law 8"):
        check_all(state)
    before = state.hash
    state.update(group, tokens=5)
    state.settle()
    assert state.hash != before
    check_all(state)


def test_each_hashed_field_of_a_group_counts() -> None:
    group = begun().groups[0]
    for name, value in zip(declared(type(group)), hashed_values(group), strict=True):
        before = digest_of(group)
        setattr(group, name, OTHER[type(value)](value))
        assert digest_of(group) != before, name
