"""A session decides as the scheduler does, refuses facts that cannot be true, and continues after its program died."""

import random
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderDone,
    ProcessUp,
    PromptsDrawn,
    RunResumed,
    RunStarted,
    SettingChanged,
    StepFailed,
    StepTrained,
    StopRequested,
    TimerFired,
    WeightsStaged,
    stamp,
)
from engine.policies import registry
from engine.policies.registry import register
from engine.record import replay
from engine.record.log import SUFFIX
from engine.runtime.local import Session, answer
from engine.scheduling.scheduler import Scheduler
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.orders import RELATIONS
from engine.states.timeouts import Timeouts

LIMITS = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=4, checkpoint_every=1,
    sync_mode="wait",
)  # fmt: skip
TOKENS = {"tokens": 5, "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}


def kind_of_answer(order: Command, *, fails: bool) -> type[Event]:
    """The first answer of the table says that an order was carried out, the last one that it was not."""
    if isinstance(order, ParkGroup):
        return GroupAborted
    return RELATIONS[type(order)].answers[-1 if fails else 0]


class Loop:
    """A user's loop, which answers one open order at a time, on a clock of its own."""

    def __init__(self, make: Callable[..., Session], **options: Any) -> None:
        self.now = 0.0
        self.session = make(clock=lambda: self.now, **options)
        self.facts: list[Event] = []
        self.orders: list[Command] = list(self.session.begin())

    def tell(self, *facts: Event) -> tuple[Command, ...]:
        self.now += 1.0
        new = self.session.report(*facts)
        self.facts += facts
        self.orders += new
        return new

    def fact_for(self, order: Command, *, fails: bool = False) -> Event:
        kind = kind_of_answer(order, fails=fails)
        data: dict[str, Any] = {"reason": "chance"} if "reason" in {field.name for field in fields(kind)} else {}
        if kind is ProcessUp and order.kind == "replica":
            data = {"slots": 4, "samples": 2}
        elif kind is PromptsDrawn:
            data = {"count": order.count, "exhausted": False}
        elif kind is GroupFailed:
            data["cause"] = "data"
        elif kind is GroupAborted:
            data = {"tokens": 0, "oldest_version": -1, "newest_version": -1}
        elif kind is GroupGenerated:
            known = self.session.view.group(order.group)
            newest = next(one.version for one in self.session.view.replicas() if one.id == order.replica)
            oldest = known.oldest_version if known is not None and known.oldest_version >= 0 else newest
            data = {"oldest_version": oldest, "newest_version": newest, **TOKENS}
        return answer(order, kind, **data)

    def first(self, kind: type[Command]) -> Any:
        """The first open order of a kind; answers others until there is one."""
        while True:
            orders = self.session.open_orders
            found = [order for order in orders if type(order) is kind]
            if found:
                return found[0]
            self.tell(self.fact_for(orders[0]))

    def finish(self) -> None:
        for _ in range(500):
            if self.session.outcome is not None:
                return
            self.tell(self.fact_for(self.session.open_orders[0]))
        raise AssertionError(self.session.waits())


def made(**options: Any) -> Loop:
    return Loop(lambda **given: Session(LIMITS, **given), **options)


def require_sound(session: Session) -> None:
    check_all(session._scheduler.state)
    report = replay(session.record)
    assert report.identical and report.events == session.events, report


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
        fact = replace(fact)
        stamp(fact, events, loop.now)
        events += 1
        wanted = twin.handle(fact)
        assert orders == tuple(order for order in wanted if type(order).__name__ not in ("SetTimer", "CancelTimer"))
        assert loop.session._scheduler.state_hash == twin.state_hash

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
    kind = draw(st.sampled_from(list(EVENTS.values())))
    hints = get_type_hints(kind)
    return kind(**{f.name: draw(VALUES[hints[f.name]]) for f in fields(kind) if f.name not in ("id", "at")})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=st.integers(0, 40), facts=st.lists(any_fact(), min_size=5, max_size=30))
def test_no_fact_breaks_it(before: int, facts: list[Event]) -> None:
    loop = made()
    for _ in range(before):
        if loop.session.open_orders:
            loop.tell(loop.fact_for(loop.session.open_orders[-1]))
    for fact in facts:
        seen = loop.session._scheduler.state_hash, loop.session.open_orders
        try:
            loop.tell(fact)
        except engine.IllegalFact as error:
            assert type(fact).__name__ in str(error)
            assert seen == (loop.session._scheduler.state_hash, loop.session.open_orders), "it changed something"
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
        with pytest.raises(RunFinished, match="give a larger max_steps"):
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
    assert "the trainer: trains step 1 on 2 groups" in capsys.readouterr().out
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


