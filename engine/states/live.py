"""What may be changed while a run goes on: its settings, how many replicas it has, and that it comes to rest.

Written by `scheduling/`, from events that the user's requests became. Nothing of it is set in a run that is left alone,
and then it adds nothing to the state hash.
"""

from engine.ids import ReplicaId, TimerId
from engine.states.digest import digest
from engine.states.limits import Limits


class Live:
    """See the module. `loosest` is the largest S that a live group may have been admitted under."""

    __slots__ = (
        "draining",
        "give_up_timer",
        "group_timer",
        "leaving",
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
        away; another life of one that is may come, where it is wanted."""
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

    def rest_is_over(self) -> None:
        """New processes carry the run: what its replicas were to do is over with them, what was set stays."""
        self.draining = ""
        self.leaving.clear()
        self.wanted = self.group_timer = self.give_up_timer = None

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        if not (self.moved or self.settings or self.group_timer is not None or self.give_up_timer is not None):
            return ()
        set_so_far = "\n".join(f"{name}={value}" for name, value in self.settings.items())
        return (
            bool(self.draining), len(self.leaving), *(2 * id + returns for id, (_, returns) in self.leaving.items()),
            -1 if self.wanted is None else self.wanted, self.over,
            *(-1 if timer is None else timer for timer in (self.group_timer, self.give_up_timer)),
            digest(tuple(set_so_far.encode())) >> 1,
        )  # fmt: skip
