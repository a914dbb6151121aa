"""The store actors, without Ray where they can be: what they do on which thread, when they answer, and what memory
they hold."""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError
from weight_holders import inodes

from engine.actors import store_actors, transports
from engine.actors.detached_actors import PackedPlan
from engine.actors.failures import HeartbeatActor
from engine.actors.store_actors import RemoteWeights, TrajectoryStoreActor
from engine.actors.transports import ObjectStoreTransport, Senders
from engine.actors.worker_actor import TrainerActor
from engine.errors import EngineError
from engine.rollout.sent_weights import Join, WeightsCall
from engine.states.process import WEIGHTS_STORE
from engine.storage.durable_trajectories import StorePolicy
from engine.training.shared_weights import PublishedTensors, copy_of
from engine.workers.plan import WeightsWire

WIRE = WeightsWire(backend="gloo", bucket_bytes=1, timeout_s=60.0, limit_s=1.0)


@pytest.fixture(autouse=True)
def visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor hides them from its process, which is that of other tests."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def store(directory: Path, **policy: Any) -> TrajectoryStoreActor:
    alone = PackedPlan(directory="", path=(), data=b"", launch="", orphan_s=0.0, run_dir=None)
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


@pytest.mark.parametrize("trainer", ["sends", "has died", "has a newer version", "is silent"])
def test_a_replica_gets_the_stores_copy_if_the_trainer_cannot_send(trainer: str) -> None:
    timeout_s = 0.05 if trainer == "is silent" else WIRE.timeout_s
    wire = replace(WIRE, timeout_s=timeout_s)
    senders = Senders(wire)
    senders.hold(1 if trainer == "sends" else 2, {"weight": torch.zeros(3)})

    async def describe(version: int) -> Any:
        if trainer == "has died":
            raise RayActorError
        if trainer == "is silent":
            await asyncio.Event().wait()
        return senders.manifest(version)

    async def story() -> None:
        publisher = SimpleNamespace(manifest=SimpleNamespace(remote=describe))
        calls = {"publisher": lambda: asyncio.sleep(0, publisher), "get": lambda *given: asyncio.sleep(0, [stored()])}
        store = SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})
        client = RemoteWeights(store, ObjectStoreTransport(), 0, wire)
        got = await client.get(1)
        assert (got == "stored") == (trainer != "sends")
        if trainer == "sends":
            assert got.manifest == senders.manifest(1) and await got.stored() == "stored"

    async def stored() -> str:
        return "stored"

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_trainer_that_sends_weights_imports_vllm_before_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def load(*given: Any) -> None:
        done.append("loaded")

    def fail() -> None:
        done.append("imported")
        raise ImportError("no vLLM")

    monkeypatch.setattr(store_actors, "sender_module", fail)
    trainer = TrainerActor.__new__(TrainerActor)
    trainer.worker, trainer._peers = SimpleNamespace(open=load), lambda: None
    trainer._weights = RemoteWeights(None, ObjectStoreTransport(), wire=WIRE)
    asyncio.run(trainer._load(None))
    assert done == ["loaded", "imported"], "the trainer comes up even if the import fails, because the store has a copy"
    with pytest.raises(EngineError, match="it cannot import vLLM"):
        trainer._weights.manifest_to_send(1)
    with pytest.raises(EngineError, match="it cannot import vLLM"):
        asyncio.run(trainer._weights.turn(0, Join(group="one", workers=1), None))
    assert not trainer._weights._watches, "nobody waits for the end of a replica without a group"


def test_a_call_after_a_group_was_closed_fails_at_once() -> None:
    async def story() -> None:
        exchange = transports.Exchange("late", WIRE)
        exchange.close()
        with pytest.raises(EngineError, match=transports.GIVEN_UP):
            await asyncio.to_thread(exchange._ask, WeightsCall(name="update_weights", argument=None))

    asyncio.run(story())


def test_what_a_custom_trainer_publishes_is_copied_before_it_is_sent() -> None:
    own = {"wide": torch.ones(4, 4), "tied": torch.zeros(2)}
    published = transports.publication_to_send(own)
    own["wide"].zero_()
    assert torch.equal(published["wide"], torch.ones(4, 4)) and transports.place_of(published) is not None
    assert transports.publication_to_send(published) is published
    with pytest.raises(EngineError, match="takes tensors by name, not int"):
        transports.publication_to_send(3)


