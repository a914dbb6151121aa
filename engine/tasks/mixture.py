"""Chooses the next prompt of a run with several data sources: by weights, by a curriculum, and without rows that rest.
A row rests if passes over its source skip it for a while, because its newest group had too high or too low a reward.

    mixture = Mixture(sources, seed=7, epochs=1)
    mixture.choose(0)            # group 0 gets the next row of the source that is furthest behind its weight
    mixture.prompt(0)

`choose` is called once for each group, in the order in which groups first start, with the number of train steps in
their first weights. `outcome` reports the mean reward of a finished group. A choice is a function of the seed and of
these calls alone, so repeating the calls from the record of a run gives the same rows. Never reads a clock, and never
draws from random state.

The law of a choice: a group that starts after `step` train steps uses the outcomes that existed when the first group
started after `step` train steps, in the order of the groups. With S = 0 these are the outcomes of all groups that
started after fewer steps, no matter when each of them ended.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from engine.errors import DataFailure
from engine.ids import GroupId, StepId
from engine.tasks.dataset import Dataset, PromptSource
from engine.tasks.source_files import Curriculum, CurriculumStage, PassRate
from engine.trajectory import Prompt

UNKNOWN = float("nan")
UNCHOSEN = -1
NEVER_AGAIN = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data source of a run."""

    name: str
    data: Dataset
    weight: float | None = None
    """Share of the draws, relative to the other sources; None: in proportion to the rows of each."""
    rest: PassRate | None = None
    """Rows whose newest group had a mean reward outside these bounds are left out of the next passes."""
    dropped: int = 0
    """Rows that a filter left out before the run."""


class _Groups:
    """Source, row, pass, step and reward of each group, by its id: 33 bytes for each."""

    def __init__(self) -> None:
        self.source = array("b")
        self.row = array("q")
        self.pass_number = array("q")
        """The pass over its source in which the row was chosen."""
        self.step = array("q")
        self.reward = array("d")

    def __len__(self) -> int:
        return len(self.row)

    def __contains__(self, group: GroupId) -> bool:
        return 0 <= group < len(self.row) and self.source[group] != UNCHOSEN

    def put(self, group: GroupId, source: int, row: int, pass_number: int, step: StepId) -> None:
        for _ in range(len(self.row), group + 1):
            self.source.append(UNCHOSEN)
            self.row.append(0)
            self.pass_number.append(0)
            self.step.append(0)
            self.reward.append(UNKNOWN)
        self.source[group], self.row[group], self.pass_number[group], self.step[group] = source, row, pass_number, step


