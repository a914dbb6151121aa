"""Which checkpoints there are, as far as the record says, and what has ended since: steps with their batches, and
released groups.

Written by `scheduling/steps.py` and `State`; read where a trainer begins, where deletions are ordered, and by
`record/recovery.py`. Resuming from a checkpoint does again what came after it. What two checkpoints contain is
forgotten: the last but one is still at hand should the last be damaged. A resume from an older one replays the
record from its beginning. This module never looks at a disk, and must never name the newest checkpoint as one to
delete.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.ids import GroupId, StepId
from engine.states.facts import Facts
from engine.states.limits import Limits

NOTHING_KNOWN = 2**62
"""The floor of what knows nothing."""


class TrainedBatch(NamedTuple):
    """What a train step was trained on."""

    step: StepId
    groups: tuple[GroupId, ...]
    staleness: tuple[int, ...]


def best_of(saved: Iterable[StepId], ratings: Mapping[StepId, float], mode: str) -> StepId:
    """Train steps in the saved checkpoint with the best rating, of equal ones the oldest; -1: none is rated. `mode`:
    `max` or `min`, the best value."""
    sign = -1.0 if mode == "max" else 1.0
    rated = [steps for steps in saved if steps in ratings]
    return min(rated, key=lambda steps: (sign * ratings[steps], steps), default=-1)


class Checkpoints(Facts):
    """The checkpoints of a run and what they do not contain."""

    tracks: bool = False
    """Whether anything that ends is noted."""
    keeps: bool = False
    """Whether trajectories are kept until a checkpoint contains what was trained on them."""
    forgets: bool = True
    """Whether what ended before the last checkpoint but one is forgotten."""
    steps: list[StepId] = []
    """The train steps in each complete checkpoint that was not deleted, oldest first."""
    floor: StepId = 0
    """Train steps from which on everything that ended is known: those of the last checkpoint but one."""
    kept_from: StepId = 0
    """Trajectories of the steps from here on are still in their store, where `Limits.keeps_batches` says so."""
    trained: dict[StepId, tuple[tuple[GroupId, ...], tuple[int, ...]]] = {}
    """The groups of each step and their staleness."""
    released: dict[StepId, list[GroupId]] = {}
    """Groups that ended untrained, by the train steps done then."""
    ordered: StepId = 0
    """Train steps in the checkpoint that was ordered last."""
    failures: int = 0
    """How often that checkpoint failed."""
    exceeded: int = 0
    """How often orders for a checkpoint exceeded their time limit since one was answered."""
    ratings: dict[StepId, float] = {}
    """The figure `Limits.keep_best` of each validation, by the number of train steps in the weights."""

    @property
    def newest(self) -> StepId:
        """Train steps in the newest checkpoint; 0: the initial weights."""
        return self.steps[-1] if self.steps else 0

    @property
    def stored_batches(self) -> dict[StepId, tuple[GroupId, ...]]:
        """The groups of each step whose trajectories are still in their store: the trainer can train it again."""
        if not self.keeps:
            return {}
        return {step: groups for step, (groups, _) in self.trained.items() if step >= self.kept_from}

    # checkpoints

    def save(self, steps: StepId) -> list[GroupId]:
        """A checkpoint is complete; a repeat changes nothing. The groups that need not be kept for it any more."""
        groups = [group for step, batch in self.stored_batches.items() if step < steps for group in batch]
        self.kept_from = max(self.kept_from, steps)
        if steps > self.newest:
            self.floor = max(self.floor, self.newest)
        self._add(steps)
        self._forget()
        return groups

    def remove(self, steps: StepId) -> None:
        """A checkpoint was deleted, or is damaged. A repeat changes nothing."""
        self.steps = [saved for saved in self.steps if saved != steps]

    def surplus(self, limits: Limits, measuring: Sequence[StepId] = ()) -> list[StepId]:
        """Those to delete, oldest first: beyond the newest `keep_checkpoints`, but for multiples of
        `keep_checkpoints_every`, the best one, and those whose weights are being measured, of which one may be."""
        every = limits.keep_checkpoints_every
        stay = {self.best(limits), *measuring} if limits.keep_best else set()
        older = self.steps[: -limits.keep_checkpoints]
        return [steps for steps in older if (not every or steps % every) and steps not in stay]

    def rate(self, steps: StepId, value: float) -> None:
        """A validation of the weights after `steps` train steps measured the figure `Limits.keep_best`."""
        self.ratings = {**self.ratings, steps: value}

    def best(self, limits: Limits) -> StepId:
        """Train steps in the best checkpoint, of equal ones the oldest; -1: none was measured."""
        return best_of(self.steps, self.ratings, limits.keep_best_mode)

    def _add(self, steps: StepId) -> None:
        self.steps = sorted({*self.steps, steps})

    # what has ended

    def train(self, step: StepId, groups: tuple[GroupId, ...], staleness: tuple[int, ...]) -> None:
        if self.tracks:
            self.trained[step] = (groups, staleness)

    def release(self, group: GroupId, steps: StepId) -> None:
        self.released.setdefault(steps, []).append(group)

    def branch(self, steps: StepId) -> None:
        """The run returns to the checkpoint after `steps` train steps, or to the initial weights, and forgets all later
        work. That checkpoint exists, even if the record ends before the report that it was saved."""
        self.steps = [saved for saved in self.steps if saved <= steps]
        if steps:
            self._add(steps)
        self.floor, self.kept_from, self.ordered = min(self.floor, steps), steps, steps
        self.ratings = {rated: value for rated, value in self.ratings.items() if rated <= steps}
        self.trained = {step: batch for step, batch in self.trained.items() if step < steps}
        self.released = {step: groups for step, groups in self.released.items() if step < steps}

    def batches(self, steps: StepId) -> list[TrainedBatch]:
        """The batches trained after `steps` steps, in order."""
        return [TrainedBatch(step, *batch) for step, batch in sorted(self.trained.items()) if step >= steps]

    def since(self, steps: StepId) -> tuple[list[GroupId], list[GroupId]]:
        """The groups consumed and those released after `steps` train steps."""
        consumed = [group for batch in self.batches(steps) for group in batch.groups]
        released = [group for step, groups in self.released.items() if step >= steps for group in groups]
        return consumed, released

    def keep_all(self) -> None:
        """Forget nothing from now on: a reader replays the record to see its history."""
        self.tracks, self.forgets = True, False

    def hand_over(self, tracks: bool) -> "Checkpoints":
        """Return all that is known, and keep only what a run needs, if it needs anything."""
        known = Checkpoints(tracks=True)
        known.floor = 0 if not self.forgets else self.floor if self.tracks else NOTHING_KNOWN
        known.trained, known.released = dict(self.trained), {step: [*ids] for step, ids in self.released.items()}
        self.tracks, self.forgets = tracks, True
        if not tracks:
            self.trained, self.released = {}, {}
        self._forget()
        return known

    def _forget(self) -> None:
        """Let go of what ended before the last checkpoint but one."""
        if self.forgets:
            for book in (self.trained, self.released):
                for step in [step for step in book if step < self.floor]:
                    del book[step]
