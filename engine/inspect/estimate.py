"""Estimates how long the train steps of a run would take under other settings, from the durations in its record.

`advice` calls it for each setting that it considers. `measure` takes the durations from a `History`. `estimate` runs a
small model of the schedule with them: K, S, slots, deadlines, weight syncs, added states and validations, without
processes, messages and failures. Must not read records or clocks.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace
from math import inf
from statistics import median

from engine.ids import GroupId, ReplicaId, StepId, Version
from engine.metrics.history import History
from engine.policies.built_in import select_in_order
from engine.states.limits import GENERATED, PUBLISHING, QUEUED, SCORING, AddedState, Limits

MOST_STEPS = 64
"""Maximum number of train steps whose durations are used: the newest."""
MOST_GROUPS = 4096
"""The same for groups. Both bound the time of an estimate."""
FEWEST_STEPS = 4
"""Steps that are used although they have more groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """What the work of a run took, in seconds, without waits."""

    groups: tuple[float, ...]
    """Generation of each group, its retries included, without the time in which weights were installed."""
    kept: tuple[bool, ...]
    """Whether a step could train on each group: it was not filtered and did not fail."""
    states: tuple[tuple[float, ...], ...]
    """For each added state, the work on each group."""
    slot_share: float
    """Share of its generation in which a group holds its slot: trajectories that ended make room for others."""
    train: tuple[float, ...]
    """Scoring and training of each step."""
    publish: float
    stage: float
    pause: float
    """Without the time in which mode `wait` lets groups finish."""
    install: float
    chunk: float
    """Measuring the validation rows of one slot."""
    chunks: int
    """Number of these in a validation."""

    def reversed(self) -> "Durations":
        """The same work, with the groups in reverse order."""
        states = tuple(state[::-1] for state in self.states)
        return replace(self, groups=self.groups[::-1], kept=self.kept[::-1], states=states)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """The settings that the model knows."""

    limits: Limits
    slots: tuple[int, ...]
    """Of each replica that generates."""
    rolling: bool = False
    """Replicas install weights one at a time."""
    train_speed: float = 1.0
    """How many times as fast as recorded the trainer is."""


# -- what the work took ------------------------------------------------------------------------------------------------


