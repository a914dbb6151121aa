"""A user's loop around a `Session`, for tests: it answers one order at a time, on a clock of its own."""

from collections.abc import Callable
from typing import Any

from engine.commands import Command, ParkGroup
from engine.events import Event, GroupAborted, GroupFailed, GroupGenerated, ProcessUp, PromptsDrawn, RowsMeasured
from engine.record import replay
from engine.runtime.local import Session, answer
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.orders import RELATIONS

LIMITS = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=4, checkpoint_every=1,
    sync_mode="wait",
)  # fmt: skip
TOKENS = {"tokens": 5, "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}


def kind_of_answer(order: Command, *, fails: bool) -> type[Event]:
    """The first answer of the table says that an order was carried out, the last one that it was not."""
    if isinstance(order, ParkGroup):
        return GroupAborted
    return RELATIONS[type(order)].answers[-1 if fails else 0]


class Loop:
    """A user's loop, which answers one open order at a time, on a clock of its own."""

    def __init__(self, make: Callable[..., Session], **options: Any) -> None:
        self.now = 0.0
        self.session = make(clock=lambda: self.now, **options)
        self.facts: list[Event] = []
        self.orders: list[Command] = list(self.session.begin())

    def tell(self, *facts: Event) -> tuple[Command, ...]:
        self.now += 1.0
        new = self.session.report(*facts)
        self.facts += facts
        self.orders += new
        return new

    def fact_for(self, order: Command, *, fails: bool = False) -> Event:
        kind = kind_of_answer(order, fails=fails)
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
        return answer(order, kind, **data)

    def first(self, kind: type[Command]) -> Any:
        """The first open order of a kind; answers others until there is one."""
        while True:
            orders = self.session.open_orders
            found = [order for order in orders if type(order) is kind]
            if found:
                return found[0]
            self.tell(self.fact_for(orders[0]))

    def finish(self) -> None:
        for _ in range(500):
            if self.session.outcome is not None:
                return
            self.tell(self.fact_for(self.session.open_orders[0]))
        raise AssertionError(self.session.waits())


def made(limits: Limits = LIMITS, **options: Any) -> Loop:
    return Loop(lambda **given: Session(limits, **given), **options)


def require_sound(session: Session) -> None:
    check_all(session._scheduler.state)
    report = replay(session.record)
    assert report.identical and report.events == session.events, report
