"""Law 10, every order ends: the one table of orders and answers, row by row, and whole runs that it carries to the end,
though the scheduler's process ends again and again and what it sent is lost."""

from collections.abc import Sequence
from typing import Any, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from engine.commands import (
    COMMANDS,
    AbortGroup,
    CancelTimer,
    Command,
    DiscardGroups,
    DrawPrompts,
    FinishRun,
    ParkGroup,
    ResumeReplica,
    ScoreBatch,
    SetTimer,
    StartGroup,
    StartProcess,
)
from engine.events import (
    EVENTS,
    BatchScored,
    CacheMeasured,
    CallsMeasured,
    CheckpointDamaged,
    DrainRequested,
    Event,
    GroupGenerated,
    OrderDone,
    OrderOverdue,
    ProcessUp,
    ReplicaLeaves,
    ReplicasWanted,
    RunInterrupted,
    RunResumed,
    RunStarted,
    SchedulerRecovered,
    SettingChanged,
    StepFailed,
    StopRequested,
    TimerFired,
)
from engine.policies import PolicySet
from engine.record.frames import Header, Tick
from engine.record.reader import read
from engine.record.recorder import MemoryRecorder
from engine.record.recovery import recover
from engine.scheduling.scheduler import Scheduler
from engine.simulation.world import Faults, Setting
from engine.states.limits import Limits, ValidationLimits
from engine.states.orders import (
    RELATIONS,
    SCORER_OF,
    TRAINER,
    UNSOLICITED,
    Order,
    OrderBook,
    OrdersFacts,
    state_owner,
    works_in_order,
)
from engine.states.process import REPLICA
from engine.states.timeouts import Timeouts
from tests.core.added_states import WEIGHING
from tests.core.adversary import Adversary
from tests.core.moves import any_limits, any_policies, drawn, generating
from tests.core.scripted import Scripted
from tests.core.test_worlds import ROUGH
from tests.judge.judged_world import JudgedWorld

NEED_NO_ORDER = (
    RunStarted, RunResumed, StopRequested, DrainRequested, ReplicaLeaves, ReplicasWanted, SettingChanged,
    SchedulerRecovered, CheckpointDamaged, RunInterrupted, CallsMeasured, CacheMeasured,
)  # fmt: skip
"""Events that answer no order: the run's own, what users, hardware and disks say, and figures."""

# the table


def orders_matched(book: OrderBook) -> list[Order]:
    """The orders that the events of the newest tick answered or reported on."""
    return [order for matched in book.matched.values() for order in matched]


def test_every_command_is_an_order_or_is_listed_as_none() -> None:
    assert not RELATIONS.keys() & {CancelTimer, FinishRun}
    assert {*RELATIONS, CancelTimer, FinishRun} == {*COMMANDS}


def test_every_event_answers_or_reports_on_an_order_or_is_listed_as_unsolicited() -> None:
    related = {event for row in RELATIONS.values() for event in (*row.answers, *row.reports)}
    assert not related & {*NEED_NO_ORDER}
    assert related | {*NEED_NO_ORDER, OrderOverdue} == {*EVENTS}, "any order with a limit may be overdue"


def sample(kind: type[Any], **chosen: Any) -> Any:
    """A command or an event whose every field has a value that follows from its name, so that an answer fits."""
    hints = get_type_hints(kind)
    values = {}
    for field in structs.fields(kind):
        hint = str(hints[field.name])
        if "tuple" in hint:
            values[field.name] = (1.0,) if "float" in hint else ("one",) if "str" in hint else (1,)
        elif "str" in hint:
            values[field.name] = f"a {field.name}"
        elif "bool" in hint:
            values[field.name] = False
        else:
            values[field.name] = 1 + sum(map(ord, field.name)) % 97
    return kind(**values | {name: value for name, value in chosen.items() if name in values})


def other(value: Any) -> Any:
    return f"not {value}" if isinstance(value, str) else value + 1


ROWS = [pytest.param(kind, id=kind.__name__) for kind in RELATIONS]
ANSWERS = [
    pytest.param(kind, event, id=f"{kind.__name__}-{event.__name__}")
    for kind, row in RELATIONS.items()
    for event in row.answers
]
ECHOES = [
    pytest.param(kind, event, name, id=f"{kind.__name__}-{event.__name__}-{name}")
    for kind, row in RELATIONS.items()
    for event in row.answers
    for name in dict.fromkeys((*row.id, *row.echo))
    if name in event.__struct_fields__
]


