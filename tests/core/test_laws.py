"""Every law after every event, whatever happens in whatever order; progress from every state; replay identical."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.policies import PolicySet
from engine.record.reader import read
from engine.record.replayer import replay
from engine.states.limits import Limits
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
