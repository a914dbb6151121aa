"""The books: how many prompts are in each phase, and how many started groups have each deadline.

Kept by `states/groups.py` as groups change state; read by the laws, the policies and the metrics. All of it costs O(1)
for each event, except for loops over deadlines: there are at most S + 2, one for each version that an open group can
have been admitted on.
"""

from bisect import insort
from collections.abc import Iterator

from msgspec import field

from engine.states.facts import Facts
from engine.states.machine import Phase

WAITING, RUNNING, PARKED, READY, BATCHED, CONSUMED, RELEASED = map(int, Phase)
"""Plain ints: these are read many times for each event, and an attribute of an enum class is slow."""


class Ledger(Facts):
    """Prompts drawn, by phase. `count[phase]` adds up to `drawn` (law 1)."""

    drawn: int = 0
    count: list[int] = field(default_factory=lambda: [0] * len(Phase))

    def draw(self, prompts: int) -> None:
        self.drawn += prompts
        self.count[WAITING] += prompts

    def branch(self, *, waiting: int, consumed: int, released: int) -> None:
        """So many prompts wait and none is in progress; these of the ended ones have not ended after all."""
        ended = {Phase.CONSUMED: self.consumed - consumed, Phase.RELEASED: self.released - released}
        self.count = [ended.get(phase, 0) for phase in Phase]
        self.count[WAITING] = waiting

    def move(self, source: int, target: int) -> None:
        self.count[source] -= 1
        self.count[target] += 1

    @property
    def waiting(self) -> int:
        return self.count[WAITING]

    @property
    def running(self) -> int:
        return self.count[RUNNING]

    @property
    def parked(self) -> int:
        return self.count[PARKED]

    @property
    def ready(self) -> int:
        return self.count[READY]

    @property
    def batched(self) -> int:
        return self.count[BATCHED]

    @property
    def consumed(self) -> int:
        return self.count[CONSUMED]

    @property
    def released(self) -> int:
        return self.count[RELEASED]

    @property
    def unconsumed(self) -> int:
        """Started groups that no step has taken: U over all deadlines."""
        count = self.count
        return count[RUNNING] + count[PARKED] + count[READY]


STARTED = tuple(phase in (Phase.RUNNING, Phase.PARKED, Phase.READY) for phase in Phase)
"""By phase: whether a group in it was started and is not taken by a step."""
UNREADY = tuple(phase in (Phase.RUNNING, Phase.PARKED) for phase in Phase)


class Deadlines:
    """U(d): started, untaken groups by deadline, and how many of them are ready (docs/STALENESS.md).

    `surplus` is X: groups that may be due by a step beyond those it can take, since they are dropped with it.
    """

    def __init__(self, surplus: int = 0) -> None:
        self.surplus = surplus
        self._order: list[int] = []
        self._started: dict[int, int] = {}
        self._ready: dict[int, int] = {}

    def move(self, deadline: int, source: int, target: int) -> None:
        """A group with that deadline changed its phase."""
        if target == READY:
            self._ready[deadline] += 1
        elif source == READY:
            self._ready[deadline] -= 1
        if STARTED[target]:
            if not STARTED[source]:
                self._start(deadline)
        elif STARTED[source]:
            self._end(deadline)

    def count(self, deadline: int, phase: int) -> None:
        """Count a group with that deadline in its phase."""
        if STARTED[phase]:
            self._start(deadline)
            self._ready[deadline] += phase == READY

    def _start(self, deadline: int) -> None:
        if deadline in self._started:
            self._started[deadline] += 1
        else:
            insort(self._order, deadline)
            self._started[deadline], self._ready[deadline] = 1, 0

    def _end(self, deadline: int) -> None:
        """A started group was taken by a step or released."""
        self._started[deadline] -= 1
        if not self._started[deadline]:
            del self._started[deadline], self._ready[deadline]
            self._order.remove(deadline)

    def cumulative(self) -> Iterator[tuple[int, int, int]]:
        """(d, U(d), ready groups with deadline ≤ d) for each deadline that has groups, ascending."""
        started = ready = 0
        for deadline in self._order:
            started += self._started[deadline]
            ready += self._ready[deadline]
            yield deadline, started, ready

    def requirements(self, step: int, batch: int) -> list[tuple[int, int, int]]:
        """(d, least number of groups with deadline ≤ d that the step must take, how many are ready), where that is
        above 0."""
        spare = self.surplus
        return [
            (deadline, started - (deadline - step) * batch - spare, ready)
            for deadline, started, ready in self.cumulative()
            if started > (deadline - step) * batch + spare
        ]

    def needs(self, step: int, batch: int) -> list[tuple[int, int]]:
        """(d, how many more unready groups with deadline ≤ d must come out of the way) for each deadline that binds.

        A deadline binds when it has run out of room for more groups than are ready. Each entry counts beyond those
        before it, so that acting on exactly so many, none twice, frees the step.
        """
        needs, acted = [], 0
        for deadline, started, ready in self.cumulative():
            missing = started - (deadline - step) * batch - self.surplus - ready - acted
            if missing > 0:
                needs.append((deadline, missing))
                acted += missing
        return needs

    def due(self, step: int) -> int:
        """U(step): started, untaken groups that no later step may take."""
        return sum(self._started[deadline] for deadline in self._order if deadline <= step)

    def by_deadline(self) -> dict[int, tuple[int, int]]:
        """deadline → (started, ready) groups."""
        return {d: (self._started[d], self._ready[d]) for d in self._order}
