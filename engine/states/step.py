"""The train step: one outer step of the trainer over a batch of groups. Driven by `scheduling/training.py`."""

from engine.ids import GroupId, StepId, TimerId
from engine.states.digest import digest
from engine.states.machine import Table, transitions

STEP = Table(
    name="step",
    states=("waiting", "collecting", "scoring", "training", "publishing", "finished"),
    transitions=transitions(
        ("collect", "waiting", "collecting", "the step before it is finished"),
        ("form", "collecting", "scoring", "the batching rule found a batch"),
        ("train", "scoring", "training", "every scoring task is done"),
        ("retry", "scoring training", "scoring", "it failed: the same batch again"),
        ("publish", "training", "publishing", "every minibatch is applied; a k-th step, or the last"),
        ("published", "publishing", "finished", "the version is in the store"),
        ("finish", "training", "finished", "every minibatch is applied; not a k-th step"),
    ),
    terminal=("finished",),
)


class Step:
    """One train step and its batch, which never changes once formed."""

    __slots__ = (
        "acts", "attempt", "batch_digest", "done", "failures", "groups", "id", "pooled", "short", "staleness",
        "state", "timer",
    )  # fmt: skip

    def __init__(self, id: StepId, *, pooled: bool = False) -> None:
        self.id = id
        self.pooled = pooled
        """Pools are listed: scoring tasks may be done side by side."""
        self.state: str = STEP.initial
        self.attempt = 0
        self.failures = 0
        self.groups: tuple[GroupId, ...] = ()
        self.staleness: tuple[int, ...] = ()
        self.done: tuple[int, ...] = ()
        """Scoring tasks done in this attempt, by their place in `Limits.scoring_tasks`."""
        self.timer: TimerId | None = None
        """Set while only stragglers keep the batch from forming."""
        self.acts = 0
        """How often the deadline policy has acted for this step."""
        self.short = False
        """The deadline policy lets this step take fewer groups than a full batch."""
        self.batch_digest = 0
        """What its batch adds to the state hash."""

    def take(self, groups: tuple[GroupId, ...], staleness: tuple[int, ...]) -> None:
        """Form the batch."""
        self.groups, self.staleness = groups, staleness
        self.batch_digest = digest((*groups, *staleness)) >> 1

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        return (
            self.id, STATE_NUMBER[self.state], self.attempt, self.failures, len(self.done), len(self.groups),
            self.batch_digest, -1 if self.timer is None else self.timer, self.acts, self.short,
            *((-1, *self.done) if self.pooled else ()),
        )  # fmt: skip


STATE_NUMBER: dict[str, int] = {state: number for number, state in enumerate(STEP.states)}
