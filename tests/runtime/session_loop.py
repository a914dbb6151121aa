"""A user's loop around a `Session`, for tests: it answers one order at a time, on a clock of its own."""

from collections.abc import Callable
from typing import Any

from engine.commands import Command, ParkGroup
from engine.events import Event, GroupAborted, GroupFailed, GroupGenerated, ProcessUp, PromptsDrawn, RowsMeasured
from engine.record import replay
from engine.runtime.local import Session, SessionOrder
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.orders import RELATIONS

LIMITS = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=4, checkpoint_every=1,
    sync_mode="wait",
)  # fmt: skip
TOKENS = {"tokens": 5, "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}


def kind_of_answer(order: SessionOrder, *, fails: bool) -> type[Event]:
    """The first answer of the table says that an order was carried out, the last one that it was not."""
    if isinstance(order, ParkGroup):
        return GroupAborted
    return RELATIONS[order.__class__].answers[-1 if fails else 0]


class Loop:
    """A user's loop, which answers one open order at a time, on a clock of its own."""

    def __init__(self, make: Callable[..., Session], **options: Any) -> None:
        self.now = 0.0
        self.session = make(clock=lambda: self.now, **options)
        self.answers: list[tuple[SessionOrder, type[Event], dict[str, Any]]] = []
        self.orders: list[SessionOrder] = list(self.session.begin())

    def report(self, *events: Event) -> tuple[SessionOrder, ...]:
        self.now += 1.0
        new = self.session.report(*events)
        self.orders += new
        return new

    def answer(self, order: SessionOrder, *, fails: bool = False, **changes: Any) -> tuple[SessionOrder, ...]:
        """Answer an order, and report it."""
        self.give(order, fails=fails, **changes)
        return self.report()

    def give(self, order: SessionOrder, *, fails: bool = False, **changes: Any) -> Event:
        """Answer an order with what a loop would say, but for some values."""
        kind = kind_of_answer(order, fails=fails)
        return self.say(order, kind, self.data_for(order, kind) | changes)

    def say(self, order: SessionOrder, kind: type[Event], data: dict[str, Any]) -> Event:
        order.answer(kind, **data)
        self.answers.append((order, kind, data))
        return self.session._answers[-1]

    def data_for(self, order: SessionOrder, kind: type[Event]) -> dict[str, Any]:
        data: dict[str, Any] = {"reason": "chance"} if "reason" in kind.__struct_fields__ else {}
        if kind is ProcessUp and order.kind == "replica":
            data = {"slots": 4, "samples": 2}
        elif kind is PromptsDrawn:
            data = {"count": order.count, "exhausted": False}
        elif kind is GroupFailed:
            data["cause"] = "data"
        elif kind is RowsMeasured:
            data = {"measured": order.count, "right": 0, "reward": 0.0}
        elif kind is GroupAborted:
            data = {"tokens": 0, "oldest_version": -1, "newest_version": -1}
        elif kind is GroupGenerated:
            known = self.session.view.group(order.group)
            newest = next(one.version for one in self.session.view.replicas() if one.id == order.replica)
            oldest = known.oldest_version if known is not None and known.oldest_version >= 0 else newest
            data = {"oldest_version": oldest, "newest_version": newest, **TOKENS}
        return data

    def first(self, kind: type[Command]) -> Any:
        """The first open order of a kind; answers others until there is one."""
        while True:
            orders = self.session.open_orders
            found = [order for order in orders if isinstance(order, kind)]
            if found:
                return found[0]
            self.answer(orders[0])

    def finish(self) -> None:
        for _ in range(500):
            if self.session.outcome is not None:
                return
            self.answer(self.session.open_orders[0])
        raise AssertionError(self.session.waits())


def made(limits: Limits = LIMITS, **options: Any) -> Loop:
    return Loop(lambda **given: Session(limits, **given), **options)


def require_sound(session: Session) -> None:
    check_all(session._scheduler.state)
    report = replay(session.record)
    assert report.identical and report.events == session.events, report
