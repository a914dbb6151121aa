"""Which replicas can take a group: by their slots, by what runs on them, and by each start of a tick."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.ids import NO_VERSION
from engine.states.replica import Replica
from engine.states.replicas import FreeSlots, OpenReplica
from tests.core.scripted import Scripted


def test_a_slot_is_free_for_each_group_whose_trajectories_have_ended() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=3, slots=4)
    replicas, (replica,) = run.state.replicas, run.state.replicas.by_id.values()

    def figures() -> tuple[int, int, int]:
        return replicas.for_groups(replica), replicas.freed, run.state.groups.unrewarded

    assert figures() == (1, 0, 0)
    assert replicas.room_beside([]) == (0, 1) and replicas.room_beside([replica]) == (NO_VERSION, 0)
    run.state.groups.finish_trajectories(run.state.groups.live[0], replica.samples)
    assert figures() == (2, 1, 1) and replicas.room_beside([]) == (0, 2)
    run.finish(0)
    assert figures() == (1, 0, 0), "group 3 took its slot"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6), st.data())
def test_free_slots_name_the_replica_that_a_walk_over_all_would(fleet: list[tuple[int, int, int]], data: Any) -> None:
    """`fleet`: version, slots and free slots of each replica."""
    replicas = [
        OpenReplica(Replica(id, slots=max(slots, free), version=version), free, max(slots, free) - free)
        for id, (version, slots, free) in enumerate(fleet)
    ]
    slots = FreeSlots(replicas)
    while there := [one for one in replicas if one.free]:
        oldest, avoid = data.draw(st.integers(0, 3)), data.draw(st.integers(-1, 6))
        assert slots.newest_version == max(one.replica.version for one in there)
        lawful = [one for one in there if one.replica.version >= oldest]
        loaded = [(one.replica.id == avoid, one.load, one.replica.id) for one in lawful]
        newest = [(one.replica.id == avoid, -one.replica.version, one.load, one.replica.id) for one in lawful]
        assert slots.least_loaded(oldest, avoid) == min(loaded, default=(None,))[-1]
        assert slots.newest(oldest, avoid) == min(newest, default=(None,))[-1]
        slots.take(data.draw(st.sampled_from(there)).replica)
    assert slots.newest_version == NO_VERSION and {slots.version_of(one.replica.id) for one in replicas} == {NO_VERSION}
