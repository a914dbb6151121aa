"""Batches of events and orders as they travel between actors."""

import pytest
from msgspec.structs import replace

from engine.commands import COMMANDS, Command
from engine.events import EVENTS, Event
from engine.record.codec import pack, unpack_events
from engine.runtime.wire import InOrder, SentOrder, pack_orders, unpack_orders
from tests.core.test_orders import sample


@pytest.mark.parametrize("kind", EVENTS)
def test_every_event_arrives_as_it_was(kind: type[Event]) -> None:
    event = replace(sample(kind), id=-1, at=0.0)  # the scheduler stamps it
    (arrived,) = unpack_events(pack([event]))
    assert arrived == event


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_order_arrives_as_it_was(kind: type[Command]) -> None:
    order = SentOrder(sample(kind))
    assert unpack_orders(pack_orders([order])) == [order]


def test_calls_come_out_in_the_order_of_their_numbers_and_each_once() -> None:
    calls: InOrder[str] = InOrder()
    assert calls.take(4, 2, "second") == []
    assert calls.take(4, 1, "first") == ["first", "second"]
    assert calls.take(4, 2, "second") == [] and calls.take(4, 3, "third") == ["third"]


def test_calls_of_an_earlier_epoch_are_refused_also_those_that_wait() -> None:
    calls: InOrder[str] = InOrder()
    assert calls.take(4, 1, "old") == ["old"] and calls.take(4, 3, "waits") == []
    assert calls.take(7, 2, "second") == [], "the new scheduler counts from 1"
    assert calls.take(4, 2, "late") == [], "the old one is refused"
    assert calls.begin(7) is False and calls.begin(4) is False
    assert calls.take(7, 1, "first") == ["first", "second"]
    assert calls.begin(8) is True and calls.take(7, 3, "late") == []
