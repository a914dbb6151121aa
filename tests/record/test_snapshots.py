"""Snapshots: a scheduler put together from one is the scheduler it was made of, and a bad one is never gone on from."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import FAULTS, LIMITS, answer, event, fill, header, leave_open, record_run

from engine.commands import Command, StageWeights
from engine.errors import RecordError
from engine.events import SettingChanged, TimerFired, WeightsStaged
from engine.ids import GroupId
from engine.metrics.transitions import Transitions
from engine.policies import PolicySet
from engine.record import Handled, Header, MemoryRecorder, RecordEnd, Recorder, read, recover, replay
from engine.record.frames import encode_snapshot
from engine.record.msgpack_values import CodecError, pack, unpack
from engine.record.reader import Snapshot
from engine.record.snapshots import GROUPS_IN_A_PART, declarations, restore, snapshot
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.stragglers import PaceScheduling
from engine.simulation.world import Faults, Setting, World
from engine.states.clocks import Clocks
from engine.states.fleet import Fleet
from engine.states.group import Group
from engine.states.limits import Limits
from engine.states.orders import OrderBook
from engine.states.tree import declared
from engine.states.validation import Validation
from tests.core.scripted import Scripted
from tests.core.test_laws import any_policies, limits
from tests.core.test_worlds import ROUGH

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


def structure(thing: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that can be reached from an object, as plain values, whatever its class declares; indexes whose order
    or outdated entries depend on how they came about are left to `check_all`."""
    seen = {} if seen is None else seen
    if isinstance(thing, (type(None), bool, int, float, str, bytes)):
        return thing
    if isinstance(thing, (list, tuple, deque)):
        return type(thing).__name__, [structure(entry, seen) for entry in thing]
    if isinstance(thing, dict):
        return [(structure(key, seen), structure(value, seen)) for key, value in thing.items()]
    if not type(thing).__module__.startswith("engine.") or isinstance(thing, type):
        return type(thing).__name__
    if isinstance(thing, Command):
        return repr(thing)
    if id(thing) in seen:
        return "seen", seen[id(thing)]
    seen[id(thing)] = len(seen)
    names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    names += [name for name in getattr(type(thing), "__annotations__", ()) if hasattr(thing, name)]
    fields = {name: getattr(thing, name) for name in (*names, *vars(thing))} if hasattr(thing, "__dict__") else {
        name: getattr(thing, name) for name in names
    }  # fmt: skip
    for name in ("hashed", "census", "observe", "_triggers", "_commands", "_discards", "cause", "touched", "changed",
                 "deadlines", "parked", "_note", "_note_run", "_waiting_failed"):  # fmt: skip
        fields.pop(name, None)
    if isinstance(thing, OrderBook):
        fields = {name: fields[name] for name in ("by_number", "digest", "next_number")}
    if isinstance(thing, Clocks):
        fields = {name: fields[name] for name in ("looks", "owners", "longest", "doubled", "least", "timer_at")}
    if isinstance(thing, Fleet):
        for name in ("room", "seats_on_slow", "_idle", "_open", "_open_at", "idle_at", "slow"):
            fields.pop(name)
    if isinstance(thing, Validation):
        fields["waiting"] = sorted(fields["waiting"])
    if isinstance(thing, PaceScheduling):
        fields = {}
    return type(thing).__name__, [(name, structure(fields[name], seen)) for name in sorted(fields)]


def over_the_wire(scheduler: Scheduler) -> list[Any]:
    """A snapshot as the record gives it back."""
    return [unpack(pack(part)) for part in snapshot(scheduler)]


def a_world(seed: int, figures: Limits, names: dict[str, str], recorder: MemoryRecorder, rough: bool = True) -> World:
    own_from = figures.validation.own_from if figures.validation is not None else None
    setting = Setting(
        limits=figures, replicas=2 if own_from is None else own_from, slots=3, prompts=30, seed=seed, spread=0.8,
        faults=ROUGH if rough else Faults(), prefix_every_tokens=3,
    )  # fmt: skip
    return World(setting, PolicySet.from_names(names), recorder, check=False)


@settings(max_examples=40)
@given(limits=limits(), names=any_policies(), seed=st.integers(0, 2**31), share=st.floats(0, 1))
def test_from_any_point_on_it_decides_as_the_other_would_have(
    limits: Limits, names: dict[str, str], seed: int, share: float
) -> None:
    recorder = MemoryRecorder(Header(run="any", limits=limits.to_plain(), policies=PolicySet.from_names(names).names))
    a_world(seed, limits, names, recorder).run()
    frames = [frame for frame in read(recorder).frames() if isinstance(frame, Handled)]
    at = int(share * (len(frames) - 1))
    first = Scheduler(limits, PolicySet.from_names(names))
    for frame in frames[: at + 1]:
        first.handle(frame.event)
    again = restore(over_the_wire(first))
    assert again.state_hash == again.state.hashed.from_scratch() == frames[at].state_hash
    assert structure(again) == structure(first)
    for frame in frames[at + 1 :]:
        assert again.handle(frame.event) == frame.commands and again.state_hash == frame.state_hash
        first.handle(frame.event)
    assert structure(again) == structure(first)


