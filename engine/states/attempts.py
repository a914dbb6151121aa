"""Which groups run under a time limit, the attempt that began first before the others.

Kept by `states/state.py` as groups take slots and leave them, where `Limits.group_timeout_s` is set; read by
`scheduling/attempts.py`. What is due first is known without a look at the others.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from engine.ids import GroupId
from engine.states.fleet import Fleet
from engine.states.group import Group


class Attempts:
    """Groups that run, in the order their attempts began, and those of them that their replicas were told to park."""

    __slots__ = ("parking", "running")

    def __init__(self) -> None:
        self.running: OrderedDict[GroupId, Group] = OrderedDict()
        self.parking: OrderedDict[GroupId, Group] = OrderedDict()

    def begin(self, group: Group) -> None:
        """A group was given a slot now."""
        self.running[group.id] = group

    def end(self, group: Group) -> None:
        """A group has lost its slot, timed or not."""
        if self.running.pop(group.id, None) is None:
            self.parking.pop(group.id, None)

    def park(self, groups: Iterable[Group]) -> None:
        """Replicas were told to park these, which began later than those that are to be parked already."""
        for group in sorted(groups, key=lambda group: group.seated_at):
            if self.running.pop(group.id, None) is not None:
                self.parking[group.id] = group

    def rebuild(self, fleet: Fleet, groups: Mapping[GroupId, Group], *, timed: bool) -> None:
        """Begin anew: with all groups that run, or with none where attempts have no time limit."""
        self.running.clear()
        self.parking.clear()
        running = [groups[id] for replica in fleet.replicas.values() for id in replica.groups] if timed else []
        for group in sorted(running, key=lambda group: group.seated_at):
            (self.parking if group.parking else self.running)[group.id] = group

    def first(self) -> Iterator[Group]:
        """The one that began first, and the one that was to be parked first, where there are such."""
        for groups in (self.running, self.parking):
            if groups:
                yield next(iter(groups.values()))
