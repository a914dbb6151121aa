"""The added states that groups of a run pass through between their last token and `generated`: who waits for its work,
and in which order.

Kept by `states/state.py` as groups enter and leave; driven by `scheduling/stages.py`. Whose work is ordered is in the
order book alone. A group in an added state is parked to the ledger: it keeps its place and deadline and has no slot.
"""

from collections.abc import Collection

from engine.ids import GroupId
from engine.states.group import Group
from engine.states.limits import AddedState
from engine.states.orders import OrderBook, stage_owner


class Stage:
    """One added state."""

    __slots__ = ("_orders", "concurrency", "name", "number", "owner", "waiting")

    def __init__(self, number: int, added: AddedState, orders: OrderBook) -> None:
        self.number = number
        """Its place among the added states."""
        self.name = added.name
        self.concurrency = added.concurrency
        self.owner = stage_owner(added.name)
        self.waiting: dict[GroupId, None] = {}
        """Groups whose work is not ordered, in the order they came; a dict for its order."""
        self._orders = orders

    @property
    def working(self) -> int:
        """Groups whose work is ordered."""
        return self._orders.held(self.owner)


class Stages:
    """Every added state of a run, in the order in which groups pass through them."""

    __slots__ = ("_orders", "by_name", "waiting")

    def __init__(self, added: tuple[AddedState, ...], orders: OrderBook) -> None:
        self.by_name = {state.name: Stage(number, state, orders) for number, state in enumerate(added)}
        self.waiting = 0
        """Groups, over all states, whose work is not ordered; what the scheduler looks at after every event."""
        self._orders = orders

    @property
    def out(self) -> int:
        """Groups whose work is ordered."""
        return len(self._orders.open("stage"))

    def enter(self, name: str, group: GroupId) -> None:
        self.by_name[name].waiting[group] = None
        self.waiting += 1

    def leave(self, name: str, group: GroupId) -> None:
        """A group is out of a state: whatever was ordered of it there is not wanted any more."""
        waiting = self.by_name[name].waiting
        if group in waiting:
            del waiting[group]
            self.waiting -= 1
        else:
            self._orders.withdraw("stage", group)

    def next(self, stage: Stage) -> GroupId:
        """The group that has waited longest; its work is to be ordered now."""
        group = next(iter(stage.waiting))
        del stage.waiting[group]
        self.waiting -= 1
        return group

    def put_back(self, groups: Collection[Group]) -> list[GroupId]:
        """Whatever was worked on waits again, before all that waited already; which groups those are. A run that was
        stopped has no orders any more, so that its `groups` say it."""
        put_back: list[GroupId] = []
        for stage in self.by_name.values():
            there = [group for group in groups if group.state == stage.name and group.id not in stage.waiting]
            worked_on = [group.id for group in sorted(there, key=lambda group: group.entered)]
            for id in worked_on:
                self._orders.withdraw("stage", id)
            stage.waiting = {**dict.fromkeys(worked_on), **stage.waiting}
            self.waiting += len(worked_on)
            put_back += worked_on
        return put_back

    def clear(self) -> None:
        for stage in self.by_name.values():
            stage.waiting.clear()
        self.waiting = 0
