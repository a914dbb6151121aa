"""A session decides as the scheduler does, takes answers from any thread, and continues after its program died."""

import gc
import pickle
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
from session_loop import LIMITS, Loop, kind_of_answer, made, require_sound

import engine
from engine.cli import main
from engine.commands import (
    CancelTimer,
    Command,
    DrawPrompts,
    ParkGroup,
    PublishWeights,
    SaveCheckpoint,
    SetTimer,
    StageWeights,
    StartGroup,
    StartProcess,
    TrainStep,
)
from engine.errors import ConfigError, PolicyError, RecordHeld, RunFinished
from engine.events import (
    EVENTS,
    Event,
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
from engine.runtime.local import Session, SessionOrder
from engine.runtime.local.session_orders import REPORTED
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


def due_at(timer: Any) -> float:
    return float(timer.at + timer.command.delay_s)


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("oooooofltt")), min_size=15, max_size=80),
    seed=st.integers(0),
)
def test_it_decides_as_the_scheduler_does(choices: list[tuple[int, str]], seed: int) -> None:
    loop = made(replicas=2)
    twin = Scheduler(replace(LIMITS, run_restarts=0))
    events = 0

    def same(event: Event, orders: tuple[SessionOrder, ...]) -> None:
        nonlocal events
        event = structs.replace(event)
        stamp(event, events, loop.now)
        events += 1
        wanted = twin.tick((event,))
        assert orders == tuple(order for order in wanted if not isinstance(order, SetTimer | CancelTimer))
        require_same_state(loop.session._scheduler, twin)

    same(RunStarted(replicas=2), tuple(loop.orders))
    for index, how in choices:
        if loop.session.outcome is not None:
            break
        orders, timers = loop.session.open_orders, twin.state.orders.open["timer"]
        if how == "t":
            loop.now += loop.session.next_due() or 0.0
            times, due = loop.session._times, [timer for timer in timers.values() if due_at(timer) <= loop.now]
            late = times.overdue(loop.now) if times.look_at <= loop.now else []
            for event in (*(TimerFired(timer=timer.number) for timer in due), *(one.event() for one in late)):
                loop.session._tick(event)
                same(event, loop.session._new_orders())
            continue
        if how == "l" and loop.answers:
            event = loop.say(*loop.answers[index % len(loop.answers)])
        else:
            event = loop.give(orders[index % len(orders)], fails=how == "f")
        same(event, loop.report())
    require_sound(loop.session)


NUMBERS = st.integers(-2, 6)
TEXTS = st.sampled_from(["", "replica", "trainer", "data", "run.max_steps", "3", "nonsense"])
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS, float: st.sampled_from([-1.0, 0.0, 0.5, float("nan")]), bool: st.booleans(), str: TEXTS,
    tuple[int, ...]: st.lists(NUMBERS, max_size=3).map(tuple),
    tuple[float, ...]: st.lists(st.floats(0, 1), max_size=3).map(tuple),
    tuple[str, ...]: st.lists(TEXTS, max_size=3).map(tuple),
}  # fmt: skip


@st.composite
def any_event(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(EVENTS))
    hints = get_type_hints(kind)
    return kind(**{f.name: draw(VALUES[hints[f.name]]) for f in structs.fields(kind) if f.name not in ("id", "at")})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=st.integers(0, 40), events=st.lists(st.tuples(any_event(), st.integers(0, 60)), min_size=5, max_size=30))
def test_no_event_and_no_answer_breaks_it(before: int, events: list[tuple[Event, int]]) -> None:
    """Whether they are reported, or given as answers to any order so far with the values that an answer may have."""
    loop = made()
    for _ in range(before):
        if loop.session.open_orders:
            loop.answer(loop.session.open_orders[-1])
    for event, index in events:
        seen = state_of(loop.session._scheduler), loop.session.open_orders
        try:
            if isinstance(event, REPORTED):
                loop.report(event)
                continue
            order = loop.orders[index % len(loop.orders)]
            names = {*event.__struct_fields__} - {*order.__struct_fields__, "id", "at", "order", "orders"}
            loop.say(order, type(event), {name: getattr(event, name) for name in names})
            loop.report()
        except engine.IllegalEvent as error:
            assert type(event).__name__ in str(error)
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
            loop.answer(chance.choice(loop.session.open_orders), fails=chance.random() < 0.1)
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
    loop.answer(loop.first(SaveCheckpoint))
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
        assert {order.__class__ for order in session.begin()} >= {StartProcess, PublishWeights}
    with Session.resume(tmp_path, steps=0, replicas=2) as session:
        assert session.steps == 0
        assert [order.index for order in session.begin() if isinstance(order, StartProcess)] == [0, 1]
    with pytest.raises(ConfigError, match=r"already has a record; continue it with engine.Session.resume"):
        Session(LIMITS, directory=tmp_path)
    with pytest.raises(ConfigError, match="nothing to resume"):
        Session.resume(tmp_path / "other")


