"""What leaves an actor in batches, and what becomes of the actor when it cannot."""

import asyncio
import math
from typing import Any

import pytest

from engine.actors.worker_actor import Inbox, Outbox
from engine.events import Event, GroupGenerated, StepTrained


def generated(reward_mean: float) -> Event:
    return GroupGenerated(
        group=0, attempt=1, replica=0, incarnation=1, tokens=1, oldest_version=0, newest_version=0, trainable=1,
        reward_mean=reward_mean, reward_spread=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("event", "error", "words"),
    [
        (generated(math.inf), None, "GroupGenerated.reward_mean is inf"),
        (StepTrained(step=0, attempt=1), TypeError("cannot pickle a lock"), "TypeError: cannot pickle a lock"),
    ],
    ids=["cannot be packed", "cannot be sent"],
)
def test_an_event_that_cannot_leave_is_told_at_once_and_none_follows(
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
        await asyncio.sleep(0)
        assert sent == []

    asyncio.run(scene())


def test_a_batch_is_taken_once_and_the_first_of_a_process_always() -> None:
    inbox = Inbox()
    assert [inbox.takes("trainer", 1, sequence) for sequence in (1, 2, 2, 3, 2)] == [True, True, False, True, False]
    assert inbox.takes("trainer", 2, 1) and inbox.takes("scorer-0", 1, 1)
    # The trainer has died unseen, and another one has its name.
    assert [inbox.takes("trainer", 1, sequence) for sequence in (1, 2, 2)] == [True, True, False]
