"""The machines: every state reachable, no trap, every change of state a trigger, what the table does not allow
refused."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transitions import Machine, MachineError

from engine.errors import IllegalTransition
from engine.simulation.world import Faults, Setting, World
from engine.states.group import GROUP, Group, group_table
from engine.states.ledger import Ledger
from engine.states.limits import Limits, ValidationLimits
from engine.states.machine import Phase, SharedMachine, Table
from engine.states.pool import POOL, PoolLease
from engine.states.process import PROCESS, Process
from engine.states.replica import REPLICA, Replica
from engine.states.state import State
from engine.states.step import STEP, Step, step_table
from engine.states.validation import VALIDATION, Validation
from engine.states.version import VERSION, WeightsVersion

RECORDS = {"group": Group, "step": Step, "replica": Replica, "version": WeightsVersion, "validation": Validation,
           "pool": PoolLease, "process": Process}  # fmt: skip
ADDED = [group_table(("judging", "checking"), ("fetching",)), step_table(("gate", "second"), ("check",))]
TABLES = pytest.mark.parametrize(
    "table", [GROUP, STEP, REPLICA, VERSION, VALIDATION, POOL, PROCESS, *ADDED],
    ids=lambda table: f"{table.name} of {len(table.states)} states",
)  # fmt: skip


@TABLES
def test_every_state_is_reached_and_only_terminal_ones_are_final(table: Table) -> None:
    reached = {table.initial}
    for _ in table.states:
        reached |= {t.target for t in table.transitions if reached & set(t.sources)}
    assert reached == set(table.states)
    assert {s for s in table.states if not any(s in t.sources for t in table.transitions)} == set(table.terminal)
    ending = set(table.terminal)
    for _ in table.states:
        ending |= {source for t in table.transitions if t.target in ending for source in t.sources}
    assert not table.terminal or ending == set(table.states)


def tables_with_added_states() -> st.SearchStrategy[Table]:
    names = st.lists(st.from_regex("[a-z]{3,8}_added", fullmatch=True), max_size=6, unique=True).map(tuple)
    groups, steps = (
        names.flatmap(lambda found, of=of: st.integers(0, len(found)).map(lambda n: of(found[:n], found[n:])))
        for of in (group_table, step_table)
    )
    return groups | steps


@given(tables_with_added_states())
@example(GROUP)
@example(STEP)
@example(REPLICA)
@example(VERSION)
@example(VALIDATION)
@example(POOL)
@example(PROCESS)
@settings(max_examples=50)
def test_each_trigger_does_in_each_state_what_the_library_does(table: Table) -> None:
    """With its own event firing, and with ours: the same states, the same refusals; and those of the table."""
    ours = SharedMachine(table, {})
    rows = [{"trigger": t.trigger, "source": list(t.sources), "dest": t.target} for t in table.transitions]
    library = Machine(None, states=list(table.states), initial=table.initial, transitions=rows, auto_transitions=False)
    for state in table.states:
        for trigger in {t.trigger for t in table.transitions}:
            record, twin = Group(7), Group(7)
            record.state = twin.state = state
            target = table.target(state, trigger)
            if target is None:
                with pytest.raises(MachineError):
                    library.events[trigger].trigger(twin)
                with pytest.raises(IllegalTransition, match=f"{table.name} 7 cannot {trigger} in state {state}"):
                    ours.fire(record, trigger)
            else:
                assert library.events[trigger].trigger(twin)
                ours.fire(record, trigger)
            assert record.state == twin.state == (target or state)
    with pytest.raises(IllegalTransition):
        ours.fire(Group(7), "no such trigger")


def test_group_phases_keep_the_books() -> None:
    """A started group never waits again, a released one never comes back, and only a batch is consumed."""
    assert GROUP.phases is not None
    assert all(set(table.phases or ()) == set(table.states) for table in (GROUP, ADDED[0]))
    moves = {(GROUP.phases[s], GROUP.phases[t.target]) for t in GROUP.transitions for s in t.sources}
    assert not [move for move in moves if move[1] is Phase.WAITING]
    assert not [move for move in moves if move[0] in (Phase.RELEASED, Phase.CONSUMED)]
    assert {source for source, target in moves if target is Phase.CONSUMED} == {Phase.BATCHED}
    assert {target for source, target in moves if source is Phase.BATCHED} == {Phase.CONSUMED}
    ledger = Ledger()
    ledger.draw(3)
    ledger.move(Phase.WAITING, Phase.RUNNING)
    assert (ledger.drawn, ledger.waiting, ledger.running, ledger.unconsumed) == (3, 2, 1, 1)


def test_every_change_of_state_is_a_trigger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to `state`, seen on the attribute itself, against triggers, seen by the observer."""
    triggers: Counter[str] = Counter()
    writes: Counter[str] = Counter()
    for kind in RECORDS.values():
        honest_set = kind.__setattr__

        def write(self, name, value, kind=kind, honest_set=honest_set) -> None:  # type: ignore[no-untyped-def]
            writes[kind.__name__] += name == "state"
            honest_set(self, name, value)

        monkeypatch.setattr(kind, "__setattr__", write)
    kinds = {machine: kind.__name__ for machine, kind in RECORDS.items()}

    def observe(machine: str, record: Group, source: str, trigger: str) -> None:
        triggers[kinds[machine]] += 1

    honest = State.__init__

    def watched(self, limits, _, facts):  # type: ignore[no-untyped-def]
        honest(self, limits, observe, facts)

    monkeypatch.setattr(State, "__init__", watched)
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, sync_mode="abort",
        validation=ValidationLimits(rows=9, rows_per_slot=2, every=1),
    )  # fmt: skip
    faults = Faults(die=0.1, fail_group=0.05, fail_sync=0.1, fail_trainer=0.1)
    World(Setting(limits=limits, prompts=60, spread=0.5, seed=3, faults=faults)).run()
    assert +writes == triggers
    assert all(triggers[kind] > 10 for kind in triggers), triggers
