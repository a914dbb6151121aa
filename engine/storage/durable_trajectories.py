"""The durable trajectory store: `trajectories.TrajectoryStore` on disk, so that its groups survive every process.

    store = DurableStore(directory, fresh=False)         # reads the existing segments
    store.put(group, attempt, packed)       # may still be in memory
    store.flush()                           # the operating system has it

Used by the trajectory store actor, and read when a run resumes. The index is in memory, the groups are on disk. Every
operation appends an entry; the last entry of a group counts. Space is reclaimed from the oldest segment: its kept
entries are appended again and synced to disk, then it is deleted. So a kill at any moment loses nothing, and a discard
is never deleted before the entry that it discards.
"""

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from engine.errors import FULL, EngineError, RecordError, StorageFull
from engine.ids import GroupId, StepId
from engine.record.files import Held, RecordLock, fsync, open_private
from engine.storage.segments import (
    DISCARD,
    PREAMBLE_BYTES,
    PUT,
    SCORES,
    Entry,
    Torn,
    packed_entry,
    preamble,
    read_entry,
    read_segment,
    segment_numbers,
    segment_path,
)
from engine.storage.trajectories import StoreStats, require_kept, require_scored

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


class Place(NamedTuple):
    """The location of an entry."""

    segment: int
    offset: int
    bytes: int


