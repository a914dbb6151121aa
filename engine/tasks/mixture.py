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
from typing import TYPE_CHECKING

from engine.errors import DataFailure
from engine.ids import EventId, GroupId, StepId
from engine.input_identity import InputIdentity, matching_rows
from engine.tasks.dataset import Dataset, PromptSource
from engine.tasks.source_files import Curriculum, CurriculumStage, PassRate
from engine.trajectory import Prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNKNOWN = float("nan")
UNCHOSEN = -1
GONE = -1
"""The row of a group whose row was removed from the data."""
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
    """`total`: the number of draws, `epochs` times the rows of all sources; None without `epochs`.

    `inputs`: what the run began with, then each change of its data. After a change, a group keeps its row by content.
    The epoch continues with the rows that it has not drawn, including new ones. If the row of a group that must be
    generated again is gone, the group gets one of them.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        epochs: int | None = None,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        inputs: Sequence[InputIdentity] = (),
    ) -> None:
        self.sources = tuple(sources)
        self._ids = [inputs[0].ids(source.name) for source in sources] if inputs else []
        self._changes, self._epochs = deque(inputs[1:]), epochs
        sizes = [len(ids) for ids in self._ids] or [len(source.data) for source in sources]
        self.total = None if epochs is None else epochs * sum(sizes)
        self.learns = curriculum is not None or any(source.rest is not None for source in sources)
        """Whether a choice depends on anything but the number of the draw."""
        self._curriculum = curriculum
        self._orders = [
            PromptSource(source.data, seed=_seed_of(seed, source.name), shuffle=shuffle, rows=size)
            for source, size in zip(sources, sizes, strict=True)
        ]
        self._stages = self._shares() if curriculum is None else curriculum.stages
        self.left: Sequence[int] = []
        """After a change: rows of each source that the epoch had not drawn. They are the weights of the next draws."""
        self._left_draws = 0
        self._next = [0] * len(sources)
        """Position of each source in its endless order."""
        self._credit: list[float] = [0] * len(sources)
        self._groups = _Groups()
        self.drawn = [0] * len(sources)
        self.rested = [0] * len(sources)
        """Rows of each source that were skipped."""
        self._forget()
        while self._changes and not self.learns:
            self._choose_until(self._changes[0].drawn)
            self._change(self._changes.popleft())

    def _shares(self) -> tuple[CurriculumStage, ...]:
        """The weights without a curriculum. Numbers of rows are whole, so that each row comes once in each epoch."""
        pairs = zip(self.sources, self._orders, strict=True)
        weights = tuple(order.rows if source.weight is None else source.weight for source, order in pairs)
        return (CurriculumStage(weights=weights),)

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
        else:
            self._choose_next(group, step)

    def _choose_until(self, end: GroupId) -> None:
        for group in range(len(self._groups), end):
            self.choose(group)

    def _choose_next(self, group: GroupId, step: StepId) -> None:
        weights = self.left if self._left_draws else self._stages[self.stage].weights
        self._left_draws = max(0, self._left_draws - 1)
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
        order, rests, rows = self._orders[source], self._rests[source], self._orders[source].rows
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
            self._choose_until(group + 1)
        if group not in self._groups:
            raise DataFailure(f"no prompt was chosen for group {group}", group=group)
        if self._groups.row[group] == GONE:
            raise DataFailure(f"the row of group {group} was removed from the data", group=group)
        source = self.sources[self._groups.source[group]]
        return replace(source.data.prompt(self._groups.row[group]), source=source.name)

    def rows_of(self, groups: range) -> "list[NDArray[np.int64]]":
        """For each source, the rows of these groups. Only for choices that do not depend on outcomes."""
        import numpy as np

        self._choose_until(groups.stop)
        chosen = slice(groups.start, groups.stop)
        sources, rows = np.array(self._groups.source[chosen]), np.array(self._groups.row[chosen])
        return [rows[sources == index] for index in range(len(self.sources))]

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

    # -- changes of the data

    def resume(self, event: EventId) -> None:
        """The record has this event of a resume: the changes of the data before it count from now on."""
        while self._changes and self._changes[0].event <= event:
            self._change(self._changes.popleft())

    def _change(self, change: InputIdentity) -> None:
        pairs = zip(self._orders, self._next, strict=True)
        passes = [order.draw(number - 1).epoch if number else max(order.begun, 0) for order, number in pairs]
        each_once = not self.learns and all(source.weight is None for source in self.sources)
        if each_once:  # the pass is the epoch, although a source may have drawn nothing in it
            passes = [max(passes)] * len(passes)
        rows_before = sum(order.rows for order in self._orders)
        for index, newest in enumerate(passes):
            self._move_rows(index, newest, change)
        self._next, self._rests = [0] * len(passes), [{} for _ in passes]
        self._stages = self._shares() if self._curriculum is None else self._stages
        rows = sum(order.rows for order in self._orders)
        again = [group for group in change.again if group in self._groups and self._groups.row[group] == GONE]
        if each_once:
            self.left, self._credit = [len(order.rest) for order in self._orders], [0] * len(passes)
            self._left_draws = sum(self.left)
            if self._epochs is not None:
                draws = self._left_draws + max(0, self._epochs - 1 - passes[0]) * rows
                again, self.total = again[:draws], change.drawn + max(0, draws - len(again))
        elif self.total is not None:  # an epoch is a number of draws
            self.total = change.drawn + round((self.total - change.drawn) * rows / rows_before)
        for group in again:
            self._choose_next(group, self._groups.step[group])

    def _move_rows(self, source: int, newest: int, change: InputIdentity) -> None:
        """Give the groups of a source the new numbers of their rows. `newest`: the present pass over it."""
        groups, again, ids = self._groups, {*change.again}, change.ids(self.sources[source].name)
        mine = [group for group, of in enumerate(groups.source) if of == source and groups.row[group] != GONE]
        drawn = [group for group in mine if groups.pass_number[group] == newest]
        finished = [groups.row[group] for group in drawn if group not in again]
        places = matching_rows(self._ids[source], ids, finished, [groups.row[group] for group in drawn])
        for group in mine:
            groups.row[group] = places[groups.row[group]]
        self._orders[source].change(len(ids), newest, [groups.row[group] for group in drawn])
        self._ids[source] = ids

    # -- figures

    def figures(self) -> dict[str, dict[str, int]]:
        """By source: groups drawn from it, rows that a filter left out before the run, and rows skipped."""
        return {
            source.name: {"drawn": self.drawn[index], "dropped": source.dropped, "rested": self.rested[index]}
            for index, source in enumerate(self.sources)
        }


def _seed_of(seed: int, name: str) -> int:
    """The seed of a source's order, which does not depend on the other sources. Only a source that is alone has no
    name."""
    return seed if not name else int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
