"""Snapshots: a scheduler put together from one is the scheduler it was made of, and a bad one is never gone on from."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import LIMITS, record_run

from engine import policies
from engine.commands import ResumeGroup, StageWeights, StartGroup
from engine.errors import RecordError
from engine.events import CheckpointSaved, DrainRequested, ProcessUp, RunResumed, SettingChanged, WeightsStaged
from engine.ids import GroupId, ReplicaId
from engine.policies import PolicySet
from engine.record import Header, MemoryRecorder, Tick, codec, read, recover, replay
from engine.record.codec import CodecError, pack, unpack
from engine.record.frames import Snapshot, encode_snapshot
from engine.record.snapshots import declarations, restore, snapshot
from engine.scheduling.scheduler import Scheduler
from engine.simulation.world import Faults, Setting, World
from engine.states.groups import GroupsFacts
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.state import RunFacts
from engine.states.view import View
from tests.core.core_rig import require_same_state, state_of
from tests.core.moves import any_limits, any_policies, drawn
from tests.core.scripted import Scripted
from tests.core.test_worlds import ROUGH
from tests.killed_writers import leave_open

EVERY = 25
KINDS = ("Step", "Replica", "Process", "WeightsVersion", "Chunk", "Validation")
ALL_KINDS = Limits.from_plain({
    **LIMITS.to_plain(),
    "scoring_tasks": ["ref_logprobs"],
    "pools": [
        {"tasks": ["rollout"], "replicas": [0]}, {"tasks": ["rollout", "train"], "replicas": [1]},
        {"tasks": ["ref_logprobs"], "replicas": []},
    ],
    "added_states": [{"name": "rewarding", "concurrency": 2}],
    "validation": {"rows": 13, "rows_per_slot": 3, "every": 2},
})  # fmt: skip


def a_world(seed: int, figures: Limits, names: dict[str, str], recorder: MemoryRecorder, rough: bool = True) -> World:
    own_from = figures.validation.own_from if figures.validation is not None else None
    setting = Setting(
        limits=figures, replicas=2 if own_from is None else own_from, slots=3, prompts=30, seed=seed, spread=0.8,
        faults=ROUGH if rough else Faults(), prefix_every_tokens=3,
    )  # fmt: skip
    return World(setting, PolicySet.from_names(names), recorder)


@settings(max_examples=12)
@given(limits=drawn(any_limits), names=drawn(any_policies), seed=st.integers(0, 2**31), share=st.floats(0, 1))
def test_from_any_point_on_it_decides_as_the_other_would_have(
    limits: Limits, names: dict[str, str], seed: int, share: float
) -> None:
    recorder = MemoryRecorder(Header(run="any", limits=limits.to_plain(), policies=PolicySet.from_names(names).names))
    a_world(seed, limits, names, recorder).run()
    ticks = list(read(recorder).ticks())
    at = int(share * (len(ticks) - 1))
    first = Scheduler(limits, PolicySet.from_names(names))
    for tick in ticks[: at + 1]:
        first.tick(tick.events)
    again = restore(state_of(first))
    require_same_state(again, first)
    for tick in ticks[at + 1 :]:
        assert again.tick(tick.events) == tick.commands
        first.tick(tick.events)
        require_same_state(again, first)


def test_a_parked_group_whose_tokens_are_gone_resumes_in_its_new_place() -> None:
    """It had the most tokens until a resume found its trajectories missing. There are slots for the two others."""
    run = Scripted(train_batch_size=3, max_staleness_steps=0, max_concurrent_groups=3, policies={"resume": "longest"})
    for group, tokens in ((0, 9), (1, 5), (2, 7)):
        run.keep_prefix(group, tokens=tokens)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True, missing=(0,)))
    run.restore_twin()
    ordered = run.tell(ProcessUp(kind="replica", index=0, life=2, slots=2))
    assert [order.group for order in ordered if isinstance(order, StartGroup | ResumeGroup)] == [2, 1]


@pytest.fixture
def counting() -> Iterator[None]:
    """A sync policy that pauses one replica at a time, and remembers how often it was asked."""

    @policies.register("sync", "counting")
    class Counting:
        memory: dict[str, Any]

        def pause(self, view: View, staged: Sequence[ReplicaId], busy: int) -> Sequence[ReplicaId]:
            self.memory["asked"] = self.memory.get("asked", 0) + 1
            return () if busy else staged[:1]

    yield
    policies.registry.forget([Counting])


def test_it_asks_the_sync_policy_at_the_same_events(counting: None) -> None:
    """Two replicas have staged new weights, and one of them installs these while the other generates."""
    figures = {"train_batch_size": 1, "max_staleness_steps": 3, "max_concurrent_groups": 4}
    run = Scripted(replicas=2, slots=2, policies={"sync": "counting"}, **figures)
    run.train_on(0)
    for sync in run.ordered(StageWeights):
        run.tell(WeightsStaged(replica=sync.replica, life=1, attempt=sync.attempt, version=1))
    (going_on,) = [id for id, replica in run.state.replicas.by_id.items() if replica.state == "ready"]
    group = next(iter(run.running_on(going_on)))
    run.keep_prefix(group)
    run.restore_twin()
    run.keep_prefix(group, tokens=8)


def test_every_kind_of_record_is_in_a_snapshot_once() -> None:
    """With pools, added states and validations, faults and a resume; so that the comparison above has seen them all."""
    seen: set[str] = set()
    recorder = MemoryRecorder(Header(run="kinds", limits=ALL_KINDS.to_plain()))
    world = a_world(4, ALL_KINDS, {}, recorder)

    judged = world.driver.observe

    def look(tick: Tick) -> None:
        assert judged is not None
        judged(tick)
        again = restore(state_of(world.scheduler))
        require_same_state(again, world.scheduler)
        state = again.state
        records = [
            *state.training.steps.values(), *state.pools.leases, *state.training.versions.values(), state.validations,
            state.checkpoints, *state.processes.values(), *state.validations.live.values(),
            *state.replicas.by_id.values(), *state.groups.live.values(), state.groups, state.training, state.replicas,
            state.ending, state.policies,
        ]  # fmt: skip
        seen.update(type(record).__name__ for record in records)
        seen.update("Chunk" for validation in state.validations.live.values() if validation.chunks)

    world.driver.observe = look
    world.run()
    assert seen >= {*KINDS, "Group"} and {*KINDS, "Group"} <= {name for name, *_ in declarations()}


def test_a_snapshot_of_other_declarations_is_refused() -> None:
    plain = state_of(Scheduler(LIMITS))
    plain[0][0].append("added_later: <class 'int'>")
    with pytest.raises(CodecError, match="other fields"):
        restore(plain)


def test_a_snapshot_that_is_too_large_for_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 1000)
    scheduler = Scheduler(LIMITS)
    with pytest.raises(CodecError, match="but at most 1000 are allowed"):
        encode_snapshot(0, 0, snapshot(scheduler))


# in a record


def recorded(directory: Path | None = None, **options: Any) -> Any:
    """A run that broke off while groups were open."""
    return record_run(directory, seed=10, snapshot_every=EVERY, steps=5, **options)


def test_the_run_goes_on_from_the_newest_snapshot_and_a_replay_checks_each() -> None:
    recorder = recorded()
    record = read(recorder)
    places = list(record.snapshots())
    assert len(places) > 2 and places == sorted(places, key=lambda place: -place.position)
    assert replay(record).identical
    recovered = recover(record)
    plain = recover(read(without_snapshots(recorder)))
    assert recovered.began_at == places[0] and plain.began_at is None
    assert recovered.report.events == recorder.next_event - places[0].position, "nothing before the snapshot is read"
    assert recovered.report.events <= EVERY < recovered.events == plain.events == recorder.next_event
    assert recovered.at == plain.at
    require_same_state(recovered.scheduler, plain.scheduler)
    for steps in range(recovered.scheduler.state.training.steps_trained + 1):
        assert recovered.resume_from_checkpoint(steps=steps, replicas=2) == plain.resume_from_checkpoint(
            steps=steps, replicas=2
        )
        assert recovered.batches(steps) == plain.batches(steps)


def test_a_snapshot_follows_each_checkpoint_and_the_end() -> None:
    recorder = record_run(seed=10, snapshot_every=1 << 40)
    ticks = list(read(recorder).ticks())
    saved = [tick.last + 1 for tick in ticks if any(isinstance(event, CheckpointSaved) for event in tick.events)]
    assert len(saved) == 3
    places = [place.position for place in read(recorder).snapshots()]
    assert places[::-1] == sorted({*saved, recorder.next_event})


def test_a_snapshot_follows_the_end_of_a_drain() -> None:
    recorder = MemoryRecorder(Header(run="drained", limits=LIMITS.to_plain()))
    setting = Setting(limits=LIMITS, replicas=2, slots=4, prompts=60, seed=3)
    world = World(setting, None, recorder, snapshot_every=1 << 40)
    assert world.run_until(lambda state: state.training.steps_trained == 3)
    world.tell(DrainRequested(reason="a user asked"))
    assert world.run().outcome == "stopped"
    assert next(read(recorder).snapshots()).position == recorder.next_event


def without_snapshots(recorder: MemoryRecorder) -> MemoryRecorder:
    record = read(recorder)
    bare = MemoryRecorder(record.header)
    bare.frames.extend(map(pack, record.ticks()))
    return bare


def forged(recorder: MemoryRecorder, change: Callable[[list[Any]], None], newest: int = 1) -> MemoryRecorder:
    """The record with its newest snapshots changed, every checksum as it should be."""
    record = read(recorder)
    other = MemoryRecorder(record.header)
    chosen = [place.position for place in record.snapshots()][:newest]
    for frame in record.frames_and_snapshots():
        if isinstance(frame, Snapshot) and frame.position in chosen:
            change(frame.plain)
        other.frames.append(pack(frame))
    return other


def groups_in(plain: list[Any]) -> dict[int, list[Any]]:
    """The groups in a snapshot, each as a list of its fields."""
    rows: dict[int, list[Any]] = plain[3][RunFacts.__struct_fields__.index("groups")][
        GroupsFacts.__struct_fields__.index("live")
    ]
    return rows


def change_group(plain: list[Any]) -> None:
    next(iter(groups_in(plain).values()))[2] += 1


def lose_group(plain: list[Any]) -> None:
    groups_in(plain).popitem()


def change_order(plain: list[Any]) -> None:
    groups = groups_in(plain)
    first = next(iter(groups))
    groups[first] = groups.pop(first)


def lose_everything(plain: list[Any]) -> None:
    plain.clear()


def change_fields(plain: list[Any]) -> None:
    plain[0][3].append("later")


def change_type(plain: list[Any]) -> None:
    plain[3][0] = "text"


@pytest.mark.parametrize("change", [lose_group, lose_everything, change_fields, change_type])
def test_a_snapshot_that_does_not_fit_is_passed_over(change: Callable[[list[Any]], None]) -> None:
    recorder = recorded()
    places = list(read(recorder).snapshots())
    one, all_of_them = recover(read(forged(recorder, change))), recover(read(forged(recorder, change, len(places))))
    assert one.began_at is not None and one.began_at.position == places[1].position
    assert all_of_them.began_at is None and len(all_of_them.passed_over) == len(places)
    reason = str(one.passed_over[0])
    assert "at byte" in reason and "this engine cannot continue from this snapshot" in reason
    straight = recover(read(recorder))
    require_same_state(one.scheduler, straight.scheduler)
    require_same_state(all_of_them.scheduler, straight.scheduler)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (change_group, r"RunFacts\.groups\.live\[\d+\]\.attempt"),
        (lose_group, r"RunFacts\.groups\.live"),
        (change_order, r"RunFacts\.groups\.live"),
        (change_type, r"RunFacts\.started"),
    ],
)
def test_a_replay_reports_a_snapshot_of_another_state(change: Callable[[list[Any]], None], field: str) -> None:
    recorder = recorded()
    position = next(read(recorder).snapshots()).position
    report = replay(read(forged(recorder, change)))
    assert report.divergence is not None and report.divergence.tick.last == position - 1
    differs = rf"the state differs from the snapshot after it: \(memory\): at byte \d+: {field}: .* was recorded, "
    assert re.search(differs, str(report))


@given(st.integers(0, 2**31), st.data())
def test_whatever_a_snapshot_says_it_fits_or_is_refused(seed: int, data: st.DataObject) -> None:
    scheduler = Scheduler(LIMITS)
    parts = state_of(scheduler) if seed % 2 else [unpack(pack(part)) for part in MIDWAY]
    at: Any = parts
    while isinstance(at, list | dict) and at:
        place: Any = data.draw(st.sampled_from([*at] if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[place], list | dict) or not at[place] or data.draw(st.integers(0, 3)) == 0:
            at[place] = data.draw(st.one_of(
                st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=3),
                st.lists(st.integers(0, 6), max_size=4),
            ))  # fmt: skip
            break
        at = at[place]
    with suppress(CodecError):
        check_all(restore(parts).state)


def _midway() -> list[Any]:
    recorder = recorded()
    return next(iter([read(recorder).snapshot(place).plain for place in read(recorder).snapshots()]))


MIDWAY = _midway()


def test_a_flipped_bit_is_refused_by_place_or_is_the_torn_end(tmp_path: Path) -> None:
    recorded(tmp_path)
    leave_open(tmp_path)
    (path,) = tmp_path.glob("*.seg")
    data = path.read_bytes()
    place = next(read(tmp_path).snapshots())
    for at in range(place.offset, place.behind, 97):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(bytes(flipped))
        with pytest.raises(RecordError, match="at byte"):
            recover(read(tmp_path))
    path.write_bytes(data[: place.behind - 1])
    recovered = recover(read(tmp_path))
    assert recovered.torn is not None and recovered.torn.offset == place.offset
    assert recovered.events == place.position and recovered.began_at != place


def test_what_a_run_keeps_of_what_ended_does_not_grow() -> None:
    recorder = recorded()
    scheduler = Scheduler(LIMITS)
    replay(read(recorder), build=lambda _: scheduler)
    ended = scheduler.state.checkpoints
    assert ended.floor > 0 and min(ended.trained) >= ended.floor
    assert all(isinstance(group, GroupId) for groups in ended.released.values() for group in groups)
    assert recover(read(recorder)).batches(0)[0].step == 0, "the record knows it all"


def test_failures_and_keys_of_groups_are_restored() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)
    run.fail(0, cause="data")
    run.state.groups.live[1].resume_key = (1, 2.5)
    restored = restore([unpack(pack(part)) for part in snapshot(run.scheduler)])
    require_same_state(restored, run.scheduler)
    live = restored.state.groups.live
    assert live[0].data_failures == 1 and live[1].resume_key == (1, 2.5)


def test_a_group_with_one_field_of_a_wrong_type_is_refused() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.state.groups.draw(0, 1)
    scheduler.state.groups.live[0].prepared = True
    for place in range(len(groups_in(state_of(scheduler))[0])):
        plain = state_of(scheduler)
        groups_in(plain)[0][place] = None
        with pytest.raises(CodecError, match=r"Expected .*, got `null`"):
            restore(plain)


def test_a_policy_that_was_changed_is_restored_in_its_place() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)
    run.tell(SettingChanged(setting="scheduler.policies.dispatch", value="newest-weights"))
    require_same_state(restore([unpack(pack(part)) for part in snapshot(run.scheduler)]), run.scheduler)