ILLEGAL: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "not a fact": (lambda loop: "done", "'done' is not a fact; report an object of a class in engine.events"),
    "the session's own": (lambda loop: RunResumed(steps=0, replicas=1, consumed=(), released=()), "in begin()"),
    "another type": (lambda loop: TimerFired(timer=1.0), "timer"),  # type: ignore[arg-type]
    "never drawn": (lambda loop: replace(group(loop), group=99), "there is no group 99: only groups 0 to 5 were drawn"),
    "another attempt": (lambda loop: replace(group(loop), attempt=7), "attempt 7 of group 0 was not ordered"),
    "no such replica": (lambda loop: replace(group(loop), replica=3), "there is no replica 3"),
    "another life": (lambda loop: replace(group(loop), incarnation=2), "incarnation 2 was not ordered"),
    "weights it cannot have": (lambda loop: replace(group(loop), newest_version=1), "0 <= oldest_version <= newest"),
    "no tokens": (lambda loop: replace(group(loop), tokens=0), "a group without tokens is GroupFailed"),
    "a negative number": (lambda loop: replace(group(loop), trainable=-1), "trainable is -1, but must be at least 0"),
    "no such cause": (
        lambda loop: answer(loop.first(StartGroup), GroupFailed, cause="bug", reason=""),
        "use infrastructure or data",
    ),
    "no batch": (lambda loop: StepTrained(step=2, attempt=1), "there is no step 2: no steps have a batch yet"),
    "too many prompts": (
        lambda loop: answer(loop.first(DrawPrompts), PromptsDrawn, count=7, exhausted=False),
        "prompts 0 to 5 were ordered",
    ),
    "no prompt": (lambda loop: answer(loop.first(DrawPrompts), PromptsDrawn, count=0, exhausted=False), "at least one"),
    "other weights": (lambda loop: answer(loop.first(StageWeights), WeightsStaged, version=0), "version 1 was ordered"),
    "not what was ordered": (
        lambda loop: OrderDone(orders=(loop.first(TrainStep) and number_of(loop, TrainStep),)),
        "is TrainStep; answer it by StepTrained or StepFailed",
    ),
    "never ordered": (lambda loop: OrderDone(orders=(999,)), "there is no order 999"),
    "no slots": (lambda loop: answer(loop.first(StartProcess), ProcessUp), "slots and samples must be at least 1"),
    "a setting": (lambda loop: SettingChanged(setting="run.seed", value="1"), "run.seed '1' cannot be changed"),
}


def group(loop: Loop) -> GroupGenerated:
    fact = loop.fact_for(loop.first(StartGroup))
    assert isinstance(fact, GroupGenerated)
    return fact


def number_of(loop: Loop, kind: type[Command]) -> int:
    orders = loop.session._scheduler.state.orders.all()
    return next(order.number for order in orders if type(order.command) is kind)


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_fact_that_cannot_be_true_is_refused(case: str) -> None:
    make, message = ILLEGAL[case]
    loop = made()
    fact = make(loop)
    events = loop.session.events
    with pytest.raises(engine.IllegalFact) as caught:
        loop.tell(fact)
    assert message in str(caught.value)
    assert loop.session.events == events
    loop.finish()
    require_sound(loop.session)


def test_the_facts_before_a_refused_one_count() -> None:
    loop = made()
    up = loop.fact_for(loop.first(StartProcess))
    drawn = loop.fact_for(loop.first(DrawPrompts))
    with pytest.raises(engine.IllegalFact, match="no group 50") as caught:
        loop.tell(up, drawn, GroupFailed(group=50, attempt=1, replica=0, incarnation=1, cause="data", reason=""))
    assert [type(order) for order in caught.value.orders] == [StartGroup] * 4


def test_late_facts_have_no_effect_and_are_recorded() -> None:
    loop = made()
    fact = group(loop)
    loop.tell(fact)
    events = loop.session.events
    assert loop.tell(fact) == ()
    assert loop.session.events == events + 1
    require_sound(loop.session)


@pytest.mark.parametrize("kind", [StageWeights, DrawPrompts])
def test_a_late_fact_is_not_held_against_the_order_that_followed(kind: type[Command]) -> None:
    loop = made()
    order = loop.first(kind)
    fact = loop.fact_for(order)
    loop.tell(fact)
    while (later := loop.first(kind)) == order:
        loop.tell(loop.fact_for(later))
    assert loop.tell(fact) == () and later in loop.session.open_orders
    require_sound(loop.session)


def test_answers_are_made_from_orders() -> None:
    loop = made()
    order = loop.first(TrainStep)
    assert answer(order, StepTrained, updates=2) == StepTrained(step=0, attempt=1, updates=2)
    with pytest.raises(engine.IllegalFact, match="WeightsStaged does not answer TrainStep; use StepTrained or StepFa"):
        answer(order, WeightsStaged)
    with pytest.raises(engine.IllegalFact, match="StepFailed lacks reason; give each as a keyword"):
        answer(order, StepFailed)
    with pytest.raises(engine.IllegalFact, match="StepTrained has no field update; did you mean updates"):
        answer(order, StepTrained, update=1)
    loop.finish()
    with pytest.raises(engine.IllegalFact, match="needs no answer"):
        answer(loop.orders[-1], OrderDone)


def test_timers_are_reported_when_they_are_due() -> None:
    limits = replace(LIMITS, timeouts=Timeouts.every(None, group_s=60.0, cut_s=5.0))
    loop = Loop(lambda **given: Session(limits, **given))
    loop.first(TrainStep)
    while loop.session.open_orders[0] is not (order := loop.first(StartGroup)):
        loop.tell(loop.fact_for(loop.session.open_orders[0]))
    due = loop.session.next_due()
    assert due is not None and 0 < due.in_s <= 60.0
    with pytest.raises(engine.IllegalFact, match=r"it is due in .* s; ask next_due"):
        loop.session.report(due.fact)
    assert loop.session.report_due() == ()
    loop.now += due.in_s
    asked = loop.session.report_due()
    assert [(type(one).__name__, one.group) for one in asked][:1] == [("ParkGroup", order.group)]
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


class Broken:
    def select(self, view: Any, size: int) -> Any:
        raise ValueError("no idea")


def test_a_policy_that_raises_leaves_the_session_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._REGISTERED, "batching", {**registry._REGISTERED["batching"]})
    register("batching", "session-broken")(Broken)
    loop = Loop(lambda **given: Session(LIMITS, policies={"batching": "session-broken"}, directory=tmp_path, **given))
    with pytest.raises(PolicyError, match="no idea"):
        loop.first(TrainStep)
    events = loop.session.events
    with pytest.raises(PolicyError, match="no idea"):
        loop.tell(group(loop))
    assert loop.session.events == events
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