class Mixture:
    """`total`: the number of draws, `epochs` times the rows of all sources; None without `epochs`."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        epochs: int | None = None,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.total = None if epochs is None else epochs * sum(len(source.data) for source in sources)
        self.learns = curriculum is not None or any(source.rest is not None for source in sources)
        """Whether a choice depends on anything but the number of the draw."""
        self._stages = (CurriculumStage(weights=shares(sources)),) if curriculum is None else curriculum.stages
        self._curriculum = curriculum
        self._orders = [
            PromptSource(source.data, seed=_seed_of(seed, source.name), shuffle=shuffle) for source in sources
        ]
        self._next = [0] * len(sources)
        """Position of each source in its endless order."""
        self._credit: list[float] = [0] * len(sources)
        self._groups = _Groups()
        self.drawn = [0] * len(sources)
        self.rested = [0] * len(sources)
        """Rows of each source that were skipped."""
        self._forget()

    def _forget(self) -> None:
        """Forget all outcomes."""
        self._known: StepId = 0
        self._pending: set[GroupId] = set()
        self.stage = 0
        self._stage_began: StepId = 0
        most = self._curriculum.window if self._curriculum is not None else 1
        self._window: deque[float] = deque(maxlen=most)
        self._rests: list[dict[int, int]] = [{} for _ in self.sources]
        """For each source: the last pass in which each resting row rests."""

    # -- choices

    def choose(self, group: GroupId, step: StepId = 0) -> None:
        """Choose the row of a group that starts after `step` train steps. A group that starts again keeps its row."""
        if step > self._known:
            self._learn(step)
        if group in self._groups:
            self._groups.step[group] = step
            return
        weights = self._stages[self.stage].weights
        credit = self._credit
        for index, weight in enumerate(weights):
            credit[index] += weight
        source = max((index for index, weight in enumerate(weights) if weight > 0), key=credit.__getitem__)
        credit[source] -= sum(weights)
        pass_number, row = self._row(source)
        self._groups.put(group, source, row, pass_number, step)
        self.drawn[source] += 1

    def _row(self, source: int) -> tuple[int, int]:
        """The next row of a source that does not rest, and its pass. If all rows rest, the next row."""
        order, rests, rows = self._orders[source], self._rests[source], len(self.sources[source].data)
        first = self._next[source]
        for number in range(first, first + rows):
            pass_number, row = order.draw(number)
            if rests.get(row, -1) < pass_number:
                self._next[source] = number + 1
                self.rested[source] += number - first
                return pass_number, row
        self._next[source] = first + 1
        return order.draw(first)

    def prompt(self, group: GroupId) -> Prompt:
        """The prompt of a group. Raises: `DataFailure` if none was chosen and choices depend on outcomes."""
        if not self.learns:
            for earlier in range(len(self._groups), group + 1):
                self.choose(earlier)
        if group not in self._groups:
            raise DataFailure(f"no prompt was chosen for group {group}", group=group)
        source = self.sources[self._groups.source[group]]
        return replace(source.data.prompt(self._groups.row[group]), source=source.name)

    # -- outcomes

    def outcome(self, group: GroupId, reward: float) -> None:
        """A group has finished, with this mean reward. The newest outcome of a group counts."""
        if group in self._groups and reward == reward:
            self._groups.reward[group] = reward
            self._pending.add(group)

    def _learn(self, step: StepId) -> None:
        """Use the outcomes that the law allows for groups that start after `step` train steps."""
        for group in sorted(self._pending):
            self._take(group)
        self._pending.clear()
        self._known = step
        self._advance(step)

    def _take(self, group: GroupId) -> None:
        groups = self._groups
        source, reward = groups.source[group], groups.reward[group]
        if groups.step[group] >= self._stage_began:
            self._window.append(reward)
        rest = self.sources[source].rest
        if rest is None:
            return
        if rest.holds(reward):
            self._rests[source].pop(groups.row[group], None)
        else:
            last = NEVER_AGAIN if rest.rest_passes is None else groups.pass_number[group] + rest.rest_passes
            self._rests[source][groups.row[group]] = last

    def _advance(self, step: StepId) -> None:
        """Move to the stage that applies after `step` train steps."""
        if self._curriculum is None:
            return
        before = self.stage
        until = self._stages[self.stage].until
        if self._curriculum.by_accuracy:
            full = len(self._window) == self._window.maxlen
            self.stage += until is not None and full and fmean(self._window) >= until
        else:
            while until is not None and step >= until:
                self.stage += 1
                until = self._stages[self.stage].until
        if self.stage != before:
            self._stage_began = step
            self._window.clear()
            self._credit = [0] * len(self.sources)

    def branch(self, steps: StepId, again: Sequence[GroupId]) -> None:
        """The run has gone back to `steps` train steps: the groups `again`, and those that started later, have no
        outcome yet. They keep their rows."""
        groups = self._groups
        undone = {*again}
        self._forget()
        by_step: dict[StepId, list[GroupId]] = {}
        for group in range(len(groups)):
            if group in groups and (group in undone or groups.step[group] >= steps):
                groups.reward[group], groups.step[group] = UNKNOWN, steps
            elif group in groups and groups.reward[group] == groups.reward[group]:
                by_step.setdefault(groups.step[group], []).append(group)
        for step in sorted(by_step):
            self._learn(step)
            self._pending.update(by_step[step])

    # -- figures

    def figures(self) -> dict[str, dict[str, int]]:
        """By source: groups drawn from it, rows that a filter left out before the run, and rows skipped."""
        return {
            source.name: {"drawn": self.drawn[index], "dropped": source.dropped, "rested": self.rested[index]}
            for index, source in enumerate(self.sources)
        }


def shares(sources: Sequence[Source]) -> tuple[float, ...]:
    """The weights without a curriculum. Numbers of rows are whole, so that each row comes once in each epoch."""
    return tuple(len(source.data) if source.weight is None else source.weight for source in sources)


def _seed_of(seed: int, name: str) -> int:
    """The seed of a source's order, which does not depend on the other sources."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
