"""The durable trajectory store: `trajectories.TrajectoryStore` on disk, so that its groups survive every process.

    store = DurableStore(directory, fresh=False)         # reads the existing segments
    store.put(group, attempt, packed)       # may still be in memory
    store.flush()                           # the operating system has it

Used by the trajectory store actor, and read when a run resumes. It keeps in memory where each group is; the groups are
on disk, in a log (`record.segment_log`) with these msgpack payloads:

    put      [1, group, attempt, packed group]
    scores   [2, group, [step, task], packed scores]
    discard  [3, [group, ...], null, null]
    extend   [4, group, attempt, packed growth]         continues the data of this attempt; nothing if there is none

The last put of a group counts, with the entries that extend it. Space is reclaimed from the oldest segment: its kept
entries are appended again, each group in one piece, and synced to disk, then it is deleted. So a kill at any moment
loses nothing, and a discard is never deleted before the entry that it discards.
"""

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from engine.errors import RecordError, StorageFull
from engine.ids import GroupId, StepId
from engine.record.files import RecordLock
from engine.record.segment_log import (
    FRAME_BYTES,
    PREAMBLE_BYTES,
    Contents,
    Payload,
    SegmentWriter,
    Torn,
    has_segments,
    open_log,
    read_payload,
    segment_name,
)
from engine.storage.checkpoints import put_aside
from engine.storage.trajectories import StoreStats, require_kept, require_scored

# -- the entries -------------------------------------------------------------------------------------------------------


PUT, SCORES, DISCARD, EXTEND = 1, 2, 3, 4
TRAJECTORIES = Contents(
    name="trajectory store",
    magic=b"step-trj",
    version=1,
)


class Entry(NamedTuple):
    """One entry."""

    kind: int
    key: Any
    mark: Any
    data: Any


def packed_entry(kind: int, key: Any, mark: Any = None, data: bytes | None = None) -> bytes:
    """The payload of an entry."""
    packed: bytes = msgpack.packb((kind, key, mark, data), use_bin_type=True)
    return packed


def entry_of(payload: Payload) -> Entry:
    """Decode a payload, whose checksum was right."""
    return Entry(*msgpack.unpackb(payload.data))


