"""A session decides as the scheduler does, refuses facts that cannot be true, and continues after its program died."""

import gc
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from session_loop import LIMITS, Loop, made, require_sound

import engine
from engine.cli import main
from engine.commands import (
    Command,
    DrawPrompts,
    ParkGroup,
    PublishWeights,
    SaveCheckpoint,
    StageWeights,
    StartGroup,
    StartProcess,
    TrainStep,
)
from engine.errors import ConfigError, PolicyError, RecordHeld, RunFinished
from engine.events import (
    EVENTS,
    Event,
    GroupFailed,
    OrderDone,
    OrderProgressed,
    PrefixStored,
    ReplicasWanted,
    RunStarted,
    StepFailed,
    StepTrained,
    StopRequested,
    TimerFired,
    WeightsStaged,
    stamp,
)
from engine.policies import registry
from engine.policies.registry import register
from engine.record.segment_log import SUFFIX
from engine.runtime.local import Session, answer
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import ValidationLimits
from engine.states.orders import RELATIONS
from engine.states.timeouts import Timeouts
from tests.core.core_rig import require_same_state, state_of


def test_a_loop_that_answers_every_order_reaches_the_end() -> None:
    loop = made(replicas=2)
    loop.finish()
    assert loop.session.outcome is not None and loop.session.outcome.outcome == "finished"
    assert loop.session.view.steps_trained == 4 and loop.session.open_orders == () and loop.session.waits() == []
    assert max(max(order.staleness) for order in loop.orders if isinstance(order, TrainStep)) <= 1
    require_sound(loop.session)


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("oooooofltt")), min_size=15, max_size=80),
    seed=st.integers(0),
)
def test_it_decides_as_the_scheduler_does(choices: list[tuple[int, str]], seed: int) -> None:
    loop = made(replicas=2)
    twin = Scheduler(replace(LIMITS, run_restarts=0))
    events = 0

    def same(fact: Event, orders: tuple[Command, ...]) -> None:
        nonlocal events
        fact = structs.replace(fact)
        stamp(fact, events, loop.now)
        events += 1
        wanted = twin.tick((fact,))
        assert orders == tuple(order for order in wanted if type(order).__name__ not in ("SetTimer", "CancelTimer"))
        require_same_state(loop.session._scheduler, twin)

    same(RunStarted(replicas=2), tuple(loop.orders))
    for index, how in choices:
        if loop.session.outcome is not None:
            break
        orders, due = loop.session.open_orders, loop.session.next_due()
        if how == "t" and due is not None:
            loop.now += due.in_s
            fact: Event = due.fact
            loop.now -= 1.0
        elif how == "l" and loop.facts:
            fact = loop.facts[index % len(loop.facts)]
            if isinstance(fact, TimerFired):
                continue
        else:
            fact = loop.fact_for(orders[index % len(orders)], fails=how == "f")
        same(fact, loop.tell(fact))
    require_sound(loop.session)


NUMBERS = st.integers(-2, 6)
TEXTS = st.sampled_from(["", "replica", "trainer", "data", "run.max_steps", "3", "nonsense"])
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS, float: st.sampled_from([-1.0, 0.0, 0.5, float("nan")]), bool: st.booleans(), str: TEXTS,
    tuple[int, ...]: st.lists(NUMBERS, max_size=3).map(tuple),
    tuple[float, ...]: st.lists(st.floats(0, 1), max_size=3).map(tuple),
}  # fmt: skip


@st.composite
def any_fact(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(EVENTS))
    hints = get_type_hints(kind)
    return kind(**{f.name: draw(VALUES[hints[f.name]]) for f in structs.fields(kind) if f.name not in ("id", "at")})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=st.integers(0, 40), facts=st.lists(any_fact(), min_size=5, max_size=30))