def measure(history: History, limits: Limits) -> Durations | None:
    """The durations of the newest train steps; None if no step has finished, or none of its groups is known."""
    most = max(FEWEST_STEPS, min(MOST_STEPS, MOST_GROUPS // limits.train_batch_size))
    steps = [step for step in history.trained if step.finished_at >= 0 and step.groups][-most:]
    if not steps:
        return None
    work, busy_s = _generation(history)
    first = min(min(step.groups) for step in steps)
    ended = [row for row in history.groups[first:] if row.ended_at >= 0 and row.group in work][:MOST_GROUPS]
    if not ended:
        return None
    ids = [row.group for row in ended]
    seconds = [{phase.name: phase.end - phase.start for phase in step.phases} for step in steps]
    syncs: dict[str, list[float]] = defaultdict(list)
    for sync in history.syncs:
        if sync.outcome == "done":
            syncs[sync.name].append(sync.end - sync.start)
    trains = ("scoring", *limits.states_at(SCORING), "training")
    publishes = ("publishing", *limits.states_at(PUBLISHING))
    chunks = [chunk for chunk in history.chunks if chunk.outcome == "measured"]
    return Durations(
        groups=tuple(work[id] for id in ids), kept=tuple(row.state not in ("filtered", "failed") for row in ended),
        states=tuple(_work_in(history, state.name, state.concurrency, ids) for state in _of_groups(limits)),
        slot_share=_slot_share(history, busy_s),
        train=tuple(sum(one.get(phase, 0.0) for phase in trains) for one in seconds),
        publish=_typical(sum(one.get(name, 0.0) for name in publishes) for one in seconds if "publishing" in one),
        stage=_typical(syncs["staging"]), pause=min(syncs["pausing"], default=0.0),
        install=_typical(syncs["installing"]), chunk=_typical(chunk.end - chunk.start for chunk in chunks),
        chunks=max((chunk.chunk + 1 for chunk in chunks), default=0),
    )  # fmt: skip


def _of_groups(limits: Limits) -> list[AddedState]:
    """The added states of groups."""
    return [state for state in limits.added_states if state.place in (QUEUED, GENERATED)]


def _typical(seconds: Iterable[float]) -> float:
    found = list(seconds)
    return median(found) if found else 0.0


def _generation(history: History) -> tuple[dict[GroupId, float], float]:
    """Seconds of generation of each group, and their sum."""
    installs: dict[ReplicaId, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for sync in history.syncs:
        if sync.name == "installing":
            installs[sync.replica][0].append(sync.start)
            installs[sync.replica][1].append(sync.end)
    work: dict[GroupId, float] = defaultdict(float)
    for attempt in history.attempts:
        (starts, ends), start, end = installs[attempt.replica], attempt.start, attempt.end
        frozen = 0.0
        for index in range(bisect_left(ends, start), bisect_left(starts, end)):
            frozen += min(ends[index], end) - max(starts[index], start)
        work[attempt.group] += max(0.0, end - start - frozen)
    return work, sum(work.values())


def _slot_share(history: History, generation_s: float) -> float:
    validators = {chunk.replica for chunk in history.chunks} - {attempt.replica for attempt in history.attempts}
    measuring = sum(chunk.end - chunk.start for chunk in history.chunks if chunk.replica not in validators)
    held = history.busy_s + history.idle_s.get("agent", 0.0) - measuring
    return min(1.0, max(0.1, held / generation_s)) if generation_s > 0 else 1.0


def _work_in(history: History, state: str, concurrency: int, ids: list[GroupId]) -> tuple[float, ...]:
    """Seconds of work on groups in an added state. Groups are worked on in the order in which they come."""
    waits = sorted((wait for wait in history.waits if wait.state == state), key=lambda wait: wait.start)
    ends: list[float] = []
    work: dict[GroupId, float] = {}
    for wait in waits:
        begins = wait.start
        if len(ends) < concurrency:
            heappush(ends, wait.end)
        else:
            begins = max(begins, heapreplace(ends, wait.end))
        work[wait.group] = max(0.0, wait.end - begins)
    usual = _typical(work.values())
    return tuple(work.get(id, usual) for id in ids)


# -- the model ---------------------------------------------------------------------------------------------------------


def estimate(durations: Durations, settings: ScheduleSettings) -> float:
    """Seconds from the start of a run to the end of as many train steps as were measured; infinite if the run could
    not continue under the settings."""
    return finish_times(durations, settings)[-1]


def finish_times(durations: Durations, settings: ScheduleSettings) -> list[float]:
    """The same for each of the train steps."""
    return _Model(durations, settings).run()


class _Generation:
    """A group that is generated."""

    __slots__ = ("replica", "rest", "since", "slot", "turn", "version")

    def __init__(self, slot: float, rest: float, version: Version) -> None:
        self.slot, self.rest = slot, rest
        """Seconds left with a slot, and then without."""
        self.version = version
        """The oldest version that it may continue under."""
        self.replica = -1
        self.since = 0.0
        self.turn = 0
        """Events of earlier turns are void."""


class _Fleet:
    """The replicas, by index."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        count = len(slots)
        self.slots = slots
        self.used = [0] * count
        self.version = [0] * count
        self.next = [0] * count
        """The version that is staged or installed."""
        self.doing = ["ready"] * count
        """`ready`, `staging` (groups start on both), `pausing` or `installing`."""
        self.groups: list[dict[int, _Generation]] = [{} for _ in slots]

    def open(self, replica: int) -> bool:
        return self.doing[replica] in ("ready", "staging") and self.used[replica] < self.slots[replica]

    def least_loaded(self, oldest: Version) -> int:
        """The replica on which a group may start; -1 if there is none."""
        best, load = -1, 2.0
        for replica, slots in enumerate(self.slots):
            if self.version[replica] >= oldest and self.used[replica] / slots < load and self.open(replica):
                best, load = replica, self.used[replica] / slots
        return best


class _Validation:
    def __init__(self, version: Version, chunks: int) -> None:
        self.version = version
        self.waiting = chunks
        self.out = 0
        self.held: list[int] = []


class _Model:
    """The schedule of a run: events in a heap, and after each what the scheduler would do."""

    def __init__(self, durations: Durations, settings: ScheduleSettings) -> None:
        self.took, self.settings, self.limits = durations, settings, settings.limits
        self.steps = len(durations.train)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self.given = 0
        self.fleet = _Fleet(settings.slots)
        self.steps_in = [0]
        """Train steps in each version."""
        self.batched = self.trained = 0
        self.finished: list[float] = []
        """When each step was finished."""
        self.at_work = False
        """A batch is trained or a version published."""
        self.started = self.released = self.running = 0
        self.deadlines: dict[int, StepId] = {}
        self.due: Counter[StepId] = Counter()
        """Started groups that no step has taken, by deadline."""
        self.ready: list[tuple[int, StepId]] = []
        self.ready_due: Counter[StepId] = Counter()
        self.parked: list[tuple[StepId, int, _Generation]] = []
        self.lines: list[deque[int]] = [deque() for _ in _of_groups(self.limits)]
        self.working = [0] * len(self.lines)
        self.validations: list[_Validation] = []

    def run(self) -> list[float]:
        self._react()
        while self.trained < self.steps or self.at_work:
            if not self.events:
                return [inf]
            self.now, _, act, about = heappop(self.events)
            act(*about)
            self._react()
        return self.finished

    def _after(self, seconds: float, act: Callable[..., None], *about: int) -> None:
        self.given += 1
        heappush(self.events, (self.now + seconds, self.given, act, about))

    def _react(self) -> None:
        self._form_batch()
        self._sync()
        self._validate()
        self._start_groups()

    # training

    def _form_batch(self) -> None:
        size = self.limits.train_batch_size
        if self.at_work or len(self.ready) < size or self.batched >= self.steps:
            return
        if self.limits.train_after_sync and min(self.fleet.version) < len(self.steps_in) - 1:
            return
        must, due, ready = [], 0, 0
        for deadline in sorted(self.due):
            due += self.due[deadline]
            ready += self.ready_due[deadline]
            needed = due - (deadline - self.batched) * size
            if needed > ready:
                return
            if needed > 0:
                must.append((deadline, needed, ready))
        ids = [id for id, _ in self.ready[:size]] if not must else select_in_order(self.ready, must, size)
        if ids is None or len(ids) < size:
            return
        taken = set(ids)
        for id in ids:
            deadline = self.deadlines.pop(id)
            self.due[deadline] -= 1
            self.ready_due[deadline] -= 1
        self.due = +self.due
        self.ready = [one for one in self.ready if one[0] not in taken]
        self.at_work = True
        self._after(self.took.train[self.batched] / self.settings.train_speed, self._step_trained)
        self.batched += 1

    def _step_trained(self) -> None:
        self.trained += 1
        if self.trained % self.limits.sync_every == 0 or self.trained == self.steps:
            self._after(self.took.publish, self._published)
        else:
            self._finish_step()

    def _finish_step(self) -> None:
        self.at_work = False
        self.finished.append(self.now)

    def _published(self) -> None:
        self._finish_step()
        before = self.steps_in[-1]
        self.steps_in.append(self.trained)
        limits = self.limits.validation
        if limits is None or limits.own or not self.took.chunks or not limits.every:
            return
        if self.trained // limits.every > before // limits.every:
            self.validations = [one for one in self.validations if one.out or one.waiting < self.took.chunks]
            self.validations.append(_Validation(len(self.steps_in) - 1, self.took.chunks))

    # weights

    def _sync(self) -> None:
        fleet, latest = self.fleet, len(self.steps_in) - 1
        if fleet.version.count(latest) == len(fleet.version):
            return
        for replica, version in enumerate(fleet.version):
            if version == latest or fleet.doing[replica] != "ready":
                continue
            target = self.validations[0].version if self._is_held(replica) else latest
            if version == target:
                continue
            if fleet.next[replica] != target:
                fleet.doing[replica], fleet.next[replica] = "staging", target
                self._after(self.took.stage, self._staged, replica)
            elif not self.settings.rolling or not any(doing in ("pausing", "installing") for doing in fleet.doing):
                fleet.doing[replica] = "pausing"
                self._after(self.took.pause, self._paused, replica)

    def _is_held(self, replica: int) -> bool:
        return bool(self.validations) and replica in self.validations[0].held

    def _staged(self, replica: int) -> None:
        self.fleet.doing[replica] = "ready"

    def _paused(self, replica: int) -> None:
        groups = self.fleet.groups[replica]
        if self.limits.sync_mode == "wait" and groups:
            self._after(self._until_empty(replica), self._paused, replica)
            return
        self.fleet.doing[replica] = "installing"
        for id, one in groups.items():
            self._stop(one)
            if self.limits.sync_mode == "abort":
                one.version = self.fleet.version[replica]
                self.fleet.used[replica] -= one.slot > 0
                self.running -= 1
                self.parked.append((self.deadlines[id], id, one))
        if self.limits.sync_mode == "abort":
            groups.clear()
            self.parked.sort(key=lambda parked: parked[:2])
        self._after(self.took.install, self._installed, replica)

    def _until_empty(self, replica: int) -> float:
        groups = self.fleet.groups[replica].values()
        return max(one.slot + one.rest - (self.now - one.since) for one in groups) + 1e-6

    def _installed(self, replica: int) -> None:
        self.fleet.doing[replica], self.fleet.version[replica] = "ready", self.fleet.next[replica]
        for id, one in self.fleet.groups[replica].items():
            self._continue(id, one)

    # groups

    def _start_groups(self) -> None:
        limits, fleet = self.limits, self.fleet
        while self.parked and self.running < limits.max_concurrent_groups:
            _, id, one = self.parked[0]
            replica = fleet.least_loaded(one.version)
            if replica < 0:
                return
            del self.parked[0]
            self._seat(id, one, replica)
        while self.running < limits.max_concurrent_groups:
            oldest = self._oldest_admissible()
            replica = -1 if oldest is None else fleet.least_loaded(oldest)
            if replica < 0:
                return
            id, self.started = self.started, self.started + 1
            seconds = self.took.groups[id % len(self.took.groups)]
            held = seconds * self.took.slot_share
            self.deadlines[id] = deadline = self.steps_in[fleet.version[replica]] + limits.max_staleness_steps
            self.due[deadline] += 1
            self._seat(id, _Generation(held, seconds - held, fleet.version[replica]), replica)

    def _oldest_admissible(self) -> Version | None:
        held, size = self.started - self.released, self.limits.train_batch_size
        if held >= self.steps * size:
            return None
        oldest = None
        for version in range(len(self.steps_in) - 1, -1, -1):
            if held >= self.limits.ahead + self.steps_in[version] * size:
                break
            oldest = version
        return oldest

    def _seat(self, id: int, one: _Generation, replica: int) -> None:
        one.replica = replica
        self.running += 1
        self.fleet.used[replica] += one.slot > 0
        self.fleet.groups[replica][id] = one
        self._continue(id, one)

    def _continue(self, id: int, one: _Generation) -> None:
        one.since = self.now
        self._after(one.slot or one.rest, self._progressed, id, one.replica, one.turn)

    def _stop(self, one: _Generation) -> None:
        """Note the progress of a group, which does not continue now."""
        seconds = self.now - one.since
        one.turn += 1
        if one.slot > 0:
            one.slot = max(1e-9, one.slot - seconds)
        else:
            one.rest = max(0.0, one.rest - seconds)

    def _progressed(self, id: int, replica: int, turn: int) -> None:
        one = self.fleet.groups[replica].get(id)
        if one is None or one.turn != turn:
            return
        if one.slot > 0:
            one.slot = 0.0
            self.fleet.used[replica] -= 1
            if one.rest > 0:
                self._continue(id, one)
                return
        del self.fleet.groups[replica][id]
        self.running -= 1
        self._enter(0, id)

    def _enter(self, state: int, id: int) -> None:
        """A group enters the added state with this number; after the last, it is ready."""
        if state < len(self.lines):
            self.lines[state].append(id)
            self._work(state)
            return
        deadline = self.deadlines[id]
        if self.took.kept[id % len(self.took.kept)]:
            self.ready.append((id, deadline))
            self.ready_due[deadline] += 1
        else:
            self.released += 1
            self.due[deadline] -= 1
            del self.deadlines[id]

    def _work(self, state: int) -> None:
        line, took = self.lines[state], self.took.states[state]
        while line and self.working[state] < _of_groups(self.limits)[state].concurrency:
            self.working[state] += 1
            id = line.popleft()
            self._after(took[id % len(took)], self._worked, state, id)

    def _worked(self, state: int, id: int) -> None:
        self.working[state] -= 1
        self._enter(state + 1, id)
        self._work(state)

    # validation

    def _validate(self) -> None:
        if not self.validations:
            return
        validation, fleet, limits = self.validations[0], self.fleet, self.limits.validation
        if validation.waiting and limits is not None and len(validation.held) < limits.replicas:
            headed = [fleet.next[r] if fleet.doing[r] != "ready" else fleet.version[r] for r in range(len(fleet.slots))]
            fit = [r for r, version in enumerate(headed) if version <= validation.version and r not in validation.held]
            fit.sort(key=lambda r: (fleet.version[r] != validation.version, headed[r] != validation.version, r))
            validation.held += fit[: limits.replicas - len(validation.held)]
        for replica in validation.held:
            while validation.waiting and fleet.version[replica] == validation.version and fleet.open(replica):
                validation.waiting -= 1
                validation.out += 1
                fleet.used[replica] += 1
                self._after(self.took.chunk, self._measured, replica)

    def _measured(self, replica: int) -> None:
        validation = self.validations[0]
        self.fleet.used[replica] -= 1
        validation.out -= 1
        if not validation.waiting and not validation.out:
            del self.validations[0]
