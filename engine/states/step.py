"""The train step: one outer step of the trainer over a batch of groups. Driven by `scheduling/steps.py`."""

from dataclasses import dataclass

from engine.ids import GroupId, StepId
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


@dataclass(eq=False)
class Step:
    """One train step and its batch, which never changes once formed."""

    id: StepId
    state: str = STEP.initial
    attempt: int = 0
    failures: int = 0
    exceeded: int = 0
    """How often orders about it exceeded their time limit since one was answered."""
    groups: tuple[GroupId, ...] = ()
    staleness: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    """Scoring tasks done in this attempt, by their place in `Limits.scoring_tasks`."""
    acts: int = 0
    """How often the deadline policy has acted for this step."""
    short: bool = False
    """The deadline policy lets this step take fewer groups than a full batch."""

    def take(self, groups: tuple[GroupId, ...], staleness: tuple[int, ...]) -> None:
        """Form the batch."""
        self.groups, self.staleness = groups, staleness
