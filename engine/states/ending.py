"""The end of a run: what counts towards it, its outcome, and how often the run was restarted from its record.

Written by the handlers that count failures, and by `State.end_run`.
"""

from msgspec import structs

from engine.commands import FinishRun
from engine.ids import StepId
from engine.states.facts import Facts


class Ending(Facts):
    """What counts towards the end of a run, and its outcome."""

    outcome: FinishRun | None = None
    draining: str = ""
    """Why the run drains; empty if it does not."""
    draining_since: float = 0.0
    """When it was asked to drain, in seconds since the run began."""
    none_left: str = ""
    """Why the last replica is gone for good, which ends the run once it needs one."""
    none_left_since: float = 0.0
    last_failure: str = ""
    """Why the last group failed or replica was lost."""
    failed_draws: int = 0
    """Draws that failed since one succeeded."""
    failed_in_a_row: int = 0
    """Groups that failed for good since one was generated."""
    filtered_in_a_row: int = 0
    """Groups that the filter dropped since it kept one."""
    judged: int = 0
    """Of the latest attempts, those that ended with rewards or failed for cause `data`; see `note_judged`."""
    misjudged: int = 0
    """Those of the `judged` attempts that failed."""
    restarts: int = 0
    """Restarts of the run from its record since `restarted_at` train steps, or since a user resumed it."""
    restarted_at: StepId = 0

    def begin_again(self) -> None:
        """The run is not over: only the restarts that it has used still count."""
        fresh = Ending(restarts=self.restarts, restarted_at=self.restarted_at)
        for name, value in structs.asdict(fresh).items():
            setattr(self, name, value)

    def note_judged(self, window: int, *, failed: bool) -> None:
        """Count an attempt that ended with rewards, or failed for cause `data`. The counts are halved when they reach
        two windows, so that they are always those of the latest attempts."""
        self.judged += 1
        self.misjudged += failed
        if self.judged >= 2 * window:
            self.judged //= 2
            self.misjudged //= 2
