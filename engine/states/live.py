"""What may be changed while a run goes on: its settings, how many replicas it has, and that it comes to rest.

Written by `scheduling/`, from events that the user's requests became. Nothing of it is set in a run that is left alone,
and then it adds nothing to the state hash.
"""

from engine.ids import ReplicaId, TimerId
from engine.states.digest import MASK, digest
from engine.states.limits import Limits


class Live:
    """See the module. `loosest` is the largest S that a live group may have been admitted under."""

    __slots__ = (
        "draining",
        "fill_timer",
        "give_up_timer",
        "group_timer",
        "leaving",
        "leaving_books",
        "loosest",
        "moved",
        "over",
        "settings",
        "slow",
        "wanted",
    )

    def __init__(self, limits: Limits) -> None:
        self.draining = ""
        """Why the run comes to rest; empty while it does not."""
        self.leaving: dict[ReplicaId, tuple[str, bool]] = {}
        """Replicas that are let go as soon as they can be: why, and whether that is because they are taken
        away; another life of one that is may come, where it is wanted. Changed by `Fleet` alone."""
        self.leaving_books = 0
        """What they add to the state hash."""
        self.wanted: int | None = None
        """Replicas that generate, as the user wants them; None: those that there are."""
        self.moved = False
        """The run or one of its replicas was ever asked to leave, or to come."""
        self.settings: dict[str, str] = {}
        """What was set, by name."""
        self.loosest = limits.max_staleness_steps
        self.over = 0
        """Groups that run beyond K since it was lowered; they end, and no other starts meanwhile."""
        self.slow = False
        """A replica is slower than the others by more than may be."""
        self.group_timer: TimerId | None = None
        """Fires when the group that has run longest on one attempt has run too long."""
        self.give_up_timer: TimerId | None = None
        """Set while no replica is left and none is coming."""
        self.fill_timer: TimerId | None = None
        """Set while more groups may be started than one event may start: the rest follow when it fires, at once."""

    def rest_is_over(self) -> None:
        """New processes carry the run: what its replicas were to do is over with them, what was set stays."""
        self.draining = ""
        self.leaving.clear()
        self.leaving_books = 0
        self.wanted = self.group_timer = self.give_up_timer = self.fill_timer = None

    def note_leaving(self, replica: ReplicaId, entry: tuple[str, bool] | None) -> None:
        """A replica is let go, for that reason; None: it is not let go any more."""
        before = self.leaving.pop(replica, None)
        if before is not None:
            self.leaving_books = (self.leaving_books - _leaving_digest(replica, before)) & MASK
        if entry is not None:
            self.leaving[replica] = entry
            self.leaving_books = (self.leaving_books + _leaving_digest(replica, entry)) & MASK

    @property
    def timers(self) -> tuple[TimerId | None, ...]:
        """Those that are set, None for each that is not."""
        return self.group_timer, self.give_up_timer, self.fill_timer

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        timers = self.timers
        if not (self.moved or self.settings or any(timer is not None for timer in timers)):
            return ()
        set_so_far = "\n".join(f"{name}={value}" for name, value in self.settings.items())
        return (
            bool(self.draining), len(self.leaving), self.leaving_books >> 1,
            -1 if self.wanted is None else self.wanted, self.over,
            *(-1 if timer is None else timer for timer in timers),
            digest(tuple(set_so_far.encode())) >> 1,
        )  # fmt: skip

    def books_agree(self) -> bool:
        """Whether the books agree with the replicas that leave."""
        return self.leaving_books == sum(_leaving_digest(*one) for one in self.leaving.items()) & MASK


def _leaving_digest(replica: ReplicaId, entry: tuple[str, bool]) -> int:
    return digest((replica, entry[1]))