def test_no_fact_breaks_it(before: int, facts: list[Event]) -> None:
    loop = made()
    for _ in range(before):
        if loop.session.open_orders:
            loop.tell(loop.fact_for(loop.session.open_orders[-1]))
    for fact in facts:
        seen = state_of(loop.session._scheduler), loop.session.open_orders
        try:
            loop.tell(fact)
        except engine.IllegalFact as error:
            assert type(fact).__name__ in str(error)
            assert seen == (state_of(loop.session._scheduler), loop.session.open_orders), "it changed something"
    require_sound(loop.session)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(0, 90), cut=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_it_continues_from_wherever_its_program_died(
    steps: int, cut: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance, directory = random.Random(seed), tmp_path_factory.mktemp("run") / "mine"
    loop = made(directory=directory, replicas=2, snapshot_every=20)
    begun = next(directory.glob(f"schedule/*{SUFFIX}")).stat().st_size
    for _ in range(steps):
        if loop.session.outcome is None:
            loop.tell(loop.fact_for(chance.choice(loop.session.open_orders), fails=chance.random() < 0.1))
    killed = shutil.copytree(directory, directory.with_name("killed"))  # before anything is closed
    newest = max(killed.glob(f"schedule/*{SUFFIX}"))
    with newest.open("rb+") as file:
        if loop.session.outcome is None:
            file.truncate(max(begun, newest.stat().st_size - cut))
    loop.session.close()
    directory = killed
    if loop.session.outcome is not None and loop.session.outcome.outcome == "finished":
        with pytest.raises(RunFinished, match="resume it with a larger max_steps"):
            Session.resume(directory)
        again = Loop(Session.resume, directory=directory, max_steps=6)
    else:
        again = Loop(Session.resume, directory=directory)
    assert again.session.steps <= loop.session.view.steps_trained
    assert again.session.events >= 1
    again.finish()
    outcome = again.session.outcome
    assert outcome is not None and outcome.outcome == "finished", outcome
    require_sound(again.session)
    again.session.close()
    assert main(["replay", str(directory)]) == 0


def test_a_resume_begins_at_a_checkpoint_that_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = made(directory=tmp_path)
    loop.tell(loop.fact_for(loop.first(SaveCheckpoint)))
    loop.first(TrainStep)
    with pytest.raises(RecordHeld):
        Session.resume(tmp_path)
    loop.session.close()
    assert main(["waits", str(tmp_path)]) == 0
    assert "the trainer has been training step 1 on 2 groups" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"steps 3 is not .* reported as saved; use one of 0, 1"):
        Session.resume(tmp_path, steps=3)
    with Session.resume(tmp_path) as session:
        assert session.steps == 1
        assert {type(order) for order in session.begin()} >= {StartProcess, PublishWeights}
    with Session.resume(tmp_path, steps=0, replicas=2) as session:
        assert session.steps == 0
        assert [order.index for order in session.begin() if isinstance(order, StartProcess)] == [0, 1]
    with pytest.raises(ConfigError, match=r"already has a record; continue it with engine.Session.resume"):
        Session(LIMITS, directory=tmp_path)
    with pytest.raises(ConfigError, match="nothing to resume"):
        Session.resume(tmp_path / "other")


def test_the_facts_before_a_refused_one_count() -> None:
    loop = made()
    up = loop.fact_for(loop.first(StartProcess))
    drawn = loop.fact_for(loop.first(DrawPrompts))
    with pytest.raises(engine.IllegalFact, match="no group 50") as caught:
        loop.tell(up, drawn, GroupFailed(group=50, attempt=1, replica=0, incarnation=1, cause="data", reason=""))
    assert [type(order) for order in caught.value.orders] == [StartGroup] * 4


def test_facts_of_one_report_are_one_tick() -> None:
    loop = made()
    loop.tell(loop.fact_for(loop.first(StartProcess)), loop.fact_for(loop.first(DrawPrompts)))
    starts = [order for order in loop.session.open_orders if isinstance(order, StartGroup)]
    loop.tell(*(loop.fact_for(order) for order in starts))
    assert [len(tick.events) for tick in loop.session.record.ticks()] == [1, 2, len(starts)]
    require_sound(loop.session)