def test_what_came_before_a_refused_event_counts() -> None:
    """Its orders come with the next report."""
    loop = made()
    loop.give(loop.first(StartProcess))
    loop.give(loop.first(DrawPrompts))
    with pytest.raises(engine.IllegalEvent, match="replicas is 0"):
        loop.session.report(ReplicasWanted(replicas=2), ReplicasWanted(replicas=0))
    assert [order.__class__ for order in loop.report()] == [StartGroup] * 4 + [StartProcess]
    require_sound(loop.session)


def test_answers_of_one_report_are_one_tick() -> None:
    loop = made()
    loop.give(loop.first(StartProcess))
    loop.answer(loop.first(DrawPrompts))
    starts = [order for order in loop.session.open_orders if isinstance(order, StartGroup)]
    for order in starts:
        loop.give(order)
    loop.report()
    assert [len(tick.events) for tick in loop.session.record.ticks()] == [1, 2, len(starts)]
    require_sound(loop.session)


@pytest.mark.parametrize("kind", [StageWeights, DrawPrompts])
def test_a_late_answer_is_recorded_and_not_held_against_the_order_that_followed(kind: type[Command]) -> None:
    loop = made()
    order = loop.first(kind)
    loop.answer(order)
    late = loop.answers[-1]
    while (later := loop.first(kind)) == order:
        loop.answer(later)
    events = loop.session.events
    loop.say(*late)
    assert loop.report() == () and later in loop.session.open_orders
    assert loop.session.events == events + 1
    require_sound(loop.session)


def test_an_order_says_what_answers_it() -> None:
    loop = made()
    order = loop.first(TrainStep)
    with pytest.raises(engine.IllegalEvent, match="WeightsStaged does not answer TrainStep; use StepTrained or StepFa"):
        order.answer(WeightsStaged)
    with pytest.raises(engine.IllegalEvent, match="StepFailed lacks reason; give each as a keyword"):
        order.answer(StepFailed)
    with pytest.raises(engine.IllegalEvent, match=r"StepTrained has no field update; it has .*; did you mean updates"):
        order.answer(StepTrained, update=1)
    order.answer(StepTrained, updates=2)
    assert loop.session._answers == [StepTrained(step=0, attempt=1, updates=2)]
    loop.finish()
    with pytest.raises(engine.IllegalEvent, match="needs no answer"):
        loop.orders[-1].answer(OrderDone)


def test_an_order_matches_by_the_class_of_its_command() -> None:
    order = made().first(TrainStep)
    match order:
        case StartGroup():
            raise AssertionError("it is another class")
        case TrainStep(step=0, groups=groups):
            assert groups == order.groups
    plain = pickle.loads(pickle.dumps(order))
    assert type(plain) is TrainStep and plain == order and order == plain and len({order, plain}) == 1


def test_other_threads_answer_while_the_loop_waits() -> None:
    loop = made(replicas=2)
    orders = tuple(loop.orders)
    with ThreadPoolExecutor(3) as others:
        while loop.session.outcome is None:
            for order in orders:
                kind = kind_of_answer(order, fails=False)
                others.submit(order.answer, kind, **loop.data_for(order, kind))
            orders = loop.session.next_orders()
    assert loop.session.outcome.outcome == "finished"
    require_sound(loop.session)


def test_timers_are_reported_when_they_are_due() -> None:
    limits = replace(LIMITS, timeouts=Timeouts.every(None, group_s=60.0, cut_s=5.0))
    loop = made(limits)
    loop.first(TrainStep)
    while loop.session.open_orders[0] != (order := loop.first(StartGroup)):
        loop.answer(loop.session.open_orders[0])
    due_s = loop.session.next_due()
    assert due_s is not None and 0 < due_s <= 60.0
    assert loop.session.report_due() == ()
    began = loop.session._scheduler.state.orders.find("group", order.group).at  # type: ignore[union-attr]
    asked: tuple[SessionOrder, ...] = ()
    while not any(isinstance(one, ParkGroup) for one in asked):
        loop.now += loop.session.next_due() or 0.0
        asked = loop.session.report_due()
    assert 60.0 <= loop.now - began <= 60.0 + 60.0 / 20, "the limit is checked every 3 s"
    assert [one.group for one in asked if isinstance(one, ParkGroup)][:1] == [order.group]
    require_sound(loop.session)


