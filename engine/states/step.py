"""The train step: one outer step of the trainer over a batch of groups. Driven by `scheduling/steps.py`."""

from collections.abc import Sequence
from functools import lru_cache
from math import fsum

from engine.ids import GroupId, StepId
from engine.states.facts import Facts
from engine.states.group import Group
from engine.states.machine import Table, Transition, transitions

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

BETWEEN = {"scoring": ("scoring", "training"), "publishing": ("publishing", "finished")}
"""Where added states of train steps lie, by place."""
LET_IN = "an added state: its policy lets the step in, and no added state before it refused"


@lru_cache
def step_table(gates: tuple[str, ...] = (), checks: tuple[str, ...] = ()) -> Table:
    """The table of steps that pass through `gates` before they are trained and through `checks` before replicas get
    their weights, in their order; the same object for the same states."""
    if not gates and not checks:
        return STEP
    also = {"train": gates, "retry": gates, "published": checks}
    rows = [
        Transition(trigger=row.trigger, sources=(*row.sources, *also.get(row.trigger, ())), target=row.target,
                   why=row.why)
        for row in STEP.transitions
    ]  # fmt: skip
    for place, added in (("scoring", gates), ("publishing", checks)):
        rows += [
            Transition(trigger=name, sources=(place, *added[:number]), target=name, why=LET_IN)
            for number, name in enumerate(added)
        ]
    if checks:
        why = "the run resumes: its weights are published again"
        rows.append(Transition(trigger="republish", sources=checks, target="publishing", why=why))
    states = (*STEP.states, *gates, *checks)
    return Table(name=STEP.name, states=states, transitions=tuple(rows), terminal=STEP.terminal)


class Step(Facts):
    """One train step and its batch, which never changes once formed."""

    id: StepId
    state: str = STEP.initial
    entered_at: float = 0.0
    """When it entered its state, in seconds since the run began."""
    seconds: dict[str, float] = {}
    """Seconds that it spent in each state that it has left."""
    attempt: int = 0
    failures: int = 0
    exceeded: int = 0
    """How often orders about it exceeded their time limit since one was answered."""
    groups: tuple[GroupId, ...] = ()
    staleness: tuple[int, ...] = ()
    tokens: int = 0
    """Response tokens of its groups."""
    reward_mean: float = 0.0
    setbacks: dict[str, int] = {}
    """Once it is finished: how often groups were aborted, resumed, filtered and failed since the step before it
    finished."""
    done: tuple[int, ...] = ()
    """Scoring tasks done in this attempt, by their place in `Limits.scoring_tasks`."""
    acts: int = 0
    """How often the deadline policy has acted for this step."""
    short: bool = False
    """The deadline policy lets this step take fewer groups than a full batch."""

    def take(self, groups: Sequence[Group], staleness: tuple[int, ...]) -> None:
        """Form the batch."""
        self.groups, self.staleness = tuple([group.id for group in groups]), staleness
        self.tokens = sum([group.tokens for group in groups])
        self.reward_mean = fsum([group.reward_mean for group in groups]) / len(groups)

    def leave(self, at: float) -> None:
        """It is about to enter another state."""
        self.seconds[self.state] = self.seconds.get(self.state, 0.0) + at - self.entered_at
        self.entered_at = at
