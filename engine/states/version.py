"""The weights version: one publication, from the store to the replicas to its end. Driven by
`scheduling/weights.py`."""

from engine.ids import Version
from engine.states.facts import Facts
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


class WeightsVersion(Facts):
    """One publication; `Training.steps_in` has its train steps."""

    id: Version
    state: str = VERSION.initial
    refused: int = 0
    """Replicas lost because they could not be brought to it."""