def test_it_must_begin_once_and_before_it_is_closed() -> None:
    session = Session(LIMITS)
    with pytest.raises(engine.IllegalEvent, match=r"call begin\(\) first"):
        session.report(StopRequested(reason="x"))
    session.begin()
    with pytest.raises(engine.IllegalEvent, match=r"call begin\(\) once"):
        session.begin()
    assert [order.__class__.__name__ for order in session.report(StopRequested(reason="x"))] == ["FinishRun"]
    assert session.outcome is not None and session.outcome.outcome == "stopped"
    session.close()
    with pytest.raises(engine.IllegalEvent, match="the session is closed"):
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
        loop.answer(loop.first(StartGroup))
    assert loop.session.events == events
    require_sound(loop.session)


class BrokenAt:
    """Raises when it judges group 1."""

    def keep(self, view: Any, group: Any) -> bool:
        if group.group == 1:
            raise RuntimeError("no idea about group 1")
        return True


def test_answers_before_the_one_at_which_a_policy_raises_count(add_policy: AddPolicy) -> None:
    """Their orders come with the next report, which also decides about the answers after it."""
    loop = made(policies=add_policy("filter", BrokenAt))
    loop.first(StartGroup)
    started = {order.group: order for order in loop.session.open_orders if isinstance(order, StartGroup)}
    for group in (0, 1, 2):
        loop.give(started[group])
    with pytest.raises(PolicyError, match="no idea"):
        loop.report()
    assert started[1] in loop.session.open_orders and started[2] in loop.session.open_orders
    (trained,) = [order for order in loop.report() if isinstance(order, TrainStep)]
    assert set(trained.groups) == {0, 2} and started[1] in loop.session.open_orders
    require_sound(loop.session)


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
    loop.report(StopRequested(reason="enough"))
    loop.session.close()
    session = Session.resume(tmp_path)
    monkeypatch.setattr(BrokenOnce, "broken", True)
    with pytest.raises(PolicyError, match="broken today"):
        session.begin()
    assert any(isinstance(order, StartProcess) for order in session.begin())
    require_sound(session)


def test_a_start_names_the_answer_that_made_room_for_it() -> None:
    """Not another event of the same tick about the same replica, and no stale echo."""
    limits = replace(LIMITS, max_staleness_steps=3, max_concurrent_groups=6)  # six groups, and four slots
    loop = made(limits, replicas=1)
    loop.first(StartGroup)
    ended, running = [order for order in loop.session.open_orders if isinstance(order, StartGroup)][:2]
    number = loop.session.events
    running.answer(PrefixStored, tokens=1, oldest_version=0, newest_version=0, unfinished=1)
    loop.give(ended)
    loop.give(ended)
    starts = [order for order in loop.report() if isinstance(order, StartGroup)]
    assert starts and {order.cause for order in starts} == {number + 1}


def test_a_session_takes_reports_of_progress_and_ignores_late_ones() -> None:
    loop = made(replicas=1)
    order = loop.first(TrainStep)
    order.answer(OrderProgressed)
    assert loop.session._answers == [OrderProgressed(order=order.number)]
    loop.report()
    assert order in loop.session.open_orders
    loop.answer(order)
    order.answer(OrderProgressed)
    assert loop.report() == ()
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
    uses: list[Callable[[], Any]] = [
        loop.session.report, loop.session.next_orders, loop.session.begin, loop.session.report_due,
        loop.session.next_due, loop.session.waits, loop.session.close, lambda: loop.session.view,
        lambda: loop.session.open_orders, lambda: loop.session.record,
    ]  # fmt: skip
    here = threading.current_thread().name
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as other:
        for use in uses:
            with pytest.raises(engine.IllegalEvent, match=f"belongs to the thread '{here}', .*; this is 'trainer_0'"):
                other.submit(use).result()
    loop.finish()
    require_sound(loop.session)


def test_a_thread_may_use_the_session_of_one_that_has_ended() -> None:
    session = Session(LIMITS)
    with ThreadPoolExecutor(1) as other:
        other.submit(session.begin).result()
        with pytest.raises(engine.IllegalEvent, match="belongs to the thread"):
            session.close()
    session.report(StopRequested(reason="x"))
    session.close()


VALIDATED = replace(LIMITS, validation=ValidationLimits(rows=4, replicas=2, own_from=3))
"""Replicas 3 and 4 do nothing but validate."""


def started(orders: Iterable[SessionOrder]) -> list[int]:
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