def test_a_clock_that_stands_still_is_looked_at_when_it_would_have_been() -> None:
    """A group is timed from a change of its limit, stands still in a sync, runs on, and stands still in the next sync
    when it is time to look at it."""
    run = Scripted(train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=6)
    run.tell(SettingChanged(setting="timeouts.group_s", value="100"))
    look_at = run.state.clocks.timer_at
    for version, groups in ((1, (0, 1)), (2, (2, 3))):
        run.finish(*groups)
        run.train()
        run.publish()
        sync = run.ordered(StageWeights)[-1]
        run.tell(WeightsStaged(replica=0, incarnation=1, attempt=sync.attempt, version=version))
        assert run.state.fleet.replicas[0].state == "pausing"
        if version == 1:
            run.twin = restore(over_the_wire(run.scheduler))
            run.install()
    assert run.state.limit_timer is not None
    run.tell(TimerFired(timer=run.state.limit_timer), at=look_at)


def test_every_kind_of_record_is_in_a_snapshot_once() -> None:
    """With pools, added states and validations, faults and a resume; so that the comparison above has seen them all."""
    seen: set[str] = set()
    recorder = MemoryRecorder(Header(run="kinds", limits=ALL_KINDS.to_plain()))
    world = a_world(4, ALL_KINDS, {}, recorder)

    judged = world.driver.observe

    def look(event: Any, commands: Any) -> None:
        assert judged is not None
        judged(event, commands)
        parts = over_the_wire(world.scheduler)
        again = restore(parts)
        assert structure(again) == structure(world.scheduler)
        state = again.state
        records = [*state.small_records(), *state.fleet.replicas.values(), *state.groups.values()]
        seen.update(type(record).__name__ for record in records)
        seen.update("Chunk" for run in state.validations.runs.values() if run.chunks)

    world.driver.observe = look
    world.run()
    assert seen >= {*KINDS, "Group"} and {*KINDS, "Group"} <= {name for name, *_ in declarations()}


def test_a_value_that_does_not_fit_its_declaration_is_refused() -> None:
    for name, value in (("steps_trained", "many"), ("exhausted", 1), ("steps_in", {0: 0.5}), ("none_left", None)):
        scheduler = Scheduler(LIMITS)
        setattr(scheduler.state, name, value)
        with pytest.raises(CodecError, match=rf"State\.{name}: .* is a {type(value).__name__}|State\.{name}: 0.5"):
            snapshot(scheduler)


def test_a_snapshot_of_other_declarations_is_refused() -> None:
    parts = over_the_wire(Scheduler(LIMITS))
    parts[0][0][0].append("added_later: <class 'int'>")
    with pytest.raises(CodecError, match="other fields"):
        restore(parts)


def test_a_snapshot_of_many_groups_has_many_parts() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.state.draw(0, 2 * GROUPS_IN_A_PART + 1)
    parts = over_the_wire(scheduler)
    assert [len(part) for part in parts[1:]] == [GROUPS_IN_A_PART, GROUPS_IN_A_PART, 1]
    assert list(restore(parts).state.groups) == list(range(2 * GROUPS_IN_A_PART + 1))


# in a record


def test_its_parts_lie_in_one_segment_and_one_that_is_cut_short_is_none(tmp_path: Path) -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.state.draw(0, 2 * GROUPS_IN_A_PART + 1)
    payloads = encode_snapshot(3, snapshot(scheduler))
    for written in (payloads, payloads[:-1]):
        recorder = Recorder(tmp_path / str(len(written)), header(), segment_bytes=200)
        fill(recorder, 3)
        recorder.snapshot(written)
        for number in range(3, 6):
            recorder.write(event(number), answer(number), 0)
        recorder.close()
        record = read(tmp_path / str(len(written)))
        assert len(list(record.frames())) == 6
        assert [place.position for place in record.snapshots()] == [3] * (written is payloads)
    with pytest.raises(RecordError, match="an event interrupts a snapshot"):
        broken = MemoryRecorder(header())
        fill(broken, 3)
        broken.snapshot(payloads[:-1])
        broken.write(event(3), answer(3), 0)
        list(read(broken).frames())


