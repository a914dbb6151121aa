"""The groups that run under a time limit, oldest attempt first.

`states/state.py` updates it when groups take and leave slots, if `Limits.group_timeout_s` is set.
`scheduling/attempts.py` reads it, and finds the attempt that is due first without a search.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from engine.ids import GroupId
from engine.states.fleet import Fleet
from engine.states.group import Group


class Attempts:
    """`running`: groups that run, oldest attempt first. `parking`: groups whose replicas were ordered to park them."""

    __slots__ = ("parking", "running")

    def __init__(self) -> None:
        self.running: OrderedDict[GroupId, Group] = OrderedDict()
        self.parking: OrderedDict[GroupId, Group] = OrderedDict()

    def begin(self, group: Group) -> None:
        """Add a group that has just taken a slot."""
        self.running[group.id] = group

    def end(self, group: Group) -> None:
        """Remove a group that has left its slot. Untimed groups are ignored."""
        if self.running.pop(group.id, None) is None:
            self.parking.pop(group.id, None)

    def park(self, groups: Iterable[Group]) -> None:
        """Move groups that replicas were ordered to park. They must have begun later than those in `parking`."""
        for group in sorted(groups, key=lambda group: group.seated_at):
            if self.running.pop(group.id, None) is not None:
                self.parking[group.id] = group

    def rebuild(self, fleet: Fleet, groups: Mapping[GroupId, Group], *, timed: bool) -> None:
        """Start again with all running groups, or with none if attempts have no time limit."""
        self.running.clear()
        self.parking.clear()
        running = [groups[id] for replica in fleet.replicas.values() for id in replica.groups] if timed else []
        for group in sorted(running, key=lambda group: group.seated_at):
            (self.parking if group.parking else self.running)[group.id] = group

    def first(self) -> Iterator[Group]:
        """The oldest attempt of `running` and of `parking`, if any."""
        for groups in (self.running, self.parking):
            if groups:
                yield next(iter(groups.values()))