def answer(command: Command, event: type[Event], number: int) -> Event:
    return sample(event, orders=(number,), number=number)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "event"), ANSWERS)
def test_an_answer_closes_its_order_once(kind: type[Command], event: type[Event]) -> None:
    book, command = OrderBook(OrdersFacts()), sample(kind, number=0)
    book.event = Event(at=3.0)
    book.add(command)
    (order,) = book.all()
    assert (order.command, order.at, book.find(order.subject, order.id)) == (command, 3.0, order)
    assert book.match(answer(command, event, 0)) and orders_matched(book) == [order]
    assert len(book) == 0 and not book.of(order.owner, order.subject) and book.owned(order.owner) == []
    book.matched = {}
    assert book.match(answer(command, event, 0)) == (event in UNSOLICITED) and orders_matched(book) == []


@pytest.mark.parametrize(("kind", "event", "name"), ECHOES)
def test_an_event_about_something_else_is_a_stale_echo(kind: type[Command], event: type[Event], name: str) -> None:
    book, command = OrderBook(OrdersFacts()), sample(kind, number=0)
    book.add(command)
    said = sample(event, number=0)
    changed = replace(said, **{name: other(getattr(said, name))})
    assert not book.match(changed) or event in UNSOLICITED
    assert orders_matched(book) == [] and len(book) == 1


@pytest.mark.parametrize("kind", ROWS)
def test_an_order_is_owned_by_who_carries_it_out_and_fails_with_it(kind: type[Command]) -> None:
    book, command = OrderBook(OrdersFacts()), sample(kind, number=0)
    book.add(command)
    (order,) = book.all()
    for bystander in ("somebody", -7):
        assert book.fail(bystander) == [] and book.owned(order.owner) == [order]
    assert book.fail(order.owner) == [order] and len(book) == 0


@pytest.mark.parametrize("kind", ROWS)
def test_a_newer_order_with_the_same_key_replaces_the_older(kind: type[Command]) -> None:
    book = OrderBook(OrdersFacts())
    for number in (0, 1):
        book.event = Event(at=float(number))
        book.add(sample(kind, number=number, attempt=number + 1))
    if RELATIONS[kind].id == ("number",):
        assert [order.number for order in book.all()] == [0, 1], "each is about other groups"
        return
    (order,) = book.all()
    assert (order.number, order.at, book.facts.next_number) == (1, 1.0, 2)


# what else ends orders


REPORTS = [(kind, event) for kind, row in RELATIONS.items() for event in row.reports]


@pytest.mark.parametrize(("kind", "event"), REPORTS, ids=lambda kind: kind.__name__)
def test_a_report_needs_its_order_and_closes_nothing(kind: type[Command], event: type[Event]) -> None:
    book = OrderBook(OrdersFacts())
    book.add(sample(kind, number=0))
    assert book.match(sample(event, order=0)) and len(orders_matched(book)) == len(book) == 1
    assert not book.match(sample(event, order=1, attempt=1, life=1)) and len(book) == 1


def test_one_event_ends_a_group_and_what_was_to_cut_it_short() -> None:
    book = OrderBook(OrdersFacts())
    book.add(sample(StartGroup))
    book.add(sample(ParkGroup))
    assert book.match(sample(GroupGenerated)) and len(orders_matched(book)) == 2 and len(book) == 0


def test_an_abort_withdraws_the_group_and_its_cut() -> None:
    book = OrderBook(OrdersFacts())
    book.add(sample(StartGroup))
    book.add(sample(ParkGroup))
    book.add(sample(AbortGroup, number=2))
    assert [type(order.command) for order in book.all()] == [AbortGroup]
    assert not book.match(sample(GroupGenerated)), "its answer is an echo by now"


def test_a_failed_step_ends_every_scoring_task_of_it() -> None:
    book = OrderBook(OrdersFacts(), ("old",))
    for step, task in ((1, "old"), (1, "ref"), (2, "old")):
        book.add(ScoreBatch(step=step, attempt=1, task=task, groups=(1,), cause=0))
    assert [order.owner for order in book.all()] == ["scorer of old", TRAINER, "scorer of old"]
    assert not book.match(StepFailed(step=1, attempt=2, reason=""))
    assert book.match(StepFailed(step=1, attempt=1, reason="")) and len(orders_matched(book)) == 2
    assert [order.id for order in book.all()] == [(2, "old")]
    assert not book.match(BatchScored(step=1, attempt=1, task="old"))