def put_store_aside(directory: Path) -> Path | None:
    """Rename the directory of a store, once its writer has ended, so that a new store can use the path. Returns the new
    path, or None if it is empty. Raises: `RecordError` if it cannot be renamed."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    lock = RecordLock(directory, waits=True)
    try:
        return put_aside(directory)
    except OSError as error:
        raise RecordError(str(directory), 0, f"cannot be set aside: {error.strerror or error}") from None
    finally:
        lock.release()


# -- the cache ---------------------------------------------------------------------------------------------------------


class Recent:
    """A cache of at most `most` bytes, with the newest entries."""

    def __init__(self, most: int) -> None:
        """`most`: size in bytes; 0 caches nothing."""
        self._most = self._room = most
        self._data: OrderedDict[Hashable, bytes] = OrderedDict()
        """An `OrderedDict`, because a plain `dict` scans its deleted entries to find the first one."""

    def keep(self, place: Hashable, data: bytes) -> None:
        """Add an entry; `place` must be new."""
        if len(data) > self._most:
            return
        self._room -= len(data)
        self._data[place] = data
        while self._room < 0:
            self.drop(next(iter(self._data)))

    def find(self, place: Hashable) -> bytes | None:
        return self._data.get(place)

    def drop(self, place: Hashable) -> None:
        """Remove an entry, if it is in the cache."""
        self._room += len(self._data.pop(place, b""))


# -- the store ---------------------------------------------------------------------------------------------------------


SEGMENT_BYTES = 64 << 20


class EntryPlace(NamedTuple):
    """The location of an entry."""

    segment: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePolicy:
    """How a durable store uses its disk."""

    segment_bytes: int = SEGMENT_BYTES
    """A segment is closed and synced to disk once it is at least this long."""
    max_bytes: int | None = None
    """Limit for all segments; None: no limit."""
    cache_bytes: int = 128 << 20
    """Size of the memory cache for the newest groups and scores."""
    fsync: str = "segment"
    """`always`: everything acknowledged survives a power cut; `segment`: closed segments do."""


class DurableStore:
    """A `TrajectoryStore[bytes]` in a directory that one process writes at a time.

    Raises: `RecordError` if another process writes the directory or its contents are damaged, `StorageFull` if there
    is no room. After a failed write, every later one raises the same.
    """

    def __init__(self, directory: Path, policy: StorePolicy | None = None, *, fresh: bool = True) -> None:
        """`fresh`: the directory must hold no segments. Else they are read, after waiting until the process that
        wrote them has ended."""
        self.directory = directory
        self.policy = policy or StorePolicy()
        self.torn: Torn | None = None
        """The incomplete tail that a crash left; it is cut off before the first write."""
        self._groups: dict[GroupId, tuple[int, tuple[EntryPlace, ...]]] = {}
        """The attempt of each group, and the places of its put and of the entries that extend it."""
        self._scores: dict[GroupId, dict[str, tuple[StepId, EntryPlace]]] = {}
        self._kept: dict[int, dict[tuple[GroupId, str], int]] = {}
        """For each segment, the bytes of its kept entries by (group, scoring task; empty for the group itself)."""
        self._recent = Recent(self.policy.cache_bytes)
        self._kept_bytes = self._read_bytes = 0
        lock = RecordLock(directory, waits=not fresh)
        self._log = SegmentWriter(
            directory, TRAJECTORIES, lock, segment_bytes=self.policy.segment_bytes, fsync=self.policy.fsync == "always"
        )
        try:
            if fresh and has_segments(directory):
                raise RecordError(str(directory), 0, "trajectories exist already; a new run needs an empty directory")
            self._read()
        except BaseException:
            lock.release()
            raise
        for group in [group for group in self._scores if group not in self._groups]:
            self._forget(group)

    # the operations of a store

    def put(self, group: GroupId, attempt: int, data: bytes) -> bool:
        kept = self._groups.get(group)
        if kept is not None and kept[0] > attempt:
            return False
        self._keep_group(group, attempt, self._append(PUT, group, attempt, data))
        return True

    def extend(self, group: GroupId, attempt: int, data: bytes) -> bool:
        if self._groups.get(group, (None,))[0] != attempt:
            return False
        self._extend_group(group, self._append(EXTEND, group, attempt, data))
        return True

    def replace(self, group: GroupId, attempt: int, data: bytes) -> bool:
        return group in self._groups and self.put(group, attempt, data)

    def partial(self, group: GroupId) -> bytes | None:
        kept = self._groups.get(group)
        return None if kept is None else self._joined([kept[1]])[0]

    def get(self, groups: Sequence[GroupId]) -> list[bytes]:
        """Raises: `EngineError` that names the missing groups; `RecordError` if an entry is damaged."""
        require_kept(groups, self._groups)
        return self._joined([self._groups[group][1] for group in groups])

    def put_scores(self, step: StepId, task: str, groups: Sequence[GroupId], packed: Sequence[bytes]) -> None:
        for group, data in zip(groups, packed, strict=True):
            if group in self._groups:
                self._keep_scores(group, task, step, self._append(SCORES, group, [step, task], data))

    def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[bytes]:
        """Raises: `EngineError` that names the groups without scores for that step; `RecordError` if an entry is
        damaged."""
        require_scored(groups, [group for group in groups if self.is_scored(group, task, step)], task, step)
        return self._data([self._scores[group][task][1] for group in groups])

    def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        gone = [
            group
            for group in dict.fromkeys(groups)
            if group in self._groups and (attempt is None or self._groups[group][0] <= attempt)
        ]
        if gone:
            self._begin()
            self._write(packed_entry(DISCARD, gone))  # ignores max_bytes, because discarding makes room
            for group in gone:
                self._forget(group)
            self._compact()

    def stats(self) -> StoreStats:
        return StoreStats(groups=len(self._groups), bytes=self._kept_bytes, disk_bytes=self._disk_bytes)

    def flush(self) -> None:
        """Write everything to the operating system, and sync it to disk if `fsync` is `always`."""
        self._log.flush()

    def close(self) -> None:
        self._log.close()

    # for a resumed run

    @property
    def attempts(self) -> Mapping[GroupId, int]:
        """The attempt of each kept group."""
        return {group: attempt for group, (attempt, _) in self._groups.items()}

    def is_scored(self, group: GroupId, task: str, step: StepId) -> bool:
        return self._scores.get(group, {}).get(task, (-1, None))[0] == step

    # reading

    @property
    def _disk_bytes(self) -> int:
        """The size of all segments, including what is in memory."""
        return sum(self._log.progress) if self._log.epoch >= 0 else self._read_bytes

    def _read(self) -> None:
        log, empty = open_log(self.directory, TRAJECTORIES), True
        for at, segment in enumerate(log.segments):
            self._kept[segment.number] = {}
            end = PREAMBLE_BYTES
            for payload in log.payloads_of(at):
                end, empty = payload.end, False
                self._take(entry_of(payload), EntryPlace(segment.number, payload.offset, end - payload.offset))
            self._read_bytes += 0 if log.torn is not None and not log.torn.offset else end
        if not empty:
            log.require_index()
        self.torn = log.torn

    def _take(self, entry: Entry, place: EntryPlace) -> None:
        if entry.kind == PUT:
            self._keep_group(entry.key, entry.mark, place)
        elif entry.kind == EXTEND:
            if self._groups.get(entry.key, (None,))[0] == entry.mark:
                self._extend_group(entry.key, place)
        elif entry.kind == SCORES:
            step, task = entry.mark
            self._keep_scores(entry.key, task, step, place)
        else:
            for group in entry.key:
                self._forget(group)

    def _joined(self, parts: Sequence[Sequence[EntryPlace]]) -> list[bytes]:
        """The data of entries that belong together, for each sequence of places."""
        data = iter(self._data(list(chain.from_iterable(parts))))
        return [b"".join(islice(data, len(places))) for places in parts]

    def _data(self, places: Sequence[EntryPlace]) -> list[bytes]:
        """The data at `places`, from the cache or from disk."""
        found = {place: data for place in places if (data := self._recent.find(place)) is not None}
        missing = [place for place in places if place not in found]
        if missing and self._log.progress[1]:
            self.flush()
        found.update(self._from_disk(missing))
        return [found[place] for place in places]

    def _from_disk(self, places: Sequence[EntryPlace]) -> Iterator[tuple[EntryPlace, bytes]]:
        """Read and verify each entry."""
        opened: dict[int, tuple[int, Path]] = {}
        try:
            for place in places:
                if place.segment not in opened:
                    path = self.directory / segment_name(place.segment)
                    opened[place.segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), path
                yield place, entry_of(read_payload(*opened[place.segment], place.offset, place.bytes)).data
        except OSError as error:
            raise RecordError(str(self.directory), 0, f"cannot be read: {error.strerror or error}") from None
        finally:
            for handle, _ in opened.values():
                os.close(handle)

    # writing

    def _begin(self) -> None:
        """Begin to write. Raises: what the last failed write raised."""
        if self._log.failure is not None:
            raise self._log.failure
        if self._log.epoch < 0:
            self._log.begin(self.torn)

    def _append(self, kind: int, group: GroupId, mark: Any, data: bytes) -> EntryPlace:
        self._begin()
        payload = packed_entry(kind, group, mark, data)
        self._make_room(FRAME_BYTES + len(payload))
        place = self._write(payload)
        self._recent.keep(place, data)
        return place

    def _write(self, payload: bytes) -> EntryPlace:
        place = EntryPlace(*self._log.append(payload))
        self._kept.setdefault(place.segment, {})
        return place

    # space

    def _keep_group(self, group: GroupId, attempt: int, place: EntryPlace) -> None:
        for before in self._groups.get(group, (0, ()))[1]:
            self._bury(before, (group, ""))
        self._groups[group] = (attempt, (place,))
        self._mark(place, (group, ""))

    def _extend_group(self, group: GroupId, place: EntryPlace) -> None:
        attempt, places = self._groups[group]
        self._groups[group] = (attempt, (*places, place))
        self._mark(place, (group, ""))

    def _keep_scores(self, group: GroupId, task: str, step: StepId, place: EntryPlace) -> None:
        of_group = self._scores.setdefault(group, {})
        if task in of_group:
            self._bury(of_group[task][1], (group, task))
        of_group[task] = (step, place)
        self._mark(place, (group, task))

    def _mark(self, place: EntryPlace, key: tuple[GroupId, str]) -> None:
        kept = self._kept[place.segment]
        kept[key] = kept.get(key, 0) + place.bytes
        self._kept_bytes += place.bytes

    def _bury(self, place: EntryPlace, key: tuple[GroupId, str]) -> None:
        kept = self._kept[place.segment]
        kept[key] -= place.bytes
        if not kept[key]:
            del kept[key]
        self._recent.drop(place)
        self._kept_bytes -= place.bytes

    def _forget(self, group: GroupId) -> None:
        for place in self._groups.pop(group, (0, ()))[1]:
            self._bury(place, (group, ""))
        for task, (_, place) in self._scores.pop(group, {}).items():
            self._bury(place, (group, task))

    def _compact(self) -> None:
        """Delete old segments until the disk holds at most twice the kept bytes plus one segment."""
        while self._disk_bytes > 2 * self._kept_bytes + self.policy.segment_bytes + PREAMBLE_BYTES:
            if not self._drop_oldest():
                return

    def _make_room(self, bytes: int) -> None:
        """Delete old segments until `bytes` more fit. Raises: `StorageFull` if they never do."""
        bound = self.policy.max_bytes
        if bound is None or self._disk_bytes + bytes <= bound:
            return
        for _ in range(len(self._kept)):
            if self._disk_bytes + bytes <= bound or not self._drop_oldest():
                break
        if self._disk_bytes + bytes > bound:
            reason = f"the {bound} bytes of durability.max_bytes are used up"
            remedy = "set it higher, or null, then resume the run"
            self._log.failure = StorageFull(str(self.directory), self._disk_bytes, reason, remedy)
            raise self._log.failure

    def _drop_oldest(self) -> bool:
        """Append the kept entries of the oldest segment again, then delete it. False: there is none to delete."""
        number = next(iter(self._kept))
        if number == self._log.number:
            return False
        keys = list(self._kept[number])
        parts = [self._groups[g][1] if not task else (self._scores[g][task][1],) for g, task in keys]
        for (group, task), data in zip(keys, self._joined(parts), strict=True):
            if task:
                step = self._scores[group][task][0]
                self._keep_scores(group, task, step, self._write(packed_entry(SCORES, group, [step, task], data)))
            else:
                attempt = self._groups[group][0]
                self._keep_group(group, attempt, self._write(packed_entry(PUT, group, attempt, data)))
        self._log.flush()
        self._log.delete(number)
        del self._kept[number]
        return True
