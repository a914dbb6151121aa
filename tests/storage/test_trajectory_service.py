"""`PackedTrajectories`, the client of the trajectory store: what a process waits for, and where groups are unpacked."""

import asyncio
import threading
from typing import Any

import pytest

from engine.runtime.trajectory_service import SMALL_BYTES, PackedTrajectories, Waits, unpacked
from engine.runtime.wire import GATHER_S
from engine.states.process import TRAJECTORY_STORE
from engine.storage.group_codec import pack_group, unpack_group
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup
from engine.workers.clock import VirtualLoop


def group_of(tokens: int) -> TrajectoryGroup:
    one = Trajectory(
        token_ids=[7] * tokens, logprobs=[-0.5] * tokens, loss_mask=[1] * tokens, spans=[Span(0, tokens, 0)],
        finish_reason="stop", reward=1.0,
    )  # fmt: skip
    return TrajectoryGroup(group=3, prompt=Prompt(row=3, text="question"), trajectories=[one])


class HeldStore:
    """A store that answers a `put` only once the test lets it."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[None]] = []
        self.sizes: list[int] = []
        """Groups of each call."""

    async def put(self, groups: list[Any]) -> None:
        self.sizes.append(len(groups))
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]


def test_a_process_waits_for_the_store_until_all_its_puts_are_answered() -> None:
    async def scene() -> None:
        store, waits = HeldStore(), Waits()
        client = PackedTrajectories(store, waits.on)
        puts = [asyncio.ensure_future(client.put(group_of(2), attempt=1)) for _ in range(2)]
        await asyncio.sleep(2 * GATHER_S)
        assert waits.oldest == TRAJECTORY_STORE
        later = asyncio.ensure_future(client.put(group_of(2), attempt=2))
        store.answers[0].set_result(None)
        await asyncio.gather(*puts)
        await asyncio.sleep(2 * GATHER_S)
        assert waits.oldest == TRAJECTORY_STORE and store.sizes == [2, 1]
        store.answers[1].set_exception(OSError("no room"))
        with pytest.raises(OSError, match="no room"):
            await later
        assert waits.oldest == ""

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene())


def test_only_large_groups_are_unpacked_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(data: bytes) -> TrajectoryGroup:
        threads.append(threading.get_ident())
        return unpack_group(data)

    async def answer(group: TrajectoryGroup) -> list[bytes | TrajectoryGroup]:
        return [pack_group(group), group]

    monkeypatch.setattr("engine.runtime.trajectory_service.unpack_group", noted)
    for tokens, own in ((2, True), (SMALL_BYTES, False)):
        group = group_of(tokens)
        assert asyncio.run(unpacked(answer(group))) == [group, group]
        assert (threads[-1] == threading.get_ident()) is own
