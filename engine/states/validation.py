"""The validation run: held-out rows measured under one weights version, chunk by chunk. Driven by
`scheduling/validation.py`.

A run never sees two versions: it holds its replicas at its own, and those alone. `Validations` keeps the runs, who
holds which replica and which chunk is out where, so that no caller can forget one of these.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from engine.ids import ReplicaId, StepId, ValidationId, Version
from engine.states.digest import MASK, digest
from engine.states.fleet import Fleet
from engine.states.machine import SharedMachine, Table, transitions
from engine.states.orders import OrderBook
from engine.states.replica import Replica

VALIDATION = Table(
    name="validation",
    states=("queued", "running", "reported", "cancelled", "failed"),
    transitions=transitions(
        ("start", "queued", "running", "a replica it holds samples from its version and has a free slot"),
        ("report", "running", "reported", "every row is measured"),
        ("cancel", "queued running", "cancelled", "superseded before it began, in conflict, or the run stops"),
        ("fail", "queued running", "failed", "its attempts are used up, or no replica can have its version"),
    ),
    terminal=("reported", "cancelled", "failed"),
)


class Chunk:
    """Rows that are measured together, in one slot of one replica."""

    __slots__ = ("attempt", "count", "digest", "done", "failures", "first", "index", "replica")

    def __init__(self, index: int, first: int, count: int) -> None:
        self.index = index
        self.first = first
        self.count = count
        self.attempt = 0
        self.failures = 0
        self.replica: ReplicaId = -1
        """Where it is being measured; -1 while it waits, and once it is done."""
        self.done = False
        self.digest = self.fresh_digest()

    def fresh_digest(self) -> int:
        return digest((self.index, self.attempt, self.failures, self.replica, self.done))


class Validation:
    """One version to be measured on every held-out row, each counted once."""

    __slots__ = (
        "books", "chunks", "ended_at", "held", "held_books", "id", "left", "measured", "queued_at", "reason", "refused",
        "replicas", "reward", "right", "rows", "started_at", "state", "steps", "version", "waiting", "waiting_failed",
    )  # fmt: skip

    def __init__(self, id: ValidationId, version: Version, steps: StepId, rows: int, size: int, at: float) -> None:
        self.id = id
        self.state: str = VALIDATION.initial
        self.version = version
        self.steps = steps
        """Train steps in the version."""
        self.rows = rows
        self.chunks = [Chunk(i, first, min(size, rows - first)) for i, first in enumerate(range(0, rows, size))]
        self.waiting = [chunk.index for chunk in self.chunks]
        """A heap: chunks to be sent out, the first rows first."""
        self.waiting_failed: dict[int, int] = {}
        """How many of them have failed so many times, where that is above 0."""
        self.left = len(self.chunks)
        """Chunks that are not done."""
        self.replicas: dict[ReplicaId, int] = {}
        """Held at its version, in the order they were taken, each with its number in it."""
        self.held = 0
        """Replicas that were ever taken."""
        self.held_books = 0
        """What those held add to the state hash."""
        self.refused = 0
        """Lives of replicas given up because they could not be brought to its version."""
        self.measured = 0
        """Rows measured; the others of a chunk that is done could not be, for their own fault."""
        self.right = 0
        self.reward = 0.0
        """Sum over the rows measured."""
        self.reason = ""
        """Why it was cancelled or failed."""
        self.queued_at = at
        self.started_at = self.ended_at = -1.0
        self.books = sum(chunk.digest for chunk in self.chunks) & MASK
        """What its chunks add to the state hash."""

    def fresh_held_books(self) -> int:
        return sum(digest(held) for held in self.replicas.items()) & MASK

    @property
    def out(self) -> int:
        """Chunks being measured."""
        return self.left - len(self.waiting)

    @property
    def worst(self) -> int:
        """Attempts that failed at the same rows: most of those that wait."""
        return max(self.waiting_failed, default=0)

    def put_back(self, chunk: Chunk) -> None:
        """A chunk waits again."""
        heappush(self.waiting, chunk.index)
        if chunk.failures:
            self.waiting_failed[chunk.failures] = self.waiting_failed.get(chunk.failures, 0) + 1

    def take(self) -> Chunk:
        """The first chunk that waits does not any more."""
        chunk = self.chunks[heappop(self.waiting)]
        if chunk.failures:
            self.waiting_failed[chunk.failures] -= 1
            if not self.waiting_failed[chunk.failures]:
                del self.waiting_failed[chunk.failures]
        return chunk

    @property
    def accuracy(self) -> float | None:
        """Share of the rows measured that are right; None while there is none."""
        return self.right / self.measured if self.measured else None

    @property
    def reward_mean(self) -> float | None:
        return self.reward / self.measured if self.measured else None

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        times = digest((), (self.reward, self.queued_at, self.started_at))
        return (
            self.id, STATE_NUMBER[self.state], self.version, self.steps, self.rows, self.left, self.refused,
            self.measured, self.right, len(self.replicas), self.held_books >> 1, times >> 1, self.books >> 1,
        )  # fmt: skip


class Validations:
    """The runs that have not ended, in the order they were queued: the first is served, the others wait."""

    def __init__(self, fleet: Fleet, orders: OrderBook, machine: SharedMachine, disturb: Callable[[], None]) -> None:
        self.runs: dict[ValidationId, Validation] = {}
        self.created = 0
        self.considered: Version = -1
        """Newest version of which it was decided whether to measure it."""
        self.newest: Version = -1
        """Newest version that has or had a run."""
        self.closing = False
        """No newer version will be published."""
        self.interrupted: StepId = -1
        """Fewest train steps in a version of which a run was cut off by the end of the process; -1: none was."""
        self.owed = False
        """The next version is measured in the place of a run that was cut off."""
        self.sendable = 0
        """Chunks of the served run that wait for a slot; what the scheduler looks at after every event."""
        self._orders = orders
        self._fleet = fleet
        self.machine = machine
        self._disturb = disturb

    @property
    def out(self) -> int:
        """Chunks being measured, each in a slot."""
        return len(self._orders.open("rows"))

    @property
    def served(self) -> Validation | None:
        """The run whose turn it is."""
        return next(iter(self.runs.values()), None)

    def queue(self, version: Version, steps: StepId, rows: int, size: int, at: float) -> Validation:
        run = Validation(self.created, version, steps, rows, size, at)
        self.created += 1
        self.newest = version
        self.runs[run.id] = run
        self._changed()
        return run

    def fire(self, run: Validation, trigger: str) -> None:
        """The only way a run changes state. One that ends gives back what it holds."""
        if self.machine.table.target(run.state, trigger) in VALIDATION.terminal:
            for id in list(run.replicas):
                self.release(run, self._fleet.replicas[id])
            del self.runs[run.id]
        self.machine.fire(run, trigger)
        self._changed()

    def hold(self, run: Validation, replica: Replica) -> None:
        """Keep a replica at the run's version until the run ends."""
        run.replicas[replica.id] = run.held
        run.held_books = (run.held_books + digest((replica.id, run.held))) & MASK
        run.held += 1
        replica.held = run.id
        self._fleet.room[replica.id] = None
        self._changed()

    def release(self, run: Validation, replica: Replica, *, failed: bool = False) -> None:
        """Let a replica go; chunks that it has go back. `failed`: each has lost an attempt."""
        for index in list(replica.chunks):
            chunk = run.chunks[index]
            chunk.failures += failed
            self._unseat(run, chunk)
            run.put_back(chunk)
        run.held_books = (run.held_books - digest((replica.id, run.replicas.pop(replica.id)))) & MASK
        replica.held = -1
        self._fleet.room.pop(replica.id, None)
        self._changed()

    def lose(self, replica: Replica, *, failed: bool) -> None:
        """A replica is gone. `failed`: its chunks have lost an attempt."""
        run = self.runs.get(replica.held)
        if run is not None:
            self.release(run, replica, failed=failed)

    def send(self, run: Validation, replica: Replica) -> Chunk:
        """Give the next chunk that waits a slot."""
        chunk = run.take()
        chunk.attempt += 1
        chunk.replica = replica.id
        replica.chunks[chunk.index] = None
        self._seats_changed(replica)
        self._note(run, chunk)
        self._changed()
        return chunk

    def put_back(self, run: Validation, chunk: Chunk, *, failed: bool = True) -> None:
        """The chunk waits again. `failed`: it has lost an attempt."""
        chunk.failures += failed
        self._unseat(run, chunk)
        run.put_back(chunk)
        self._changed()

    def with_room(self, run: Validation) -> list[Replica]:
        """The replicas a run holds that may have a free slot, in the order they were taken; `no_room` takes out those
        that were found to have none."""
        room = sorted((id for id in self._fleet.room if id in run.replicas), key=run.replicas.__getitem__)
        return [self._fleet.replicas[id] for id in room]

    def no_room(self, replica: Replica) -> None:
        """A replica has no slot for a chunk, until it changes."""
        self._fleet.room.pop(replica.id, None)

    def look_again(self, replicas: Iterable[ReplicaId]) -> None:
        """Those of these replicas that are held may have a free slot after all."""
        run = self.served
        if run is not None:
            self._fleet.room.update((id, None) for id in replicas if id in run.replicas)

    def count(self, run: Validation, chunk: Chunk, measured: int, right: int, reward: float) -> None:
        """A chunk is done: its rows are counted, once."""
        chunk.done = True
        self._unseat(run, chunk)
        run.left -= 1
        run.measured += measured
        run.right += right
        run.reward += reward
        self._changed()

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of, the runs aside; nothing where nothing was ever validated."""
        if self.considered < 0 and not self.created:
            return ()
        return (self.created, self.considered, self.newest, self.closing, *((1,) if self.owed else ()))

    def _unseat(self, run: Validation, chunk: Chunk) -> None:
        replica = self._fleet.replicas[chunk.replica]
        del replica.chunks[chunk.index]
        chunk.replica = -1
        self._orders.withdraw("rows", (run.id, chunk.index))
        self._seats_changed(replica)
        self._note(run, chunk)

    def _seats_changed(self, replica: Replica) -> None:
        replica.count_taken()
        self._fleet.changed(replica)

    def _note(self, run: Validation, chunk: Chunk) -> None:
        fresh = chunk.fresh_digest()
        run.books = (run.books + fresh - chunk.digest) & MASK
        chunk.digest = fresh

    def _changed(self) -> None:
        served = self.served
        self.sendable = len(served.waiting) if served is not None and served.replicas else 0
        self._disturb()


STATE_NUMBER: dict[str, int] = {state: number for number, state in enumerate(VALIDATION.states)}
