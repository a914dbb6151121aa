"""The trajectory store's actor, without Ray: what it does on which thread, and when it answers."""

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from engine.actors.detached_actors import PackedPlan
from engine.actors.failures import HeartbeatActor
from engine.actors.store_actors import RemoteWeights, TrajectoryStoreActor
from engine.actors.transports import ObjectStoreTransport
from engine.states.process import WEIGHTS_STORE
from engine.storage.durable_trajectories import StorePolicy


@pytest.fixture(autouse=True)
def visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor hides them from its process, which is that of other tests."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def store(directory: Path, **policy: Any) -> TrajectoryStoreActor:
    alone = PackedPlan(directory="", path=(), data=b"", launch="", detached=False, orphan_s=0.0, run_dir=None)
    return TrajectoryStoreActor(alone, None, directory, StorePolicy(**policy))


def test_an_actor_made_outside_ray_starts_no_cluster(tmp_path: Path) -> None:
    before = ray.is_initialized()
    store(tmp_path / "trajectories")
    assert ray.is_initialized() == before


def test_a_disk_that_does_not_answer_keeps_no_sign_of_life_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread, hangs, answers, written = threading.get_ident(), threading.Event(), threading.Event(), os.fsync

    def hang(handle: int) -> None:
        assert threading.get_ident() != loop_thread, "the disk is waited for on the event loop"
        hangs.set()
        assert answers.wait(60)
        written(handle)

    async def story() -> None:
        actor = store(tmp_path / "trajectories", fsync="always")
        monkeypatch.setattr(os, "fsync", hang)
        put = asyncio.ensure_future(actor.put([(0, 1, b"first", False)]))
        assert await asyncio.to_thread(hangs.wait, 60)
        got = asyncio.ensure_future(actor.get([0]))
        assert (await actor.beat()).pid == os.getpid() and not put.done() and not got.done()
        answers.set()
        await put
        assert await got == [b"first"], "calls are carried out in order"
        assert (await actor.stats()).groups == 1
        await actor.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_calls_are_carried_out_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    async def story() -> None:
        actor = store(tmp_path / "trajectories")
        puts = [actor.put([(group, attempt, b"%d" % attempt, False)]) for attempt in (1, 2, 3) for group in range(40)]
        await asyncio.gather(*puts, actor.discard(list(range(20))))
        assert await actor.get(list(range(20, 40))) == [b"3"] * 20 and await actor.partial(0) is None
        await actor.close()

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_process_that_waits_for_the_weights_store_says_so_until_it_is_answered(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a store that hangs is stopped, and not the process whose order is late: `tests/core/test_blame.py`."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))

    async def story() -> None:
        answered, asked = asyncio.Event(), asyncio.Event()

        async def hang(*given: Any) -> Any:
            asked.set()
            await answered.wait()
            return [asyncio.sleep(0, "weights")] if call == "get" else None

        remote = SimpleNamespace(remote=hang)
        client = RemoteWeights(SimpleNamespace(pull=remote, get=remote), ObjectStoreTransport())
        waiting = asyncio.ensure_future(client.put(1, "weights") if call == "put" else client.get(1))
        await asked.wait()
        assert (await HeartbeatActor().beat()).waits_for == WEIGHTS_STORE
        answered.set()
        await waiting
        assert (await HeartbeatActor().beat()).waits_for == ""

    asyncio.run(asyncio.wait_for(story(), 60))
