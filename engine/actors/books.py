"""What the scheduler's process counts over the whole run, for `RunMetrics` and for the one that may take its place.

The driver has it in every snapshot of the record, so that nobody who takes the run up has to read further back.
"""

from typing import Any

from engine.metrics.transitions import Transitions
from engine.schedule.open_orders import OpenOrders


class RunBooks:
    """See `engine.schedule.snapshots.Books`."""

    def __init__(self) -> None:
        self.transitions = Transitions()
        self.orders = OpenOrders()
        """Given and not answered."""

    def to_plain(self) -> Any:
        return {"transitions": self.transitions.to_plain(), "orders": self.orders.to_plain()}

    def take(self, plain: Any) -> None:
        """Raises: `ValueError`, `TypeError`, `LookupError` or `CodecError` where that is not what `to_plain` gave; it
        is then not changed."""
        orders = OpenOrders.of_plain(plain["orders"])
        self.transitions.take(plain["transitions"])
        self.orders = orders