@pytest.mark.parametrize("kind", [StageWeights, DrawPrompts])
def test_a_late_fact_is_recorded_and_not_held_against_the_order_that_followed(kind: type[Command]) -> None:
    loop = made()
    order = loop.first(kind)
    fact = loop.fact_for(order)
    loop.tell(fact)
    while (later := loop.first(kind)) == order:
        loop.tell(loop.fact_for(later))
    events = loop.session.events
    assert loop.tell(fact) == () and later in loop.session.open_orders
    assert loop.session.events == events + 1
    require_sound(loop.session)


def test_answers_are_made_from_orders() -> None:
    loop = made()
    order = loop.first(TrainStep)
    assert answer(order, StepTrained, updates=2) == StepTrained(step=0, attempt=1, updates=2)
    with pytest.raises(engine.IllegalFact, match="WeightsStaged does not answer TrainStep; use StepTrained or StepFa"):
        answer(order, WeightsStaged)
    with pytest.raises(engine.IllegalFact, match="StepFailed lacks reason; give each as a keyword"):
        answer(order, StepFailed)
    with pytest.raises(engine.IllegalFact, match=r"StepTrained has no field update; it has .*; did you mean updates"):
        answer(order, StepTrained, update=1)
    loop.finish()
    with pytest.raises(engine.IllegalFact, match="needs no answer"):
        answer(loop.orders[-1], OrderDone)


def test_timers_are_reported_when_they_are_due() -> None:
    limits = replace(LIMITS, timeouts=Timeouts.every(None, group_s=60.0, cut_s=5.0))
    loop = made(limits)
    loop.first(TrainStep)
    while loop.session.open_orders[0] is not (order := loop.first(StartGroup)):
        loop.tell(loop.fact_for(loop.session.open_orders[0]))
    due = loop.session.next_due()
    assert due is not None and 0 < due.in_s <= 60.0
    with pytest.raises(engine.IllegalFact, match=r"it is due in .* s; ask next_due"):
        loop.session.report(due.fact)
    assert loop.session.report_due() == ()
    began = loop.session._scheduler.state.orders.find("group", order.group).at  # type: ignore[union-attr]
    asked: tuple[Command, ...] = ()
    while not any(isinstance(one, ParkGroup) for one in asked):
        loop.now += loop.session.next_due().in_s  # type: ignore[union-attr]
        asked = loop.session.report_due()
    assert 60.0 <= loop.now - began <= 60.0 + 60.0 / 20, "the limit is checked every 3 s"
    assert [one.group for one in asked if isinstance(one, ParkGroup)][:1] == [order.group]
    require_sound(loop.session)


def test_it_must_begin_once_and_before_it_is_closed() -> None:
    session = Session(LIMITS)
    with pytest.raises(engine.IllegalFact, match=r"call begin\(\) first"):
        session.report(StopRequested(reason="x"))
    session.begin()
    with pytest.raises(engine.IllegalFact, match=r"call begin\(\) once"):
        session.begin()
    assert [type(order).__name__ for order in session.report(StopRequested(reason="x"))] == ["FinishRun"]
    assert session.outcome is not None and session.outcome.outcome == "stopped"
    session.close()
    with pytest.raises(engine.IllegalFact, match="the session is closed"):
        session.report(StopRequested(reason="x"))


AddPolicy = Callable[[str, type], dict[str, str]]


@pytest.fixture
def add_policy(monkeypatch: pytest.MonkeyPatch) -> AddPolicy:
    """Registers a policy for one test; returns the names of the policies."""

    def add(decision: str, policy: type) -> dict[str, str]:
        monkeypatch.setitem(registry._REGISTERED, decision, {**registry._REGISTERED[decision]})
        register(decision, "session-broken")(policy)
        return {decision: "session-broken"}

    return add