def test_orders_that_arrive_may_be_answered_late_twice_together_and_one_by_one() -> None:
    book = OrderBook(OrdersFacts())
    for number in range(4):
        book.add(DiscardGroups(groups=(number,), number=number, cause=0))
    assert book.match(OrderDone(orders=(3, 1)))
    assert not book.match(OrderDone(orders=(3, 1))), "an echo"
    assert book.match(OrderDone(orders=(1, 0))) and book.match(OrderDone(orders=(2, 3, 9)))
    assert len(book) == 0


def test_a_cancelled_timer_is_withdrawn_and_a_finished_run_has_no_orders() -> None:
    book = OrderBook(OrdersFacts())
    for timer in (4, 5):
        book.add(SetTimer(timer=timer, name=str(timer), delay_s=1.0, cause=0))
    book.add(CancelTimer(timer=4, name="4", cause=0))
    assert not book.match(TimerFired(timer=4)) and len(book) == 1
    book.add(sample(StartGroup))
    book.add(FinishRun(outcome="stopped", reason="enough", cause=0))
    assert book.all() == []


def test_a_run_that_is_resumed_has_no_order_of_before() -> None:
    figures = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=3)
    for kept in (False, True):
        world = Adversary(figures, PolicySet.from_names({}), prompts=12, slots=2)
        world.join(0)
        for _ in range(4):
            world.act()
        before = world.scheduler.state.orders
        assert len(before) and before.open["group"]
        world.crash(1, kept=kept)
        after = world.scheduler.state.orders
        assert all(order.number >= before.facts.next_number for order in after.all())
        world.complete()


def test_what_a_stopped_run_had_under_way_is_done_after_it_is_resumed() -> None:
    """Its book is empty, so that the records say what that was."""
    figures = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=4, checkpoint_every=2,
        keeps_batches=True, added_states=(WEIGHING,),
    )  # fmt: skip
    for under_way in ("state", "checkpoint"):
        world = Adversary(figures, PolicySet.from_names({}), prompts=12, slots=4)
        world.join(0)
        while not world.scheduler.state.orders.open[under_way]:
            assert world.act()
        ordered = [*world.scheduler.state.orders.open[under_way]]
        world.deliver(StopRequested(reason="enough"))
        assert len(world.scheduler.state.orders) == 0
        world.crash(1, kept=True)
        assert [*world.scheduler.state.orders.open[under_way]] == ordered
        world.complete()


def test_orders_are_reissued_oldest_first_and_a_timer_with_its_remaining_time() -> None:
    book = OrderBook(OrdersFacts())
    book.event = Event(at=5.0)
    timer = SetTimer(timer=3, name="drain", delay_s=10.0, cause=0)
    drawn, resumed = DrawPrompts(first=0, count=4, cause=0), sample(ResumeReplica, number=2)
    for command in (timer, drawn, resumed):
        book.add(command)
    assert book.reissued(9.0) == [replace(timer, delay_s=6.0), drawn, resumed]
    assert book.reissued(60.0)[0] == replace(timer, delay_s=0.0)
    assert book.reissued(9.0)[0] == replace(timer, delay_s=6.0), "the book itself is as it was"


def test_the_work_of_a_state_belongs_to_whoever_does_that_state_s() -> None:
    book = OrderBook(OrdersFacts())
    for row, kind in enumerate(kind for kind in RELATIONS if RELATIONS[kind].owner == "state"):
        book.add(sample(kind, group=row, state="judging"))
    assert book.owned(state_owner("judging")) == book.all() != [] and book.owned(state_owner("other")) == []
    book.add(replace(sample(StartProcess), kind=REPLICA, index=6))
    assert [order.subject for order in book.owned(6)] == ["start"]


# whole runs


