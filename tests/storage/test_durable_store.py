"""The durable store: what was acknowledged is there after any end of its process, and nothing else is."""

import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RecordError, RunDamaged, StorageFull
from engine.record.segment_log import (
    FRAME_BYTES,
    PREAMBLE_BYTES,
    Index,
    frame,
    load_index,
    preamble,
    store_index,
)
from engine.storage.durable_trajectories import (
    PUT,
    SCORES,
    TRAJECTORIES,
    DurableStore,
    StorePolicy,
    packed_entry,
    put_store_aside,
)
from engine.storage.trajectories import TrajectoryStore
from tests.killed_writers import leave_open

SMALL = StorePolicy(segment_bytes=256, cache_bytes=0)
TASKS = ("old_logprobs", "ref_logprobs")
StoreContents = tuple[dict[int, tuple[int, bytes]], dict[tuple[int, str], tuple[int, bytes]]]


def contents_of(store: DurableStore) -> StoreContents:
    """All that a store holds, read back from its segments."""
    groups = {group: (attempt, store.get([group])[0]) for group, attempt in store.attempts.items()}
    scores = {
        (group, task): (step, store.scores(step, task, [group])[0])
        for group in groups for task in TASKS for step in range(3) if store.is_scored(group, task, step)
    }  # fmt: skip
    return groups, scores


def reopened(directory: Path, policy: StorePolicy = SMALL) -> StoreContents:
    store = DurableStore(directory, policy, fresh=False)
    try:
        return contents_of(store)
    finally:
        store.close()


groups = st.integers(0, 5)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), groups, st.integers(1, 3), st.binary(min_size=0, max_size=90)),
        st.tuples(st.just("put"), groups, st.integers(1, 3), st.binary(min_size=60, max_size=200)),
        st.tuples(st.just("replace"), groups, st.integers(1, 3), st.binary(max_size=60)),
        st.tuples(st.just("extend"), groups, st.integers(1, 3), st.binary(min_size=1, max_size=90)),
        st.tuples(st.just("scores"), groups, st.integers(0, 2), st.sampled_from(TASKS), st.binary(max_size=40)),
        st.tuples(st.just("discard"), st.lists(groups, max_size=4), st.none() | st.integers(1, 3)),
    ),
    max_size=40,
)


def carry_out(store: Any, operation: tuple[Any, ...]) -> None:
    kind, *rest = operation
    if kind in ("put", "replace", "extend"):
        group, attempt, data = rest
        getattr(store, kind)(group, attempt, data)
    elif kind == "scores":
        group, step, task, data = rest
        store.put_scores(step, task, [group], [data])
    else:
        store.discard(*rest)
    store.flush()


@dataclass
class History:
    """What a store held after each operation, as a store in memory has it."""

    memory: TrajectoryStore[bytes] = field(default_factory=lambda: TrajectoryStore(len))
    held: list[StoreContents] = field(default_factory=lambda: [({}, {})])

    def after(self, operation: tuple[Any, ...]) -> None:
        carry_out(self.memory, operation)
        kept = {group: (attempt, data) for group, (attempt, data, _) in self.memory._kept.items()}
        scores = {
            (group, task): said
            for group, by_task in self.memory._scores.items() for task, said in by_task.items()
        }  # fmt: skip
        self.held.append((kept, scores))