class Broken:
    def select(self, view: Any, size: int) -> Any:
        raise ValueError("no idea")


def test_a_policy_that_raises_leaves_the_session_as_it_was(tmp_path: Path, add_policy: AddPolicy) -> None:
    names = add_policy("batching", Broken)
    loop = made(policies=names, directory=tmp_path)
    with pytest.raises(PolicyError, match="no idea"):
        loop.first(TrainStep)
    events = loop.session.events
    with pytest.raises(PolicyError, match="no idea"):
        loop.tell(loop.fact_for(loop.first(StartGroup)))
    assert loop.session.events == events
    require_sound(loop.session)


class BrokenAt:
    """Raises when it judges group 1."""

    def keep(self, view: Any, group: Any) -> bool:
        if group.group == 1:
            raise RuntimeError("no idea about group 1")
        return True


def test_the_error_of_a_policy_has_the_orders_of_the_facts_before_it(add_policy: AddPolicy) -> None:
    names = add_policy("filter", BrokenAt)
    loop = made(policies=names)
    loop.first(StartGroup)
    started = {order.group: order for order in loop.session.open_orders if isinstance(order, StartGroup)}
    with pytest.raises(PolicyError, match="no idea") as raised:
        loop.tell(*(loop.fact_for(started[group]) for group in (0, 2, 1)))
    (trained,) = [order for order in raised.value.orders if isinstance(order, TrainStep)]
    assert set(trained.groups) == {0, 2} and trained in loop.session.open_orders


class BrokenOnce:
    broken: ClassVar[bool] = False

    def admit(self, view: Any, legal: int) -> int:
        if BrokenOnce.broken:
            BrokenOnce.broken = False
            raise RuntimeError("broken today")
        return legal


def test_a_beginning_that_a_policy_prevented_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add_policy: AddPolicy
) -> None:
    names = add_policy("admission", BrokenOnce)
    loop = made(policies=names, directory=tmp_path)
    loop.first(StartGroup)
    loop.tell(StopRequested(reason="enough"))
    loop.session.close()
    session = Session.resume(tmp_path)
    monkeypatch.setattr(BrokenOnce, "broken", True)
    with pytest.raises(PolicyError, match="broken today"):
        session.begin()
    assert any(isinstance(order, StartProcess) for order in session.begin())
    require_sound(session)


def test_a_start_names_the_fact_that_made_room_for_it() -> None:
    """Not another fact of the same tick about the same replica, and no stale echo."""
    limits = replace(LIMITS, max_staleness_steps=3, max_concurrent_groups=6)  # six groups, and four slots
    loop = made(limits, replicas=1)
    loop.first(StartGroup)
    started = [order for order in loop.session.open_orders if isinstance(order, StartGroup)]
    ended, stored = (
        loop.fact_for(started[0]),
        answer(started[1], PrefixStored, tokens=1, oldest_version=0, newest_version=0, unfinished=1),
    )
    number = loop.session.events
    starts = [order for order in loop.tell(stored, ended, ended) if isinstance(order, StartGroup)]
    assert starts and {order.cause for order in starts} == {number + 1}


def test_a_session_takes_reports_of_progress_and_ignores_late_ones() -> None:
    loop = made(replicas=1)
    order = loop.first(TrainStep)
    progress = answer(order, OrderProgressed)
    assert progress == OrderProgressed(order=order.number)
    loop.tell(progress)
    assert order in loop.session.open_orders
    loop.tell(loop.fact_for(order))
    assert loop.tell(structs.replace(progress)) == ()
    require_sound(loop.session)


def test_its_limits_may_come_from_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {make: arithmetic}\nrun: {max_steps: 3}\nrollout: {replicas: 2}\n", encoding="utf-8")
    with Session(file) as session:
        assert session.limits.max_steps == 3
        assert sum(isinstance(order, StartProcess) for order in session.begin()) == 2
    with pytest.raises(ConfigError, match=r"must be engine\.Limits, a configuration or the path"):
        Session({"train_batch_size": 4})  # type: ignore[arg-type]


