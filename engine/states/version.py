"""The weights version: one publication, from the store to the replicas to its end. Driven by `scheduling/sync.py`."""

from engine.ids import Version
from engine.states.machine import Table, transitions

VERSION = Table(
    name="version",
    states=("published", "transferring", "live", "retired"),
    transitions=transitions(
        ("transfer", "published", "transferring", "a first replica stages it"),
        ("live", "published transferring", "live", "every replica samples from it"),
        ("retire", "published transferring live", "retired", "superseded, and no replica is taking it"),
    ),
    terminal=("retired",),
)


class WeightsVersion:
    """One publication and the train steps it contains."""

    __slots__ = ("id", "refused", "state", "steps")

    def __init__(self, id: Version, steps: int) -> None:
        self.id = id
        self.state: str = VERSION.initial
        self.steps = steps
        self.refused = 0
        """Replicas lost because they could not be brought to it."""

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        return (self.id, STATE_NUMBER[self.state], self.steps, self.refused)


STATE_NUMBER: dict[str, int] = {state: number for number, state in enumerate(VERSION.states)}
