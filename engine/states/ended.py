"""What has ended since the checkpoints that a run can be resumed from: the steps trained, with their batches, and the
groups released meanwhile.

Kept by `states/state.py` where checkpoints are written; read by `schedule/recovery.py`. Resuming from a checkpoint
does again what came after it, so this is forgotten once two newer checkpoints are there: the last but one is still at
hand should the last be damaged. Whoever resumes from an older one replays the record from its beginning.
"""

from typing import NamedTuple

from engine.ids import GroupId, StepId

NOTHING_KNOWN = 2**62
"""The floor of what knows nothing."""


class Batch(NamedTuple):
    """What a train step was trained on."""

    step: StepId
    groups: tuple[GroupId, ...]
    staleness: tuple[int, ...]


class Ended:
    """Steps trained and groups released, by how many steps were trained before."""

    __slots__ = ("floor", "forgets", "newest", "released", "tracks", "trained")

    def __init__(self, tracks: bool) -> None:
        self.tracks = tracks
        """Whether anything is kept; the one thing that is looked at for each group."""
        self.forgets = True
        """Whether what two checkpoints contain is let go of."""
        self.floor = 0
        """Train steps from which on everything is known: those of the last checkpoint but one."""
        self.newest = 0
        """Train steps of the newest checkpoint."""
        self.trained: dict[StepId, tuple[tuple[GroupId, ...], tuple[int, ...]]] = {}
        """The groups of each step and their staleness."""
        self.released: dict[StepId, list[GroupId]] = {}
        """Groups that ended untrained, by the train steps done then."""

    def train(self, step: StepId, groups: tuple[GroupId, ...], staleness: tuple[int, ...]) -> None:
        if self.tracks:
            self.trained[step] = (groups, staleness)

    def release(self, group: GroupId, steps: int) -> None:
        self.released.setdefault(steps, []).append(group)

    def saved(self, steps: int) -> None:
        """A checkpoint after so many train steps is complete."""
        if steps > self.newest:
            self.floor, self.newest = max(self.floor, self.newest), steps
            self._forget()

    def damaged(self, newest: int) -> None:
        """A checkpoint cannot be used. `newest`: train steps in the newest of the others."""
        self.newest = min(self.newest, newest)

    def branch(self, steps: int) -> None:
        """The run goes back to the checkpoint after so many train steps, or to the initial weights: what came after has
        not been."""
        self.floor, self.newest = min(self.floor, steps), steps
        self.trained = {step: batch for step, batch in self.trained.items() if step < steps}
        self.released = {step: groups for step, groups in self.released.items() if step < steps}

    def keep_all(self) -> None:
        """From the first step on, for a record that is replayed to learn what it says."""
        self.tracks, self.forgets = True, False

    def hand_over(self, tracks: bool) -> "Ended":
        """All that is known, to whoever asked for it; here what a run needs is left, if it needs anything."""
        known = Ended(True)
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

    def batches(self, steps: int) -> list[Batch]:
        """What was trained after so many steps, in order."""
        return [Batch(step, *batch) for step, batch in sorted(self.trained.items()) if step >= steps]

    def since(self, steps: int) -> tuple[list[GroupId], list[GroupId]]:
        """The groups consumed and those released after so many train steps."""
        consumed = [group for batch in self.batches(steps) for group in batch.groups]
        released = [group for step, groups in self.released.items() if step >= steps for group in groups]
        return consumed, released