def test_a_snapshot_begins_anew_behind_one_that_was_cut_short(tmp_path: Path) -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.state.draw(0, 2 * GROUPS_IN_A_PART + 1)
    payloads = encode_snapshot(3, snapshot(scheduler))
    recorder = Recorder(tmp_path, header())
    fill(recorder, 3)
    recorder.snapshot(payloads[:-1])
    recorder.close()
    again = Recorder(tmp_path, RecordEnd(events=3))
    again.snapshot(payloads)
    again.close()
    *events, whole = read(tmp_path).frames_and_snapshots()
    assert isinstance(whole, Snapshot) and len(events) == 3
    assert [part.payload for part in whole.parts] == payloads and whole.path == str(again.path)


def recorded(directory: Path | None = None, **options: Any) -> Any:
    return record_run(directory, seed=10, snapshot_every=EVERY, **options)  # its newest snapshot has open groups


def test_the_run_goes_on_from_the_newest_snapshot_and_a_replay_checks_each() -> None:
    recorder = recorded()
    record = read(recorder)
    places = list(record.snapshots())
    assert len(places) > 2 and [place.position for place in places] == sorted(
        (place.position for place in places), reverse=True
    )
    whole = read(MemoryRecorder(record.header))
    assert replay(record).identical and whole.header == record.header
    recovered = recover(record)
    plain = recover(read(without_snapshots(recorder)))
    assert recovered.began_at == places[0] and plain.began_at is None
    seen: list[int] = []
    assert recover(record, replayed=lambda frame, _: seen.append(frame.event.id)).began_at == places[0]
    assert seen == list(range(places[0].position, recorder.next_event)), "nothing before the snapshot is read"
    assert recovered.report.events < EVERY <= recovered.events == plain.events == recorder.next_event
    assert recovered.at == plain.at
    assert structure(recovered.scheduler) == structure(plain.scheduler)
    for steps in range(recovered.scheduler.state.steps_trained + 1):
        assert recovered.resume_from_checkpoint(steps=steps, replicas=2) == plain.resume_from_checkpoint(
            steps=steps, replicas=2
        )
        assert recovered.batches(steps) == plain.batches(steps)


def without_snapshots(recorder: MemoryRecorder) -> MemoryRecorder:
    record = read(recorder)
    bare = MemoryRecorder(record.header)
    bare.frames.extend(frame.payload for frame in record.frames() if isinstance(frame, Handled))
    return bare


def forged(recorder: MemoryRecorder, change: Callable[[list[Any]], None], newest: int = 1) -> MemoryRecorder:
    """The record with its newest snapshots changed, every checksum as it should be."""
    record = read(recorder)
    other = MemoryRecorder(record.header)
    chosen = [place.position for place in record.snapshots()][:newest]
    for frame in record.frames_and_snapshots():
        if isinstance(frame, Handled):
            other.frames.append(frame.payload)
        elif hasattr(frame, "plain"):
            parts = frame.plain
            if frame.position in chosen:
                change(parts)
            other.frames.extend(encode_snapshot(frame.position, parts))
    return other


def change_hash(parts: list[Any]) -> None:
    parts[0][3] ^= 1


def change_group(parts: list[Any]) -> None:
    rows = [row for part in parts[1:] for row in part if type(row) is list]
    rows[0][2] += 1


def lose_group(parts: list[Any]) -> None:
    parts[-1].pop()


def lose_everything(parts: list[Any]) -> None:
    parts[0] = None


def change_fields(parts: list[Any]) -> None:
    parts[0][0][3].append("later")


def change_type(parts: list[Any]) -> None:
    parts[0][5][0] = "text"


@pytest.mark.parametrize("change", [change_hash, change_group, lose_group, lose_everything, change_fields, change_type])
def test_a_snapshot_that_does_not_fit_is_passed_over(change: Callable[[list[Any]], None]) -> None:
    recorder = recorded()
    places = list(read(recorder).snapshots())
    one, all_of_them = recover(read(forged(recorder, change))), recover(read(forged(recorder, change, len(places))))
    assert one.began_at is not None and one.began_at.position == places[1].position
    assert all_of_them.began_at is None and len(all_of_them.passed_over) == len(places)
    told = str(one.passed_over[0])
    assert "at byte" in told and "this engine cannot continue from this snapshot" in told
    straight = recover(read(recorder))
    assert structure(one.scheduler) == structure(all_of_them.scheduler) == structure(straight.scheduler)


