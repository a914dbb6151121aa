"""Every law after every event, whatever happens in whatever order; progress from every state; replay identical."""

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.policies import PolicySet
from engine.record.reader import read
from engine.record.replayer import replay
from engine.states.limits import Limits, Pool
from engine.states.timeouts import Timeouts
from tests.core.added_states import GATING, PROVING, SIFTING
from tests.core.adversary import Adversary
from tests.core.moves import MOVES, Drawn, Move, any_limits, any_policies, drawn


class AnyOrder(RuleBasedStateMachine):
    """Every move is a rule. The run is then completed, and its record replayed."""

    @initialize(
        limits=drawn(any_limits), names=drawn(any_policies), prompts=st.integers(1, 24), slots=st.integers(1, 4),
        samples=st.integers(1, 4), replicas=st.integers(1, 3), together=st.sampled_from([1, 1, 3]),
    )  # fmt: skip
    def begin(
        self, limits: Limits, names: dict[str, str], prompts: int, slots: int, samples: int, replicas: int,
        together: int,
    ) -> None:  # fmt: skip
        self.world = Adversary(
            limits, PolicySet.from_names(names), prompts, slots, samples=samples, together=together, replicas=replicas
        )

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.complete()
        report = replay(read(self.world.recorder))
        assert report.divergence is None, report.divergence
        assert report.events == self.world.driver.events_handled


def as_rule(move: Move) -> object:
    def happens(machine: AnyOrder, data: st.DataObject) -> None:
        choose = Drawn(data.draw)
        move.act(machine.world, choose.choice(list(move.among(machine.world))), choose)

    happens.__name__ = move.name
    possible = precondition(lambda machine: bool(move.among(machine.world)))
    return rule(data=st.data())(possible(happens))


for move in MOVES:
    setattr(AnyOrder, move.name, as_rule(move))

AnyOrder.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase


COME_AND_GO = ("arrive_up", "work", "kill", "kill_worker", "come_up", "fail_start", "take_away", "crash", "drain")
"""The moves that end or start processes, and those by which a run goes on meanwhile."""


@settings(max_examples=40, deadline=None)
@given(
    tasks=st.sampled_from([("rollout", "train"), ("rollout", "train", "old_logprobs")]), acts=st.integers(4, 30),
    moves=st.lists(st.sampled_from(COME_AND_GO), min_size=1, max_size=8), seed=st.integers(0, 99),
)  # fmt: skip
def test_what_takes_turns_never_meets_whatever_starts_or_ends_meanwhile(
    tasks: tuple[str, ...], acts: int, moves: list[str], seed: int
) -> None:
    """Also while an added state inspects a batch, or weights, and the pool is leased but not used."""
    limits = Limits(
        train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=2, scoring_tasks=tasks[2:],
        pools=(Pool(tasks=tasks, replicas=(0, 1)),), added_states=(GATING, SIFTING, PROVING),
        timeouts=Timeouts.every(None), checkpoint_every=1, keeps_batches=True,
    )  # fmt: skip
    world, choose = Adversary(limits, PolicySet.from_names({}), 8, 1, replicas=2), Random(seed)
    for _ in range(acts):
        world.act()
    for name in moves:
        move = next(move for move in MOVES if move.name == name)
        if among := list(move.among(world)):
            move.act(world, choose.choice(among), choose)
    world.complete()