@dataclass(slots=True)
class _Segment:
    """One file: its length, and the sizes of its kept entries by (group, scoring task; empty for the group itself)."""

    bytes: int
    kept: dict[tuple[GroupId, str], int] = field(default_factory=dict)


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
        """The incomplete tail that a crash left; it is cut off before the next write."""
        self._uncut: Torn | None = None
        self._groups: dict[GroupId, tuple[int, Place]] = {}
        self._scores: dict[GroupId, dict[str, tuple[StepId, Place]]] = {}
        self._segments: dict[int, _Segment] = {}
        self._recent = Recent(self.policy.cache_bytes)
        self._kept_bytes = self._disk_bytes = 0
        self._file: BinaryIO | None = None
        self._held = Held()
        self._failure: EngineError | None = None
        self._lock = RecordLock(directory, waits=not fresh)
        try:
            numbers = segment_numbers(directory)
            if numbers and fresh:
                path = segment_path(directory, numbers[0])
                raise RecordError(str(path), 0, "trajectories exist already; a new run needs an empty directory")
            for number in numbers:
                self._read(number, last=number == numbers[-1])
        except BaseException:
            self._lock.release()
            raise
        self._next = numbers[-1] + 1 if numbers else 0
        for group in [group for group in self._scores if group not in self._groups]:
            self._forget(group)

    # the operations of a store

    def put(self, group: GroupId, attempt: int, data: bytes, bytes: int = 0) -> bool:
        kept = self._groups.get(group)
        if kept is not None and kept[0] > attempt:
            return False
        self._keep_group(group, attempt, self._append(PUT, group, attempt, data))
        return True

    def replace(self, group: GroupId, attempt: int, data: bytes, bytes: int = 0) -> bool:
        return group in self._groups and self.put(group, attempt, data)

    def partial(self, group: GroupId) -> bytes | None:
        kept = self._groups.get(group)
        return None if kept is None else self._data([kept[1]])[0]

    def get(self, groups: Sequence[GroupId]) -> list[bytes]:
        """Raises: `EngineError` that names the missing groups; `RecordError` if an entry is damaged."""
        require_kept(groups, self._groups)
        return self._data([self._groups[group][1] for group in groups])

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
            if self._failure is not None:
                raise self._failure
            self._write(packed_entry(DISCARD, gone))  # ignores max_bytes, because discarding makes room
            for group in gone:
                self._forget(group)
            self._compact()

    def stats(self) -> StoreStats:
        return StoreStats(groups=len(self._groups), bytes=self._kept_bytes, disk_bytes=self._disk_bytes)

    def flush(self) -> None:
        """Write everything to the operating system, and sync it to disk if `fsync` is `always`."""
        if self._failure is not None:
            raise self._failure
        if self._file is None:
            return
        try:
            self._held.write(self._file, fsync=self.policy.fsync == "always")
        except OSError as error:
            raise self._give_up(error) from None

    def close(self) -> None:
        try:
            if self._failure is None:
                self.flush()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._lock.release()

    # for a resumed run

    @property
    def attempts(self) -> Mapping[GroupId, int]:
        """The attempt of each kept group."""
        return {group: attempt for group, (attempt, _) in self._groups.items()}

    def is_scored(self, group: GroupId, task: str, step: StepId) -> bool:
        return self._scores.get(group, {}).get(task, (-1, None))[0] == step

    # reading

    def _read(self, number: int, *, last: bool) -> None:
        path = segment_path(self.directory, number)
        self._segments[number] = _Segment(PREAMBLE_BYTES)
        for entry in read_segment(path, number, last=last):
            if isinstance(entry, Torn):
                self.torn = self._uncut = entry
                if not entry.offset:
                    del self._segments[number]
                    return
                break
            self._segments[number].bytes += entry.bytes
            self._take(entry, Place(number, entry.offset, entry.bytes))
        self._disk_bytes += self._segments[number].bytes

    def _take(self, entry: Entry, place: Place) -> None:
        if entry.kind == PUT:
            self._keep_group(entry.key, entry.mark, place)
        elif entry.kind == SCORES:
            step, task = entry.mark
            self._keep_scores(entry.key, task, step, place)
        else:
            for group in entry.key:
                self._forget(group)

    def _cut(self) -> None:
        torn, self._uncut = self._uncut, None
        if torn is None:
            return
        try:
            if torn.offset:
                os.truncate(torn.path, torn.offset)
            else:
                os.unlink(torn.path)
        except FileNotFoundError:
            return  # the segment held no kept entry and has been deleted
        except OSError as error:
            reason = f"its incomplete last entry cannot be cut off: {error.strerror or error}"
            raise RecordError(torn.path, torn.offset, reason) from None

    def _data(self, places: Sequence[Place]) -> list[bytes]:
        """The data at `places`, from the cache or from disk."""
        found = {place: data for place in places if (data := self._recent.find(place)) is not None}
        missing = [place for place in places if place not in found]
        if missing and self._held.bytes:
            self.flush()
        found.update(self._from_disk(missing))
        return [found[place] for place in places]

    def _from_disk(self, places: Sequence[Place]) -> Iterator[tuple[Place, bytes]]:
        """Read and verify each entry."""
        opened: dict[int, tuple[int, Path]] = {}
        try:
            for place in places:
                if place.segment not in opened:
                    path = segment_path(self.directory, place.segment)
                    opened[place.segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), path
                yield place, read_entry(*opened[place.segment], place.offset, place.bytes).data
        except OSError as error:
            raise RecordError(str(self.directory), 0, f"cannot be read: {error.strerror or error}") from None
        finally:
            for handle, _ in opened.values():
                os.close(handle)

    # writing

    def _append(self, kind: int, group: GroupId, mark: Any, data: bytes) -> Place:
        if self._failure is not None:
            raise self._failure
        entry = packed_entry(kind, group, mark, data)
        self._make_room(len(entry))
        place = self._write(entry)
        self._recent.keep(place, data)
        return place

    def _write(self, entry: bytes) -> Place:
        current = self._segments.get(self._next - 1) if self._file is not None else None
        if current is None or current.bytes >= self.policy.segment_bytes:
            current = self._begin_segment()
        place = Place(self._next - 1, current.bytes, len(entry))
        current.bytes += len(entry)
        self._disk_bytes += len(entry)
        self._held.add(entry)
        if self._held.bytes >= self.policy.segment_bytes:
            self.flush()
        return place

    def _begin_segment(self) -> _Segment:
        self._cut()
        self._close_segment()
        number = self._next
        try:
            self._file = open_private(segment_path(self.directory, number), "xb")
            if self.policy.fsync == "always" or not self._segments:  # a power cut must not remove the only segment
                fsync(self.directory)
        except OSError as error:
            raise self._give_up(error) from None
        self._next += 1
        self._segments[number] = _Segment(PREAMBLE_BYTES)
        self._disk_bytes += PREAMBLE_BYTES
        self._held.add(preamble(number))
        return self._segments[number]

    def _close_segment(self) -> None:
        """Sync the last segment to disk, also that of an earlier process. Otherwise a power cut could tear a segment
        that is not the last."""
        last = next(reversed(self._segments), None)
        if last is None:
            return
        self.flush()
        try:
            fsync(segment_path(self.directory, last))
            fsync(self.directory)
        except OSError as error:
            raise self._give_up(error) from None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> EngineError:
        """Refuse all later writes: nothing may follow an entry that may be incomplete."""
        if error.errno in FULL:
            self._failure = StorageFull(str(self.directory), self._disk_bytes, f"{error.strerror}")
        else:
            self._failure = EngineError(f"{self.directory} cannot be written: {error.strerror or error}")
        return self._failure

    # space

    def _keep_group(self, group: GroupId, attempt: int, place: Place) -> None:
        before = self._groups.get(group)
        if before is not None:
            self._bury(before[1], (group, ""))
        self._groups[group] = (attempt, place)
        self._mark(place, (group, ""))

    def _keep_scores(self, group: GroupId, task: str, step: StepId, place: Place) -> None:
        of_group = self._scores.setdefault(group, {})
        if task in of_group:
            self._bury(of_group[task][1], (group, task))
        of_group[task] = (step, place)
        self._mark(place, (group, task))

    def _mark(self, place: Place, key: tuple[GroupId, str]) -> None:
        self._segments[place.segment].kept[key] = place.bytes
        self._kept_bytes += place.bytes

    def _bury(self, place: Place, key: tuple[GroupId, str]) -> None:
        del self._segments[place.segment].kept[key]
        self._recent.drop(place)
        self._kept_bytes -= place.bytes

    def _forget(self, group: GroupId) -> None:
        kept = self._groups.pop(group, None)
        if kept is not None:
            self._bury(kept[1], (group, ""))
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
        for _ in range(len(self._segments)):
            if self._disk_bytes + bytes <= bound or not self._drop_oldest():
                break
        if self._disk_bytes + bytes > bound:
            reason = f"the {bound} bytes of durability.max_bytes are used up"
            remedy = "set it higher, or null, then resume the run"
            self._failure = StorageFull(str(self.directory), self._disk_bytes, reason, remedy)
            raise self._failure

    def _drop_oldest(self) -> bool:
        """Append the kept entries of the oldest segment again, then delete it. False: there is none to delete."""
        number = next(iter(self._segments), None)
        if number is None or (self._file is not None and number == self._next - 1):
            return False
        oldest = self._segments[number]
        keys = list(oldest.kept)
        places = [self._groups[g][1] if not task else self._scores[g][task][1] for g, task in keys]
        for (group, task), data in zip(keys, self._data(places), strict=True):
            if task:
                step = self._scores[group][task][0]
                self._keep_scores(group, task, step, self._write(packed_entry(SCORES, group, [step, task], data)))
            else:
                attempt = self._groups[group][0]
                self._keep_group(group, attempt, self._write(packed_entry(PUT, group, attempt, data)))
        self.flush()
        try:
            if keys and self._file is not None:
                os.fsync(self._file.fileno())
                fsync(self.directory)
            segment_path(self.directory, number).unlink()
        except OSError as error:
            raise self._give_up(error) from None
        del self._segments[number]
        self._disk_bytes -= oldest.bytes
        return True
