"""The added states that groups of a run pass through between their last token and `generated`: who waits, who is worked
on.

Kept by `states/state.py` as groups enter and leave; driven by `scheduling/stages.py`. A group in an added state is
parked to the ledger: it keeps its place and its deadline and has no slot.
"""

from engine.ids import GroupId
from engine.states.limits import AddedState


class Stage:
    """One added state. Both dicts are for their order: of entry, and of the work ordered."""

    __slots__ = ("concurrency", "name", "number", "waiting", "working")

    def __init__(self, number: int, added: AddedState) -> None:
        self.number = number
        """Its place among the added states."""
        self.name = added.name
        self.concurrency = added.concurrency
        self.waiting: dict[GroupId, None] = {}
        self.working: dict[GroupId, None] = {}


class Stages:
    """Every added state of a run, in the order in which groups pass through them."""

    __slots__ = ("by_name", "out", "waiting")

    def __init__(self, added: tuple[AddedState, ...]) -> None:
        self.by_name = {state.name: Stage(number, state) for number, state in enumerate(added)}
        self.waiting = 0
        """Groups, over all states, whose work is not ordered; what the scheduler looks at after every event."""
        self.out = 0
        """Groups whose work is ordered."""

    def enter(self, name: str, group: GroupId) -> None:
        self.by_name[name].waiting[group] = None
        self.waiting += 1

    def leave(self, name: str, group: GroupId) -> None:
        stage = self.by_name[name]
        if group in stage.working:
            del stage.working[group]
            self.out -= 1
        else:
            del stage.waiting[group]
            self.waiting -= 1

    def work(self, stage: Stage) -> GroupId:
        """The group that has waited longest is worked on from now on."""
        group = next(iter(stage.waiting))
        del stage.waiting[group]
        stage.working[group] = None
        self.waiting -= 1
        self.out += 1
        return group

    def put_back(self) -> list[GroupId]:
        """Whatever is worked on waits again, before all that waited already; which groups those are."""
        put_back: list[GroupId] = []
        for stage in self.by_name.values():
            stage.waiting = {**stage.working, **stage.waiting}
            put_back += stage.working
            stage.working = {}
        self.waiting += self.out
        self.out = 0
        return put_back

    def clear(self) -> None:
        for stage in self.by_name.values():
            stage.waiting.clear()
            stage.working.clear()
        self.waiting = self.out = 0