@pytest.mark.parametrize("change", [change_hash, change_group, lose_group, change_type])
def test_a_replay_tells_of_a_snapshot_of_another_state(change: Callable[[list[Any]], None]) -> None:
    recorder = recorded()
    position = next(read(recorder).snapshots()).position
    report = replay(read(forged(recorder, change)))
    assert report.divergence is not None and report.divergence.index == position - 1
    assert "the state differs from the snapshot after it: (memory) at byte" in str(report)


@given(st.integers(0, 2**31), st.data())
def test_whatever_a_snapshot_says_it_fits_or_is_refused(seed: int, data: st.DataObject) -> None:
    scheduler = Scheduler(LIMITS)
    parts = over_the_wire(scheduler) if seed % 2 else [unpack(pack(part)) for part in MIDWAY]
    at: Any = parts
    while isinstance(at, list) and at:
        place = data.draw(st.integers(0, len(at) - 1))
        if not isinstance(at[place], list) or not at[place] or data.draw(st.integers(0, 3)) == 0:
            at[place] = data.draw(st.one_of(
                st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=3),
                st.lists(st.integers(0, 6), max_size=4),
            ))  # fmt: skip
            break
        at = at[place]
    try:
        again = restore(parts)
    except CodecError:
        return
    assert again.state_hash == again.state.hashed.from_scratch()


def _midway() -> list[Any]:
    recorder = recorded()
    return next(iter([read(recorder).snapshot(place).plain for place in read(recorder).snapshots()]))


MIDWAY = _midway()


def test_wherever_the_end_is_torn_the_rest_is_recovered(tmp_path: Path) -> None:
    recorder = recorded(tmp_path / "whole")
    leave_open(tmp_path / "whole")
    (last,) = (tmp_path / "whole").glob("*.seg")
    data = last.read_bytes()
    straight = [frame.state_hash for frame in read(tmp_path / "whole").frames() if isinstance(frame, Handled)]
    assert len(straight) == recorder.next_event
    began = set()
    for cut in range(len(data) // 2, len(data), 131):
        last.write_bytes(data[:cut])
        recovered = recover(read(tmp_path / "whole"))
        assert recovered.scheduler.state_hash == straight[recovered.events - 1]
        began.add(recovered.began_at.position if recovered.began_at else 0)
    assert len(began) > 1, "of a snapshot that is torn itself, the one before is used"


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
    assert recovered.torn is not None and recovered.torn.offset > place.offset
    assert recovered.events == place.position and recovered.began_at != place


def test_what_observers_counted_goes_on(tmp_path: Path) -> None:
    counted = Transitions()
    figures = Limits.from_plain({**LIMITS.to_plain(), "validation": {"rows": 5, "every": 2}})
    recorder = MemoryRecorder(Header(run="books", limits=figures.to_plain()))
    world = World(
        Setting(limits=figures, replicas=2, slots=4, prompts=60, seed=3, faults=FAULTS), None, recorder, check=False,
        snapshot_every=EVERY,
    )  # fmt: skip
    judged = world.judge.changed
    world.scheduler.state.observe(lambda *change: [judged(*change), counted(*change)])  # type: ignore[func-returns-value]
    counted("version", world.scheduler.state.versions[0], "published", "live")
    world.driver.books = counted
    world.run()
    resumed = Transitions()
    recovered = recover(read(recorder), resumed, books=resumed)
    assert recovered.began_at is not None
    assert resumed.count == counted.count
    assert resumed.ended == resumed.validations == counted.ended != []
    uncounted = Transitions()
    assert recover(read(recorded()), uncounted, books=uncounted).began_at is None, (
        "a snapshot that lacks them is of no use"
    )


def test_what_a_run_keeps_of_what_ended_does_not_grow() -> None:
    recorder = recorded()
    scheduler = Scheduler(LIMITS)
    replay(read(recorder), build=lambda _: scheduler)
    ended = scheduler.state.checkpoints
    assert ended.floor > 0 and min(ended.trained) >= ended.floor
    assert all(isinstance(group, GroupId) for groups in ended.released.values() for group in groups)
    assert recover(read(recorder)).batches(0)[0].step == 0, "the record knows it all"


def test_groups_that_nobody_began_are_told_by_their_ids() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.state.draw(0, 2)
    scheduler.state.groups[1].attempt = 3
    rows = over_the_wire(scheduler)[1]
    assert rows[0] == 0 and len(rows[1]) == len(declared(Group))


def test_a_group_with_one_field_of_a_wrong_type_is_refused() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.state.draw(0, 1)
    scheduler.state.groups[0].attempt = 3
    for place in range(len(declared(Group))):
        parts = over_the_wire(scheduler)
        parts[1][0][place] = None
        with pytest.raises(CodecError, match="a group's fields have wrong types"):
            restore(parts)