def test_a_transposed_tensor_is_not_taken_for_a_tied_one() -> None:
    wide = torch.arange(4.0).view(2, 2)
    published = transports.publication_to_send({"wide": wide, "turned": wide.T})
    assert torch.equal(published["wide"], wide) and torch.equal(published["turned"], wide.T)


# -- a published version through the store -----------------------------------------------------------------------------


def publication() -> PublishedTensors:
    wide = torch.arange(64 << 10, dtype=torch.float32).view(256, 256)
    memory, _ = copy_of({"wide": wide, "tied": wide, "odd": torch.randn(3, 5).bfloat16(), "none": torch.zeros(0, 4)})
    try:
        return memory.complete()
    finally:
        memory.close()


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


class Ends:
    """The trainer, the store and a reader of one version, in this process. Notes which answers they asked for."""

    def __init__(self, tensors: PublishedTensors) -> None:
        self.transport = ObjectStoreTransport()
        self.packed = self.transport.pack(tensors)
        self.kept: Any = None
        self.asked: list[tuple[str, bool]] = []

    async def publish(self) -> None:
        async def give(apart: bool) -> Any:
            self.asked.append(("trainer", apart))
            return self.transport.hand_out(self.packed, apart)

        self.kept = await self.transport.keep(lambda apart: asyncio.ensure_future(give(apart)))
        self.packed = None

    async def read(self) -> Any:
        async def give(apart: bool) -> Any:
            self.asked.append(("store", apart))
            return await self.transport.give(self.kept, apart)

        return await self.transport.take(give)


def test_a_version_has_one_copy_on_a_machine_while_the_store_or_a_reader_has_it() -> None:
    async def story() -> None:
        before, tensors = inodes(os.getpid()), publication()
        expected = {name: value.clone() for name, value in tensors.items()}
        ends = Ends(tensors)
        del tensors
        (memory,) = inodes(os.getpid()) - before
        await ends.publish()
        assert inodes(os.getpid()) == before | {memory}, "the trainer no longer has it, but the store has"
        first, second = await ends.read(), await ends.read()
        assert equal(first, expected) and equal(second, expected)
        assert first["tied"].data_ptr() == first["wide"].data_ptr(), "tied tensors stay tied"
        assert ends.asked == [("trainer", False), ("store", False), ("store", False)]
        ends.kept = None
        del second
        assert inodes(os.getpid()) == before | {memory}, "the reader has it"
        del first
        await asyncio.get_running_loop().shutdown_default_executor()  # its threads had the results last
        assert inodes(os.getpid()) == before

    asyncio.run(story())


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_reader_on_another_machine_gets_a_copy_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = publication()
    monkeypatch.setattr(transports, "find", lambda *_: None)

    async def story() -> None:
        ends = Ends(tensors)
        await ends.publish()
        copies = await asyncio.gather(ends.read(), ends.read())
        assert [equal(one, tensors) for one in copies] == [True, True]
        assert (
            copies[0].publication == tensors.publication and copies[0]["wide"].data_ptr() != tensors["wide"].data_ptr()
        )
        assert copies[0]["wide"].data_ptr() == copies[1]["wide"].data_ptr(), "they share one copy"
        assert sorted(ends.asked) == [("store", False)] * 2 + [("store", True)] * 2 + [("trainer", False)]

    asyncio.run(story())


def test_a_reader_that_cannot_map_the_memory_asks_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = publication()

    def fail(*_: Any) -> None:
        raise OSError("no address space")

    async def story() -> None:
        async def give(apart: bool) -> Any:
            return [asyncio.sleep(0, transports.pack_tensors(tensors))] if apart else transports.place_of(tensors)

        assert equal(await ObjectStoreTransport().take(give), tensors)

    monkeypatch.setattr(transports, "find", fail)
    asyncio.run(story())


def test_a_store_on_another_machine_asks_the_trainer_for_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = publication()

    async def story() -> None:
        ends = Ends(tensors)
        monkeypatch.setattr(transports, "open_publication", lambda *_: None)
        await ends.publish()
        assert equal(await ends.read(), tensors)
        assert ends.asked == [("trainer", False), ("trainer", True), ("store", False)]

    asyncio.run(story())
