"""A validation: rows measured under one weights version, chunk by chunk. Driven by `scheduling/validation.py`.

It never sees two versions: it holds its replicas at its own, and those alone. `Validations` keeps the live ones, who
holds which replica and which chunk is out where, so that no caller can forget one of these.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from heapq import heappop, heappush

from engine.events import RowsMeasured
from engine.ids import ReplicaId, StepId, ValidationId, Version
from engine.states.facts import Facts
from engine.states.limits import ValidationLimits, ValidationSet
from engine.states.machine import SharedMachine, Table, transitions
from engine.states.orders import OrderBook
from engine.states.replica import Replica
from engine.states.replicas import Replicas
from engine.states.validation_figures import Figure, Response, figures

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


class Chunk(Facts):
    """Rows that are measured together, in one slot of one replica: where, the order book says."""

    index: int
    first: int
    count: int
    attempt: int = 0
    failures: int = 0
    exceeded: int = 0
    """How often orders about it exceeded their time limit since one was answered."""
    done: bool = False
    rows: tuple[int, ...] = ()
    """The rows that could be measured, with the reward and the answer of each (`validation_figures.Response`)."""
    rewards: tuple[float, ...] = ()
    answers: tuple[int, ...] = ()
    right_rows: tuple[int, ...] = ()
    part_rows: tuple[int, ...] = ()
    """For each value of a reward part its row, and its place in the parts of the row's set."""
    part_places: tuple[int, ...] = ()
    part_values: tuple[float, ...] = ()
    reason: str = ""
    """Why its first row that failed did; empty: none did."""

    def responses(self) -> dict[int, Response]:
        """The measured responses by row."""
        parts: dict[int, dict[int, float]] = {}
        for row, place, value in zip(self.part_rows, self.part_places, self.part_values, strict=True):
            parts.setdefault(row, {})[place] = value
        right = {*self.right_rows}
        measured = zip(self.rows, self.rewards, self.answers, strict=True)
        return {row: Response(reward, answer, row in right, parts.get(row, {})) for row, reward, answer in measured}


class Validation(Facts):
    """One version to be measured on every validation row, each counted once."""

    id: ValidationId
    version: Version
    steps: StepId
    """Train steps in the version."""
    rows: int
    dropped: int
    """Responses that count as wrong although they are not asked for (`ValidationLimits.dropped`)."""
    queued_at: float
    state: str = VALIDATION.initial
    chunks: list[Chunk] = []
    replicas: dict[ReplicaId, None] = {}
    """Held at its version, in the order they were taken."""
    refused: int = 0
    """Lives of replicas given up because they could not be brought to its version."""
    done: int = 0
    """Chunks that are done."""
    measured: int = 0
    """Rows measured; the others of a chunk that is done failed, and count as wrong."""
    right: int = 0
    reward: float = 0.0
    """Sum over the rows measured."""
    reason: str = ""
    """Why it was cancelled or failed; if it is reported, why its first row that failed did."""
    started_at: float = -1.0
    ended_at: float = -1.0
    figures: tuple[Figure, ...] = ()
    """The figures of each set, once it is reported."""

    @property
    def left(self) -> int:
        """Chunks that are not done."""
        return len(self.chunks) - self.done

    def split(self, size: int) -> None:
        """Divide the rows into chunks."""
        self.chunks = [
            Chunk(i, first, min(size, self.rows - first)) for i, first in enumerate(range(0, self.rows, size))
        ]

    def evaluate(self, sets: Sequence[ValidationSet]) -> None:
        """Compute the figures of each set from the measured rows."""
        self.figures = figures(sets, {r: one for chunk in self.chunks for r, one in chunk.responses().items()})

    def rating(self, metric: str, mode: str) -> float | None:
        """The figure by which the best checkpoint is kept, by its name (`validation_figures.metric_names`); None if no
        row gives it."""
        if metric == "accuracy":
            return self.accuracy
        named = {f"{one.set}/{one.metric}": one for one in self.figures}
        rewards = tuple(reward for chunk in self.chunks for reward in chunk.rewards) or (self.reward_mean or 0.0,)
        ends = min(0.0, *rewards), max(0.0, *rewards)
        named["reward_mean"] = Figure("", "reward_mean", rewards, self.asked, self.asked - self.measured, ends)
        return named[metric].rating(mode) if metric in named else None

    @property
    def asked(self) -> int:
        """Responses that count: those of all rows, and the dropped ones."""
        return self.rows + self.dropped

    @property
    def accuracy(self) -> float | None:
        """Share of the responses that are right; None before every row was tried, and if none could be measured."""
        return self.right / self.asked if self.measured and not self.left else None

    @property
    def reward_mean(self) -> float | None:
        """Mean of the rows measured; None as the accuracy is."""
        return self.reward / self.measured if self.measured and not self.left else None