def test_the_reference_names_every_order() -> None:
    page = (Path(engine.__file__).parents[1] / "docs" / "SESSION.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for command, relation in RELATIONS.items():
        if command.__name__ == "SetTimer":
            continue
        row = next((row for row in rows if f"`{command.__name__}" in row.split("|")[1]), None)
        assert row is not None, f"{command.__name__} is not in the table"
        assert all(f"`{event.__name__}" in row for event in relation.answers), row


def test_a_session_that_is_dropped_does_not_hold_its_record(tmp_path: Path) -> None:
    session = Session(LIMITS, directory=tmp_path)
    session.begin()
    with pytest.raises(RecordHeld, match="another session of this process that is not closed"):
        Session.resume(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the file was not closed either
        del session
        gc.collect()
    Session.resume(tmp_path).close()


def test_a_second_thread_is_refused_by_name(tmp_path: Path) -> None:
    loop = made(directory=tmp_path)
    first = loop.fact_for(loop.session.open_orders[0])
    uses: list[Callable[[], Any]] = [
        lambda: loop.session.report(first), loop.session.begin, loop.session.report_due, loop.session.next_due,
        loop.session.waits, loop.session.close, lambda: loop.session.open_orders, lambda: loop.session.record,
        lambda: loop.session.view,
    ]  # fmt: skip
    here = threading.current_thread().name
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as other:
        for use in uses:
            with pytest.raises(engine.IllegalFact, match=f"belongs to the thread '{here}', .*; this is 'trainer_0'"):
                other.submit(use).result()
    loop.finish()
    require_sound(loop.session)


def test_a_thread_may_use_the_session_of_one_that_has_ended() -> None:
    session = Session(LIMITS)
    with ThreadPoolExecutor(1) as other:
        other.submit(session.begin).result()
        with pytest.raises(engine.IllegalFact, match="belongs to the thread"):
            session.close()
    session.report(StopRequested(reason="x"))
    session.close()


VALIDATED = replace(LIMITS, validation=ValidationLimits(rows=4, replicas=2, own_from=3))
"""Replicas 3 and 4 do nothing but validate."""


def started(orders: Iterable[Command]) -> list[int]:
    return [order.index for order in orders if isinstance(order, StartProcess) and order.kind == "replica"]


@pytest.mark.parametrize(("replicas", "expected"), [(None, [0, 1, 3, 4]), (1, [0, 3, 4]), (3, [0, 1, 2, 3, 4])])
def test_a_resume_starts_the_replicas_wanted_last_and_the_validators(
    tmp_path: Path, replicas: int | None, expected: list[int]
) -> None:
    with Session(VALIDATED, directory=tmp_path, replicas=3) as session:
        assert started(session.begin()) == [0, 1, 2, 3, 4]
        session.report(ReplicasWanted(replicas=2))
    with Session.resume(tmp_path, replicas=replicas) as session:
        assert started(session.begin()) == expected
        require_sound(session)


@pytest.mark.parametrize("replicas", [0, -1, 4097])
def test_a_resume_needs_replicas_that_it_can_start(tmp_path: Path, replicas: int) -> None:
    with Session(LIMITS, directory=tmp_path) as session:
        session.begin()
    with pytest.raises(ConfigError, match=f"replicas is {replicas}, but must be"):
        Session.resume(tmp_path, replicas=replicas)


def test_replicas_that_only_validate_come_after_those_that_generate(tmp_path: Path) -> None:
    for replicas in (2, 4):
        with pytest.raises(ConfigError, match=rf"validation.own_from is 3, but must be {replicas}"):
            Session(VALIDATED, replicas=replicas)
    with Session(VALIDATED, directory=tmp_path, replicas=3) as session:
        session.begin()
    with pytest.raises(ConfigError, match="replicas is 4, but must be at most 3"):
        Session.resume(tmp_path, replicas=4)
