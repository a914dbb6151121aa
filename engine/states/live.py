"""What may be changed while a run goes on: its settings, how many replicas it has, and that it comes to rest.

Written by `scheduling/`, from events that the user's requests became. Nothing of it is set in a run that is left alone,
and then it adds nothing to the state hash.
"""

from engine.ids import TimerId
from engine.states.digest import digest
from engine.states.limits import Limits


class Live:
    """See the module. `loosest` is the largest S that a live group may have been admitted under."""

    __slots__ = (
        "drain_timer",
        "draining",
        "fill_timer",
        "give_up_timer",
        "limit_timer",
        "loosest",
        "moved",
        "over",
        "settings",
        "slow",
    )

    def __init__(self, limits: Limits) -> None:
        self.draining = ""
        """Why the run comes to rest; empty while it does not."""
        self.moved = False
        """The run or one of its replicas was ever asked to leave, or to come."""
        self.settings: dict[str, str] = {}
        """What was set, by name."""
        self.loosest = limits.max_staleness_steps
        self.over = 0
        """Groups that run beyond K since it was lowered; they end, and no other starts meanwhile."""
        self.slow = False
        """A replica is slower than the others by more than may be."""
        self.limit_timer: TimerId | None = None
        """Fires when the first order may exceed its time limit."""
        self.give_up_timer: TimerId | None = None
        """Set while no replica is left and none is coming."""
        self.drain_timer: TimerId | None = None
        """Fires when a drain has taken too long: the run then stops as it is."""
        self.fill_timer: TimerId | None = None
        """Set while more groups may be started than one event may start: the rest follow when it fires, at once."""

    def rest_is_over(self) -> None:
        """New processes carry the run: what its replicas were to do is over with them, what was set stays."""
        self.draining = ""
        self.limit_timer = self.drain_timer = self.give_up_timer = self.fill_timer = None

    @property
    def timers(self) -> tuple[TimerId | None, ...]:
        """Those that are set, None for each that is not."""
        return self.limit_timer, self.give_up_timer, self.fill_timer, self.drain_timer

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        timers = self.timers
        if not (self.moved or self.settings or any(timer is not None for timer in timers)):
            return ()
        set_so_far = "\n".join(f"{name}={value}" for name, value in self.settings.items())
        return (
            bool(self.draining), self.over,
            *(-1 if timer is None else timer for timer in timers),
            digest(tuple(set_so_far.encode())) >> 1,
        )  # fmt: skip
