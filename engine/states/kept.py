"""Batches whose trajectories are still in their store: those of steps that no checkpoint contains.

Kept by `scheduling/training.py` where `Limits.keeps_batches` says so. From them the trainer can do again what it did
since its checkpoint.
"""

from engine.ids import GroupId, StepId
from engine.states.digest import MASK, digest


class KeptBatches:
    """The groups of each such step, in the order of the steps."""

    __slots__ = ("_digests", "books", "by_step")

    def __init__(self) -> None:
        self.by_step: dict[StepId, tuple[GroupId, ...]] = {}
        self._digests: dict[StepId, int] = {}
        self.books = 0
        """What they add to the state hash."""

    def keep(self, step: StepId, groups: tuple[GroupId, ...]) -> None:
        self.by_step[step] = groups
        self._digests[step] = digest((step, *groups))
        self.books = (self.books + self._digests[step]) & MASK

    def let_go(self, steps: StepId) -> list[GroupId]:
        """A checkpoint contains so many steps: the groups that need not be kept for them any more."""
        covered = [step for step in self.by_step if step < steps]
        groups: list[GroupId] = []
        for step in covered:
            groups += self.by_step.pop(step)
            self.books = (self.books - self._digests.pop(step)) & MASK
        return groups

    def clear(self) -> None:
        self.by_step.clear()
        self._digests.clear()
        self.books = 0

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of; nothing where nothing is kept."""
        return (self.books >> 1,) if self.by_step else ()

    def books_agree(self) -> bool:
        """Whether the books agree with the batches."""
        return self.books == sum(digest((step, *groups)) for step, groups in self.by_step.items()) & MASK
