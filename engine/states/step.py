"""The train step: one outer step of the trainer over a batch of groups. Driven by `scheduling/steps.py`."""

from dataclasses import dataclass
from typing import ClassVar

from engine.ids import GroupId, StepId, TimerId
from engine.states.machine import Table, transitions
from engine.states.tree import Record, digest

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


@dataclass(eq=False)
class Step(Record):
    """One train step and its batch, which never changes once formed."""

    UNHASHED: ClassVar[tuple[str, ...]] = ("groups", "staleness")  # `batch_digest` stands for them

    id: StepId
    state: str = STEP.initial
    attempt: int = 0
    failures: int = 0
    groups: tuple[GroupId, ...] = ()
    staleness: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    """Scoring tasks done in this attempt, by their place in `Limits.scoring_tasks`."""
    timer: TimerId | None = None
    """Set while only stragglers keep the batch from forming."""
    acts: int = 0
    """How often the deadline policy has acted for this step."""
    short: bool = False
    """The deadline policy lets this step take fewer groups than a full batch."""
    batch_digest: int = 0
    """What its batch adds to the state hash."""

    def take(self, groups: tuple[GroupId, ...], staleness: tuple[int, ...]) -> None:
        """Form the batch."""
        self.groups, self.staleness = groups, staleness
        self.batch_digest = digest((groups, staleness)) >> 1
