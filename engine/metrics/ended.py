"""What metrics keep of records that have ended. Counted by `collector.Transitions`, written into snapshots."""

from typing import NamedTuple


class EndedValidation(NamedTuple):
    """What is kept of a validation that ended."""

    id: int
    version: int
    steps: int
    state: str
    accuracy: float | None
    reward_mean: float | None
    rows: int
    measured: int
    reason: str
    queued_at: float
    started_at: float
    ended_at: float