class WaitingChunks:
    """The chunks of a validation that are to be sent out, the first rows first."""

    def __init__(self, chunks: Iterable[Chunk], out: Container[int]) -> None:
        """`out`: those that are being measured."""
        waiting = [chunk for chunk in chunks if not chunk.done and chunk.index not in out]
        self.indexes = [chunk.index for chunk in waiting]
        """A heap."""
        self._failed = Counter(chunk.failures for chunk in waiting)
        """How many of them have failed so many times."""

    def __len__(self) -> int:
        return len(self.indexes)

    @property
    def worst(self) -> int:
        """Attempts that failed at the same rows: most of those that wait."""
        return max(self._failed, default=0)

    def put_back(self, chunk: Chunk) -> None:
        """A chunk waits again."""
        heappush(self.indexes, chunk.index)
        self._failed[chunk.failures] += 1

    def take(self, chunks: Sequence[Chunk]) -> Chunk:
        """The first chunk that waits begins another attempt."""
        chunk = chunks[heappop(self.indexes)]
        chunk.attempt += 1
        self._failed[chunk.failures] -= 1
        if not self._failed[chunk.failures]:
            del self._failed[chunk.failures]
        return chunk


class ValidationsFacts(Facts):
    """The validations that have not ended, and what the run knows of those that have."""

    live: dict[ValidationId, Validation] = {}
    """In the order they were queued: the first is served, the others wait."""
    created: int = 0
    considered: Version = -1
    """Newest version of which it was decided whether to measure it."""
    newest: Version = -1
    """Newest version that has or had a validation."""
    closing: bool = False
    """No newer version will be published."""
    interrupted: StepId = -1
    """Fewest train steps in a version of which a validation was cut off by the end of the process; -1: none was."""
    owed: bool = False
    """The next version is measured instead of one that was cut off."""


class Validations:
    """The validations of a run, and which of their chunks wait."""

    def __init__(self, facts: ValidationsFacts, replicas: Replicas, orders: OrderBook, machine: SharedMachine) -> None:
        self.facts, self.live = facts, facts.live
        self._replicas, self._orders = replicas, orders
        self.machine = machine
        rows = orders.open["rows"]
        self.waiting = {
            validation.id: WaitingChunks(validation.chunks, {chunk for of, chunk in rows if of == validation.id})
            for validation in self.live.values()
        }
        """By validation."""

    @property
    def out(self) -> int:
        """Chunks being measured, each in a slot."""
        return len(self._orders.open["rows"])

    def out_of(self, validation: Validation) -> int:
        """Chunks of a validation that are being measured."""
        return validation.left - len(self.waiting[validation.id])

    @property
    def served(self) -> Validation | None:
        """The one whose turn it is."""
        return next(iter(self.live.values()), None)

    def holding(self, replica: Replica) -> Validation | None:
        """The one that keeps a replica at its version."""
        validation = self.served
        return validation if validation is not None and replica.id in validation.replicas else None

    def queue(self, version: Version, steps: StepId, limits: ValidationLimits, at: float) -> Validation:
        validation = Validation(self.facts.created, version, steps, limits.rows, limits.dropped, at)
        validation.split(limits.rows_per_slot)
        self.live[validation.id], self.waiting[validation.id] = validation, WaitingChunks(validation.chunks, ())
        self.facts.created += 1
        self.facts.newest = version
        return validation

    def fire(self, validation: Validation, trigger: str) -> None:
        """The only way a validation changes state. One that ends gives back what it holds."""
        if self.machine.table.target(validation.state, trigger) in VALIDATION.terminal:
            for id in list(validation.replicas):
                self.release(validation, self._replicas.by_id[id])
            del self.live[validation.id], self.waiting[validation.id]
        self.machine.fire(validation, trigger)

    def hold(self, validation: Validation, replica: Replica) -> None:
        """Keep a replica at the validation's version until that ends."""
        validation.replicas[replica.id] = None

    def release(self, validation: Validation, replica: Replica, *, failed: bool = False) -> None:
        """Let a replica go; chunks that it has go back. `failed`: each has lost an attempt."""
        for _, index in list(self._orders.of(replica.id, "rows")):
            self.put_back(validation, validation.chunks[index], failed=failed)
        del validation.replicas[replica.id]

    def lose(self, replica: Replica, *, failed: bool) -> None:
        """A replica is gone. `failed`: its chunks have lost an attempt."""
        validation = self.holding(replica)
        if validation is not None:
            self.release(validation, replica, failed=failed)

    def put_back(self, validation: Validation, chunk: Chunk, *, failed: bool = True) -> None:
        """A chunk that was being measured waits again. `failed`: it has lost an attempt."""
        chunk.failures += failed
        self._orders.withdraw("rows", (validation.id, chunk.index))
        self.waiting[validation.id].put_back(chunk)

    def count(self, validation: Validation, chunk: Chunk, event: RowsMeasured) -> None:
        """A chunk is done: its rows are counted, once."""
        chunk.done = True
        chunk.rows, chunk.rewards, chunk.answers = event.rows, event.rewards, event.answers
        chunk.right_rows, chunk.part_rows = event.right_rows, event.part_rows
        chunk.part_places, chunk.part_values, chunk.reason = event.part_places, event.part_values, event.reason
        validation.done += 1
        validation.measured += event.measured
        validation.right += event.right
        validation.reward += event.reward
