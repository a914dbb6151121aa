"""The added states of groups: which groups wait for their work, in which order. Those of train steps have no queue.

`states/groups.py` updates it when groups enter and leave; `scheduling/groups.py` drives it. The order book alone says
whose work is ordered. The ledger counts a group in a state before generation as waiting, and in a state after it as
parked: it keeps its place and deadline, but holds no slot.
"""

from engine.ids import GroupId
from engine.states.limits import GENERATED, QUEUED, AddedState
from engine.states.orders import OrderBook, state_owner


class StateQueue:
    """The groups in one added state."""

    def __init__(self, number: int, added: AddedState, waiting: dict[GroupId, None], orders: OrderBook) -> None:
        self.number = number
        """Its index among the added states."""
        self.name = added.name
        self.place = added.place
        self.concurrency = added.concurrency
        self.owner = state_owner(added.name)
        self.waiting = waiting
        """Groups whose work is not ordered, oldest first. A dict keeps the order."""
        self._orders = orders

    @property
    def working(self) -> int:
        """The number of groups whose work is ordered."""
        return len(self._orders.of(self.owner, "state"))


class StateQueues:
    """Every added state of a run's groups, in the order in which groups pass through them."""

    def __init__(
        self, queues: dict[str, dict[GroupId, None]], added: tuple[AddedState, ...], orders: OrderBook
    ) -> None:
        of_groups = [state for state in added if state.place in (QUEUED, GENERATED)]
        self.by_name = {
            state.name: StateQueue(number, state, queues.setdefault(state.name, {}), orders)
            for number, state in enumerate(of_groups)
        }
        every = self.by_name.values()
        self.at = {place: tuple(queue for queue in every if queue.place == place) for place in (QUEUED, GENERATED)}
        """By place."""
        self._orders = orders

    def groups_at(self, place: str) -> int:
        """The number of groups in the states of a place."""
        return sum(len(queue.waiting) + queue.working for queue in self.at[place])

    @property
    def out(self) -> int:
        """The number of groups whose work is ordered."""
        return len(self._orders.open["state"])

    def enter(self, name: str, group: GroupId) -> None:
        """A group waits for the work of a state, behind those that already wait."""
        self.by_name[name].waiting[group] = None

    def leave(self, name: str, group: GroupId) -> None:
        """Remove a group from a state, and withdraw its work if that is ordered."""
        waiting = self.by_name[name].waiting
        if group in waiting:
            del waiting[group]
        else:
            self._orders.withdraw("state", group)

    def next(self, queue: StateQueue) -> GroupId:
        """Remove and return the group that has waited longest. The caller must order its work now."""
        group = next(iter(queue.waiting))
        del queue.waiting[group]
        return group

    def put_back(self) -> None:
        """Queue all ordered work again, before the groups that already wait. Call it before the book is cleared."""
        for queue in self.by_name.values():
            worked_on, waiting = [*self._orders.of(queue.owner, "state")], [*queue.waiting]
            for group in worked_on:
                self._orders.withdraw("state", group)
            queue.waiting.clear()
            queue.waiting.update(dict.fromkeys((*worked_on, *waiting)))

    def clear(self) -> None:
        for queue in self.by_name.values():
            queue.waiting.clear()
