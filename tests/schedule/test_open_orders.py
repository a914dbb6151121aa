"""Orders that a record shows as given and not answered, in simulated worlds whose scheduler forgets what it sent."""

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.commands import (
    Command,
    DrawPrompts,
    FinishRun,
    MeasureRows,
    ResumeGroup,
    ResumeReplica,
    RetireWeights,
    ScoreBatch,
    SetTimer,
    StageWeights,
    StartGroup,
    StopMeasuring,
    TrainStep,
)
from engine.events import Event, PromptsDrawn, RunResumed, RunStarted, TimerFired, WeightsStaged
from engine.policies import PolicySet
from engine.schedule.open_orders import OpenOrders
from engine.simulation.world import Faults, Setting, World
from engine.states.group import PHASES
from engine.states.limits import Limits
from engine.states.machine import Phase
from tests.core.test_laws import any_policies, limits
from tests.core.test_worlds import ROUGH


class Forgetful(World):
    """When so many events were handled (`ends`) the process of the scheduler ends: orders on their way and timers are
    lost. At once another orders again what the record shows as open; actors and what they have sent live on."""

    def __init__(self, setting: Setting, policies: PolicySet, ends: Sequence[int]) -> None:
        self.orders = OpenOrders()
        self.life = 0
        self._ends = set(ends)
        self._over = False
        self._carried_out: set[tuple[object, ...]] = set()
        super().__init__(setting, policies)

    def _observe(self, event: Event, commands: tuple[Command, ...]) -> None:
        super()._observe(event, commands)
        self.orders.take(event, commands)
        if self.driver.outcome is None and not any(isinstance(command, FinishRun) for command in commands):
            self._over |= self.driver.events_handled in self._ends
            self._check_groups()

    def _check_groups(self) -> None:
        """Exactly the groups that run are owed by replicas."""
        state = self.scheduler.state
        running = {(g.id, g.attempt, g.replica) for g in state.groups.values() if PHASES[g.state] is Phase.RUNNING}
        left = self.orders.left(self.time)
        owed = {(c.group, c.attempt, c.replica) for c in left if isinstance(c, StartGroup | ResumeGroup)}
        assert owed == running
        scored = {c.step for c in left if isinstance(c, ScoreBatch | TrainStep)}
        assert scored <= set(state.steps)

    def execute(self, commands: Sequence[Command]) -> None:
        if self._over:
            self._over = False
            self.life += 1
            commands = self.orders.left(self.time)
            self.orders = OpenOrders.of_plain(self.orders.to_plain())
            assert self.orders.left(self.time) == commands, "a snapshot says them all"
        super().execute(commands)

    def _in_this_life(self, action: Callable[[], None]) -> Callable[[], None]:
        life = self.life
        return lambda: action() if self.life == life else None

    def _transit(self, channel: tuple[str, int], action: Callable[[], None]) -> None:
        super()._transit(channel, self._in_this_life(action) if channel[0] == "down" else action)

    def _draw(self, command: DrawPrompts) -> None:
        first = self.scheduler.state.ledger.drawn
        count = min(command.count, self.setting.prompts - first)
        last = first + count == self.setting.prompts
        drawn = PromptsDrawn(first=first, count=count, exhausted=last, number=command.number)
        self._after(0.0, self._in_this_life(lambda: self.driver.deliver(drawn)))

    def _set_timer(self, command: SetTimer) -> None:
        self._timers.add(command.timer)

        def fire() -> None:
            if command.timer in self._timers:
                self.driver.deliver(TimerFired(timer=command.timer))

        self._after(command.delay_s, self._in_this_life(fire))

    def _train(self, command: Command) -> None:
        fields = ("step", "version", "steps", "attempt", "task")
        key = (type(command), *(getattr(command, name, None) for name in fields))
        if key not in self._carried_out:
            self._carried_out.add(key)
            super()._train(command)


@given(
    limits=limits(), names=any_policies(), seed=st.integers(0, 2**31), replicas=st.integers(1, 3),
    prompts=st.integers(1, 40), rough=st.booleans(), every=st.integers(3, 40),
)  # fmt: skip
def test_a_scheduler_that_orders_again_what_is_open_goes_on_to_the_end(
    limits: Limits, names: dict[str, str], seed: int, replicas: int, prompts: int, rough: bool, every: int
) -> None:
    own_from = limits.validation.own_from if limits.validation is not None else None
    setting = Setting(
        limits=limits, replicas=replicas if own_from is None else own_from, prompts=prompts, seed=seed,
        faults=ROUGH if rough else Faults(), prefix_every_tokens=3,
    )  # fmt: skip
    world = Forgetful(setting, PolicySet.from_names(names), range(every, 25 * every, every))
    outcome = world.run()
    assert outcome.outcome == "finished" or rough or limits.group_timeout_s, outcome
    assert world.orders.left(world.time) == []


def test_a_timer_has_the_rest_of_its_time_left_and_one_that_is_late_none() -> None:
    orders = OpenOrders()
    timer = SetTimer(timer=3, delay_s=10.0, cause=0)
    orders.take(RunStarted(id=0, at=5.0), [timer, DrawPrompts(count=4, cause=0)])
    assert orders.left(9.0) == [SetTimer(timer=3, delay_s=6.0, cause=0), DrawPrompts(count=4, cause=0)]
    assert orders.left(60.0)[0] == SetTimer(timer=3, delay_s=0.0, cause=0)
    resumed = RunResumed(id=1, at=61.0, steps=0, replicas=1, consumed=(), released=())
    orders.take(resumed, [])
    assert orders.left(62.0) == [], "the actors of the life before are gone, and with them what they owed"


def test_a_replica_is_told_to_sample_again_until_an_answer_shows_that_it_heard() -> None:
    who = {"replica": 1, "incarnation": 1}
    resume, stage = ResumeReplica(attempt=1, cause=0, **who), StageWeights(attempt=2, version=2, cause=0, **who)
    orders = OpenOrders()
    orders.take(RunStarted(id=0), [resume])
    orders.take(RunStarted(id=1), [stage])
    assert orders.left(0.0) == [resume, stage], "both may have been lost on their way"
    orders.take(WeightsStaged(id=2, attempt=2, version=2, **who), [])
    assert orders.left(0.0) == []


def test_measuring_is_not_stopped_again_once_it_goes_on() -> None:
    """A replica that was to leave, and then not, measures for the same validation again."""

    def rows(chunk: int, attempt: int) -> MeasureRows:
        return MeasureRows(
            validation=3, chunk=chunk, attempt=attempt, replica=0, incarnation=1, version=2, first=4 * chunk, count=4,
            cause=0,
        )  # fmt: skip

    orders, stop = OpenOrders(), StopMeasuring(validation=3, replica=0, incarnation=1, cause=0)
    orders.take(RunStarted(id=0, at=0.0), [rows(0, 1), stop])
    assert orders.left(0.0) == [stop]
    orders.take(RunStarted(id=1, at=1.0), [rows(0, 2), rows(1, 1)])
    assert orders.left(1.0) == [rows(0, 2), rows(1, 1)]


def test_what_arrived_long_ago_is_not_ordered_again() -> None:
    orders = OpenOrders()
    for at in (0.0, 400.0, 900.0):
        orders.take(RunStarted(id=0, at=at), [RetireWeights(version=int(at), cause=0)])
    assert orders.left(900.0) == [RetireWeights(version=400, cause=0), RetireWeights(version=900, cause=0)]
