"""What leaves an actor in batches, and what becomes of the actor when it cannot."""

import asyncio
from typing import Any

import pytest

from engine.actors.worker_actor import FIGURE_WAIT_S, Inbox, Outbox
from engine.events import Event, OrderDone, OrderProgressed, StepFailed, StepTrained
from engine.record.codec import unpack_events
from engine.runtime.wire import GATHER_S, WAIT_S, GatheredCalls, Message
from engine.workers.clock import VirtualLoop


@pytest.mark.parametrize(
    ("event", "error", "words"),
    [
        (StepFailed(step=0, attempt=1, reason="\ud800"), None, "half of a surrogate pair"),
        (StepTrained(step=0, attempt=1), TypeError("cannot pickle a lock"), "TypeError: cannot pickle a lock"),
    ],
    ids=["cannot be packed", "cannot be sent"],
)
def test_an_event_that_cannot_leave_is_reported_at_once_and_none_follows(
    event: Event, error: Exception | None, words: str
) -> None:
    sent: list[Any] = []

    async def report(sequence: int, events: bytes, figures: list[Any]) -> int:
        if error is not None:
            raise error
        sent.append(events)
        return sequence

    async def scene() -> None:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        outbox = Outbox(report, lost.set_result)
        outbox.add(event)
        reason = await asyncio.wait_for(lost, 60)
        assert reason.startswith("events cannot be sent to the scheduler: ") and words in reason
        outbox.add(StepTrained(step=1, attempt=1))
        await asyncio.sleep(2 * GATHER_S)
        assert sent == []

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene())


def test_the_first_event_leaves_at_once_and_those_right_after_it_in_one_report() -> None:
    sent: list[tuple[int, list[Event]]] = []

    async def report(sequence: int, events: bytes, figures: list[Any]) -> None:
        sent.append((sequence, unpack_events(events)))

    async def scene() -> None:
        outbox = Outbox(report, pytest.fail)
        steps = [StepTrained(step=step, attempt=1) for step in range(3)]
        await asyncio.sleep(1)
        outbox.add(steps[0])
        await asyncio.sleep(GATHER_S / 4)
        assert sent == [(1, steps[:1])]
        outbox.add(steps[1])
        await asyncio.sleep(GATHER_S / 4)
        outbox.add(steps[2])
        await asyncio.sleep(GATHER_S)
        assert sent[1:] == [(2, steps[1:])]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene())


def test_an_event_that_nobody_awaits_leaves_with_the_next_other_one_or_after_a_while() -> None:
    sent: list[list[Event]] = []

    async def report(sequence: int, events: bytes, figures: list[Any]) -> None:
        sent.append(unpack_events(events))

    async def scene() -> None:
        outbox = Outbox(report, pytest.fail)
        patient, trained = OrderProgressed(order=1, finished=2), StepTrained(step=1, attempt=1)
        done = OrderDone(orders=(1,))
        outbox.add(patient)
        await asyncio.sleep(WAIT_S / 2)
        outbox.add(patient)
        outbox.add(trained)
        await asyncio.sleep(GATHER_S / 4)
        assert sent == [[patient, patient, trained]]
        outbox.add(patient)
        await asyncio.sleep(WAIT_S / 2)
        assert len(sent) == 1
        await asyncio.sleep(WAIT_S)
        assert sent[1:] == [[patient]]
        outbox.add(done)
        await asyncio.sleep(FIGURE_WAIT_S / 2)
        outbox.add(patient)
        await asyncio.sleep(2 * WAIT_S)
        assert sent[2:] == [[done, patient]], "nothing follows from the acknowledgment"
        outbox.add(done)
        await asyncio.sleep(2 * FIGURE_WAIT_S)
        assert sent[3:] == [[done]]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene())


def test_a_call_that_fails_does_not_hold_up_the_next() -> None:
    sent: list[list[int]] = []

    async def send(items: list[int]) -> None:
        sent.append(items)
        if items == [1]:
            raise asyncio.CancelledError

    async def scene() -> None:
        calls = GatheredCalls(send)
        for item in (1, 2):
            calls.add(item)
            await asyncio.sleep(2 * GATHER_S)
        assert sent == [[1], [2]]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene())


def test_a_batch_is_handled_once_and_the_first_of_a_process_always() -> None:
    """A batch that Ray resends gets the same answer, once the first call has it."""
    handled: list[tuple[str, int, int]] = []
    goes_on = asyncio.Event()

    async def scene() -> None:
        inbox = Inbox()

        async def send(source: str, life: int, sequence: int) -> list[Message]:
            async def handle() -> list[Message]:
                handled.append((source, life, sequence))
                await goes_on.wait()
                return [(0, len(handled), b"")]

            return await inbox.answer(source, life, sequence, handle)

        first, again = (asyncio.ensure_future(send("trainer", 1, 2)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert handled == [("trainer", 1, 2)] and not again.done()
        goes_on.set()
        assert await first == await again == [(0, 1, b"")]
        assert await send("trainer", 1, 3) == [(0, 2, b"")]
        assert await send("trainer", 2, 1) == [(0, 3, b"")] and await send("scorer-0", 1, 1) == [(0, 4, b"")]
        # The trainer has died unseen, and another one has its name.
        assert await send("trainer", 2, 1) == [(0, 5, b"")]
        assert await send("trainer", 2, 2) == await send("trainer", 2, 2) == [(0, 6, b"")]

    asyncio.run(asyncio.wait_for(scene(), 60))
