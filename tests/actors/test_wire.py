"""Batches of events and orders as they travel between actors."""

from dataclasses import replace

import pytest

from engine.actors.wire import Order, pack_events, pack_orders, unpack_events, unpack_orders
from engine.commands import COMMANDS, Command
from engine.events import EVENTS, Event
from tests.core.test_orders import sample


@pytest.mark.parametrize("kind", EVENTS.values())
def test_every_event_arrives_as_it_was(kind: type[Event]) -> None:
    event = replace(sample(kind), id=-1, at=0.0)  # the scheduler stamps it
    (arrived,) = unpack_events(pack_events([event]))
    assert arrived == event


@pytest.mark.parametrize("kind", COMMANDS.values())
def test_every_order_arrives_as_it_was(kind: type[Command]) -> None:
    order = Order(sample(kind))
    assert unpack_orders(pack_orders([order])) == [order]
