"""A house rule: whatever the state holds has a plain form, so that no run goes on without snapshots of it.

Read off the annotations, since a field that is None or empty in one run holds something in another; and said by the
driver, where a state of somebody's own breaks it.
"""

import ast
import inspect
import logging
import sys
import textwrap
from collections import deque
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest

from engine.driver import Driver
from engine.events import RunStarted
from engine.schedule import Header, MemoryRecorder, read
from engine.schedule.snapshots import GROUP_FIELDS, PARTS, SAMPLES, SCALARS, _fields, _plain
from engine.scheduler import Scheduler
from engine.states.group import Group
from engine.states.limits import REWARDING, AddedState, Limits, Pool, ValidationLimits

ALL = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, scoring_tasks=("ref_logprobs",),
    added_states=(AddedState(name=REWARDING, concurrency=1),), validation=ValidationLimits(rows=1),
    pools=(Pool(tasks=("rollout", "train"), replicas=(0,)),),
)  # fmt: skip
PLAIN = {*SCALARS, bytes, None, ...}
HOLDERS = {list, tuple, deque, dict, Union, UnionType}


def things() -> list[Any]:
    """One of everything that a snapshot is made of."""
    scheduler = Scheduler(ALL)
    state = scheduler.state
    parts = [
        state, state.pools, *state.pools.leases, state.stages, *state.stages.by_name.values(), state.fleet,
        state.ledger, state.deadlines, state.validations, state.ended, state.kept, state.checkpoints,
        state.live, state.clocks,
    ]  # fmt: skip
    assert {type(part) for part in parts} == {*PARTS}
    return [*parts, *SAMPLES.values(), Group(0)]


def annotations(cls: type[Any]) -> dict[str, Any]:
    """Of the attributes of a class that its methods declare."""
    found = {}
    names = vars(sys.modules[cls.__module__])
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            declared = eval(ast.unparse(node.annotation), names)
            found[node.target.attr] = eval(declared, names) if isinstance(declared, str) else declared
    return found


def without_a_form(kind: Any) -> Iterator[Any]:
    """What of a type a snapshot cannot say."""
    if get_origin(kind) in HOLDERS:
        for part in get_args(kind):
            yield from without_a_form(part)
    elif kind not in PLAIN and kind not in PARTS and getattr(kind, "__name__", "") not in SAMPLES:
        yield kind


@pytest.mark.parametrize("thing", things(), ids=lambda thing: type(thing).__name__)
def test_every_field_has_a_plain_form(thing: Any) -> None:
    declared = annotations(type(thing))
    for field in GROUP_FIELDS if type(thing) is Group else _fields(thing):
        where = f"{type(thing).__name__}.{field}"
        if field in declared:
            assert not [*without_a_form(declared[field])], f"{where}: a snapshot cannot hold {declared[field]}"
        _plain(getattr(thing, field), where)


def test_a_field_without_one_is_noticed() -> None:
    for kind in (set[int], dict[int, frozenset[int]], tuple[Limits, ...], list[int] | object, Any):
        assert [*without_a_form(kind)], kind
    assert not [*without_a_form(dict[int, tuple[str, bool]] | None)]


class Nothing:
    """A clock that stands still, and an executor that does nothing."""

    def now(self) -> float:
        return 0.0

    def execute(self, commands: Any) -> None:
        return None


def test_a_run_whose_state_has_no_plain_form_says_once_that_it_goes_without_snapshots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler(ALL)
    scheduler.state.added_later = {1, 2}  # type: ignore[attr-defined]
    recorder, nothing = MemoryRecorder(Header(run="set", limits=ALL.to_plain())), Nothing()
    driver = Driver(scheduler, nothing, recorder, nothing, snapshot_every=1)
    with caplog.at_level(logging.WARNING, logger="engine"):
        driver.deliver(RunStarted())
        driver.deliver(RunStarted())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no snapshot" in line and "State.added_later" in line
    assert driver.events_handled == 2 and not list(read(recorder).snapshots())