class Forgetful(JudgedWorld):
    """When so many events but timers were handled (`ends`), the scheduler's process ends: orders on their way and
    timers are lost. The next gives the open orders again, `times` times; actors and what they have sent live on."""

    def __init__(
        self, setting: Setting, policies: PolicySet, ends: Sequence[int], times: int = 1,
        recorder: MemoryRecorder | None = None, snapshot_every: int = 0,
    ) -> None:  # fmt: skip
        self.life = 0
        self._memory = recorder
        self._times = times
        self._ends = set(ends)
        self._counted = 0
        self._dies = False
        super().__init__(setting, policies, recorder, snapshot_every=snapshot_every)

    def _observe(self, tick: Tick) -> None:
        super()._observe(tick)
        before = self._counted
        self._counted += sum(not isinstance(event, TimerFired) for event in tick.events)
        reached = any(number in self._ends for number in range(before + 1, self._counted + 1))
        self._dies |= reached and self.scheduler.state.ending.outcome is None

    def execute(self, commands: Sequence[Command]) -> None:
        """The commands of the turn after which the process ends are never sent. If a later event of the turn ended the
        run, the process lives on: a run that is over gives no order again."""
        if not self._dies or self.scheduler.state.ending.outcome is not None:
            super().execute(commands)
            return
        self._dies = False
        self.life += 1
        self.fail_over(None if self._memory is None else self._recovered(), self._times)

    def _recovered(self) -> Scheduler:
        """A scheduler that is built from the record alone."""
        assert self._memory is not None
        judging = False
        recovered = recover(read(self._memory), lambda *change: self.judge.changed(*change) if judging else None)
        judging = True
        orders = self.scheduler.state.orders
        assert recovered.scheduler.state.orders.reissued(self.time) == orders.reissued(self.time)
        return recovered.scheduler


@settings(max_examples=50)
@given(
    limits=drawn(any_limits), names=drawn(any_policies), seed=st.integers(0, 2**31), replicas=st.integers(1, 3),
    prompts=st.integers(1, 40), rough=st.booleans(), every=st.integers(3, 40), times=st.integers(1, 2),
)  # fmt: skip
@example(
    limits=Limits(
        train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1, max_steps=1, infrastructure_attempts=1,
        checkpoint_every=1, over_sample=1.5, timeouts=Timeouts.every(None, group_s=4.0),
    ),
    names={"deadline": "drop", "sync": "rolling"}, seed=16, replicas=1, prompts=2, rough=False, every=4, times=1,
)  # fmt: skip
def test_a_scheduler_that_gives_open_orders_again_reaches_the_end(
    limits: Limits, names: dict[str, str], seed: int, replicas: int, prompts: int, rough: bool, every: int, times: int
) -> None:
    """Given twice, an order is carried out once."""
    setting = Setting(
        limits=limits, replicas=generating(limits, replicas), prompts=prompts, seed=seed,
        faults=ROUGH if rough else Faults(), prefix_every_tokens=3,
    )  # fmt: skip
    world = Forgetful(setting, PolicySet.from_names(names), range(every, 25 * every, every), times)
    outcome = world.run()
    barren = not world.scheduler.state.training.steps_trained  # its few groups were filtered, or dropped as stragglers
    assert outcome.outcome == "finished" or rough or limits.timeouts.group_s or barren, outcome
    assert not world.scheduler.state.orders.reissued(world.time)


FULL = Limits(
    train_batch_size=3, max_staleness_steps=2, max_concurrent_groups=9, max_steps=6, sync_mode="abort",
    checkpoint_every=2, validation=ValidationLimits(rows=9, every=1), deadline_timeout_s=2.0,
)  # fmt: skip
"""Timers, validations and checkpoints, too."""


@pytest.mark.parametrize("snapshot_every", [0, 25])
@pytest.mark.parametrize("seed", range(3))
def test_a_scheduler_rebuilt_from_the_record_has_its_open_orders_and_reaches_the_end(
    seed: int, snapshot_every: int
) -> None:
    names = {"deadline": "truncate"}
    recorder = MemoryRecorder(Header(run="forgetful", limits=FULL.to_plain(), policies=names))
    setting = Setting(limits=FULL, replicas=3, slots=3, prompts=60, seed=seed, faults=ROUGH)
    world = Forgetful(setting, PolicySet.from_names(names), range(20, 400, 40), 1, recorder, snapshot_every)
    world.run()
    assert world.life >= 4


def test_an_event_of_an_older_life_answers_nothing() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)
    run.finish(0)
    assert len(orders_matched(run.state.orders)) == 1
    run.tell(ProcessUp(kind="replica", index=0, life=1, slots=100, version=0))
    assert run.state.orders.facts.stale_echoes == 1 and orders_matched(run.state.orders) == []


def test_only_trainer_and_scorers_execute_their_orders_one_after_another() -> None:
    assert works_in_order(TRAINER) and works_in_order(f"{SCORER_OF}ref_logprobs")
    assert not works_in_order(3) and not works_in_order("weights store")
