"""Which checkpoints there are, as far as the record says, and which of them need not be kept.

Written by `scheduling/training.py` and `State.branch`; read where deletions are ordered and where a run is resumed. It
never looks at a disk, and must never name the newest checkpoint as one to delete.
"""

from engine.states.digest import MASK, digest
from engine.states.limits import Limits


class Checkpoints:
    """The train steps in each complete checkpoint that was not deleted, oldest first."""

    __slots__ = ("books", "steps")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.books = 0
        """What they add to the state hash."""

    @property
    def newest(self) -> int:
        """Train steps in the newest checkpoint; 0: the initial weights."""
        return self.steps[-1] if self.steps else 0

    def add(self, steps: int) -> None:
        """A checkpoint is complete. A repeat changes nothing."""
        if steps not in self.steps:
            self.steps.append(steps)
            self.steps.sort()
            self.books = (self.books + digest((steps,))) & MASK

    def remove(self, steps: int) -> None:
        """A checkpoint was deleted, or is damaged. A repeat changes nothing."""
        if steps in self.steps:
            self.steps.remove(steps)
            self.books = (self.books - digest((steps,))) & MASK

    def branch(self, steps: int) -> None:
        """The run goes back to the checkpoint after so many train steps; 0: to the initial weights. Later ones belong
        to another line of weights. That one is there, even if the record ends before the report that it was saved."""
        for later in [saved for saved in self.steps if saved > steps]:
            self.remove(later)
        if steps:
            self.add(steps)

    def surplus(self, limits: Limits) -> list[int]:
        """Those to delete, oldest first: beyond the newest `keep_checkpoints`, but for multiples of
        `keep_checkpoints_every`."""
        every = limits.keep_checkpoints_every
        return [steps for steps in self.steps[: -limits.keep_checkpoints] if not every or steps % every]

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of; nothing where there are none."""
        return (self.books >> 1,) if self.steps else ()

    def books_agree(self) -> bool:
        """Whether the books agree with the checkpoints."""
        return self.books == sum(digest((steps,)) for steps in self.steps) & MASK