@settings(max_examples=120, deadline=None)
@given(operations=operations, data=st.data())
def test_a_kill_at_any_byte_leaves_a_prefix_of_what_happened(operations: list[Any], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory, killed = Path(place, "store"), Path(place, "killed")
        cached = replace(SMALL, cache_bytes=data.draw(st.sampled_from((0, 150, 1 << 20))))
        store, history = DurableStore(directory, cached), History()
        on_disk: dict[Path, int] = {}
        for operation in operations:
            before = {path: path.read_bytes() for path in directory.glob("*.seg")}
            carry_out(store, operation)
            history.after(operation)
            segments = sorted(directory.glob("*.seg"))
            gone = {path: content for path, content in before.items() if path not in segments}
            if gone:  # what was still kept of these was brought to the disk before they went: killed in between
                on_disk = {path: path.stat().st_size for path in segments}
                shutil.rmtree(killed, ignore_errors=True)
                shutil.copytree(directory, killed)
                for path, content in gone.items():
                    Path(killed, path.name).write_bytes(content)
                assert reopened(killed) == history.held[-1]
            stats = store.stats()
            assert stats.disk_bytes == sum(path.stat().st_size for path in segments)
            assert stats.disk_bytes <= 2 * stats.bytes + 2 * (SMALL.segment_bytes + 300), "space comes back"
        assert contents_of(store) == history.held[-1]
        store.close()
        assert reopened(directory) == history.held[-1], "what was acknowledged is there"
        for last in sorted(directory.glob("*.seg"))[-1:]:
            os.truncate(last, data.draw(st.integers(on_disk.get(last, 0), last.stat().st_size)))
            leave_open(directory, listed=last.stat().st_size >= PREAMBLE_BYTES)
            assert reopened(directory) in history.held


def test_scores_whose_group_was_written_again_behind_them_are_kept(tmp_path: Path) -> None:
    """As clearing away leaves it, one segment after the other."""
    path = tmp_path / "00000002.seg"
    of_gone = frame(packed_entry(SCORES, 1, [2, "old_logprobs"], b"of a group that is gone"))
    scores, group = frame(packed_entry(SCORES, 0, [2, "old_logprobs"], b"s")), frame(packed_entry(PUT, 0, 1, b"g"))
    path.write_bytes(preamble(TRAJECTORIES, 2, 0) + of_gone + scores + group)
    store_index(tmp_path, Index([None], first=2))
    store = DurableStore(tmp_path, SMALL, fresh=False)
    assert contents_of(store) == ({0: (1, b"g")}, {(0, "old_logprobs"): (2, b"s")})
    assert store.stats().bytes == len(scores) + len(group)
    store.discard([0])
    store.close()
    assert reopened(tmp_path) == ({}, {})


def filled(directory: Path, *, groups: int = 3, policy: StorePolicy = SMALL) -> list[Path]:
    """A store of a few groups that was closed; its segments."""
    store = DurableStore(directory, policy)
    for group in range(groups):
        store.put(group, 1, bytes([group]) * 50)
        store.flush()
    store.close()
    return sorted(directory.glob("*.seg"))


def test_one_flipped_while_the_store_is_open_is_refused_as_well(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, SMALL, fresh=False)
    store.put(4, 1, b"x" * 50)
    store.flush()
    (path,) = tmp_path.glob("*.seg")
    with path.open("r+b") as file:
        file.seek(PREAMBLE_BYTES + FRAME_BYTES + 20)
        file.write(b"y")
    with pytest.raises(RecordError, match=rf"at byte {PREAMBLE_BYTES}: the frame is damaged"):
        store.get([4])


def test_the_newest_are_read_without_the_disk_and_the_others_from_it(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, StorePolicy(cache_bytes=100))
    for group, data in enumerate((b"a" * 60, b"b" * 60, b"c" * 30)):
        store.put(group, 1, data)
    store.flush()
    assert store.get([2, 0, 1, 2]) == [b"c" * 30, b"a" * 60, b"b" * 60, b"c" * 30]
    (path,) = tmp_path.glob("*.seg")
    path.unlink()
    assert store.get([1, 2]) == [b"b" * 60, b"c" * 30]
    with pytest.raises(RecordError, match="cannot be read"):
        store.get([0])
    with pytest.raises(RunDamaged, match="was deleted or moved during the run"):
        store.close()
    with pytest.raises(RunDamaged):
        store.put(3, 1, b"d")
    store.close()


def test_the_cache_drops_what_was_discarded_and_what_is_too_large(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, StorePolicy(cache_bytes=100))
    for group, data in enumerate((b"a" * 60, b"b" * 60, b"c" * 30)):
        store.put(group, 1, data)
    store.flush()
    (path,) = tmp_path.glob("*.seg")
    path.write_bytes(b"")
    store.discard([1])
    store.put(1, 2, b"d" * 60)
    store.put(3, 1, b"e" * 200)  # more than there is room for
    assert store.get([1]) == [b"d" * 60]
    store.discard([1])
    store.put(4, 1, b"f" * 60)
    assert store.get([2]) == [b"c" * 30], "what was discarded takes no room"


def test_a_new_run_needs_an_empty_directory_and_one_process_writes_at_a_time(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(RecordError, match="a new run needs an empty directory"):
        DurableStore(tmp_path)
    store = DurableStore(tmp_path, fresh=False)
    with pytest.raises(RecordError, match="another process is writing"):
        DurableStore(tmp_path)
    store.close()
    assert put_store_aside(tmp_path / "nothing") is None
    before = sorted(path.read_bytes() for path in tmp_path.iterdir())
    aside = put_store_aside(tmp_path)
    assert aside is not None and sorted(path.read_bytes() for path in aside.iterdir()) == before
    DurableStore(tmp_path).close()
    assert put_store_aside(tmp_path) is None, "it holds nothing"


def test_a_store_over_its_bound_cleans_up_then_says_what_to_do_and_keeps_its_data(tmp_path: Path) -> None:
    policy = StorePolicy(segment_bytes=256, max_bytes=1024)
    store = DurableStore(tmp_path, policy)
    for group in range(100):  # ten times what there is room for, most of it discarded
        store.put(group, 1, b"x" * 80)
        store.discard([group - 3])
        store.flush()
    assert set(store.attempts) == {97, 98, 99}
    with pytest.raises(StorageFull, match=r"durability\.max_bytes are used up.*set it higher") as full:
        for group in range(100, 120):
            store.put(group, 1, b"x" * 80)
            store.flush()
    assert str(tmp_path) in str(full.value)
    kept = dict(store.attempts)
    assert 5 < len(kept) < 14
    with pytest.raises(StorageFull):
        store.discard([98])
    with pytest.raises(StorageFull):
        store.flush()
    store.close()
    again = DurableStore(tmp_path, StorePolicy(segment_bytes=256), fresh=False)
    assert set(again.attempts) == set(kept)
    again.close()


def test_what_makes_room_is_taken_at_the_bound_itself(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, StorePolicy(segment_bytes=4096))
    store.put(0, 1, b"x" * 80)
    full = StorePolicy(segment_bytes=4096, max_bytes=store.stats().disk_bytes)
    store.close()
    store = DurableStore(tmp_path, full, fresh=False)
    store.discard([0])
    assert store.stats().groups == 0
    store.close()


def test_tokens_that_look_like_entries_do_not_keep_a_torn_end_from_being_cut(tmp_path: Path) -> None:
    store = DurableStore(tmp_path)
    store.put(1, 1, b"a")
    store.put(2, 1, (404).to_bytes(4, "little") * 70_000)
    store.close()
    leave_open(tmp_path)
    (path,) = tmp_path.glob("*.seg")
    path.write_bytes(path.read_bytes()[:-5])
    store = DurableStore(tmp_path, fresh=False)
    assert store.torn is not None and store.get([1]) == [b"a"] and set(store.attempts) == {1}
    store.close()


def test_a_deletion_that_a_kill_interrupted_is_finished(tmp_path: Path) -> None:
    first, *others = filled(tmp_path, groups=20)
    index = load_index(tmp_path)
    assert index is not None
    store_index(tmp_path, Index(index.seals[1:], first=1))
    store = DurableStore(tmp_path, SMALL, fresh=False)
    assert 0 not in store.attempts and 19 in store.attempts and first.exists()
    store.put(20, 1, b"x")
    store.close()
    assert not first.exists() and all(path.exists() for path in others)
